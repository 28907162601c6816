"""From fragments to elements: any placement, any selection, through both kinds of store, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lazyckpt import DataError, MissingFileError
from lazyckpt.core.box import Box, c_strides
from lazyckpt.core.compose import averaged
from lazyckpt.core.dtypes import dtype_of
from lazyckpt.core.extents import Extent, Hole
from lazyckpt.core.placement import Part, Rank
from lazyckpt.core.select import Selection
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.formats.shared.flat import FlatFragments, Partition
from lazyckpt.io import pool
from lazyckpt.io.reading import gather
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.tensor import LazyTensor

from .algebra import Array, index, keys, shapes
from .lanes import rounds
from .placements import FLOATS, NUMPY, UNSET, Disk, Placed, PlainStore, fill, placed

property_test = settings(max_examples=rounds(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
BIG, SMALL, TINY = (8 << 20, 32 << 10), (96, 48), (16, 8)  # BLOCK and _RUN


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        yield Path(folder)


@contextmanager
def files(case: Placed) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder))
        yield Path(folder)


@contextmanager
def small_blocks(data: st.DataObject) -> Iterator[None]:
    """Blocks so small that little tensors are cut too, and threads for them."""
    block, run = data.draw(st.sampled_from([BIG, SMALL, TINY]), label="BLOCK, _RUN")
    inline = data.draw(st.sampled_from([4 << 20, 1]), label="_INLINE")
    with (
        mock.patch.multiple(gather, BLOCK=block, _RUN=run, _WINDOW=4 * block),
        mock.patch.multiple(pool, _INLINE=inline, _BATCH=inline),
    ):
        yield


def stores(folder: Path) -> dict[str, Any]:
    return {"local": LocalStore(folder), "gap 0": PlainStore(folder), "gap 64": PlainStore(folder, gap=64)}


def same(found: torch.Tensor, expected: Array) -> bool:
    """Bit for bit."""
    plain = found.contiguous().as_strided(found.shape, c_strides(found.shape))  # a length of 1 may have any stride
    bits = plain.view(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""
    return tuple(found.shape) == expected.shape and bits == np.ascontiguousarray(expected).tobytes()


@property_test
@given(st.data(), placed())
def test_any_slice_of_any_placement(data: st.DataObject, case: Placed) -> None:
    key = data.draw(keys(case.truth.shape))
    expected = index(case.truth, key)
    with files(case) as folder, small_blocks(data):
        for name, store in stores(folder).items():
            found = LazyTensor(store, case.spec)[key]
            assert found.dtype == case.spec.dtype
            assert found.is_contiguous()
            assert same(found, expected), name


@property_test
@given(st.data(), placed())
def test_deferred_slices(data: st.DataObject, case: Placed) -> None:
    """``t.lazy[a][b]`` is ``whole[a][b]``, however it is read, and says its shape before it is."""
    first = data.draw(keys(case.truth.shape, added=False))
    middle = index(case.truth, first)
    second = data.draw(keys(middle.shape))
    expected = index(middle, second)
    with files(case) as folder, small_blocks(data):
        for name, store in stores(folder).items():
            lazy = LazyTensor(store, case.spec).lazy[first].lazy[second]
            assert tuple(lazy.shape) == expected.shape
            for found in (LazyTensor(store, case.spec).lazy[first][second], lazy[...], lazy.to("cpu")):
                assert same(found, expected), name


@property_test
@given(st.data(), placed())
def test_runs_are_the_bytes_in_their_order(data: st.DataObject, case: Placed) -> None:
    """Of any block, if there are runs; of a plain tensor there are."""
    block = tuple(slice(*sorted(data.draw(st.integers(0, n)) for _ in "ab")) for n in case.truth.shape)
    with files(case) as folder:
        tensor = LazyTensor(LocalStore(folder), case.spec)
        for part, expected in ((tensor, case.truth), (tensor.lazy[block], case.truth[block])):
            runs = part._runs()
            event("runs" if runs is not None else "none")
            if runs is not None:
                found = b"".join(case.files[r.path][r.offset : r.offset + r.nbytes] for r in runs)
                assert found == np.ascontiguousarray(expected).tobytes()
        assert tensor._plain is None or tensor._runs() is not None


@property_test
@given(st.data(), placed())
def test_what_is_read_is_the_callers_own(data: st.DataObject, case: Placed) -> None:
    with files(case) as folder:
        for store in stores(folder).values():
            tensor = LazyTensor(store, case.spec)
            found = tensor[data.draw(keys(case.truth.shape))]
            found.view(-1).view(torch.uint8).fill_(0x55) if found.numel() else None
            assert same(tensor[...], case.truth)
        for path, content in case.files.items():
            assert (folder / path).read_bytes() == content


@property_test
@given(st.data(), placed(holes=True))
def test_holes(data: st.DataObject, case: Placed) -> None:
    """Slices that miss them read; slices that touch one raise, naming its file; and explain says the same."""
    key = data.draw(keys(case.truth.shape))
    touched = index(case.address, key)
    lost = {-2 - int(n) for n in touched[touched < UNSET]}
    event("touches a hole" if lost else "misses all holes")
    with files(case) as folder, small_blocks(data):
        for store in stores(folder).values():
            tensor = LazyTensor(store, case.spec)
            if not lost:
                assert same(tensor[key], index(case.truth, key))
                tensor.explain(key)
                continue
            for do in (tensor.__getitem__, tensor.explain, lambda k, t=tensor: t.lazy[k].numpy()):
                with pytest.raises(MissingFileError, match="is not there") as caught:
                    do(key)
                assert any(case.holes[n].path in str(caught.value) for n in lost)
                assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.slow
@property_test
@given(st.data(), placed(replicas=False))
def test_what_no_file_holds_is_no_data(data: st.DataObject, case: Placed) -> None:
    fragments = [f for f in case.spec.fragments if data.draw(st.booleans())]
    spec = TensorSpec("t", case.spec.shape, case.spec.dtype, tuple(fragments))
    covered = np.zeros(case.truth.shape, bool)
    for number, fragment in enumerate(case.spec.fragments):
        if fragment in fragments:
            covered |= np.isin(case.address, addresses(case, number))
    key = data.draw(keys(case.truth.shape))
    with files(case) as folder:
        tensor = LazyTensor(LocalStore(folder), spec)
        if len(fragments) == len(case.spec.fragments):
            assert same(tensor[key], index(case.truth, key))
        elif not fragments and index(case.truth, key).size:
            with pytest.raises(DataError, match="'t'"):
                _ = tensor[key]
        elif index(covered, key).all():
            assert same(tensor[key], index(case.truth, key))


def addresses(case: Placed, number: int) -> Array:
    """The addresses of the elements that one fragment's extent holds."""
    extent = case.spec.fragments[number].extent
    assert isinstance(extent, Extent)
    steps = np.zeros((), np.int64)
    for n, s in zip(extent.shape, extent.strides, strict=True):
        steps = steps[..., None] + np.arange(n) * s
    return (int(extent.path.split("_")[1][0]) << 40) + extent.offset + steps.reshape(-1) * extent.dtype.itemsize


@property_test
@given(st.data(), placed(replicas=False))
def test_reads_only_what_is_wanted(data: st.DataObject, case: Placed) -> None:
    """And nothing before it is wanted."""
    key = data.draw(keys(case.truth.shape))
    elements = index(case.address, key).size
    width = max((f.extent.dtype.itemsize for f in case.spec.fragments if isinstance(f.extent, Extent)), default=0)
    with files(case) as folder, small_blocks(data):
        store = PlainStore(folder)
        tensor = LazyTensor(store, case.spec)
        repr(tensor), tensor.explain(key), tensor.lazy[key]
        assert store.reads == 0
        assert same(tensor[key], index(case.truth, key))
        assert store.bytes <= elements * width
        assert store.reads <= elements


@property_test
@given(st.data(), placed(replicas=False, overlaps=False))
def test_reads_at_most_the_gap_between_two_runs(data: st.DataObject, case: Placed) -> None:
    key = data.draw(keys(case.truth.shape))
    width = max((f.extent.dtype.itemsize for f in case.spec.fragments if isinstance(f.extent, Extent)), default=0)
    where, piece = index(case.address, key), index(case.piece, key)
    joints = 0  # between two runs of the same part
    for number in np.unique(piece):
        joints += int((np.diff(np.unique(where[piece == number])) > width).sum())
    with files(case) as folder, small_blocks(data):
        store = PlainStore(folder, gap=64)
        assert same(LazyTensor(store, case.spec)[key], index(case.truth, key))
        assert store.bytes <= where.size * width + 64 * joints


@property_test
@given(st.data(), placed())
def test_splitting_ends(data: st.DataObject, case: Placed) -> None:
    """However small the blocks, a copy falls into at most as many tasks as it has elements, none of them empty."""
    reads = Selection.all(case.truth.shape)[data.draw(keys(case.truth.shape))].reads()
    out = torch.empty(reads.shape, dtype=case.spec.dtype.torch)
    with files(case) as folder, mock.patch.multiple(gather, BLOCK=16, _RUN=8, _WINDOW=32):
        for store in stores(folder).values():
            tasks = list(islice(gather.tasks(store, case.spec, reads, out), out.numel() + 1))
            assert len(tasks) <= out.numel()
            assert all(size > 0 for size, _ in tasks)


@property_test
@given(st.data(), shapes(max_dims=3), st.sampled_from(FLOATS), st.integers(1, 4))
def test_the_mean_of_replicas(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    """Averaged in float32 (float64 for float64), also where some replicas are cut differently or lost."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    disk = Disk(rng)
    wide = np.float64 if dtype == torch.float64 else np.float32
    total = np.zeros(shape, wide)
    replicas = []
    for _ in range(count):
        fragments = []
        array = fill(rng, shape, dtype, "exact")
        total += array.astype(wide)
        rows = data.draw(st.integers(0, shape[0])) if shape else 0
        for lo, hi in ((0, rows), (rows, shape[0])) if shape else ((0, 0),):
            block = array[lo:hi] if shape else array
            extent, _ = disk.store(data.draw, block, dtype, "flagged", flat=False)
            start = (lo, *[0] * (len(shape) - 1)) if shape else ()
            fragments.append(Fragment(extent, block.shape, (Part(Box.of(block.shape), start),)))
        replicas.append(tuple(fragments))
    spec = averaged("t", shape, dtype_of(dtype), replicas, "")
    expected = (total / wide(count)).astype(NUMPY[dtype])
    case = Placed(spec, expected, {p: bytes(b) for p, b in disk.files.items()}, [], np.zeros(shape))
    key = data.draw(keys(shape))
    with files(case) as folder, small_blocks(data):
        for store in stores(folder).values():
            assert same(LazyTensor(store, spec)[key], index(expected, key))


@property_test
@given(st.data(), st.integers(1, 12), st.integers(2, 3))
def test_a_mean_with_holes_is_the_same_for_every_slice(data: st.DataObject, n: int, count: int) -> None:
    """Which replicas an element is the mean of must not depend on what else was asked for."""
    disk = Disk(np.random.default_rng(n))
    replicas = []
    values = np.zeros((count, n))
    for r in range(count):
        fragments = []
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))})
        for lo, hi in pairwise(cuts):
            part = (Part(Box((0,), (hi - lo,)), (lo,)),)
            if r and data.draw(st.booleans()):
                fragments.append(Fragment(Hole("lost.bin", "lost.bin is not there"), (hi - lo,), part))
                continue
            block = np.full(hi - lo, float(10**r), np.float32)
            extent, _ = disk.store(data.draw, block, torch.float32, "plain", flat=False)
            fragments.append(Fragment(extent, (hi - lo,), part))
            values[r, lo:hi] = 10**r
        replicas.append(tuple(data.draw(st.permutations(fragments))))
    spec = averaged("t", (n,), dtype_of(torch.float32), data.draw(st.permutations(replicas)), "")
    case = Placed(spec, np.zeros(n), {p: bytes(b) for p, b in disk.files.items()}, [], np.zeros(n))
    with files(case) as folder:
        tensor = LazyTensor(LocalStore(folder), spec)
        whole = tensor[...]
        assert np.array_equal(whole.numpy(), (values.sum(0) / (values > 0).sum(0)).astype(np.float32))
        for i in range(n):
            assert tensor[i] == whole[i]


@property_test
@given(st.data(), shapes(max_side=5), st.integers(1, 5))
def test_flat_groups_are_cut_on_demand_as_beforehand(data: st.DataObject, shape: tuple[int, ...], ranks: int) -> None:
    """ZeRO's flat groups: every parameter of a group, and the fragments that a slice needs among a thousand."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    truth = fill(rng, shape, torch.float32, "plain")
    before = data.draw(st.integers(0, 20))
    stage3 = data.draw(st.booleans())
    n, base = truth.size, 0 if stage3 else before
    width = -(-(base + n + data.draw(st.integers(0, 9))) // ranks)
    flat = np.concatenate([fill(rng, (base,), torch.float32, "plain"), truth.reshape(-1)])
    flat = np.concatenate([flat, fill(rng, (width * ranks - flat.size,), torch.float32, "plain")])
    disk, partitions = Disk(rng), []
    for r in range(ranks):
        share = flat[r * width : (r + 1) * width]
        if stage3:  # a rank's buffer holds its share of one parameter after the other
            share = np.concatenate([fill(rng, (before,), torch.float32, "plain"), share])
        extent, _ = disk.store(data.draw, share, torch.float32, "plain", flat=True)
        partitions.append(Partition(extent, Rank(dp=r)))
    lazily = FlatFragments(shape, width, tuple(partitions), None if stage3 else before, before if stage3 else 0)
    assert list(lazily) == [lazily[i] for i in range(len(lazily))]
    key = data.draw(keys(shape))
    address = np.zeros(shape)
    for fragments in (lazily, tuple(lazily)):
        spec = TensorSpec("t", shape, torch.float32, fragments)
        with files(Placed(spec, truth, {p: bytes(b) for p, b in disk.files.items()}, [], address)) as folder:
            assert same(LazyTensor(LocalStore(folder), spec)[key], index(truth, key))
