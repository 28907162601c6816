"""`explain` says, before anything is read, which requests and bytes a read takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt

from .network import Traffic, opened
from .test_remote_opening import zero3

STATE = {f"layers.{n}.w": torch.randn(1000, 500) for n in range(6)}
NAME = "layers.3.w"


def torch_file(path: Path) -> Path:
    torch.save(STATE, path / "x.pt")
    return path / "x.pt"


def safetensors(path: Path) -> Path:
    save_file(STATE, path / "x.safetensors")
    return path / "x.safetensors"


def dcp(path: Path) -> Path:
    pytest.importorskip("torch.distributed.checkpoint").save(STATE, checkpoint_id=path / "x", no_dist=True)
    return path / "x"


def zarr(path: Path) -> Path:
    pytest.importorskip("zarr")
    lazyckpt.open(safetensors(path)).to_zarr(path / "x")
    return path / "x"


FORMATS = [torch_file, safetensors, dcp, zarr]


def told(text: str) -> tuple[int, int]:
    found = re.search(r"\(([\d,]+) bytes read in ([\d,]+) requests?\)", text)
    assert found is not None, text
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def counted(carried: Traffic, read: Callable[[], Any]) -> tuple[int, int]:
    carried.clear()
    read()
    return carried.nbytes, carried.requests


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", FORMATS)
@pytest.mark.parametrize("key", [..., 500, slice(3, 900, 400), (slice(None), 7)], ids=str)
def test_a_read_takes_what_was_told(tmp_path: Path, make: Callable[[Path], Path], key: Any) -> None:
    path = make(tmp_path)
    view, carried = opened(path)
    for _ in range(2):  # the second time, archives are located and headers compared
        expected = counted(carried, lambda: None), told(view[NAME].explain(key))
        assert expected[0] == (0, 0), "explaining reads nothing"
        assert counted(carried, lambda: view[NAME][key]) == expected[1]
    assert torch.equal(view[NAME][key], STATE[NAME][key])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [*FORMATS, lambda path: zero3(path / "x", 8, 1 << 16)])
def test_a_view_and_a_layer_take_what_was_told(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    for part in ("layers.0", ""):
        view, carried = opened(path)
        carried.clear()
        view = view.prefix(part) if part else view
        expected = told(view.explain())
        assert not carried.gets  # the sizes of files are asked for
        assert counted(carried, lambda view=view: view.to()) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("count", [2_361, 4_000, 8_000, 20_000])
def test_an_item_of_dcp_is_read_once(tmp_path: Path, count: int) -> None:
    """Both ends of an item are read before its elements, and not what lies between them."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    state = {"w": torch.arange(count)}
    checkpoint.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    view, carried = opened(tmp_path / "x")
    expected = told(view["w"].explain(...))
    assert counted(carried, lambda: view["w"][...]) == expected
    assert expected[0] < 8 * count + 6_000
    assert torch.equal(view["w"][...], state["w"])


def test_a_compressed_chunk_is_told_by_the_bytes_that_it_has_at_most(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    lazyckpt.open(safetensors(tmp_path)).to_zarr(tmp_path / "z", codec="zstd")
    view, carried = opened(tmp_path / "z")
    nbytes, requests = told(view[NAME].explain(5))
    real = counted(carried, lambda: view[NAME][5])
    assert real[1] == requests and 0.8 * nbytes < real[0] <= nbytes


def test_files_that_are_here_take_no_requests(tmp_path: Path) -> None:
    view = lazyckpt.open(safetensors(tmp_path))
    assert "request" not in view.explain() + view[NAME].explain()
