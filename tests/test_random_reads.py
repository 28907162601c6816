"""Random slices of tensors in random chunks, and random rank files that agree up to a place, compared with torch."""

from __future__ import annotations

import io
import itertools
import pickle
import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import lazyckpt
from lazyckpt.io.containers.pickle import machine, memo
from lazyckpt.io.reading import mosaic, rows, strips, window
from lazyckpt.testing.case import bit_equal

from .test_pickles_sharing import outcome, read_among

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
LIMITS = {
    rows: ("LARGE", "ONE_CALL", "SMALL", "_JOINED", "_PIECE", "_THREADS", "_SHORT", "_MANY"),
    mosaic: ("LARGE", "NEAR", "_MOST", "_FILES", "_CACHED"),
    strips: ("NEAR", "SMALL", "_CACHED"),
    window: ("LARGE", "SMALL", "ONE_CALL", "_HUGE", "NEAR", "_CACHED"),
}


def random_tensor(r: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits, also NaNs with a payload."""
    raw = torch.frombuffer(bytearray(r.randbytes(prod(shape) * dtype.itemsize)), dtype=torch.uint8)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).view(shape)


def write_at_random(r: random.Random, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint of torch.distributed.checkpoint: rows or a grid of equal or unequal chunks, in any order and file,
    at any address."""
    folder.mkdir()
    described: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    chunks: list[tuple[str, tuple[int, ...], torch.Tensor]] = []
    for name, tensor in tensors.items():
        grid = r.random() < 0.3
        cuts = []
        for d, n in enumerate(tensor.shape):
            ends = {*range(0, n, r.choice((1, 2, 3, 5, 8)))} if r.random() < 0.6 else {r.randrange(n) for _ in range(3)}
            at = sorted({0, n, *(ends if d == 0 or grid else ())})
            cuts.append(list(itertools.pairwise(at)))
        blocks = list(itertools.product(*cuts))
        sizes = [torch.Size([b - a for a, b in block]) for block in blocks]
        starts = [torch.Size([a for a, _ in block]) for block in blocks]
        described[name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), tensor.shape, list(map(ChunkStorageMetadata, starts, sizes))
        )
        chunks += [(name, tuple(s), tensor[tuple(slice(*c) for c in b)]) for s, b in zip(starts, blocks, strict=True)]
    if r.random() < 0.4:
        r.shuffle(chunks)
    files = [bytearray() for _ in range(r.choice((1, 1, 2, 3)))]
    gap = r.choice((0, 0, 1, 2, 4))
    for n, (name, start, chunk) in enumerate(chunks):
        packed = io.BytesIO()
        torch.save(chunk.clone(), packed)
        rank = n * len(files) // len(chunks)
        files[rank] += bytes(gap)
        place = _StorageInfo(f"__{rank}_0.distcp", len(files[rank]), len(packed.getvalue()))
        stored[MetadataIndex(name, torch.Size(start))] = place
        files[rank] += packed.getvalue()
    for rank, data in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=stored)))


def random_slice(r: random.Random, n: int) -> slice:
    ends = (None, 0, 1, -1, n, -n, r.randint(-n - 3, n + 3), 10**12, -(10**12))
    return slice(r.choice(ends), r.choice(ends), r.choice((None, None, 1, 2, 3, 5, n, -1, -2, -n, 10**12, -(2**62))))


def random_key(r: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Ints, slices, and at most one list or mask."""
    key: list[Any] = []
    listed = False
    for n in shape[: r.randint(1, len(shape))]:
        kind = r.random()
        if kind < 0.25 and not listed:
            listed = True
            index = [r.randint(-n, n - 1) for _ in range(r.choice((0, 1, 3, n, 2 * n)))]
            mask = torch.tensor([r.random() < 0.4 for _ in range(n)])
            key.append(r.choice((index, sorted(index), torch.tensor(index, dtype=torch.int64), mask, mask.numpy())))
        else:
            key.append(r.randint(-n, n - 1) if kind < 0.5 else random_slice(r, n))
    if r.random() < 0.2:
        key.append(...)
    if r.random() < 0.1:
        key.insert(0, None)
    return tuple(key)


def indexed(whole: torch.Tensor, key: tuple[Any, ...]) -> torch.Tensor:
    """What torch returns for the key, with each slice, also of negative step, in the place of its indices."""
    items: list[Any] = []
    d = 0
    for item in key:
        if isinstance(item, slice):
            chosen = torch.tensor(range(*item.indices(whole.shape[d])), dtype=torch.int64)
            whole, item = whole.index_select(d, chosen), slice(None)
        d += item is not None and item is not ...
        items.append(item)
    return whole[tuple(items)]


@pytest.mark.parametrize("seed", range(12))
def test_random_slices_of_random_chunks(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(seed)
    shapes = ((60,), (31, 7), (24, 16), (100, 3), (9, 4, 5), (12, 1, 2, 3))
    tensors = {f"w{n}": random_tensor(r, r.choice(shapes), r.choice(DTYPES)) for n in range(4)}
    write_at_random(r, tmp_path / "dcp", tensors)
    torch.save({name: t.mT.contiguous().mT if t.ndim > 1 else t for name, t in tensors.items()}, tmp_path / "x.pt")
    if seed % 2:  # limits that small tensors exceed
        for module, names in LIMITS.items():
            for name in names:
                if r.random() < 0.4:
                    monkeypatch.setattr(module, name, r.choice((1, 16, 64, 512)))
    for path in (tmp_path / "dcp", tmp_path / "x.pt"):
        view = lazyckpt.open(path, cache=False)
        for name, whole in tensors.items():
            for _ in range(40):
                key = random_key(r, tuple(whole.shape))
                want = indexed(whole, key)
                for _ in range(2):
                    got = view[name][key]
                    assert got.shape == want.shape and bit_equal(got, want), (path.name, name, whole.shape, key)
                    if got.dtype.itemsize > 1:
                        got.zero_()  # the result belongs to the caller


@pytest.mark.parametrize("seed", range(8))
def test_rank_files_that_agree_up_to_a_place(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it, values differ that take as many bytes: shapes, dtypes, numbers, names and tied tensors."""
    r = random.Random(seed)
    for module, name, value in ((memo, "_LEAST", 32), (memo, "_SHORTEST", 16), (machine, "NOTED", r.choice((8, 1024)))):
        monkeypatch.setattr(module, name, value)
    tied = [torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3).int()]
    text = "".join(r.choices("abc", k=9))

    def value() -> Any:
        more = (r.randrange(9), -0.0, 0.0, True, text, text[::-1], (1, text), torch.zeros(r.randint(1, 9)))
        return r.choice((*tied, *more, tied[0][r.randrange(2)]))

    first = {f"k{n:02}": value() for n in range(30)}
    paths = []
    for rank in range(5):
        at = r.randrange(30)
        state = {k: v if n < at or r.random() < 0.7 else value() for n, (k, v) in enumerate(first.items())}
        paths.append(tmp_path / f"{rank}.pt")
        torch.save({"optimizer_state_dict": state, "rank": rank}, paths[-1])
    for path, found in zip(paths, read_among(paths), strict=True):
        alone = lazyckpt.open(path, cache=False).stored
        assert found == outcome(path, None)
        wanted = torch.load(path)["optimizer_state_dict"]
        tensors = {f"optimizer_state_dict.{k}": v for k, v in wanted.items() if isinstance(v, torch.Tensor)}
        assert set(alone) == set(tensors)
        for name, tensor in tensors.items():
            assert bit_equal(alone[name][...], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_target_of_one_element_may_have_any_stride(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"w": torch.full((1, 1), 3, dtype=dtype)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt", cache=False)
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(4, 2, dtype=dtype).as_strided((1, 1), (1, 2)))
    view.load_into(module)
    assert torch.equal(module.get_buffer("w"), torch.full((1, 1), 3, dtype=dtype))
    target = torch.zeros(4, dtype=dtype)
    view["w"].read_into(target.as_strided((1, 1), (3, 2), 1))
    assert target.tolist() == [0, 3, 0, 0]


def test_a_conjugated_target_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.full((2, 2), 1 + 2j)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt", cache=False)
    with pytest.raises(lazyckpt.DataError, match="conjugated"):
        view["w"].read_into(torch.zeros(2, 2, dtype=torch.complex64).conj())
