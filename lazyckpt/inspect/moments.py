"""Counts and moments of numbers in float64 that can be merged: those of a whole follow from those of its pieces.

Count, mean and sum of squared deviations of the finite elements merge as in Chan, Golub and LeVeque, "Updating Formulae
and a Pairwise Algorithm for Computing Sample Variances" (1979), which loses no digits if the mean is far from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.dtypes import dtype_of
from ..errors import DataError

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

Array = np.ndarray[Any, Any]

# Elements at a time. They and the intermediate results, some 600 KB, stay in the processor's cache; and torch, which
# distributes 32,768 and more elements over threads of its own, computes on this thread.
BLOCK = 32_704
WIDE = 400  # numbers from 2 ** -400 to 2 ** 400 have sums of squares that float64 holds
_CANCELS = 1e-3  # below this fraction of the sum of squares, subtracting the mean has lost digits


@dataclass(frozen=True, slots=True)
class Moments:
    """Counts and moments of some elements. ``mean``, ``m2`` (sum of squared deviations from the mean), ``l1`` (sum of
    absolute values), ``low`` and ``high`` are those of the finite elements; ``low > high`` if there are none.

    ``m2`` is in units of ``4 ** exponent``, which is 1 unless the squares of the elements are beyond float64."""

    count: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    mean: float = 0.0
    m2: float = 0.0
    l1: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    exponent: int = 0

    @classmethod
    def of_std(
        cls, tallies: tuple[int, int, int, int, int], mean: float, std: float, l1: float, low: float, high: float
    ) -> Moments:
        """Return moments from a standard deviation, in place of ``m2``."""
        exponent = exponent_of(max(std, abs(mean)))
        finite = tallies[0] - sum(tallies[1:4])
        unit = scaled(std, -exponent)
        return cls(*tallies, mean, unit * unit * finite, l1, low, high, exponent)

    @property
    def std(self) -> float:
        """The standard deviation of the finite elements; NaN if there are none."""
        return scaled(math.sqrt(self.m2 / self.finite), self.exponent) if self.finite else math.nan

    @property
    def l2(self) -> float:
        """The root of the sum of squares of the finite elements."""
        mean = scaled(self.mean, -self.exponent)
        return scaled(math.sqrt(self.m2 + self.finite * mean * mean), self.exponent)

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.posinf - self.neginf

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the elements of both."""
        exponent = self.exponent
        if exponent != other.exponent:  # use the larger one: the squares in units of the other are too small to count
            exponent = max((one.exponent for one in (self, other) if one.m2 or one.mean), default=0)
        (mean, m2), (mean_b, m2_b) = self._in_units(exponent), other._in_units(exponent)
        if not self.finite:
            mean, m2 = mean_b, m2_b
        elif other.finite:
            delta, share = mean_b - mean, other.finite / (self.finite + other.finite)
            mean += delta * share
            m2 += m2_b + delta * delta * self.finite * share
        return Moments(
            self.count + other.count,
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.zeros + other.zeros,
            scaled(mean, exponent),
            m2,
            self.l1 + other.l1,
            min(self.low, other.low),
            max(self.high, other.high),
            exponent,
        )

    def _in_units(self, exponent: int) -> tuple[float, float]:
        """Return the mean in units of ``2 ** exponent``, and the squares in units of ``4 ** exponent``."""
        return scaled(self.mean, -exponent), scaled(self.m2, 2 * (self.exponent - exponent))


def exponent_of(largest: float) -> int:
    """Return the exponent of the power of 2 by which numbers are divided before they are squared, by their largest
    magnitude: 0 unless float64 cannot hold the sum of the squares."""
    exponent = math.frexp(largest)[1]  # 0 for 0, NaN and infinities
    return exponent if abs(exponent) > WIDE else 0


def scaled(number: float, exponent: int) -> float:
    """Return a number times ``2 ** exponent``; infinite if it is beyond float64."""
    if not exponent:
        return number
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def scaled_numbers(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return numbers times ``2 ** exponent``, by two factors that float64 has."""
    if not exponent:
        return numbers
    half = max(-1000, min(1000, exponent // 2))
    return numbers * 2.0**half * 2.0 ** max(-1000, min(1000, exponent - half))


def merged(parts: Iterable[Moments]) -> Moments:
    """Return the moments of the elements of all parts."""
    whole = Moments()
    for part in parts:
        whole += part
    return whole


def of_numbers(numbers: torch.Tensor) -> Moments:
    """Return the moments of a contiguous CPU tensor with 32 or 64 bits an element (or more, for complex numbers)."""
    flat = numbers.view(-1)
    return merged(_of_block(real(flat[at : at + BLOCK])) for at in range(0, flat.numel(), BLOCK))


def of_rows(rows: torch.Tensor) -> list[Moments]:
    """Return the moments of each row of a contiguous CPU matrix of real numbers of 32 or 64 bits, with the same digits
    as `of_numbers` of the row."""
    if rows.shape[1] > BLOCK:
        return list(map(of_numbers, rows))
    step = BLOCK // rows.shape[1]
    return [one for at in range(0, len(rows), step) for one in _of_rows(rows[at : at + step].numpy())]


def _of_rows(block: Array) -> Iterator[Moments]:
    lows, highs = (x.astype(np.float64).tolist() for x in (block.min(1), block.max(1)))
    zeros = np.count_nonzero(block == 0, axis=1).tolist()
    doubles = _doubles(block)
    totals, norms = doubles.sum(1).tolist(), torch.linalg.vector_norm(doubles, dim=1).tolist()
    sums = doubles.abs_().sum(1).tolist()
    size = block.shape[1]
    for n, (low, high, total, norm) in enumerate(zip(lows, highs, totals, norms, strict=True)):
        mean = total / size
        m2 = norm * norm - total * mean
        known = math.isfinite(low) and math.isfinite(high) and not exponent_of(max(-low, high))
        if known and m2 > _CANCELS * norm * norm:
            yield Moments(size, 0, 0, 0, zeros[n], mean, m2, sums[n], low + 0.0, high + 0.0)
        else:
            yield _of_block(block[n])


def real(block: torch.Tensor) -> Array:
    """Return numbers as a numpy array; for complex numbers their absolute values in float64."""
    if not block.is_complex():
        return block.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.abs(block.to(torch.complex128).resolve_conj().numpy())
    return found


def of_counts(values: Array, counts: Array) -> Moments:
    """Return the moments of float64 ``values``, each of which occurs ``counts`` times."""
    finite = np.isfinite(values)
    v, c = values[finite], counts[finite]
    n = int(c.sum())
    tallies = {
        "count": int(counts.sum()),
        "nan": int(counts[np.isnan(values)].sum()),
        "posinf": int(counts[values == math.inf].sum()),
        "neginf": int(counts[values == -math.inf].sum()),
        "zeros": int(counts[values == 0].sum()),
    }
    if not n:
        return Moments(**tallies)
    mean = math.fsum(v * c) / n
    return Moments(
        **tallies,
        mean=mean,
        m2=math.fsum(np.square(v - mean) * c),
        l1=math.fsum(np.abs(v) * c),
        low=float(v.min()) + 0.0,
        high=float(v.max()) + 0.0,
    )


def _of_block(block: Array) -> Moments:
    low, high = float(block.min()), float(block.max())  # NaN if the block has one
    if math.isfinite(low) and math.isfinite(high):
        return _of_finite(block, low, high)
    good = block[np.isfinite(block)]
    part = _of_finite(good, float(good.min()), float(good.max())) if good.size else Moments()
    odd = block.size - good.size
    nan, posinf = int(np.count_nonzero(np.isnan(block))), int(np.count_nonzero(block == math.inf))
    return part + Moments(odd, nan, posinf, odd - nan - posinf)


def _of_finite(block: Array, low: float, high: float) -> Moments:
    zeros = int(np.count_nonzero(block == 0))
    doubles = _doubles(block)
    exponent = exponent_of(max(-low, high))
    if exponent:
        doubles = torch.from_numpy(np.ldexp(doubles.numpy(), -exponent))
    total = float(doubles.sum())
    mean = total / block.size
    norm = float(torch.linalg.vector_norm(doubles))
    m2 = norm * norm - total * mean
    if not m2 > _CANCELS * norm * norm:
        rest = float(torch.linalg.vector_norm(doubles - mean))
        m2 = rest * rest
    mean, l1 = scaled(mean, exponent), scaled(float(doubles.abs_().sum()), exponent)
    return Moments(block.size, 0, 0, 0, zeros, mean, m2, l1, low + 0.0, high + 0.0, exponent)  # + 0.0: no "-0.0"


def _doubles(block: Array) -> torch.Tensor:
    """Return the numbers as float64, in a copy."""
    return torch.from_numpy(block).to(torch.float64, copy=True)


def even_edges(low: float, high: float, bins: int) -> Array:
    """Return the edges of ``bins`` bins of equal width between two numbers, as numpy computes them; fewer bins if
    float64 has fewer numbers between the two."""
    if low == high:
        margin = max(0.5, math.ulp(low))
        low, high = low - margin, high + margin
    halves = np.linspace(low / 2, high / 2, bins + 1) if math.isinf(high - low) else None
    found: Array = np.unique(np.linspace(low, high, bins + 1) if halves is None else 2 * halves)
    return found


# -- Counts of bit patterns of 8 or 16 bits: they determine all statistics of bf16, fp16, fp8, small integers and bools
# exactly, in one pass that costs as much as computing moments.

_BLOCKS = 8  # blocks that numpy handles at a time: threads of Python meet less often
FEW = 4096  # elements that are sorted in less time than counts of all patterns of 16 bits are looked through


class Patterns(NamedTuple):
    """The bit patterns that occur, ascending, and how often each occurs."""

    patterns: Array
    counts: Array


def count(numbers: torch.Tensor) -> Array:
    """Count each bit pattern in a contiguous CPU tensor of 1 or 2 bytes an element. The counts are int64."""
    raw = numbers.view(-1).view(torch.uint8).numpy()
    if numbers.itemsize == 2:
        return _counted(raw.view(np.uint16))
    # two bytes at a time, in half the time
    even = raw.size // 2 * 2
    pairs = _counted(raw[:even].view(np.uint16)).reshape(256, 256)
    found: Array = pairs.sum(0) + pairs.sum(1) + np.bincount(raw[even:], minlength=256)
    return found


def few(numbers: torch.Tensor) -> Patterns:
    """Return the patterns of a contiguous CPU tensor of 1 or 2 bytes an element by sorting them: for up to `FEW`."""
    raw = numbers.view(-1).view(torch.uint8).numpy()
    return Patterns(*np.unique(raw if numbers.itemsize == 1 else raw.view(np.uint16), return_counts=True))


def sparse(counts: Array) -> Patterns:
    """Return only the patterns that occur."""
    patterns = np.flatnonzero(counts)
    return Patterns(patterns, counts[patterns])


@cache
def values(dtype: torch.dtype) -> Array:
    """Return the value of each bit pattern of a dtype, in float64. Raises DataError if they are not numbers."""
    size = 1 << 8 * dtype.itemsize
    plain = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    patterns = torch.arange(size, dtype=torch.int32, device="cpu").to(plain)
    if not dtype_of(dtype).is_number:
        raise DataError(f"elements of {dtype} are packed bits, no numbers: there are no statistics of them")
    found: Array = patterns.view(dtype).to(torch.float64).numpy()
    return found


def _counted(raw: Array) -> Array:
    """Count the values of uint16 elements.

    Patterns are rotated by one bit, so that the sign is the lowest bit: numbers of similar size have neighbouring
    patterns then, and a block needs counts of a few thousand patterns only. torch counts integers of 16 bits without
    converting them, unlike numpy, in 0.6 of the time.
    """
    rotated = np.zeros(1 << 16, np.int64)
    for at in range(0, raw.size, _BLOCKS * BLOCK):
        some = raw[at : at + _BLOCKS * BLOCK]
        some = (some << 1) | (some >> 15)
        least = int(some.min())
        some -= least
        signed = torch.from_numpy(some.view(np.int16) if some.max() < 1 << 15 else some.astype(np.int32))
        for block in torch.split(signed, BLOCK):
            found = torch.bincount(block).numpy()
            rotated[least : least + len(found)] += found
    counts: Array = rotated.reshape(1 << 15, 2).T.reshape(-1)
    return counts
