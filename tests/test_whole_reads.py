"""Whole state dicts: how many reads they take, in which order, and which pages.

Everything is counted: reads, bytes, pages of the system's cache, descriptions of tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.extents import Extent
from lazyckpt.io import pool, system
from lazyckpt.io.reading import device as transfer
from lazyckpt.io.reading.arenas import SMALL
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.system import File
from lazyckpt.lazy import LazyArray
from lazyckpt.testing.oracle import same

from .devices import QueueDevice, near, simulated
from .index_caches import cache, forget
from .test_local import PAGE, drop, need_a_droppable_cache, resident

__all__ = ["cache"]

MIB = 1 << 20


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is read from local files: (how, offset, bytes); threads read one at a time, so that the order is certain."""
    log: list[tuple[str, int, int]] = []
    read_at, read_vector = File.read_at, File.read_vector

    def one(file: File, offset: int, target: memoryview) -> int:
        log.append(("one", offset, len(target)))
        return read_at(file, offset, target)

    def vector(file: File, offset: int, targets: list[memoryview]) -> int:
        log.append(("vector", offset, sum(map(len, targets))))
        return read_vector(file, offset, targets)

    monkeypatch.setattr(File, "read_at", one)
    monkeypatch.setattr(File, "read_vector", vector)
    monkeypatch.setattr(pool, "_THREADS", 1)
    return log


def _saved(path: Path, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    truth = {}
    for n, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        truth[f"t{n:04}"] = (torch.arange(numel) * 7 + n).to(dtype).view(shape)
    save_file(truth, path)
    return truth


def _holes(path: Path, count: int, nbytes: int) -> Path:
    """A safetensors file of tensors that are holes: zeros that take no room on the disk."""
    entries = {
        f"t{n}": {"dtype": "U8", "shape": [nbytes // 4096, 4096], "data_offsets": [n * nbytes, (n + 1) * nbytes]}
        for n in range(count)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % PAGE)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * nbytes)
    return path


# -- few reads, in the order of the file


def test_neighbours_are_one_read(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    """128 tensors of 64 KiB are four reads of 2 MiB, and each has memory of its own."""
    truth = _saved(tmp_path / "x.safetensors", [(64, 256)] * 128)
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=False)
    reads.clear()
    found = view.to("cpu")
    assert [(how, nbytes) for how, _, nbytes in reads] == [("vector", 2 * MIB)] * 4
    assert [offset for _, offset, _ in reads] == sorted(offset for _, offset, _ in reads)
    assert list(found) == list(truth)
    for name, tensor in found.items():
        same(tensor, truth[name], name)
        assert tensor._base is None and tensor.untyped_storage().nbytes() == tensor.nbytes, "no neighbour is kept alive"


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_tensors_of_all_sizes_in_one_file(
    tmp_path: Path, reads: list[tuple[str, int, int]], dtype: torch.dtype
) -> None:
    """Without elements, scalars, small, middle and large ones, mixed: every byte is read once, in order."""
    shapes = [(), (3,), (0, 5), (5, 7), (100, 200), (64, 256), (700, 1024), (1,), (16,), (16,), (SMALL,), (2, 3, 4)] * 3
    truth = _saved(tmp_path / "x.safetensors", shapes, dtype)
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=False)
    reads.clear()
    found = view.to("cpu")
    assert list(found) == list(view)
    for name, tensor in found.items():
        same(tensor, truth[name], name)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel(), "aligned as torch aligns"
    offsets = [offset for _, offset, _ in reads]
    assert offsets == sorted(offsets) and sum(nbytes for *_, nbytes in reads) == view.nbytes


def test_small_tensors_that_fit_exactly_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 1 KiB are next to each other in the file and in memory: no list of thousands of targets is made."""
    truth = _saved(tmp_path / "x.safetensors", [(256,)] * 3000)
    targets: list[int] = []
    fetch = LocalStore._fetch_pieces

    def counted(store: LocalStore, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        targets.append(len(pieces))
        fetch(store, path, pieces)

    monkeypatch.setattr(LocalStore, "_fetch_pieces", counted)
    found = lazyckpt.open(tmp_path / "x.safetensors", cache=False).to("cpu")
    assert targets and set(targets) == {1} and len(targets) <= 4
    for name, tensor in found.items():
        same(tensor, truth[name], name)


def test_names_in_another_order_than_the_file(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    truth = _saved(tmp_path / "x.safetensors", [(64, 256)] * 64)
    whole = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    names = sorted(header, key=lambda name: name[::-1])
    turned = json.dumps({name: header[name] for name in names}).encode()
    turned += b" " * (-len(turned) % 8)
    (tmp_path / "y.safetensors").write_bytes(len(turned).to_bytes(8, "little") + turned + whole[8 + length :])
    view = lazyckpt.open(tmp_path / "y.safetensors", cache=False)
    reads.clear()
    found = view.to("cpu")
    assert sorted(found) == sorted(names)
    assert [nbytes for *_, nbytes in reads] == [2 * MIB] * 2
    for name, tensor in found.items():
        same(tensor, truth[name], name)


def test_a_large_tensor_is_read_in_pieces_in_order(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    path = _holes(tmp_path / "x.safetensors", 1, 15 * MIB)
    t = lazyckpt.open(path, cache=False)["t0"]
    reads.clear()
    assert not t[...].any()
    assert [nbytes for *_, nbytes in reads] == [2 * MIB] * 7 + [MIB]
    assert [offset for _, offset, _ in reads] == sorted(offset for _, offset, _ in reads)


def test_threads_take_tasks_in_order_and_stop_at_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_THREADS", 1)
    done: list[int] = []

    def task(n: int) -> None:
        done.append(n)
        if n == 5:
            raise ValueError("the sixth")

    with pytest.raises(ValueError, match="the sixth"):
        pool.run((pool._INLINE, lambda n=n: task(n)) for n in range(2000))
    assert done[:6] == list(range(6)) and len(done) < 2000
    done.clear()
    pool.run((pool._INLINE, lambda n=n: done.append(n)) for n in range(200))
    assert done == list(range(200))


# -- no descriptions


def _refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a tensor was described")


@pytest.mark.parametrize("kept", [False, True], ids=["opened", "from the cache"])
def test_plain_tensors_are_read_without_being_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, kept: bool
) -> None:
    truth = _saved(tmp_path / "x.safetensors", [(5, 5)] * 50 + [(100, 200)] * 50)
    if kept:
        lazyckpt.open(tmp_path / "x.safetensors", cache=True)
        forget()
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=kept)
    monkeypatch.setattr(LazyArray, "__init__", _refused)
    monkeypatch.setattr(Extent, "__init__", _refused)
    assert view.nbytes == sum(t.nbytes for t in truth.values())
    for name, tensor in view.to("cpu").items():
        same(tensor, truth[name], name)


def test_the_place_is_that_of_the_description(torch_cases: dict[str, Any], huggingface_cases: dict[str, Any]) -> None:
    known = 0
    for case in (*torch_cases.values(), *huggingface_cases.values()):
        view = lazyckpt.open(case.path, cache=False)
        for name in view:
            found = view._owned().place(view.owner(name))
            if found is not None:
                plain = view[name]._plain
                assert plain is not None
                assert found[1] == (plain.path, plain.offset, view[name].spec.shape, view[name].spec.dtype), name
                known += 1
        assert isinstance(view.nbytes, int)
    assert known > 50


def test_tied_names_and_parts_share_the_tensor(torch_cases: dict[str, Any]) -> None:
    for case in torch_cases.values():
        view = lazyckpt.open(case.path, cache=False)
        found = view.to("cpu")
        assert list(found) == list(view)
        for alias in view.aliases:
            if alias in found:
                assert found[alias] is found[view.aliases[alias]]


# -- pages


@pytest.mark.skipif(sys.platform != "linux" or system.PORTABLE, reason="counts pages with posix_fadvise and mincore")
@pytest.mark.parametrize("names", [["t0"], ["t1"], ["t2"], ["t0", "t1", "t2"]], ids="+".join)
def test_whole_tensors_are_read_and_their_neighbours_are_not(tmp_path: Path, names: list[str]) -> None:
    path = _holes(tmp_path / "x.safetensors", 3, 24 * MIB)
    need_a_droppable_cache(path)
    view = lazyckpt.open(path, cache=False).select(lambda name: name in names)
    drop(path)
    before = resident(path)
    assert not any(t.any() for t in view.to("cpu").values())
    wanted = view.nbytes // PAGE
    assert wanted <= resident(path) - before <= wanted + 2


# -- to a device


@pytest.fixture
def gpu() -> Iterator[QueueDevice]:
    with simulated() as device:
        yield device


def test_neighbours_are_one_read_on_their_way(
    tmp_path: Path, gpu: QueueDevice, reads: list[tuple[str, int, int]]
) -> None:
    """64 tensors of 64 KiB are two reads of 2 MiB, straight into the buffer, and one transfer."""
    truth = _saved(tmp_path / "x.safetensors", [(64, 256)] * 64)
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=False)
    reads.clear()
    for name, tensor in view.to("cuda").items():
        same(near(tensor), truth[name], name)
    assert [nbytes for *_, nbytes in reads] == [2 * MIB] * 2 and len(gpu.copied) == 1


@pytest.mark.parametrize("piece", [256, 1000, 32 * MIB])
def test_runs_of_all_sizes_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: QueueDevice, piece: int
) -> None:
    """Also where their places in the buffer and in the file differ, and where the order of names is not the file's."""
    monkeypatch.setattr(transfer, "PIECE", piece)
    truth = _saved(tmp_path / "x.safetensors", [(), (3,), (16,), (16,), (5, 7), (0, 5), (64, 3), (2, 2), (100,)] * 2)
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=False)
    for names in (list(view), list(view)[::-1]):
        with transfer.ring(gpu) as way:
            found = {name: view[name]._send(way) for name in names}
        for name, tensor in found.items():
            same(near(tensor), truth[name], name)
