"""Tensors are read to the CPU, whatever device torch is told to create new ones on.

People read checkpoints inside ``with torch.device("meta")``, where they build a model, or after
``torch.set_default_device("cuda")``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import lazyckpt

WEIGHTS = {
    "w": torch.arange(600.0).reshape(20, 30),
    "t": torch.arange(600.0).reshape(30, 20).t(),
    "b": torch.arange(600.0).reshape(20, 30).bfloat16(),
}
CPU = torch.device("cpu")


def _torch(path: Path) -> None:
    torch.save(WEIGHTS, path)


def _safetensors(path: Path) -> None:
    save_file({name: weight.contiguous() for name, weight in WEIGHTS.items()}, path)


def _dcp(path: Path) -> None:
    dcp.save(dict(WEIGHTS), checkpoint_id=path, no_dist=True)


def _zarr(path: Path) -> None:
    _torch(path.with_suffix(".pt"))
    lazyckpt.open(path.with_suffix(".pt")).to_zarr(path)


@pytest.fixture(params=[(_torch, "x.pt"), (_safetensors, "x.safetensors"), (_dcp, "dcp"), (_zarr, "x.zarr")])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save, name = request.param
    save(tmp_path / name)
    return tmp_path / name


READS: dict[str, Callable[[Any], Any]] = {
    "all": lambda t: t[...],
    "rows": lambda t: t[3:5],
    "steps": lambda t: t[::2, 1],
    "reversed": lambda t: t[::-1] if isinstance(t, lazyckpt.LazyTensor) else t.flip(0),
    "list": lambda t: t[[3, 1]],
    "dtype": lambda t: t.to(dtype=torch.float64),
    "numpy": lambda t: t.to(dtype=torch.float64).numpy(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_gives_the_elements(path: Path, read: Callable[[Any], Any]) -> None:
    with torch.device("meta"):
        view = lazyckpt.open(path, cache=False)
        found = {name: read(view[name]) for name in WEIGHTS}
    for name, weight in WEIGHTS.items():
        wanted = read(weight)
        if isinstance(wanted, Tensor):
            assert found[name].device == CPU
            assert torch.equal(found[name], wanted)
        else:
            assert np.array_equal(found[name], wanted)


def test_statistics(path: Path) -> None:
    with torch.device("meta"):
        stats = lazyckpt.open(path, cache=False)["b"].stats()
    assert stats.mean == pytest.approx(WEIGHTS["b"].double().mean().item())


def test_reading_afterwards(path: Path) -> None:
    """Buffers that a thread keeps are not those of the device that was chosen meanwhile."""
    view = lazyckpt.open(path, cache=False)
    with torch.device("meta"):
        view["w"][::2, 1]
        view["t"][[3, 1]]
    assert torch.equal(view["w"][::2, 1], WEIGHTS["w"][::2, 1])
    assert torch.equal(view["t"][[3, 1]], WEIGHTS["t"][[3, 1]])


@pytest.mark.parametrize("export", ["to_torch", "to_safetensors", "to_dcp", "to_zarr"])
def test_exports(tmp_path: Path, export: str) -> None:
    _torch(tmp_path / "x.pt")
    suffix = {"to_torch": ".pt", "to_zarr": ".zarr"}.get(export, "")
    with torch.device("meta"):
        view = lazyckpt.open(tmp_path / "x.pt", cache=False)
        getattr(view, export)(tmp_path / f"out{suffix}")
    written = lazyckpt.open(tmp_path / f"out{suffix}", cache=False)
    for name, weight in WEIGHTS.items():
        assert torch.equal(written[name][...], weight)
