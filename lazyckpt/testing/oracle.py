"""What a slice of a tensor must be: torch's own indexing of the whole, and keys of every kind to try it with."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import bit_equal

__all__ = ["as_ints", "indexed", "keys", "same", "same_values", "some_keys"]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_RANDOM_KEYS = 5


def as_ints(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size (a lazy conjugate or negative is resolved into a copy first): torch
    cannot index, copy and fill all of its dtypes, but all of these."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:  # torch's kernels load these aligned: they would not fail, they would crash
        assert tensor.data_ptr() % 16 == 0, f"unaligned memory: {tensor.shape} {tensor.dtype} at {tensor.data_ptr()}"
    return tensor.view(_INTS[tensor.element_size()])


def indexed(whole: Tensor, key: Any) -> Tensor:
    """``whole[key]`` as torch gives it; a negative step, which torch refuses, is taken as a list of indices first."""
    bits = as_ints(whole)
    items = key if isinstance(key, tuple) else (key,)
    used = sum(item is not None and item is not Ellipsis for item in items)
    wanted: list[Any] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += whole.ndim - used
        elif item is not None:
            if isinstance(item, slice) and (item.step or 1) < 0:
                bits = bits.index_select(dim, torch.tensor(range(bits.shape[dim])[item], dtype=torch.int64))
                item = slice(None)
            elif isinstance(item, list | np.ndarray):
                item = torch.tensor(item, dtype=None if len(item) else torch.int64)
            elif not isinstance(item, slice) and not (isinstance(item, Tensor) and item.ndim):
                item = operator.index(item)
            dim += 1
        wanted.append(item)
    return bits[tuple(wanted)].view(whole.dtype)


def keys(shape: Sequence[int], seed: str, count: int = _RANDOM_KEYS) -> Iterator[Any]:
    """Some keys that everyone uses, then ``count`` random ones of every kind that a lazy tensor takes."""
    rng = random.Random(f"{seed} {tuple(shape)}")
    yield from (..., (), None)
    if shape:
        yield slice(1, None)
        yield slice(None, None, -1)
    if len(shape) > 1:
        yield (slice(None), slice(None, None, 2))
    if shape and 0 not in shape:
        yield from (0, (..., -1))
    for _ in range(count):
        yield _random_key(shape, rng)


def some_keys(shape: Sequence[int], seed: str, count: int) -> list[Any]:
    """A few of them, others with every seed."""
    return random.Random(f"some {seed}").sample(list(keys(shape, seed, count)), count)


def _random_key(shape: Sequence[int], rng: random.Random) -> Any:
    items = [_random_item(n, rng) for n in shape]
    if items and rng.random() < 0.5:
        at = rng.randrange(len(items))
        items[at] = _random_array(shape[at], rng)
    lo = rng.randint(0, len(items))
    how = rng.random()
    if how < 0.3:
        items[lo : rng.randint(lo, len(items))] = [...]
    elif how < 0.5:
        del items[lo:]
    for _ in range(rng.choice((0, 0, 1, 2))):
        items.insert(rng.randint(0, len(items)), None)
    return items[0] if len(items) == 1 and rng.random() < 0.5 else tuple(items)


def _random_item(n: int, rng: random.Random) -> Any:
    if n and rng.random() < 0.3:
        return rng.choice((int, np.int64, torch.tensor))(rng.randrange(-n, n))
    start, stop = (rng.choice((None, rng.randint(-n - 2, n + 2))) for _ in range(2))
    return slice(start, stop, rng.choice((None, 1, 2, 3, n + 1, -1, -2, -3)))


def _random_array(n: int, rng: random.Random) -> Any:
    make = rng.choice((list, np.array, torch.tensor))
    if rng.random() < 0.4:
        return make([rng.random() < 0.4 for _ in range(n)]) if n else []
    count = rng.randint(0, n + 2) if n else 0  # repeated ones too
    indices = [rng.randrange(-n, n) for _ in range(count)]
    if rng.random() < 0.3:
        indices.sort()
    return make(indices) if indices else []


def same(got: Tensor, want: Tensor, what: object) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert bit_equal(_dense(got), _dense(want)), f"{what}: other bits"


def _dense(tensor: Tensor) -> Tensor:
    """A copy with the strides of a new tensor, also where a dimension has one element and any stride would do."""
    return as_ints(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def same_values(got: Tensor, want: Tensor, what: object) -> None:
    """Equal, or not a number in both: a conversion may choose a NaN's payload by the vector unit it happens to use."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{what}: {got.dtype} {got.shape}"
    assert torch.equal(torch.nan_to_num(got, nan=1.25), torch.nan_to_num(want, nan=1.25)), f"{what}: other values"
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN elsewhere"
