"""The planner on many fragments in any order: who holds which element, as a brute force says, and in little time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt import DataError, MissingFileError
from lazyckpt.core.box import Box, c_strides, remainder
from lazyckpt.core.copies import Copy
from lazyckpt.core.extents import Extent, Hole
from lazyckpt.core.placement import Part
from lazyckpt.core.plan import earlier_overlaps, overlaps, plan
from lazyckpt.core.specs import Fragment, TensorSpec

from .lanes import rounds

Shape = tuple[int, ...]


@st.composite
def box_in(draw: st.DrawFn, shape: Shape) -> Box:
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[tuple[Box, bool]]]:
    """A shape, and blocks of it: of a grid, shuffled, and any others, some of them missing."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cell = tuple(draw(st.integers(1, n)) for n in shape)
    grid = [
        Box(at, tuple(min(a + c, n) for a, c, n in zip(at, cell, shape, strict=True)))
        for at in product(*(range(0, n, c) for n, c in zip(shape, cell, strict=True)))
    ]
    boxes = draw(st.permutations(grid)) + draw(st.lists(box_in(shape), max_size=40))
    boxes = draw(st.permutations(boxes)) if draw(st.booleans()) else boxes
    return shape, [(box, draw(st.integers(0, 30)) == 0) for box in boxes]


def spec_of(shape: Shape, boxes: Sequence[tuple[Box, bool]]) -> TensorSpec:
    """One fragment for each block, in a file of its own."""
    fragments = []
    for n, (box, missing) in enumerate(boxes):
        extent = Extent(str(n), 0, torch.float32, box.shape, c_strides(box.shape))
        part = Part(Box.of(box.shape), box.start)
        fragments.append(Fragment(Hole(str(n), f"{n} is gone") if missing else extent, box.shape, (part,)))
    return TensorSpec("w", shape, torch.float32, tuple(fragments))


def held_by(copies: Sequence[Copy], shape: Shape) -> np.ndarray:
    """Of each element: the number of the file it is read from, and where in it. Fails if one is read twice."""
    found = np.full((*shape, 2), -1)
    for copy in copies:
        block = found[copy.slices]
        assert (block == -1).all(), "an element is read twice"
        places = sum(
            (np.arange(n) * s).reshape((-1,) + (1,) * (len(shape) - d - 1))
            for d, (n, s) in enumerate(zip(copy.shape, copy.strides, strict=True))
        )
        block[..., 0], block[..., 1] = int(copy.extent.path), places + copy.start
    return found


def first_holders(shape: Shape, boxes: Sequence[tuple[Box, bool]]) -> np.ndarray:
    """The same by brute force: blocks written over each other, the first one last."""
    found = np.full((*shape, 2), -1)
    for n, (box, missing) in reversed(list(enumerate(boxes))):
        if not missing:
            found[(*box.slices, 0)] = n
            found[(*box.slices, 1)] = np.arange(box.numel).reshape(box.shape)
    return found


@settings(max_examples=rounds(200), deadline=None)
@given(cases())
def test_each_element_is_read_from_the_first_block_that_has_it(case: tuple[Shape, list[tuple[Box, bool]]]) -> None:
    shape, boxes = case
    spec, expected = spec_of(shape, boxes), first_holders(shape, boxes)
    want = tuple(map(range, shape))
    lost = expected[..., 0] == -1
    if not lost.any():
        assert np.array_equal(held_by(plan(spec, want), shape), expected)
        return
    told = {n for n, (box, missing) in enumerate(boxes) if missing and lost[box.slices].any()}
    with pytest.raises(MissingFileError if told else DataError) as caught:
        plan(spec, want)
    assert f"{lost.sum():,} of the wanted" in str(caught.value)
    for n in list(told)[:1]:
        assert f"{n} is gone" in str(caught.value) or len(told) > 8
    for n in {n for n, (_, missing) in enumerate(boxes) if missing} - told:
        assert f" {n} is gone" not in str(caught.value)


@settings(max_examples=rounds(200), deadline=None)
@given(cases())
def test_overlaps_are_those_of_a_brute_force(case: tuple[Shape, list[tuple[Box, bool]]]) -> None:
    """Each element of each block but the first one that has it, once, together with that one."""
    shape, boxes = case
    first = first_holders(shape, boxes)
    expected = set()
    for n, (box, missing) in enumerate(boxes):
        for at in () if missing else product(*map(range, box.start, box.stop)):
            if first[at][0] != n:
                expected.add((int(first[at][0]), n, at))
    found = []
    for a, b in overlaps(spec_of(shape, boxes), tuple(map(range, shape))):
        assert (a.at, a.shape) == (b.at, b.shape)
        block = product(*(range(x, x + n) for x, n in zip(a.at, a.shape, strict=True)))
        found += [(int(a.extent.path), int(b.extent.path), at) for at in block]
    assert len(found) == len(set(found)) and set(found) == expected


@settings(max_examples=rounds(100), deadline=None)
@given(st.data())
def test_earlier_overlaps_are_those_of_a_brute_force(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 5, 40, 1 << 40]), min_size=1, max_size=4)))
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
    boxes = []
    for _ in range(data.draw(st.integers(0, 200))):
        start = [rng.randrange(n) for n in shape]
        stop = [
            rng.randint(a + 1, min(n, a + max(1, n // rng.choice((1, 4, 50)))))
            for a, n in zip(start, shape, strict=True)
        ]
        boxes.append(Box(tuple(start), tuple(stop)))
    assert earlier_overlaps(boxes) == [[m for m in range(n) if boxes[m] & boxes[n]] for n in range(len(boxes))]


@settings(max_examples=rounds(100), deadline=None)
@given(st.data())
def test_a_remainder_is_what_is_left(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    left = np.ones(shape, bool)
    taken = []
    for box in data.draw(st.lists(box_in(shape), max_size=60)):
        if left[box.slices].all():
            taken.append(box)
            left[box.slices] = False
    found = np.zeros(shape, int)
    for box in remainder(Box.of(shape), taken):
        found[box.slices] += 1
    assert np.array_equal(found, left.astype(int))


def shuffled(shape: Shape, pieces: Shape, seed: int = 0) -> list[tuple[Box, bool]]:
    cell = [n // p for n, p in zip(shape, pieces, strict=True)]
    boxes = [
        (
            Box(
                tuple(a * c for a, c in zip(at, cell, strict=True)),
                tuple((a + 1) * c for a, c in zip(at, cell, strict=True)),
            ),
            False,
        )
        for at in product(*map(range, pieces))
    ]
    random.Random(seed).shuffle(boxes)
    return boxes


def seconds(boxes: Sequence[tuple[Box, bool]], shape: Shape, rounds: int = 3) -> float:
    """Of the processor, for planning all of the tensor and for looking at what is held twice."""
    spec, want = spec_of(shape, boxes), tuple(map(range, shape))
    best = 1e9
    for _ in range(rounds):
        start = time.process_time()
        plan(spec, want)
        for _ in overlaps(spec, want):
            pass
        best = min(best, time.process_time() - start)
    return best


LAYOUTS = {
    "1-d": lambda n: ((n * n,), shuffled((n * n,), (n * n,))),
    "rows": lambda n: ((n * n, 8), shuffled((n * n, 8), (n * n, 1))),
    "a grid": lambda n: ((n * 4, n * 2), shuffled((n * 4, n * 2), (n, n))),
    "a long grid": lambda n: ((n * n // 4 * 3, 8), shuffled((n * n // 4 * 3, 8), (n * n // 4, 4))),
    "a grid of 3 dimensions": lambda n: ((n * 2, n, 4), shuffled((n * 2, n, 4), (n, n // 4, 4))),
    "two grids": lambda n: (
        (n * 4, n * 2), shuffled((n * 4, n * 2), (n, n // 2)) + shuffled((n * 4, n * 2), (n // 2, n))
    ),
    "replicas": lambda n: ((n, n), shuffled((n, n), (n, n // 4)) * 4),
    "blocks, and then all": lambda n: ((n, n), [*shuffled((n, n), (n, n))[1:], (Box.of((n, n)), False)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planning_takes_about_as_long_as_there_are_blocks(layout: str) -> None:
    """Four times as many blocks: less than nine times as long."""
    small, large = LAYOUTS[layout](24), LAYOUTS[layout](48)
    if seconds(large[1], large[0], 1) >= 9 * seconds(small[1], small[0], 1):  # once more: the machine may be busy
        assert seconds(large[1], large[0]) < 9 * seconds(small[1], small[0])


def test_the_same_block_many_times_takes_no_longer_than_other_blocks() -> None:
    """Replicas: of each only the first one is looked at again."""
    count = 3000
    spec = TensorSpec("w", (8, 8), torch.int8, tuple(_copy_of_all(n) for n in range(count)))
    want = (range(8), range(8))
    start = time.process_time()
    found = list(overlaps(spec, want))
    assert time.process_time() - start < 1.5
    assert len(found) == count - 1
    assert {first.extent.path for first, _ in found} == {"rank0"}


def _copy_of_all(rank: int) -> Fragment:
    extent = Extent(f"rank{rank}", 0, torch.int8, (8, 8), (8, 1))
    return Fragment(extent, (8, 8), (Part(Box.of((8, 8)), (0, 0)),))
