"""Slices through mappings: what is checked, what is requested from the disk, and memory that small tensors share."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.export import dcp
from lazyckpt.io.reading.gather import read
from lazyckpt.io.reading.mosaic import Mosaic
from lazyckpt.io.reading.window import Window
from lazyckpt.io.storage.local import LocalStore, _vectors
from lazyckpt.io.system import File

PAGE = os.sysconf("SC_PAGE_SIZE")
WHOLE = torch.arange(3000 * 1024, dtype=torch.int32).view(3000, 1024)  # a row is a page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"w": WHOLE}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize("change", ["truncate", "touch"])
def test_the_thread_that_changes_a_file_sees_it_at_once(path: Path, change: str) -> None:
    """Also in a burst of reads, in which the file is checked only now and then."""
    t = lazyckpt.open(path, cache=False)["w"]
    for _ in range(50):
        t[5]
    if change == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(lazyckpt.ChangedFileError):
        t[5]


def test_a_burst_of_reads_sees_the_change_of_another_thread(path: Path) -> None:
    t = lazyckpt.open(path, cache=False)["w"]
    changed = threading.Event()

    def change() -> None:
        os.utime(path, ns=(1, 1))
        changed.set()

    t[5]
    thread = threading.Thread(target=change)
    thread.start()
    with pytest.raises(lazyckpt.ChangedFileError):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            t[5]
    thread.join()
    assert changed.is_set()


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (slice(None, None, 100), range(0, 3000, 100)),
        ([7, 2900, 8, 1500], [7, 8, 1500, 2900]),
        ((slice(100, 900, 5), slice(3, 9)), range(100, 900, 5)),
    ],
    ids=["strided", "list", "block"],
)
def test_only_missing_pages_are_requested(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: object, rows: object
) -> None:
    """And each once, before the copy waits for them."""
    requested: list[tuple[int, int]] = []
    monkeypatch.setattr(File, "prefetch", lambda self, offset, nbytes: requested.append((offset, nbytes)))
    monkeypatch.setattr("lazyckpt.io.storage.mapping.Mapped.resident", lambda self, start, stop: False)
    monkeypatch.setattr(
        "lazyckpt.io.storage.mapping.Mapped._pages", lambda self, first, count: np.zeros(count, np.bool_)
    )
    t = lazyckpt.open(path, cache=False)["w"]
    start = t.fragments[0].extent.offset
    assert torch.equal(t[key], WHOLE[key])
    pages = {n for offset, nbytes in requested for n in range(offset // PAGE, (offset + nbytes) // PAGE)}
    wanted = {
        (start + r * 4096 + byte) // PAGE
        for r in list(rows)
        for byte in ((12, 35) if "slice(3" in str(key) else (0, 4095))
    }
    assert pages == wanted
    assert sum(nbytes for _, nbytes in requested) == len(wanted) * PAGE


def test_a_plain_tensor_has_a_window_and_one_of_two_files_a_mosaic(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4096.0).view(64, 64)}, tmp_path / "model.safetensors")
    t = lazyckpt.open(tmp_path / "model.safetensors")["w"]
    assert t[..., 3].shape == (64,)
    assert isinstance(t._window, Window | Mosaic)


def test_the_mapping_goes_with_the_view(path: Path) -> None:
    t = lazyckpt.open(path, cache=False)["w"]
    t[3]
    t[::7]
    assert any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    del t
    assert not any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


# -- vectored reads and shared memory of small tensors


def test_near_pieces_are_one_vectored_read() -> None:
    memory = memoryview(bytearray(5 * PAGE))
    pieces = [
        (0, memory[:10]),
        (10, memory[10:30]),
        (40, memory[30:50]),
        (40 + 20 + PAGE, memory[50:60]),
        (5, memory[60:70]),
    ]
    found = [(start, [len(target) for target in targets], nbytes) for start, targets, nbytes in _vectors(pieces)]
    assert found == [(0, [10, 20, 10, 20], 60), (60 + PAGE, [10], 10), (5, [10], 10)]
    many = [(n, memory[n : n + 1]) for n in range(3000)]
    assert max(len(targets) for _, targets, _ in _vectors(many)) <= 1024
    assert sum(nbytes for _, _, nbytes in _vectors(many)) == 3000


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_many_small_tensors(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all dtypes and sizes, in few reads; each with a storage of its own size, aligned, and writable."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    truth = {
        f"t{n:04}": torch.randint(0, 2, (n % 7, 1 + n % 5) if n % 3 else (n,), generator=generator).to(
            dtypes[n % len(dtypes)]
        )
        for n in range(1, 700)
    }
    path = tmp_path / f"x.{kind}"
    torch.save(truth, path) if kind == "pt" else save_file(truth, path)
    view = lazyckpt.open(path, cache=False)
    calls: list[int] = []
    fetch = LocalStore._fetch_pieces
    monkeypatch.setattr(
        LocalStore,
        "_fetch_pieces",
        lambda self, name, pieces: (calls.append(len(pieces)), fetch(self, name, pieces))[1],
    )
    found = view.to()
    assert list(found) == list(truth) or set(found) == set(truth)
    assert len(calls) < 10 and sum(calls) > 600
    for name, tensor in truth.items():
        got = found[name]
        assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
        assert got.untyped_storage().nbytes() == tensor.nbytes
        assert not got.numel() or got.data_ptr() % 64 == 0
    saved = io.BytesIO()
    torch.save(found["t0003"], saved)
    assert len(saved.getvalue()) < 4096
    before = found["t0006"].clone()
    found["t0005"].zero_()
    assert torch.equal(found["t0006"], before)
    assert torch.equal(view["t0005"][...], truth["t0005"])


BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def same(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Compare the bits of a tensor with those of an array."""
    return found.shape == expected.shape and np.array_equal(
        found.contiguous().view(-1).view(torch.uint8).numpy(), np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
    )


def keys_of(length: int, random: np.random.Generator) -> list[tuple[object, ...]]:
    """Keys of every form for a tensor of three dimensions, the last two of 7 and 5."""
    rows: list[object] = [
        slice(None), slice(5, length - 3), slice(6, 12), slice(None, None, 4), slice(length - 13, 3, -7),
        slice(13, 14), slice(2, length), slice(1, length, 2), slice(3, -1, 3), slice(4, length - 1, 6),
        slice(5, length, 12), slice(7, None, 18), slice(-40, -9, 5), slice(9, 3), 0, 11, -1, length // 2,
    ]  # fmt: skip
    lists: list[object] = [
        random.integers(0, length, 60), np.flatnonzero(random.random(length) < 0.3), random.random(length) < 0.2,
        [5], [-1, 0, 3, 3, -length], np.sort(random.integers(0, length, 9)), list(range(20, 4, -2)),
    ]  # fmt: skip
    inner: list[tuple[object, ...]] = [
        (), (slice(2, 5),), (slice(None, None, 3), slice(4, 1, -2)), (3,), (slice(None), 2), (-1, 4), (0, slice(1, 4)),
        (slice(1, 6, 2), slice(0, 5, 3)), (slice(None), slice(3, 1)),
    ]  # fmt: skip
    keys = [(row, *rest) for row in rows + lists for rest in inner]
    return [*keys, (slice(1, length - 4, 3), [4, 0, 2]), (slice(None), slice(None), [1, 1, 4])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("large", [False, True], ids=["one-thread", "all-cores"])
def test_many_chunks_at_equal_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, files: int, large: bool
) -> None:
    """The last chunk is shorter. A plan of chunks has no part in these reads: they are copied as strided arrays."""
    if large:
        monkeypatch.setattr("lazyckpt.io.reading.strips.ONE_CALL", 0)
        monkeypatch.setattr("lazyckpt.io.reading.strips._THREADS", 0)
        monkeypatch.setattr("lazyckpt.io.reading.strips._SHORT", 0)
    whole = (torch.arange(203 * 7 * 5) % 251).view(203, 7, 5).to(dtype)
    safetensors = tmp_path / "x.safetensors"
    save_file({"w": whole}, safetensors)
    monkeypatch.setattr(dcp, "CHUNK", 6 * 35 * dtype.itemsize)
    monkeypatch.setattr(dcp, "FILE", 30_000 if files > 1 else 1 << 30)
    lazyckpt.open(safetensors).to_dcp(tmp_path / "dcp", progress=False)
    assert (len(list((tmp_path / "dcp").glob("*.distcp"))) > 1) == (files > 1)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    assert len(t.fragments) == 34
    t[...]
    planned: list[object] = []
    monkeypatch.setattr("lazyckpt.lazy.read", lambda store, spec, reads: planned.append(reads) or read(store, spec, reads))
    bits = whole.view(torch.from_numpy(np.empty(0, BITS[dtype.itemsize])).dtype).numpy()
    keys = keys_of(203, np.random.default_rng(0))
    for key in keys:
        found = t[key]
        assert found.dtype == dtype and same(found, bits[key]), key
    assert len(planned) < len(keys) // 4, "empty selections only"
