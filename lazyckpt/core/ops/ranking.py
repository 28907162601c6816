"""Which elements of a tensor have the largest magnitudes, exactly and in bounded memory; and masks by chance.

Magnitudes are compared as bits: those of a float without its sign are in the order of the numbers, with NaN as the
largest. The value of a rank is found 16 bits at a time, by counting: two passes over a float32 tensor, four over a
float64 one. Of equal magnitudes those at the lower positions count as larger for "magnitude", and as smaller for
"outliers", as in stable sorts (mergekit 0.1.5, mergekit/sparsify.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..axes import indices
from ..box import Selection, Shape, c_strides

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_STEP = 16  # bits that a pass decides
# The differences of which elements are kept, block by block; each call is a pass.
Passes = Callable[[], Iterator[tuple[Selection, list["torch.Tensor"]]]]


class Band(NamedTuple):
    """The elements that are kept: those between two magnitudes, and some of those that are equal to one of them.

    Attributes
    ----------
    low, high
        The magnitudes, as bits. ``high`` < ``low`` keeps nothing.
    low_from, low_to, high_to
        Elements of the magnitude ``low`` are kept at positions from ``low_from`` to ``low_to``, those of ``high`` up to
        ``high_to``. Positions count the elements in C order.
    """

    low: int
    high: int
    low_from: int
    low_to: int
    high_to: int


_ALL = (1 << 63) - 1
_NOTHING = Band(_ALL, -1, 0, _ALL, _ALL)


class _Wanted(NamedTuple):
    """The element of a rank among a tensor's magnitudes: ``number`` of the tensor, ``rank`` from 0, the smallest."""

    number: int
    rank: int


def bands(
    shape: Shape, dtype: torch.dtype, settings: Sequence[tuple[float, float]], how: str, passes: Passes
) -> list[Band]:
    """Return the band of each difference.

    Parameters
    ----------
    shape, dtype
        The shape and the dtype, float32 or float64, of the differences.
    settings
        For each difference the part of the elements that is kept and, for "outliers", the part of the largest that is
        not.
    how
        "magnitude" or "outliers".
    passes
        The blocks of the differences.
    """
    count = prod(shape)
    limits: list[tuple[int, int]] = []  # the ranks that are kept
    for density, gamma in settings:
        if how == "magnitude":
            kept = max(1, int(density * count)) if density > 0 and count else 0
            limits.append((count - kept, count))
        else:
            kept = max(0, int(density * count))
            start = max(0, count - kept - int(gamma * count))
            limits.append((start, start + kept))
    largest = how == "magnitude"
    kept_of = {n: (a, b) for n, (a, b) in enumerate(limits) if a < b}
    wanted = [_Wanted(n, rank) for n, (a, b) in kept_of.items() for rank in ((a,) if largest else {a: 0, b - 1: 0})]
    values = _values(wanted, dtype, passes) if wanted else {}
    sought: dict[tuple[int, int, int], int] = {}  # tensor, magnitude, number among the equal ones -> position
    ends: dict[int, tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]] = {}
    for n, (a, b) in kept_of.items():
        low, below, equal = values[_Wanted(n, a)]
        if largest:
            last = below + equal - a  # so many of the equal ones are kept: those at the lower positions
            ends[n] = None, (n, low, last - 1) if last < equal else None
        else:
            high, under, alike = values[_Wanted(n, b - 1)]
            ends[n] = (
                ((n, low, a - below) if a > below else None),
                ((n, high, b - 1 - under) if b - under < alike else None),
            )
        sought |= {key: -1 for key in ends[n] if key is not None}
    _find(sought, shape, passes)
    found = []
    for n in range(len(settings)):
        if n not in kept_of:
            found.append(_NOTHING)
            continue
        a, b = kept_of[n]
        begin, end = (
            fallback if key is None else sought[key] for key, fallback in zip(ends[n], (0, _ALL), strict=True)
        )
        low = values[_Wanted(n, a)][0]
        high = _ALL if largest else values[_Wanted(n, b - 1)][0]
        found.append(Band(low, high, begin, end if largest else _ALL, _ALL if largest else end))
    return found


def _values(wanted: Sequence[_Wanted], dtype: torch.dtype, passes: Passes) -> dict[_Wanted, tuple[int, int, int]]:
    """Return the magnitude of each rank, how many elements are smaller, and how many are equal."""
    bits = dtype.itemsize * 8 - 1
    known = dict.fromkeys(
        wanted, (0, 0, 0)
    )  # the first bits, how many elements are smaller by them, how many have them
    left = bits
    while left:
        width = min(_STEP, left)
        left -= width
        groups = dict.fromkeys((one.number, known[one][0]) for one in wanted)
        counts = {group: np.zeros(1 << width, np.int64) for group in groups}
        for _, blocks in passes():
            for (number, start), histogram in counts.items():
                part = _bits(blocks[number]).numpy().ravel()
                part = part[part >> (left + width) == start] if left + width < bits else part
                histogram += np.bincount((part >> left) & ((1 << width) - 1), minlength=1 << width)
        for one in wanted:
            start, below, _ = known[one]
            histogram = counts[one.number, start]
            sums = np.cumsum(histogram)
            at = int(np.searchsorted(sums, one.rank - below, side="right"))
            known[one] = (start << width | at, below + int(sums[at] - histogram[at]), int(histogram[at]))
    return known


def _find(sought: dict[tuple[int, int, int], int], shape: Shape, passes: Passes) -> None:
    """Set the positions of elements: the tensor, the magnitude and the number among the equal ones are given."""
    if not sought:
        return
    seen = dict.fromkeys(sought, 0)
    for want, blocks in passes():
        for key in sought:
            number, value, nth = key
            if sought[key] >= 0:
                continue
            equal = _bits(blocks[number]) == value
            count = int(equal.sum())
            if seen[key] + count > nth:
                sought[key] = int(positions(shape, want)[equal].sort().values[nth - seen[key]])
            seen[key] += count


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Return the bits of the magnitudes, as integers of the same size."""
    if block.itemsize == 4:
        return block.contiguous().view(torch.int32) & 0x7FFFFFFF
    return block.contiguous().view(torch.int64) & _ALL


def chosen(band: Band, block: torch.Tensor, shape: Shape, want: Selection) -> torch.Tensor:
    """Return which of the selected elements of a difference of this shape are in the band."""
    bits = _bits(block)
    keep = (bits >= band.low) if band.low <= torch.iinfo(bits.dtype).max else torch.zeros_like(bits, dtype=torch.bool)
    if band.high < torch.iinfo(bits.dtype).max:
        keep &= bits <= band.high
    if band.low_from > 0 or band.low_to < _ALL or band.high_to < _ALL:
        places = positions(shape, want)
        if band.low_from > 0 or band.low_to < _ALL:
            keep &= (bits != band.low) | ((places >= band.low_from) & (places <= band.low_to))
        if band.high_to < _ALL:
            keep &= (bits != band.high) | (places <= band.high_to)
    return keep


def positions(shape: Shape, want: Selection) -> torch.Tensor:
    """Return the numbers, in C order, of the selected elements of a tensor of this shape."""
    found = np.zeros((1,) * len(want), np.int64)
    for d, (axis, stride) in enumerate(zip(want, c_strides(shape), strict=True)):
        found = found + (indices(axis).astype(np.int64) * stride).reshape(
            *(-1 if k == d else 1 for k in range(len(want)))
        )
    return torch.from_numpy(np.ascontiguousarray(found).reshape(tuple(map(len, want))))


def mask_key(seed: int, number: int, name: str) -> int:
    """Return the 64 bits that begin a tensor's random numbers: of the SHA-256 of seed, number of the model and name."""
    return int.from_bytes(sha256(f"{seed}\0{number}\0{name}".encode()).digest()[:8], "little")


def random_bits(key: int, places: torch.Tensor) -> NDArray[np.uint64]:
    """Return 64 random bits for each position: output n, for position n, of SplitMix64 that begins at ``key``."""
    golden = 0x9E3779B97F4A7C15
    z: NDArray[np.uint64] = np.atleast_1d(places.numpy().astype(np.uint64))  # numpy warns of scalars that overflow
    z = z * np.uint64(golden) + np.uint64((key + golden) & 0xFFFFFFFFFFFFFFFF)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31))).reshape(tuple(places.shape))


def random_mask(key: int, places: torch.Tensor, density: float) -> torch.Tensor:
    """Return which elements are kept: each with the probability ``density``, by its position alone.

    An element is kept if the first 53 of its `random_bits`, as a fraction, are below the density.

    Parameters
    ----------
    key
        What `mask_key` returns.
    places
        The positions of the elements.
    density
        The probability.
    """
    keep = (random_bits(key, places) >> np.uint64(11)).astype(np.float64) < density * 2.0**53
    return torch.from_numpy(np.asarray(keep)).reshape(places.shape)
