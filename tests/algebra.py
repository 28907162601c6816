"""What the property tests of the algebra share: random shapes and index expressions, and an oracle that indexes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from .lanes import rounds

Array = NDArray[Any]
often = settings(max_examples=rounds(400), deadline=None)  # a busy machine must not fail a test


@st.composite
def shapes(
    draw: st.DrawFn, min_dims: int = 0, max_dims: int = 4, min_side: int = 0, max_side: int = 6
) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims)))


def slices_of(n: int) -> st.SearchStrategy[slice]:
    """Any slice, also reversed, with bounds far outside and as numpy or torch integers."""
    bound = st.none() | st.integers(-n - 3, n + 3)
    bound |= st.integers(-n, n).map(np.int32) | st.integers(-n, n).map(torch.tensor)
    step = st.none() | st.integers(1, n + 2) | st.integers(-n - 2, -1)
    return st.builds(slice, bound, bound, step)


def ints_of(n: int) -> st.SearchStrategy[Any]:
    i = st.integers(-n, n - 1)
    return i | i.map(np.int64) | i.map(torch.tensor)


@st.composite
def lists_of(draw: st.DrawFn, n: int) -> Any:
    """A list of indices (repeated, unordered, evenly spaced) or a mask, as list, array or tensor."""
    if draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return draw(st.sampled_from([list, np.array, torch.tensor]))(mask) if mask else np.zeros(0, bool)
    if not n:
        picked = []
    elif draw(st.booleans()):
        picked = draw(st.lists(st.integers(-n, n - 1), max_size=2 * n))
    else:
        picked = list(range(n))[draw(slices_of(n))]
    kind = draw(st.sampled_from(["list", "int64", "int16", "torch"]))
    if kind == "list":
        return picked
    return torch.tensor(picked, dtype=torch.int64) if kind == "torch" else np.array(picked, dtype=kind)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...], lists: bool = True, added: bool = True) -> Any:
    """An index expression that fits an array of this shape: everything the library promises to take."""
    used = draw(st.integers(0, len(shape)))
    dots = draw(st.booleans()) if used == len(shape) else draw(st.sampled_from([True, True, False]))
    front = draw(st.integers(0, used)) if dots else used
    dims = [*range(front), *range(len(shape) - (used - front), len(shape))]
    listed = draw(st.sampled_from(dims)) if lists and dims and draw(st.booleans()) else None
    items: list[Any] = []
    for d in dims:
        n = shape[d]
        if d == listed:
            items.append(draw(lists_of(n)))
        elif n and draw(st.integers(0, 2)) == 0:
            items.append(draw(ints_of(n)))
        else:
            items.append(draw(slices_of(n)))
    if dots:
        items.insert(front, Ellipsis)
    for _ in range(draw(st.integers(0, 2)) if added else 0):
        items.insert(draw(st.integers(0, len(items))), None)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def index(array: Array, key: Any) -> Array:
    """``array[key]`` one dimension at a time, so that an int beside a list does not change the order of dimensions
    (as it does in numpy alone; torch, and this library, keep the order)."""
    items = list(key) if isinstance(key, tuple) else [key]
    used = sum(k is not None and k is not Ellipsis for k in items)
    at = next((n for n, k in enumerate(items) if k is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (array.ndim - used)
    d = 0
    for item in items:
        if item is None:
            array = np.expand_dims(array, d)
        elif isinstance(item, slice):
            array = array[(slice(None),) * d + (item,)]
        elif isinstance(item, list | np.ndarray | torch.Tensor) and np.ndim(item) == 1:
            picked = np.asarray(item)
            picked = np.flatnonzero(picked) if picked.dtype == bool else picked.astype(np.int64)
            array = np.take(array, picked, axis=d)
        else:
            array = np.take(array, int(item), axis=d)
            continue
        d += 1
    return array


def plain(key: Any) -> bool:
    """True if torch itself can index with this key (it takes no negative steps, and no int tensor as a bound)."""
    items = key if isinstance(key, tuple) else (key,)
    return not any(isinstance(k, slice) and k.step is not None and k.step < 0 for k in items)
