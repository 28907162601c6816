"""Histograms of the values of a tensor, over even bins or over powers of two, of all elements or of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.box import Box
from ..errors import DataError
from ..lazy import LazyArray
from .bits import has_bits, values_and_counts
from .moments import Moments, even_edges, of_counts, of_numbers
from .numbers import Array, number_shape
from .planes import checked, even_cells, fold_all, plane_of, source_of

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

BINS = 2000
"""Maximum number of bins."""
_BANDS = 256  # parts of a tensor of which a sample reads some rows
_PART = 1 << 16  # elements that are counted at a time, as numpy does: what they become takes memory
_WRAP = 1 << 14  # elements of a row of a tensor of one dimension


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Counts of the values of a tensor, and their moments."""

    edges: Array
    """The edges of the bins, ascending: float64."""
    counts: Array
    """The number of elements in each bin, as int64."""
    moments: Moments
    """Counts and moments of the elements that were read."""
    total: int
    """The number of elements of the tensor."""

    @property
    def exact(self) -> bool:
        """Whether every element was read; if not, the numbers are those of a sample."""
        return self.moments.count == self.total

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain objects."""
        m = self.moments
        some = m.finite > 0
        return {
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "count": m.count,
            "nan": m.nan,
            "posinf": m.posinf,
            "neginf": m.neginf,
            "zeros": m.zeros,
            "mean": m.mean if some else math.nan,
            "std": m.std,
            "min": m.low if some else math.nan,
            "max": m.high if some else math.nan,
            "absmax": max(abs(m.low), abs(m.high)) if some else math.nan,
            "l1": m.l1,
            "l2": m.l2,
            "exact": self.exact,
            "read": m.count,
            "total": self.total,
        }


def histogram_of(
    t: LazyArray,
    bins: int = 100,
    log: bool = False,
    exact: bool = True,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> Distribution:
    """Count the finite elements of a tensor in bins.

    Parameters
    ----------
    t
        The tensor. Of complex numbers the absolute values are counted.
    bins
        The number of bins, at most 2,000 (`BINS`).
    log
        False: bins of equal width between the least and the greatest element; each has its start. True: the edges are
        powers of two, down from the greatest absolute value, on both sides of zero, and each bin has the edge that is
        nearer to zero; the bin in the middle has the rest, and zero.
    exact
        False reads a sample of about 32 MiB of a larger tensor. The result says whether it is exact.
    check, executor, memory
        See `pixels.pooled`.

    Returns
    -------
    Distribution
        Tensors of 8 and 16 bits are read once, others twice.

    Raises
    ------
    DataError
        The elements are no numbers, or there are too many bins.
    LazyckptError
        What reading raises.
    """
    if not 1 <= bins <= BINS:
        raise DataError(f"bins={bins:,}: a histogram has 1 to {BINS:,} bins")
    shape = number_shape(t)
    total = math.prod(shape)
    if has_bits(t.spec.dtype) and exact:
        numbers, counts = values_and_counts(t, check, executor, memory)
        moments = of_counts(numbers, counts)
        binning = _Bins.of(moments, bins, log)
        return Distribution(binning.edges, binning.count(numbers, counts), moments, total)
    measured = _Measured()
    if not total:
        binning = _Bins.of(measured.moments, bins, log)
        return Distribution(binning.edges, np.zeros(len(binning.edges) - 1, np.int64), measured.moments, 0)
    wrap = _WRAP if len(shape) == 1 and shape[0] > _WRAP else None
    plane = plane_of(t, wrap=wrap)
    span = checked(plane, None)
    rows, columns = (even_cells(0, n, _BANDS) for n in (plane.height, plane.width))
    source = source_of(t, plane, span, rows, exact, columns)
    fold_all(t, source, _measuring, measured.merge, check, executor, memory)
    binning = _Bins.of(measured.moments, bins, log)
    counted = _Counted(binning)
    fold_all(t, source, partial(_counting, binning), counted.merge, check, executor, memory)
    return Distribution(binning.edges, counted.counts, measured.moments, total)


@dataclass(frozen=True, slots=True)
class _Bins:
    """Even bins, or for ``powers`` those between powers of two: ``top`` is the exponent of the last edge."""

    edges: Array
    even: bool = False
    """Whether the edges are those that numpy computes for the first and the last one."""
    powers: int = 0
    top: int = 0

    @classmethod
    def of(cls, moments: Moments, bins: int, log: bool) -> _Bins:
        low, high = (moments.low, moments.high) if moments.finite else (0.0, 1.0)
        most = max(abs(low), abs(high))
        if not log or most == 0:
            edges = even_edges(low, high, bins)
            return cls(edges, len(edges) == bins + 1 and math.isfinite(float(edges[-1]) - float(edges[0])))
        top = min(math.frexp(most)[1], 1023)
        powers = max(1, min(bins // 2, top + 1074))
        ends = np.ldexp(1.0, np.arange(top - powers, top + 1))
        return cls(np.concatenate([-ends[::-1], ends]), False, powers, top)

    def count(self, numbers: Array, counts: Array | None = None) -> Array:
        """Count finite numbers; ``counts``: how often each occurs."""
        good = np.isfinite(numbers)
        if not good.all():
            numbers = numbers[good]
            counts = counts if counts is None else counts[good]
        size = len(self.edges) - 1
        if self.powers:
            exponents = np.frexp(numbers)[1]  # |x| is in [2 ** (e - 1), 2 ** e)
            steps = np.clip(exponents - (self.top - self.powers), 0, self.powers)
            steps[numbers == 0] = 0
            where = self.powers + np.where(numbers < 0, -steps, steps)
            return np.bincount(where, counts, size).astype(np.int64)
        # in float64: of float32 numbers numpy rounds the edges to float32
        wide = numbers.astype(np.float64, copy=False)
        if counts is None and self.even:
            found, _ = np.histogram(wide, size, (float(self.edges[0]), float(self.edges[-1])))
        else:
            found, _ = np.histogram(wide, self.edges, weights=counts)
        return found.astype(np.int64)


class _Measured:
    """The moments of some blocks."""

    def __init__(self) -> None:
        self.moments = Moments()

    def add(self, box: Box, block: Array) -> None:
        self.moments += of_numbers(torch.from_numpy(np.ascontiguousarray(block)))

    def merge(self, other: _Measured) -> None:
        self.moments += other.moments


def _measuring(boxes: Sequence[Box]) -> _Measured:
    return _Measured()


class _Counted:
    """The counts of some blocks."""

    def __init__(self, bins: _Bins) -> None:
        self._bins = bins
        self.counts = np.zeros(len(bins.edges) - 1, np.int64)

    def add(self, box: Box, block: Array) -> None:
        flat = block.reshape(-1)
        for at in range(0, len(flat), _PART):
            self.counts += self._bins.count(flat[at : at + _PART])

    def merge(self, other: _Counted) -> None:
        self.counts += other.counts


def _counting(bins: _Bins, boxes: Sequence[Box]) -> _Counted:
    return _Counted(bins)
