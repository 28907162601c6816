"""Boxes and spans against numpy, which looks at every single index."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyckpt.core.box import Box, c_strides, hull, is_run, span_boxes

from .algebra import often, shapes


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None) -> Box:
    """Any box, also empty ones and ones that lie inside out."""
    ndim = draw(st.integers(0, 4)) if ndim is None else ndim
    corner = st.tuples(*[st.integers(-3, 6)] * ndim)
    return Box(draw(corner), draw(corner))


pairs = st.integers(0, 4).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@often
@given(pairs)
def test_intersection_holds_the_common_indices(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert indices(a & b) == indices(a) & indices(b)
    assert bool(a & b) == bool(indices(a) & indices(b))
    assert indices(a & b) == indices(b & a)


@often
@given(boxes())
def test_a_box_counts_its_indices(box: Box) -> None:
    assert box.numel == len(indices(box))
    assert bool(box) == (box.numel > 0)


@often
@given(shapes())
def test_the_box_of_a_shape_is_the_whole_array(shape: tuple[int, ...]) -> None:
    box = Box.of(shape)
    array = np.arange(prod(shape)).reshape(shape)
    assert box.shape == shape
    assert box.numel == array.size
    assert np.array_equal(array[box.slices], array)


@often
@given(pairs)
def test_minus_leaves_what_the_other_box_lacks(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = list(a.minus(b))
    assert len(rest) <= max(1, 2 * len(a.start))
    held = [i for box in rest for i in indices(box)]
    assert len(held) == len(set(held)), "the boxes that are left overlap"
    assert set(held) == indices(a) - indices(b)


@often
@given(boxes(), st.data())
def test_shift_moves_every_index(box: Box, data: st.DataObject) -> None:
    by = data.draw(st.tuples(*[st.integers(-9, 9)] * len(box.start)))
    assert indices(box.shift(by)) == {tuple(i + d for i, d in zip(index, by, strict=True)) for index in indices(box)}
    assert box.shift(by).shift([-d for d in by]) == box


def test_boxes_of_different_spaces_do_not_mix() -> None:
    with pytest.raises(ValueError):
        Box((0,), (1,)).shift((1, 2))
    with pytest.raises(ValueError):
        _ = Box((0,), (1, 2)).shape


@often
@given(shapes(max_side=5, max_dims=5), st.integers(-5, 400), st.integers(-5, 400))
def test_a_span_is_few_boxes_in_flat_order(shape: tuple[int, ...], lo: int, hi: int) -> None:
    found = span_boxes(shape, lo, hi)
    flat = np.arange(prod(shape)).reshape(shape)
    pieces = [flat[box.slices].ravel() for box in found]
    elements = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    assert elements.tolist() == list(range(max(lo, 0), min(hi, prod(shape))))
    assert all(found), "an empty box"
    assert len(found) <= max(1, 2 * len(shape) - 1)


@often
@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6), st.data())
def test_a_span_of_a_huge_array_costs_no_more(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    found = span_boxes(shape, lo, hi)
    assert len(found) <= 2 * len(shape) - 1
    assert sum(box.numel for box in found) == hi - lo
    at = lo
    strides = c_strides(shape)
    for box in found:
        assert sum(i * s for i, s in zip(box.start, strides, strict=True)) == at
        at += box.numel
        assert sum((i - 1) * s for i, s in zip(box.stop, strides, strict=True)) == at - 1


@often
@given(shapes(min_side=1))
def test_c_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    assert c_strides(shape) == tuple(s // 8 for s in np.empty(shape, np.int64).strides)


strided = shapes(max_side=4).flatmap(lambda s: st.tuples(st.just(s), st.tuples(*[st.integers(0, 20)] * len(s))))


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Of every element in C order."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]


@often
@given(strided)
def test_the_hull_reaches_from_the_first_to_the_last_element(array: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert hull(*array) == 1 + max(offsets(*array), default=-1)


@often
@given(st.one_of(strided, shapes(min_side=1).map(lambda s: (s, c_strides(s)))))
def test_a_run_is_what_lies_in_c_order_without_a_gap(array: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, strides = array
    if 0 not in shape:
        assert is_run(shape, strides) == (offsets(shape, strides) == list(range(prod(shape))))
