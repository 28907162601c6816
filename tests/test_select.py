"""Index expressions against numpy and torch: every kind, composed, and the wrong ones."""

from __future__ import annotations

import operator
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyckpt import LazyckptError, SelectionError
from lazyckpt.core.select import Selection
from lazyckpt.io.reading.gather import finish

from .algebra import Array, index, keys, often, plain, shapes


def numbered(shape: tuple[int, ...]) -> Array:
    """An array that shows which of its elements were taken."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


def carry_out(selection: Selection, array: Array) -> Array:
    """Do what a selection says to read."""
    reads = selection.reads()
    assert all((np.diff(axis) > 0).all() for axis in reads.want), "an axis that is not ascending"
    out = np.array(array[np.ix_(*reads.want)] if reads.want else array)
    assert out.shape == reads.shape
    return finish(reads, torch.from_numpy(out)).numpy()


@often
@given(st.data(), shapes())
def test_every_index_is_as_in_numpy(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = data.draw(keys(shape))
    array = numbered(shape)
    expected = index(array, key)
    selection = Selection.all(shape)[key]
    assert selection.shape == expected.shape
    assert np.array_equal(carry_out(selection, array), expected)


@often
@given(st.data(), shapes())
def test_every_index_is_as_in_torch(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = data.draw(keys(shape).filter(plain))
    array = numbered(shape)
    expected = torch.from_numpy(array)[key].numpy()
    assert np.array_equal(carry_out(Selection.all(shape)[key], array), expected)


@often
@given(st.data(), shapes())
def test_indices_compose(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = expected = numbered(shape)
    selection = Selection.all(shape)
    for _ in range(data.draw(st.integers(2, 4))):
        key = data.draw(keys(expected.shape, added=False))
        selection, expected = selection[key], index(expected, key)
        assert selection.shape == expected.shape
    assert np.array_equal(carry_out(selection, array), expected)


@often
@given(st.data(), shapes(max_dims=3))
def test_added_dimensions_compose(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Dimensions that None added are kept, reversed, dropped by an int or picked once, like any other of length 1."""
    array = expected = numbered(shape)
    selection = Selection.all(shape)
    for _ in range(data.draw(st.integers(1, 3))):
        dims = expected.ndim
        one = st.sampled_from([0, -1, slice(None), slice(None, None, -1), slice(0, 5, 3), [0], [-1], [True]])
        key = tuple(
            data.draw(one)
            if expected.shape[d] == 1
            else data.draw(st.just(slice(None)) | st.just(slice(None, None, -1)))
            for d in range(dims)
        )
        if sum(isinstance(k, list) for k in key) > 1:
            key = tuple(0 if isinstance(k, list) else k for k in key)
        selection, expected = selection[key], index(expected, key)
        added = data.draw(st.integers(0, expected.ndim))
        key = (*[slice(None)] * added, None)
        selection, expected = selection[key], index(expected, key)
        assert selection.shape == expected.shape
    assert np.array_equal(carry_out(selection, array), expected)


@pytest.mark.parametrize("key", [slice(0, 0), slice(1, None), [], [0, 0], [0, -1, 0], [False]], ids=repr)
def test_an_added_dimension_can_be_emptied_and_repeated(key: Any) -> None:
    array = numbered((2, 3))
    selection = Selection.all((2, 3))[:, None][:, key]
    expected = index(array[:, None], (slice(None), key))
    assert selection.shape == expected.shape
    assert np.array_equal(carry_out(selection, array), expected)


@often
@given(st.data(), shapes(min_dims=1, min_side=1))
def test_an_index_out_of_range_is_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    d = data.draw(st.integers(0, len(shape) - 1))
    n = shape[d]
    far = st.integers(n, 1 << 40) | st.integers(-(1 << 40), -n - 1)
    wrong = data.draw(far | far.map(lambda i: [0, i]) | far.map(lambda i: np.array([i, 0])))
    with pytest.raises(SelectionError, match=r"out of range for dimension \d+ of length \d+"):
        _ = Selection.all(shape)[(slice(None),) * d + (wrong,)]


@often
@given(st.data(), shapes(min_dims=1))
def test_a_mask_of_another_length_is_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    wrong = data.draw(st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda m: len(m) != shape[0]))
    with pytest.raises(SelectionError, match="mask"):
        _ = Selection.all(shape)[torch.tensor(wrong)]


@often
@given(st.data(), shapes())
def test_too_many_indices_are_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = tuple(data.draw(st.lists(st.just(slice(None)), min_size=len(shape) + 1, max_size=len(shape) + 3)))
    with pytest.raises(SelectionError, match="too many indices"):
        _ = Selection.all(shape)[key]


class Odd:
    """No index at all, and no short name either."""

    def __repr__(self) -> str:
        return "odd " * 1000


WRONG: dict[str, Any] = {
    "a string": "a",
    "a float": 1.0,
    "a list of floats": [0.0, 1.0],
    "a list of strings": ["a"],
    "a bool": True,
    "a numpy bool": np.True_,
    "a torch bool": torch.tensor(True),
    "two ellipses": (..., ...),
    "a 2-d list": [[0, 1], [1, 0]],
    "a ragged list": [[0], [1, 2]],
    "a 2-d array": np.zeros((1, 1), int),
    "a 2-d mask": np.zeros((4, 5), bool),
    "two lists": ([0, 1], [1, 2]),
    "a mask and a list": ([True, False, True, False], [1, 2]),
    "a dict": {},
    "a set": {1},
    "an object": Odd(),
    "a huge int": 1 << 70,
    "a list of huge ints": [1 << 70],
    "a slice of strings": slice("a", None),
    "a slice of floats": slice(0.5, 2.5),
    "a step of zero": slice(None, None, 0),
    "a complex": 1j,
    "a list with None": [None],
    "too many": (0, 0, 0),
}


@pytest.mark.parametrize("key", WRONG.values(), ids=list(WRONG))
def test_what_is_no_index_is_refused(key: Any) -> None:
    with pytest.raises(SelectionError) as caught:
        _ = Selection.all((4, 5))[key]
    assert isinstance(caught.value, IndexError)
    assert isinstance(caught.value, LazyckptError)
    assert 10 < len(str(caught.value)) < 400


@often
@given(st.lists(st.integers(0, 40), max_size=30))
def test_a_list_is_read_once_and_evenly_spaced_indices_as_a_range(picked: list[int]) -> None:
    (want,) = Selection.all((41,))[picked].reads().want
    distinct = sorted(set(picked))
    assert list(want) == distinct
    assert isinstance(want, range) == (len({b - a for a, b in pairwise(distinct)}) < 2)


def test_a_selection_is_arithmetic_whatever_the_size() -> None:
    """Composing slices of a huge tensor makes no arrays."""
    selection = reduce(
        operator.getitem, [slice(1, None), slice(None, None, -2)] * 10, Selection.all((1 << 50, 1 << 40))
    )
    assert all(isinstance(axis, range) for axis in selection.axes)
    assert selection.shape[1] == 1 << 40
