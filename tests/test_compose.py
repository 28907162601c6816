"""Tensors made of blocks of others read as numpy cuts, turns and joins the wholes; whatever the blocks lie in."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lazyckpt.core.box import Box
from lazyckpt.core.compose import compose
from lazyckpt.core.placement import Part, Placement
from lazyckpt.core.specs import TensorSpec
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.tensor import LazyTensor

from .algebra import Array, index, keys
from .lanes import rounds
from .placements import Placed, placed
from .test_plan import same

pytestmark = pytest.mark.slow

property_test = settings(max_examples=rounds(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reads(case: Placed, spec: TensorSpec, expected: Array, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder))
        tensor = LazyTensor(LocalStore(folder), spec)
        assert tuple(tensor.shape) == expected.shape
        assert same(tensor[...], expected)
        key = data.draw(keys(expected.shape))
        assert same(tensor[key], index(expected, key))


@st.composite
def turned_block(draw: st.DrawFn, source: TensorSpec, truth: Array) -> tuple[TensorSpec, Array]:
    """A block, its dimensions in another order, some of size 1 left out, new ones put in."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in source.shape]
    for d in range(len(ends)):
        if ends[d][1] and draw(st.booleans()):  # one index, so that the dimension may go
            ends[d] = [ends[d][1] - 1, ends[d][1]]
    block = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    cut = truth[block.slices]
    order: list[int | None] = list(draw(st.permutations(range(truth.ndim))))
    order = [d for d in order if cut.shape[d] != 1 or draw(st.booleans())]  # type: ignore[index]
    kept = [d for d in order if d is not None]
    array = np.moveaxis(cut, kept, range(len(kept))).reshape([cut.shape[d] for d in kept])
    for d in sorted(draw(st.lists(st.integers(0, len(order)), max_size=2))):
        order.insert(d, None)
        array = np.expand_dims(array, d)
    shape = tuple(array.shape)
    placement = Placement.of(source.shape, block, (0,) * len(shape), tuple(order))
    return compose("c", shape, [(source, placement)]), array


@property_test
@given(st.data(), placed())
def test_a_block_turned_and_turned_again(data: st.DataObject, case: Placed) -> None:
    spec, array = data.draw(turned_block(case.spec, case.truth))
    reads(case, spec, array, data)
    again, array = data.draw(turned_block(spec, array))
    reads(case, again, array, data)


@property_test
@given(st.data(), placed())
def test_blocks_in_another_order_and_back(data: st.DataObject, case: Placed) -> None:
    """Cut along a dimension, shuffled (q, k and v of a fused matrix), and put back."""
    assume(case.truth.ndim > 0)
    d = data.draw(st.integers(0, case.truth.ndim - 1))
    n = case.truth.shape[d]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]
    blocks = data.draw(st.permutations(list(pairwise(cuts))))

    def box(a: int, b: int) -> Box:
        whole = Box.of(case.truth.shape)
        return Box((*whole.start[:d], a, *whole.start[d + 1 :]), (*whole.stop[:d], b, *whole.stop[d + 1 :]))

    there, back, at = [], [], 0
    for a, b in blocks:
        start = box(at, at + b - a).start
        there.append((case.spec, Placement.of(case.spec.shape, box(a, b), start)))
        back.append((box(at, at + b - a), box(a, b).start))
        at += b - a
    shuffled = compose("s", case.spec.shape, there)
    expected = np.concatenate([case.truth[box(a, b).slices] for a, b in blocks], axis=d)
    reads(case, shuffled, expected, data)
    pieces = [(shuffled, Placement.of(case.spec.shape, block, to)) for block, to in back]
    reads(case, compose("b", case.spec.shape, pieces), case.truth, data)
    parts = tuple(Part(block, to) for block, to in back)  # the same as one placement of all blocks
    again = compose("b", case.spec.shape, [(shuffled, Placement(case.spec.shape, parts))])
    reads(case, again, case.truth, data)


@property_test
@given(st.data(), placed())
def test_stacked_and_taken_from_the_stack(data: st.DataObject, case: Placed) -> None:
    count = data.draw(st.integers(1, 4))
    at = data.draw(st.integers(0, case.truth.ndim))
    axes = (*range(at), None, *range(at, case.truth.ndim))
    shape = (*case.spec.shape[:at], count, *case.spec.shape[at:])
    zero = (0,) * case.truth.ndim
    pieces = [(case.spec, Placement.at(case.spec.shape, (*zero[:at], n, *zero[at:]), axes)) for n in range(count)]
    stack = compose("stack", shape, pieces)
    reads(case, stack, np.stack([case.truth] * count, axis=at), data)
    n = data.draw(st.integers(0, count - 1))
    block = Box((*zero[:at], n, *zero[at:]), (*case.spec.shape[:at], n + 1, *case.spec.shape[at:]))
    left = tuple(d for d in range(len(shape)) if d != at)
    taken = compose("one", case.spec.shape, [(stack, Placement.of(shape, block, zero, left))])
    reads(case, taken, case.truth, data)


def spec(dtype: torch.dtype = torch.float32, **more: Any) -> TensorSpec:
    return TensorSpec("x", (2, 3), dtype, (), **more)


def at(start: tuple[int, int]) -> Placement:
    return Placement.at((2, 3), start)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "0 pieces"),
        ([(spec(), at((0, 0))), (spec(torch.float16), at((2, 0)))], "2 dtypes"),
        ([(spec(), at((3, 0)))], "does not fit"),
        ([(spec(), Placement.of((2, 3), Box((0, 0), (3, 3)), (0, 0)))], "does not fit"),
        ([(spec(), Placement.of((2, 3), Box((0, 0), (2, 3)), (0, 0), (0, None)))], "does not fit"),
        ([(spec(), Placement.at((2, 2), (0, 0)))], "does not fit"),
    ],
)
def test_pieces_that_cannot_be(pieces: list[tuple[TensorSpec, Placement]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose("c", (4, 3), pieces)
