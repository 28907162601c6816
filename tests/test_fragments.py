"""The contract of `Fragments`, for each kind: what `meeting` returns holds just what all fragments hold of a selection.

The bookkeeping is brute force: for every element of the tensor, the places (file, element of the extent) that hold it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt.core.blocks import Blocks, Boxes, Grid
from lazyckpt.core.box import Box, Shape, c_strides
from lazyckpt.core.chunking import fragment_grid
from lazyckpt.core.compose import Composed, Layer, compose, stack
from lazyckpt.core.dtypes import F32
from lazyckpt.core.extents import Archive, Extent, Hole
from lazyckpt.core.flat import Interval, Joined
from lazyckpt.core.fragments import Fragments, fragment_boxes, fragments_of
from lazyckpt.core.packs import member, packed
from lazyckpt.core.placement import Part, Placement, Rank
from lazyckpt.core.plan import plan
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.errors import LazyckptError
from lazyckpt.formats.dcp.chunks import in_chunks
from lazyckpt.formats.dcp.items import Item
from lazyckpt.formats.megatron.stacks import regridded
from lazyckpt.formats.ranks.fragments import MeshFragments, Team
from lazyckpt.formats.shared.flat import FlatFragments, Partition
from lazyckpt.formats.zarr.grid import Array, GridFragments, Level, Packing, spec_of
from lazyckpt.layouts.merge import Merge, concatenated, in_parts, replicated
from lazyckpt.layouts.placements import Cut, Layout, Same

from .algebra import shapes

Place = tuple[str, Any]  # the file, or the reason of a hole; the element of the extent


def places(fragments: Sequence[Fragment], shape: Shape) -> dict[Shape, list[Place]]:
    """Of every element, by its index: where it is held, in the order of the fragments."""
    found: dict[Shape, list[Place]] = {}
    for fragment in fragments:
        numbers = np.arange(prod(fragment.local_shape)).reshape(fragment.local_shape)
        for local, globe in fragment_boxes(fragment):
            inside = numbers[local.slices].ravel().tolist()
            axes = range(len(shape)) if fragment.axes is None else fragment.axes
            kept = [a for a in axes if a is not None]
            for offset in np.ndindex(globe.shape):
                own = list(local.start)
                for d, axis in enumerate(axes):
                    if axis is not None:
                        own[axis] += offset[d]
                number = int(numbers[tuple(own)])
                assert number in inside and len(set(kept)) == len(kept)
                index = tuple(a + n for a, n in zip(globe.start, offset, strict=True))
                if all(n < size for n, size in zip(index, shape, strict=True)):  # (not padding)
                    found.setdefault(index, []).append(address(fragment, number))
    return found


def address(fragment: Fragment, number: int) -> Place:
    """Where the element of this number of a rank-local array is."""
    extent = fragment.extent
    if isinstance(extent, Hole):
        return extent.reason, None
    if not isinstance(extent, Extent):
        return extent.path, (extent.key, number - (fragment.span or (0, 0))[0])
    if fragment.span is not None:
        return extent.path, extent.offset + 4 * (number - fragment.span[0]) * (
            extent.strides[-1] if extent.strides else 1
        )
    index = np.unravel_index(number, fragment.local_shape)
    return extent.path, extent.offset + 4 * sum(int(n) * s for n, s in zip(index, extent.strides, strict=True))


@st.composite
def selections(draw: st.DrawFn, shape: Shape) -> tuple[range, ...]:
    """Any ascending ranges, some of them empty."""
    found = []
    for n in shape:
        start = draw(st.integers(0, n))
        found.append(range(start, draw(st.integers(start, n)), draw(st.integers(1, 3))))
    return tuple(found)


# -- tensors of each kind


def listed(draw: st.DrawFn, name: str = "w", shape: Shape | None = None) -> TensorSpec:
    """A plain tuple: rows of one file each, in any order, some twice."""
    shape = draw(shapes(1, 3, 0, 4)) if shape is None else shape
    cuts = [0, *sorted(draw(st.lists(st.integers(0, shape[0]), max_size=3))), shape[0]] if shape else []
    if not shape:
        extent = Extent(f"{name}.bin", 8, F32, (), ())
        return TensorSpec(name, shape, F32, (Fragment(extent, ()),))
    fragments = []
    for a, b in draw(st.permutations(list(pairwise(cuts)))):
        rows = (b - a, *shape[1:])
        part = Part(Box.of(rows), (a, *(0,) * (len(shape) - 1)))
        for copy in range(draw(st.integers(1, 2))):
            extent = Extent(f"{name}{a}.{copy}", 4 * a, F32, rows, c_strides(rows))
            fragments.append(Fragment(extent, rows, (part,)))
    return TensorSpec(name, shape, F32, tuple(fragments))


def table(draw: st.DrawFn) -> TensorSpec:
    """DCP: a table of blocks, which may overlap and leave gaps."""
    shape = draw(shapes(1, 3, 0, 4))
    chunks = []
    for n in range(draw(st.integers(0, 5))):
        ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        start, sizes = tuple(a for a, _ in ends), tuple(b - a for a, b in ends)
        chunks.append((start, sizes, Item(f"__{n}_0.distcp", 100 * n, 100)))
    return in_chunks("w", F32, shape, chunks)


def grid(draw: st.DrawFn) -> TensorSpec:
    """Zarr: a regular grid, whose last cells are cut off."""
    shape = draw(shapes(1, 3, 0, 4))
    cell = tuple(draw(st.integers(1, n + 1)) for n in shape)
    array = Array(shape, F32, cell, Packing(tuple(range(len(shape)))), bytes(4), "c", "/")
    return spec_of("w", GridFragments(array, "w", complete=draw(st.booleans())))


def mesh(draw: st.DrawFn) -> TensorSpec:
    """DTensors: cut and replicated over a mesh, with files that are lost."""
    shape = draw(shapes(1, 3, 0, 4))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    over = tuple(
        Same() if draw(st.booleans()) else Cut(draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2)))
        for _ in sizes
    )
    layout = Layout(sizes, over)
    coordinates = tuple(product(*map(range, sizes)))
    lost = tuple(f"rank {n} is lost" if draw(st.integers(0, 5)) == 0 else "" for n in range(len(coordinates)))
    team = Team(coordinates, tuple(f"rank{n}" for n in range(len(coordinates))), lost)
    offsets = np.zeros(len(coordinates), np.int64)
    return TensorSpec("w", shape, F32, MeshFragments(shape, F32, layout, team, offsets))


def partitioned(draw: st.DrawFn, name: str = "w", shape: Shape | None = None) -> TensorSpec:
    """ZeRO: flat partitions, of a parameter (stage 3) or of the group that it is in."""
    shape = draw(shapes(0, 3, 0, 4)) if shape is None else shape
    total, dp = prod(shape), draw(st.integers(1, 4))
    within = draw(st.none() | st.integers(0, 5))
    width = max(1, -(-(total + (within or 0)) // dp))
    at = 0 if within is not None else draw(st.integers(0, 3))
    holders = []
    for r in range(dp):
        extent: Extent | Hole = Extent(f"{name}{r}", 16, F32, (width + at,), (1,))
        if draw(st.integers(0, 5)) == 0:
            extent = Hole(f"{name}{r}", f"{name}{r} is lost")
        holders.append(Partition(extent, Rank(dp=r)))
    return TensorSpec(name, shape, F32, FlatFragments(shape, width, tuple(holders), within, at))


def interval(draw: st.DrawFn) -> TensorSpec:
    source = draw(st.sampled_from((listed, partitioned, table)))(draw)
    lo = draw(st.integers(0, source.numel))
    hi = draw(st.integers(lo, source.numel))
    return TensorSpec("w", (hi - lo,), F32, Interval(source.shape, source.fragments, lo, hi))


def joined(draw: st.DrawFn) -> TensorSpec:
    """Intervals of one dimension, of any kind, as a tensor; some intervals are missing."""
    shape = draw(shapes(0, 3, 0, 4))
    total = prod(shape)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=3))), total]
    held = []
    for n, (a, b) in enumerate(pairwise(cuts)):
        one = draw(st.sampled_from((listed, partitioned)))(draw, f"i{n}.", (b - a,))
        if b > a and draw(st.integers(0, 3)) == 0:  # packed, in chunks of its own length
            one = in_chunks("w", F32, (b - a,), [((0,), (b - a,), Item(f"i{n}", 0, 8))])
        if draw(st.integers(0, 5)):
            held.append((a, b - a, one.fragments))
    return TensorSpec("w", shape, F32, Joined(shape, tuple(held)))


def composed(draw: st.DrawFn) -> TensorSpec:
    """Blocks of tensors of any kind, turned, with a new dimension, beside each other along it."""
    source = draw(st.sampled_from((listed, partitioned, grid, table)))(draw)
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in source.shape]
    block = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    axes: tuple[int | None, ...] = (None, *draw(st.permutations(range(len(source.shape)))))
    turned = tuple(block.shape[a] for a in axes if a is not None)
    count = draw(st.integers(1, 3))
    pieces = [
        (source, Placement.of(source.shape, block, (n, *(0 for _ in turned)), axes))
        for n in draw(st.permutations(range(count)))
    ]
    return compose("w", (count, *turned), pieces)


def nested(draw: st.DrawFn) -> TensorSpec:
    """A block of what is composed."""
    source = composed(draw)
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in source.shape]
    block = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    return compose("w", block.shape, [(source, Placement.of(source.shape, block, (0,) * len(ends)))])


def merged(draw: st.DrawFn) -> TensorSpec:
    """The shards of ranks, by a merge rule."""
    ranks = draw(st.integers(1, 3))
    shape = draw(shapes(1, 3, 0, 4))
    kind = draw(st.sampled_from(("replicated", "concatenated", "in_parts")))
    if kind == "in_parts":
        shape = (2 * shape[0], *shape[1:])
    rule: Callable[[Sequence[Shape]], Merge] = {
        "replicated": replicated, "concatenated": concatenated(len(shape) - 1), "in_parts": in_parts(0, 2)
    }[kind]  # fmt: skip
    merge = rule([shape] * ranks)
    one = st.sampled_from((listed, partitioned))
    shards = [whole_only(draw(one)(draw, f"r{r}.", shape)) for r in range(ranks)]
    return merge.tensor("w", F32, shards)


def whole_only(spec: TensorSpec) -> Sequence[Fragment]:
    return spec.fragments


def stacked(draw: st.DrawFn) -> TensorSpec:
    """The steps of a run."""
    shape = draw(shapes(0, 3, 0, 4))
    one = st.sampled_from((listed, partitioned))
    layers = [
        Layer(10 * n, draw(st.sampled_from(("", f"step{n}"))), draw(one)(draw, f"s{n}.", shape))
        for n in range(draw(st.integers(1, 3)))
    ]
    return stack("w", layers, F32)


def regrid(draw: st.DrawFn) -> TensorSpec:
    """Megatron: a grid of blocks, each flat."""
    block = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    counts = tuple(draw(st.integers(1, 3)) for _ in block)
    chunks = []
    for n, cell in enumerate(product(*map(range, counts))):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, prod(block)), max_size=2))), prod(block)]
        for m, (a, b) in enumerate(pairwise(cuts)):
            sizes = (*(1 for _ in counts), b - a)
            chunks.append(((*cell, a), sizes, Extent(f"{n}.{m}", 0, F32, sizes, c_strides(sizes))))
    flat = in_chunks("w", F32, (*counts, prod(block)), chunks)
    return regridded(flat, tuple(c * n for c, n in zip(counts, block, strict=True)))


def whole(draw: st.DrawFn, name: str, shape: Shape) -> TensorSpec:
    """A tensor in one piece."""
    extent = Extent(f"{name}bin", 4 * draw(st.integers(0, 9)), F32, shape, c_strides(shape))
    return TensorSpec(name, shape, F32, (Fragment(extent, shape),))


def archived(draw: st.DrawFn, name: str, shape: Shape) -> TensorSpec:
    """A tensor in one piece, which has to be looked up."""
    return in_chunks("w", F32, shape, [((0,) * len(shape), shape, Item(name, 8, 100))])


def of_pack(draw: st.DrawFn, name: str = "w", shape: Shape | None = None) -> TensorSpec:
    """One of the tensors in a pack, which is stored in chunks, perhaps of a shard."""
    shape = draw(shapes(0, 3, 0, 3)) if shape is None else shape
    lo = draw(st.integers(0, 5))
    total = lo + prod(shape) + draw(st.integers(0, 5))
    cell = (draw(st.integers(1, total + 1)),)
    levels = (Level(cell, (0,)),) if draw(st.booleans()) else ()
    whole_cells = -(-max(total, 1) // cell[0]) * cell[0]
    array = Array((total,), F32, (whole_cells,) if levels else cell, Packing((0,), levels), bytes(4), "c", "/")
    spec = spec_of(f"{name}pack", GridFragments(array, f"{name}pack", complete=draw(st.booleans())))
    return member(name, spec, lo, shape, "")


def pack(draw: st.DrawFn) -> TensorSpec:
    """Tensors of any kind, one after the other; most often they all lie in one piece."""
    makers = draw(st.sampled_from(((whole,), (whole, listed, partitioned, archived, of_pack))))
    count = draw(st.integers(1, 12))
    return packed("w", [draw(st.sampled_from(makers))(draw, f"p{n}.", draw(shapes(0, 3, 0, 3))) for n in range(count)])


KINDS: dict[str, Callable[[st.DrawFn], TensorSpec]] = {
    one.__name__: one
    for one in (
        listed,
        table,
        grid,
        mesh,
        partitioned,
        interval,
        joined,
        composed,
        nested,
        merged,
        stacked,
        regrid,
        pack,
        of_pack,
    )
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_contract(kind: str, data: st.DataObject) -> None:
    spec = st.composite(KINDS[kind])()
    tensor: TensorSpec = data.draw(spec)
    fragments = fragments_of(tensor.fragments)
    everything = list(fragments)

    # a sequence
    assert len(fragments) == len(everything)
    assert bool(fragments) == bool(everything)
    assert [fragments[n] for n in range(len(everything))] == everything
    assert list(fragments[1:]) == everything[1:]
    if everything:
        assert fragments[-1] == everything[-1]
    for n in (len(everything), -len(everything) - 1):
        with pytest.raises(IndexError):
            fragments[n]
    assert list(pickle.loads(pickle.dumps(fragments_of(tensor.fragments)))) == everything

    # what meets a selection
    want = data.draw(selections(tensor.shape))
    wanted = set(product(*want))
    held = {at: found for at, found in places(everything, tensor.shape).items() if at in wanted}
    near = {at: found for at, found in places(fragments.meeting(want), tensor.shape).items() if at in wanted}
    if kind == "mesh":  # of replicas, one that is there
        assert near.keys() == held.keys()
        for at, found in near.items():
            assert len(found) == 1 and found[0] in held[at]
            assert found[0][1] is not None or all(where is None for _, where in held[at])
    else:
        assert near == held
    if not wanted:
        assert not list(fragments.meeting(want)) or isinstance(tensor.fragments, tuple)

    # what lies in a block
    box = Box(tuple(r.start for r in want), tuple(max(r.start, r.stop) for r in want))
    inside = places(list(fragments.inside(box)), tensor.shape)
    for at in product(*map(range, box.start, box.stop)):
        assert set(inside.get(at, ())) >= set(near.get(at, ()))

    # what is known without making the fragments
    only = fragments.only()
    assert only is None or [only] == everything
    readable = True
    try:
        plan(tensor, tuple(map(range, tensor.shape)))
    except LazyckptError:
        readable = False
    assert readable or not fragments.intact
    if fragments.cell is not None:
        assert fragment_grid(tensor) == fragment_grid(TensorSpec("w", tensor.shape, F32, tuple(everything)))
    extents = [fragment.extent for fragment in everything]
    assert all(archive in extents for archive in fragments.packed())


def test_blocks_of_a_grid_and_of_a_table_are_found_alike() -> None:
    grid = Grid((5, 7), (2, 3))
    boxes = [grid.box(n) for n in grid.numbers]
    starts, stops = (np.array([getattr(box, end) for box in boxes]) for end in ("start", "stop"))
    table = Boxes(starts, stops, range(len(boxes)))
    for rows, columns in product((range(5), range(1, 2), range(4, 4), range(2, 5, 2)), (range(7), range(2, 4))):
        assert list(grid.meeting((rows, columns))) == [table.box(n) for n in table.meeting((rows, columns))]
    assert [table.box(n) for n in range(len(table))] == boxes


def test_what_has_only_the_abstract_methods_works() -> None:
    class Least(Fragments):
        def meeting(self, want: tuple[range, ...]) -> list[Fragment]:
            return list(self)

        def __iter__(self) -> Any:
            return iter([Fragment(Extent("a", 0, F32, (2,), (1,)), (2,))])

    least = Least()
    assert len(least) == 1 and least and least[0] == least[-1] and least.only() is None
    assert (least.intact, least.cell, least.packed(), least.shards, least.steps) == (False, None, [], (), ())
    assert len(plan(TensorSpec("w", (2,), F32, least), (range(2),))) == 1
    assert least.inside(Box((0,), (1,))) is least and least.inside(Box((1,), (1,))) == ()


def test_shards_are_those_of_the_ranks() -> None:
    merge = concatenated(0)([(2, 3), (1, 3)])
    rows = [(Fragment(Extent(f"{r}", 0, F32, s, c_strides(s)), s),) for r, s in enumerate([(2, 3), (1, 3)])]
    fragments = merge.join(rows)
    assert [placement.shape for placement in fragments.shards] == [(2, 3), (1, 3)]
    assert Composed(fragments.sources, fragments.placements).shards == ()
    assert issubclass(GridFragments, Blocks) and isinstance(in_chunks("w", F32, (4,), []).fragments, tuple)
    assert [Archive("f", 0, 8, F32, (2,))] == fragments_of((Fragment(Archive("f", 0, 8, F32, (2,)), (2,)),)).packed()
