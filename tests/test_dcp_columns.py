"""Large `.metadata` of torch.distributed.checkpoint: read as columns, they are what the pickle machine alone gives."""

from __future__ import annotations

import pickle
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import lazyckpt
from lazyckpt.errors import LazyckptError
from lazyckpt.formats.dcp import metadata as reading
from lazyckpt.io.storage.local import LocalStore


def copied(size: torch.Size) -> torch.Size:
    return torch.Size(list(size))


def saved(rng: random.Random, tensors: int, chunks: int, odd: bool) -> Metadata:
    """Metadata as saves leave them: names, offsets and paths are the same objects, or equal ones from other ranks."""
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths = [f"__{n}_0.distcp" for n in range(5)]
    share = rng.random()
    for t in range(tensors):
        name = f"model.layers.{t}.weight"
        dims = rng.choice([1, 2, 2, 3, 4, 5, 0] if odd else [1, 2, 3, 4])
        rows = rng.choice([1, 3, 300, 70_000])
        rest = [rng.choice([1, 2, 200]) for _ in range(dims - 1)]
        count = rng.randrange(1, chunks) if dims else 1
        listed = []
        usual = torch.Size([rows, *rest][:dims])
        for c in range(count):
            start = torch.Size([c * rows, *[0] * (dims - 1)][:dims])
            size = torch.Size([0 if odd and rng.random() < 0.02 else rows, *rest][:dims])
            size = usual if size == usual and rng.random() < share else size
            listed.append(ChunkStorageMetadata(start, size))
            if odd and rng.random() < 0.01:
                continue
            mine = start if rng.random() < share else copied(start)
            key = name if rng.random() < share else "".join(list(name))
            path = rng.choice(paths) if rng.random() < share else "".join(list(rng.choice(paths)))
            at = rng.choice([0, 255, 65_536, 1 << 31, 1 << 40])
            info = _StorageInfo(path, at, rng.choice([7, 3000, 1 << 33]))
            if odd and rng.random() < 0.02:
                info = _StorageInfo(path, at, 99, transform_descriptors=["zstd"])
            storage[MetadataIndex(key, mine, rng.choice([c, None]))] = info
        shape = torch.Size([count * rows, *rest][:dims])
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), shape, listed)
        if rng.random() < 0.2:
            entries[f"object.{t}"] = BytesStorageMetadata()
            storage[MetadataIndex(f"object.{t}")] = _StorageInfo(paths[0], 5, 17)
    if odd and storage:
        index = rng.choice(list(storage))
        storage[MetadataIndex("unknown", torch.Size([1]))] = storage[index]
    return Metadata(entries, {name: (name,) for name in entries}, storage)


def outcome(data: bytes, folder: Path, columns: bool) -> Any:
    (folder / ".metadata").write_bytes(data)
    try:
        found = reading._read(LocalStore(str(folder)), ".metadata", columns)
    except LazyckptError as e:
        return str(e)
    tensors = {key: (t.dtype, t.shape, list(t.chunks)) for key, t in found.tensors.items()}
    items = {index: found.items[index] for index in found.items}
    assert all(found.items.get(index) == item for index, item in items.items())
    return tensors, items, found.others, found.paths, found.files, found.globals, found.reshaped


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LARGE", 0)


@pytest.mark.parametrize("seed", range(40))
def test_columns_and_the_machine_agree(seed: int, tmp_path: Path, always: None) -> None:
    rng = random.Random(seed)
    value = saved(rng, rng.randrange(1, 30), rng.choice([2, 40, 400]), seed % 2 == 1)
    data = pickle.dumps(value, rng.choice([2, 4, 4, 4, 5]))
    expected = outcome(data, tmp_path, False)
    assert outcome(data, tmp_path, True) == expected
    assert type(expected) is tuple


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_byte_is_never_read_differently(seed: int, tmp_path: Path, always: None) -> None:
    rng = random.Random(seed)
    data = pickle.dumps(shared(2, 6) if seed % 2 else saved(rng, 2, 12, False), rng.choice([4, 5]))
    for at in range(seed // 2, len(data), 10):
        value = rng.choice([0, 0xFF, data[at] ^ 1, data[at] + 1 & 0xFF, rng.randrange(256), rng.choice(b"(hjKN2t\x94")])
        damaged = data[:at] + bytes([value]) + data[at + 1 :]
        assert outcome(damaged, tmp_path, True) == outcome(damaged, tmp_path, False), (at, value)


@pytest.mark.parametrize("seed", range(150))
def test_damaged_metadata_fare_alike(seed: int, tmp_path: Path, always: None) -> None:
    rng = random.Random(seed)
    data = bytearray(pickle.dumps(saved(rng, 4, 30, False), 4))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] = rng.choice(b"0120epqjhKMJ\x94\x85\x86bu(.")
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = rng.choice([b"0", b"2", b"(0", b"\x94", b"q\x05", b"N0", data[at : at + 70]])
    assert outcome(bytes(data), tmp_path, True) == outcome(bytes(data), tmp_path, False)


def test_objects_that_are_used_twice_are_left_to_the_machine(tmp_path: Path, always: None) -> None:
    rng = random.Random(1)
    value = saved(rng, 6, 40, False)
    first = next(iter(value.state_dict_metadata.values()))
    first.chunks.append(first.chunks[3])  # type: ignore[union-attr]
    for other in value.state_dict_metadata.values():
        if isinstance(other, TensorStorageMetadata) and len(other.size) == len(first.size):  # type: ignore[union-attr]
            other.chunks = first.chunks  # type: ignore[union-attr]
    data = pickle.dumps(value)
    assert outcome(data, tmp_path, True) == outcome(data, tmp_path, False)


def even(tensors: int, chunks: int) -> Metadata:
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for t in range(tensors):
        name = f"layers.{t}.weight"
        starts = [torch.Size([64 * c, 0]) for c in range(chunks)]
        listed = [ChunkStorageMetadata(start, torch.Size([64, 8])) for start in starts]
        for c, start in enumerate(starts):
            storage[MetadataIndex(name, copied(start), c)] = _StorageInfo("__0_0.distcp", 2000 * (t * chunks + c), 2000)
        shape = torch.Size([64 * chunks, 8])
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), shape, listed)
    return Metadata(entries, {name: (name,) for name in entries}, storage)


def shared(tensors: int, chunks: int) -> Metadata:
    """All records refer to the same strings and shapes, as in a pickle of one process."""
    found = even(tensors, chunks)
    paths = ["__0_0.distcp", "__1_0.distcp"]
    size = torch.Size([64, 8])
    for (index, info), n in zip(list(found.storage_data.items()), range(tensors * chunks), strict=True):
        found.storage_data[index] = _StorageInfo(paths[n % 2], info.offset, info.length)
    for entry in found.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks = [ChunkStorageMetadata(chunk.offsets, size) for chunk in entry.chunks]
    return found


def checkpoint(folder: Path, tensors: int, chunks: int, make: Callable[[int, int], Metadata] = even) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(make(tensors, chunks)))
    with (folder / "__1_0.distcp").open("wb") as file:
        file.truncate(2000 * tensors * chunks)
    with (folder / "__0_0.distcp").open("wb") as file:
        file.truncate(2000 * tensors * chunks)
    return folder


def calls(work: Any) -> int:
    count = 0

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("make", [even, shared])
def test_a_chunk_costs_a_call_and_tens_of_bytes(make: Callable[[int, int], Metadata], tmp_path: Path) -> None:
    few, many = checkpoint(tmp_path / "few", 20, 200, make), checkpoint(tmp_path / "many", 20, 1000, make)
    lazyckpt.open(few, cache=False)
    more = calls(lambda: lazyckpt.open(many, cache=False)) - calls(lambda: lazyckpt.open(few, cache=False))
    assert more < 2 * 16_000, "two calls of Python for each of 16,000 chunks"
    tracemalloc.start()
    try:
        view = lazyckpt.open(many, cache=False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 110 * 20_000, "bytes of the index for each chunk"
    spec = view._index.states["weights"]["layers.7.weight"]
    assert len(spec.fragments) == 1000
    assert len(pickle.dumps(spec)) < 100 * 1000, "a pickled tensor has its own chunks only"


def test_a_tensor_in_columns_is_that_of_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "c", 3, 500)
    columns = lazyckpt.open(path, cache=False)._index
    monkeypatch.setattr(reading, "_LARGE", 1 << 60)
    alone = lazyckpt.open(path, cache=False)._index
    assert columns.problems == alone.problems and columns.files == alone.files and columns.aliases == alone.aliases
    for name, spec in alone.states["weights"].items():
        found = columns.states["weights"][name]
        assert list(found.fragments) == list(spec.fragments) and (found.shape, found.dtype) == (spec.shape, spec.dtype)
        assert list(pickle.loads(pickle.dumps(found)).fragments) == list(spec.fragments)
