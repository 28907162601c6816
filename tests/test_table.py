"""Plans as columns: the same bytes as the general plan finds, for every selection of tensors over many ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product
from math import prod

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lazyckpt.core.box import Selection, Shape, c_strides, span_boxes
from lazyckpt.core.compose import Composed
from lazyckpt.core.copies import Copy
from lazyckpt.core.dtypes import dtype_of
from lazyckpt.core.extents import Extent
from lazyckpt.core.fragments import fragments_of
from lazyckpt.core.placement import Placement, Rank
from lazyckpt.core.plan import plan
from lazyckpt.core.specs import TensorSpec
from lazyckpt.core.table import Copies, choose, spans
from lazyckpt.formats.dcp.chunks import in_chunks
from lazyckpt.formats.shared.flat import FlatFragments, Partition

from .algebra import often, shapes

F16 = dtype_of(torch.float16)


@st.composite
def partitioned(draw: st.DrawFn, shape: Shape) -> FlatFragments:
    """A parameter over many ranks, each with its own file, as ZeRO-1 and 2 (within a flat buffer) or 3."""
    total = prod(shape)
    within = draw(st.none() | st.integers(0, 9))
    width = draw(st.integers(1, max(1, total // 8)))
    count = -(-((within or 0) + total) // width)
    unit = draw(st.integers(1, 2))
    at = draw(st.integers(0, 3)) if within is None else 0
    partitions = tuple(
        Partition(Extent(f"rank{r}", 64 + 1000 * r, F16, (width + at,), (unit,)), Rank(dp=r)) for r in range(count)
    )
    return FlatFragments(shape, width, partitions, within, at)


@st.composite
def selections(draw: st.DrawFn, shape: Shape) -> Selection:
    want: list[range | NDArray[np.int64]] = []
    for n in shape:
        if draw(st.booleans()):
            start = draw(st.integers(0, n - 1))
            want.append(range(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 3))))
        else:
            want.append(np.array(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))), np.int64))
    return tuple(want)


def addresses(copies: Iterable[Copy], want: Selection) -> dict[tuple[int, ...], tuple[str, int]]:
    """(index of the output) -> (file, position of its element in bytes)."""
    found: dict[tuple[int, ...], tuple[str, int]] = {}
    for copy in copies:
        lists = copy.lists or (None,) * len(copy.shape)
        for index in np.ndindex(*copy.shape):
            steps = [n if one is None else int(one[n]) for n, one in zip(index, lists, strict=True)]
            at = copy.start + sum(n * s for n, s in zip(steps, copy.strides, strict=True))
            place = tuple(a + n for a, n in zip(copy.at, index, strict=True))
            assert place not in found
            found[place] = copy.extent.path, copy.extent.offset + at * copy.extent.dtype.itemsize
    assert len(found) == prod(map(len, want))
    return found


def listed(spec: TensorSpec) -> TensorSpec:
    """The same tensor with a tuple of fragments, which has no table."""
    return replace(spec, fragments=tuple(spec.fragments))


@often
@given(st.data(), shapes(max_dims=3))
def test_a_table_finds_the_same_bytes(data: st.DataObject, shape: Shape) -> None:
    assume(prod(shape) >= 8)
    spec = TensorSpec("t", shape, F16, data.draw(partitioned(shape)))
    want = data.draw(selections(shape))
    copies = plan(spec, want)
    assert addresses(copies, want) == addresses(plan(listed(spec), want), want)
    if isinstance(copies, Copies):
        runs = copies.runs(tuple(map(len, want)))
        found: dict[int, tuple[str, int]] = {}
        strides = c_strides(tuple(map(len, want)))
        expected = {sum(n * s for n, s in zip(i, strides, strict=True)): a for i, a in addresses(copies, want).items()}
        for file, offset, at, nbytes in zip(*(column.tolist() for column in runs[:4]), strict=True):
            for n in range(nbytes // 2):
                found[at // 2 + n] = (copies.table.paths[file], offset + 2 * n)
        for n in runs.rest.tolist():
            copy = copies[n]
            for index in np.ndindex(*copy.shape):
                place = sum((a + i) * s for a, i, s in zip(copy.at, index, strides, strict=True))
                assert place not in found
                found[place] = expected[place]
        assert found == expected


@often
@given(st.data())
def test_tables_of_shards_compose(data: st.DataObject) -> None:
    rows, columns = data.draw(st.tuples(st.integers(4, 9), st.integers(2, 5)))
    sources, placements = [], []
    for n in range(data.draw(st.integers(1, 3))):
        sources.append(data.draw(partitioned((rows, columns))))
        placements.append(Placement.at((rows, columns), (0, n * columns)))
    shape = (rows, columns * len(sources))
    spec = TensorSpec("t", shape, F16, Composed(tuple(sources), tuple(placements)))
    want = data.draw(selections(shape))
    assert addresses(plan(spec, want), want) == addresses(plan(listed(spec), want), want)


@often
@given(st.data(), shapes(max_dims=3))
def test_a_table_of_chunks(data: st.DataObject, shape: Shape) -> None:
    """Chunks cut at any lines in each dimension, as planners of FSDP and TP cut them; also one that overlaps them."""
    assume(shape and prod(shape) >= 8)
    lines = [data.draw(st.sets(st.integers(0, n), max_size=4)) for n in shape]
    chunks: list[tuple[Shape, Shape, Extent]] = []
    for cell in product(*(pairwise(sorted(edges | {0, n})) for edges, n in zip(lines, shape, strict=True))):
        start, sizes = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
        chunks.append((start, sizes, Extent(f"f{len(chunks) % 3}", 1000 * len(chunks), F16, sizes, c_strides(sizes))))
    if data.draw(st.booleans()):
        chunks.append(((0,) * len(shape), shape, Extent("all", 7, F16, shape, c_strides(shape))))
    spec = in_chunks("t", F16, shape, data.draw(st.permutations(chunks)))
    want = data.draw(selections(shape))
    assert addresses(plan(spec, want), want) == addresses(plan(listed(spec), want), want)
    assert len(pickle.dumps(spec)) == len(pickle.dumps(pickle.loads(pickle.dumps(spec))))


@often
@given(st.data(), shapes(max_dims=4))
def test_intervals_as_boxes(data: st.DataObject, shape: Shape) -> None:
    total = prod(shape)
    assume(total and shape)
    ends = [sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total)))) for _ in range(3)]
    numbers, places, starts, stops = spans(shape, *(np.array(side, np.int64) for side in zip(*ends, strict=True)))
    for n, (low, high) in enumerate(ends):
        mine = numbers == n
        boxes = span_boxes(shape, low, high)
        got = [(tuple(a), tuple(b)) for a, b in zip(starts[mine].tolist(), stops[mine].tolist(), strict=True)]
        assert got == [(box.start, box.stop) for box in boxes] or (not shape and len(got) == len(boxes))
        at = low
        for place, box in zip(places[mine].tolist(), boxes, strict=True):
            assert place == at
            at += box.numel


def test_a_plan_of_many_ranks_has_columns() -> None:
    """100,000 ranks: the plan has columns, and a copy is made when it is asked for."""
    count = 100_000
    partitions = tuple(Partition(Extent(f"r{r}", 0, F16, (16,), (1,)), Rank(dp=r)) for r in range(count))
    fragments = FlatFragments((count, 16), 16, partitions)
    copies = plan(TensorSpec("t", (count, 16), F16, fragments), (range(count), range(16)))
    assert isinstance(copies, Copies) and len(copies) == count
    assert copies[count - 1].extent.path == f"r{count - 1}" and copies[7].at == (7, 0)
    table = fragments_of(fragments).table((range(count), range(16)))
    assert table is not None and choose(table, (np.array([3, 99_999]), range(16))) is not None
