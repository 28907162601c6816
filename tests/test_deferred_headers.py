"""Headers of large zips are compared with the directory when their records are read, not when the file is opened."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError
from lazyckpt.formats import registry
from lazyckpt.io.storage.local import LocalStore

COUNT, ROWS = 80, 24
LIES = {"length of the extra field": 28, "length of the name": 26, "name": 33, "size": 22, "crc": 14, "magic": 0}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "HEADERS", 0)
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(ROWS, 512, generator=generator) for n in range(COUNT)}
    state["empty"] = torch.zeros(0, 3)
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def header_of(path: Path, storage: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return next(i.header_offset for i in archive.infolist() if i.filename.endswith(f"/data/{storage}"))


def lie(path: Path, storage: str, field: str) -> None:
    data = bytearray(path.read_bytes())
    data[header_of(path, storage) + LIES[field]] ^= 1
    path.write_bytes(data)


def opened(path: Path, counted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> lazyckpt.CheckpointView:
    fetch = LocalStore._fetch

    def counting(store: LocalStore, name: str, offset: int, target: memoryview) -> Any:
        counted.append((offset, len(target)))
        return fetch(store, name, offset, target)

    monkeypatch.setattr(LocalStore, "_fetch", counting)
    return lazyckpt.open(path, cache=False)


def test_opening_does_not_read_every_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, int]] = []
    view = opened(path, counted, monkeypatch)
    assert len(counted) < 30, "of 80 headers that lie apart"
    truth = torch.load(path)
    for name, tensor in truth.items():
        assert torch.equal(view[name][...], tensor)
    counted.clear()
    for name in truth:
        view[name][3:5]
    headers = {header_of(path, str(n)) for n in range(COUNT)}
    assert not headers & {offset for offset, _ in counted}, "each header is read once"


READERS: dict[str, Callable[[lazyckpt.LazyTensor], torch.Tensor]] = {
    "whole": lambda t: t[...],
    "a row": lambda t: t[7],
    "a column": lambda t: t[:, 3],
    "steps": lambda t: t[::5, ::7],
    "mapped": lambda t: t.to(copy=False),
    "pickled": lambda t: pickle.loads(pickle.dumps(t))[...],
    "lazily": lambda t: t.lazy[2:9][...],
    "other dtype": lambda t: t.to(torch.float64),
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("field", LIES)
def test_a_header_that_contradicts_the_directory_is_refused_when_read(path: Path, field: str, how: str) -> None:
    truth = torch.load(path)
    lie(path, "5", field)
    view = lazyckpt.open(path, cache=False)
    t = view["layers.5.w"]
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"x\.pt"):
            READERS[how](t)
    for n in (0, 4, 6, COUNT - 1):
        name = f"layers.{n}.w"
        assert torch.equal(READERS[how](view[name]).flatten(), READERS[how](view[name]).flatten())
        assert torch.equal(view[name][...], truth[name])


def test_views_that_travel_check_too(path: Path, tmp_path: Path) -> None:
    lie(path, "5", "name")
    first = lazyckpt.open(path)
    for view in (
        first,
        lazyckpt.open(path),
        pickle.loads(pickle.dumps(first)),
        first.select("layers.*"),
        first.astype(torch.float64),
    ):
        assert view["layers.4.w"][0].shape == (512,)
        with pytest.raises(CorruptError):
            view["layers.5.w"][0]
    for write in (
        lambda: first.to_safetensors(tmp_path / "out"),
        lambda: first.to_zarr(tmp_path / "out.zarr"),
        lambda: first.to(),
        lambda: first.stats()[5].mean + 0.0,
    ):
        with pytest.raises((CorruptError, TypeError)):  # statistics of what cannot be read are None
            write()


def test_runs_check_too(path: Path) -> None:
    run = path.parent / "run"
    run.mkdir()
    for step in (1, 2):
        (run / f"step_{step}.pt").write_bytes(path.read_bytes())
    lie(run / "step_2.pt", "5", "name")
    view = lazyckpt.open_run(run)
    assert torch.equal(view["layers.5.w"][0], torch.load(path)["layers.5.w"])
    for again in (view, pickle.loads(pickle.dumps(view))):
        with pytest.raises(CorruptError):
            again["layers.5.w"][1]


def test_another_alignment_is_read_from_the_headers(path: Path, tmp_path: Path) -> None:
    from torch.utils.serialization import config

    truth = torch.load(path)
    before = config.save.storage_alignment
    try:
        for alignment in (1, 16, 128, 4096):
            config.save.storage_alignment = alignment
            torch.save(truth, tmp_path / "y.pt")
            view = lazyckpt.open(tmp_path / "y.pt", cache=False)
            assert all(torch.equal(view[name][...], tensor) for name, tensor in truth.items())
    finally:
        config.save.storage_alignment = before


def test_ranks_of_one_layout_check_their_own_headers(path: Path, tmp_path: Path) -> None:
    from lazyckpt.io.containers.torch_file import Pickles, read_torch_file

    for n in range(3):
        (tmp_path / f"r{n}.pt").write_bytes(path.read_bytes())
    lie(tmp_path / "r1.pt", "5", "name")
    store = LocalStore(tmp_path)
    store.reads_of_headers = 0
    pickles = Pickles()
    files = [read_torch_file(store, f"r{n}.pt", pickles) for n in range(3)]
    assert len(store.guards) == 3
    offset = files[1].records["5"].offset
    assert bytes(store.read("r0.pt", offset, 8)) == bytes(store.read("r2.pt", offset, 8))
    with pytest.raises(CorruptError):
        store.read("r1.pt", offset, 8)


def test_references_to_other_readers_are_checked(path: Path, tmp_path: Path) -> None:
    lie(path, "5", "crc")
    with pytest.raises(CorruptError):
        lazyckpt.open(path, cache=False).to_virtual(tmp_path / "x.json")


def test_headers_are_read_once_beside_empty_storages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HEADERS", 0)
    state = {str(n): torch.zeros(0 if n % 20 == 7 else 10_000) for n in range(300)}
    torch.save(state, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt", cache=False)
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: (counted.append(at), preadv(fd, buffers, at))[1])
    for tensor in view.values():
        tensor[...]
    assert len(counted) < 3 * len(state)


def test_a_view_that_is_gone_keeps_no_file_open(path: Path) -> None:
    view = lazyckpt.open(path)
    view["layers.5.w"][...]
    assert any(str(path) == os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())
    del view
    assert not any(str(path) == os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
