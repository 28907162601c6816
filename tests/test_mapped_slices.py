"""Slices through mappings: what is checked, what is requested from the disk, and memory that small tensors share."""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from benchmarks.sparse_dcp import write_chunks
from lazyckpt.core.select import Reads
from lazyckpt.core.specs import TensorSpec
from lazyckpt.export import dcp
from lazyckpt.io.reading.gather import read
from lazyckpt.io.reading.mosaic import Mosaic
from lazyckpt.io.reading.slices import window_of
from lazyckpt.io.reading.window import Window
from lazyckpt.io.storage.base import Store
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
    vectors = _vectors(pieces, PAGE - 1)
    found = [(start, [len(target) for target in targets], nbytes) for start, targets, nbytes in vectors]
    assert found == [(0, [10, 20, 10, 20], 60), (60 + PAGE, [10], 10), (5, [10], 10)]
    many = [(n, memory[n : n + 1]) for n in range(3000)]
    assert max(len(targets) for _, targets, _ in _vectors(many, PAGE - 1)) <= 1024
    assert sum(nbytes for _, _, nbytes in _vectors(many, PAGE - 1)) == 3000


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


def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with each planned read."""
    planned: list[object] = []

    def counted(store: Store, spec: TensorSpec, reads: Reads) -> torch.Tensor:
        planned.append(reads)
        return read(store, spec, reads)

    monkeypatch.setattr("lazyckpt.lazy.read", counted)
    return planned


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
        monkeypatch.setattr("lazyckpt.io.reading.rows.ONE_CALL", 0)
        monkeypatch.setattr("lazyckpt.io.reading.rows._THREADS", 0)
        monkeypatch.setattr("lazyckpt.io.reading.rows._SHORT", 0)
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
    planned = plans(monkeypatch)
    bits = whole.view(torch.from_numpy(np.empty(0, BITS[dtype.itemsize])).dtype).numpy()
    keys = keys_of(203, np.random.default_rng(0))
    for key in keys:
        found = t[key]
        assert found.dtype == dtype and same(found, bits[key]), key
    assert len(planned) < len(keys) // 4, "empty selections only"


ODD = (torch.arange(90 * 7 * 5) % 251).view(90, 7, 5)


def archives(folder: Path, chunks: int, files: int, dtype: torch.dtype) -> torch.Tensor:
    """Write `ODD` as a tensor in so many archives of `torch.save`, at any byte of their files."""
    whole = ODD.to(dtype)
    write_chunks(folder, {"ahead": torch.zeros(1, dtype=torch.uint8), "w": whole}, chunks, files)
    for n, path in enumerate(sorted(folder.glob("*.distcp"))):  # a byte ahead of all archives, in every second file
        if n % 2:
            move(path)
    return whole


def move(path: Path) -> None:
    """Insert a byte at the beginning of a file of archives."""
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    path.write_bytes(b"x" + path.read_bytes())
    for place in metadata.storage_data.values():
        if place.relative_path == path.name:
            place.offset += 1
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(("chunks", "files"), [(1, 1), (2, 2), (15, 4), (30, 2)])
@pytest.mark.parametrize("large", [False, True], ids=["one-thread", "all-cores"])
def test_elements_that_are_not_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunks: int, files: int, large: bool
) -> None:
    if large:
        for name in ("ONE_CALL", "_THREADS", "_SHORT", "_JOINED"):
            monkeypatch.setattr(f"lazyckpt.io.reading.rows.{name}", 0)
    whole = archives(tmp_path / "dcp", chunks, files, dtype)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    if isinstance(window_of(t.store, t.spec), Window):  # it is aligned
        move(tmp_path / "dcp" / "__0_0.distcp")
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    t[...]
    mosaic = window_of(t.store, t.spec)
    assert isinstance(mosaic, Mosaic)
    starts = mosaic._firsts[:-1]
    strips = [mosaic._strip(n, 0, 90)[2] for n in range(len(starts))]
    assert any(strip.wide > 1 for strip in strips)
    assert len(strips) <= files + 1
    planned = plans(monkeypatch)
    bits = whole.view(torch.from_numpy(np.empty(0, BITS[dtype.itemsize])).dtype).numpy()
    keys = keys_of(90, np.random.default_rng(1))
    for key in keys:
        found = t[key]
        assert found.dtype == dtype and same(found, bits[key]), key
    assert len(planned) < len(keys) // 4, "empty selections only"


def test_a_tensor_in_one_aligned_archive_is_a_plain_one(tmp_path: Path) -> None:
    write_chunks(tmp_path / "dcp", {"w": ODD}, 1, 1)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    assert torch.equal(t[3:40], ODD[3:40])
    assert isinstance(t._window, Window)


def test_warm_slices_of_many_chunks_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy out of the mapping, and check each file once in a burst."""
    archives(tmp_path / "dcp", 30, 2, torch.float32)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    t[:], t[:]
    calls: list[str] = []
    for name in ("read_at", "read_vector", "stat"):
        real = getattr(File, name)
        counted = lambda *args, name=name, real=real: (calls.append(name), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(File, name, counted)
    monkeypatch.setattr("lazyckpt.io.storage.mapping._GAP", 60.0)
    monkeypatch.setattr("lazyckpt.io.storage.mapping._BURST", 60.0)
    for key in (slice(None), slice(40, 50), (slice(None), 3), [1, 80, 30], slice(None, None, 9), 3, (3, 4, 1)):
        t[key]
    assert calls == ["stat", "stat"] or not calls


def test_chunks_are_located_together_once_many_were_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slices read only the headers of the chunks that they want."""
    archives(tmp_path / "dcp", 30, 1, torch.float32)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    assert torch.equal(t[4], ODD[4].float())
    mosaic = t._window
    assert isinstance(mosaic, Mosaic)
    assert (mosaic._offsets >= 0).sum() <= 1
    for n in range(30):
        assert torch.equal(t[n], ODD[n].float())
    assert (mosaic._offsets >= 0).all()


def test_a_damaged_chunk_does_not_matter_to_others(tmp_path: Path) -> None:
    archives(tmp_path / "dcp", 30, 1, torch.float32)
    path = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.find(ODD[45:48].float().numpy().tobytes())
    end = data.find(b"PK\x01\x02", at)
    data[end : end + 4] = bytes(4)
    path.write_bytes(data)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    for _ in range(3):
        for n in (0, 20, 44, 48, 89):
            assert torch.equal(t[n], ODD[n].float())
        assert torch.equal(t[:45:2], ODD[:45:2].float())
        with pytest.raises(lazyckpt.CorruptError):
            t[40:50]


@pytest.mark.parametrize("change", ["truncate", "touch"])
@pytest.mark.parametrize("key", [slice(None), slice(0, 90, 9), (slice(None), 3), [1, 80, 30], 88], ids=str)
def test_a_change_of_one_of_several_files_is_seen(tmp_path: Path, change: str, key: object) -> None:
    """Also in a burst, and by access to bytes that are gone."""
    archives(tmp_path / "dcp", 30, 3, torch.float32)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    for _ in range(40):
        t[key]
    assert isinstance(t._window, Mosaic)
    path = tmp_path / "dcp" / "__2_0.distcp"
    if change == "truncate":
        os.truncate(path, 10)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(lazyckpt.ChangedFileError):
        t[key]


def test_a_slice_over_all_chunks_makes_the_strips_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many chunks is planned as a whole after several slices, or one that needs all of it anyway."""
    monkeypatch.setattr("lazyckpt.io.reading.slices._PLANNED", 4)
    archives(tmp_path / "dcp", 30, 1, torch.float32)
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    planned = plans(monkeypatch)
    for n in range(7):
        assert torch.equal(t[n], ODD[n].float())
        assert t._window is False
    t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
    assert len(planned) == 7
    for key in ((slice(None), 3), slice(None, None, -9), slice(2, 90)):
        t = lazyckpt.open(tmp_path / "dcp", cache=False)["w"]
        assert torch.equal(t[key], torch.from_numpy(ODD.float().numpy()[key].copy()))
        assert isinstance(t._window, Mosaic)
