"""Bit patterns of tensors of 8 and 16 bits (and of packed 4-bit floats): how often each bit is set, and each exponent.

Counts of bit patterns determine all of it, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..core.dtypes import DType
from ..errors import DataError
from ..io.cancelling import go_on
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, runner
from ..jobs.pieces import scratch
from ..jobs.places import PIECE
from ..jobs.write import RUN
from ..lazy import LazyArray
from .moments import Patterns, count, sparse, values
from .numbers import FP4, Array, packing


@dataclass(frozen=True, slots=True)
class BitLayout:
    """What the bits of a dtype mean, from the highest one."""

    sign: int
    """Number of bits of the sign: 0 or 1."""
    exponent: int
    """Number of bits of the exponent; 0 for integers."""
    mantissa: int
    """Number of bits of the mantissa; for integers, of the number."""
    bias: int = 0
    """What is subtracted from the exponent's bits."""

    @property
    def width(self) -> int:
        """Number of bits of a number."""
        return self.sign + self.exponent + self.mantissa


# bfloat16: float32's upper half; float16: IEEE 754-2008; 8-bit floats: "FP8 Formats for Deep Learning"
# (arXiv:2209.05433) and, for the fnuz types, arXiv:2206.02915; E8M0 and E2M1: OCP Microscaling Formats 1.0.
_FLOATS = {
    "bfloat16": BitLayout(1, 8, 7, 127),
    "float16": BitLayout(1, 5, 10, 15),
    "float8_e4m3fn": BitLayout(1, 4, 3, 7),
    "float8_e5m2": BitLayout(1, 5, 2, 15),
    "float8_e4m3fnuz": BitLayout(1, 4, 3, 8),
    "float8_e5m2fnuz": BitLayout(1, 5, 2, 16),
    "float8_e8m0fnu": BitLayout(0, 8, 0, 127),
    "float4_e2m1fn_x2": BitLayout(1, 2, 1, 1),
}


@dataclass(frozen=True, slots=True, eq=False)
class Bits:
    """The bit patterns of a tensor."""

    layout: BitLayout
    """What the bits mean."""
    count: int
    """The number of elements."""
    ones: Array
    """The fraction of elements in which each bit is set, from the highest bit: float64."""
    exponents: Array | None
    """How many elements have each value of the exponent's bits: int64; None for integers."""
    patterns: Array
    """The patterns that occur, ascending."""
    counts: Array
    """How often each of them occurs, as int64."""
    values: Array
    """The value of each of them, as float64."""

    @property
    def distinct(self) -> int:
        """The number of different patterns."""
        return len(self.patterns)

    @property
    def entropy(self) -> float:
        """The entropy of the patterns, in bits: what an ideal code of single elements takes for each."""
        share = self.counts / max(1, self.count)
        return float(-(share * np.log2(share)).sum()) + 0.0


def has_bits(dtype: DType) -> bool:
    """Return whether `bits_of` takes tensors of a dtype."""
    return dtype.itemsize <= 2 and (dtype.is_number or packing(dtype) > 1) and not dtype.is_complex


def bits_of(
    t: LazyArray,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> Bits:
    """Count the bit patterns of a tensor. Every element is read once.

    Parameters
    ----------
    t
        A tensor of 8- or 16-bit numbers, or of packed 4-bit floats, each of which counts.
    check, executor, memory
        See `pixels.pooled`.

    Raises
    ------
    DataError
        The tensor has another dtype.
    LazyckptError
        What reading raises.
    """
    dtype = t.spec.dtype
    some = _patterns(t, check, executor, memory)
    layout = _FLOATS.get(dtype.name) or BitLayout(int(dtype.is_signed), 0, 8 * dtype.itemsize - dtype.is_signed)
    total = t.numel() * packing(dtype)
    width = layout.width
    ones = np.array([some.counts[some.patterns >> n & 1 == 1].sum() for n in reversed(range(width))], np.float64)
    exponents = None
    if layout.exponent:
        fields = some.patterns >> layout.mantissa & (1 << layout.exponent) - 1
        exponents = np.zeros(1 << layout.exponent, np.int64)
        np.add.at(exponents, fields, some.counts)
    return Bits(layout, total, ones / max(1, total), exponents, some.patterns, some.counts, _values(t, some))


def values_and_counts(
    t: LazyArray,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> tuple[Array, Array]:
    """Return the different values of a tensor that `bits_of` takes, as float64, and how often each occurs. (NaN may
    occur several times: it has many bit patterns.)"""
    some = _patterns(t, check, executor, memory)
    return _values(t, some), some.counts


def _values(t: LazyArray, some: Patterns) -> Array:
    table: Array = FP4.astype(np.float64) if packing(t.spec.dtype) > 1 else values(t.dtype)
    return table[some.patterns]


def _patterns(
    t: LazyArray, check: Callable[[], None] | None, executor: Executor | None, memory: int | str | None
) -> Patterns:
    if not has_bits(t.spec.dtype):
        raise DataError(f"{t.name!r} is {t.spec.dtype}: bit patterns are counted for numbers of 8 and 16 bits")
    found = _counts(t, check, executor, memory)
    if packing(t.spec.dtype) > 1:
        pairs = found.reshape(16, 16)
        found = pairs.sum(0) + pairs.sum(1)
    return sparse(found)


def _counts(
    t: LazyArray, check: Callable[[], None] | None, executor: Executor | None, memory: int | str | None
) -> Array:
    found = np.zeros(1 << 8 * t.itemsize, np.int64)
    t._check()

    def tasks() -> Iterator[Task]:
        for _, part in t.pieces(RUN):
            if check is not None:
                check()
            yield Task(part.nbytes, PIECE + OVERHEAD, partial(_counted, part), part)

    def done(task: Task, result: Patterns) -> None:
        if check is not None:
            check()
        found[result.patterns] += result.counts

    runner(executor, memory)(tasks(), done, tensors=[t])
    return found


def _counted(part: LazyArray) -> Patterns:
    found = np.zeros(1 << 8 * part.itemsize, np.int64)
    for _, piece in part.pieces(PIECE):
        go_on()
        found += count(piece.read_into(scratch(piece.nbytes).view(piece.dtype).view(piece.shape)))
    return sparse(found)
