"""Chunk grids whose chunks are runs of bytes in existing files, so that references can describe them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd, isqrt, prod
from typing import NamedTuple

from ..errors import DataError
from .box import Shape, is_run
from .copies import Copy
from .specs import TensorSpec

MOST = 1 << 16  # references of one tensor; looking up more would take longer than copying the bytes


class Reference(NamedTuple):
    """The bytes of one chunk: ``place`` is its index in the grid, ``offset`` and ``length`` are in bytes."""

    place: Shape
    path: str
    offset: int
    length: int


def reference_chunk(spec: TensorSpec, copies: Sequence[Copy], most: int) -> Shape:
    """Return the shape of chunks that tile the tensor evenly, each of them one run of unconverted bytes of one file.

    The chunks are as large as the files allow, but have at most ``most`` bytes. ``copies`` is the plan of the whole
    tensor.

    Raises DataError, with the reason, if there is no such grid, or only grids of more than 65,536 chunks.
    """
    shape = tuple(max(1, n) for n in spec.shape)
    for copy in copies:
        extent = copy.extent
        if extent.within is not None:
            raise DataError(f"its bytes are packed in {extent.path}")
        if not extent.raw:
            raise DataError(f"its bytes in {extent.path} are not its values: they are swapped, conjugated or negated")
        if extent.dtype != spec.dtype:
            raise DataError(f"it is {extent.dtype} in {extent.path} and read as {spec.dtype}")
    if sum(prod(copy.shape) for copy in copies) > spec.numel:
        raise DataError("it is the mean of several copies, which has to be computed")
    chunk = [gcd(n, *(c.at[d] for c in copies), *(c.at[d] + c.shape[d] for c in copies)) for d, n in enumerate(shape)]
    if not copies:
        return shape
    for d in range(len(chunk)):
        if all(is_run(tuple(chunk), copy.strides) for copy in copies):
            break
        chunk[d] = 1
    for d in range(len(chunk)):
        times = -(-prod(chunk) * spec.dtype.itemsize // most)
        if times <= 1:
            break
        chunk[d] //= _divisor(chunk[d], times)
    count = prod(shape) // prod(chunk)
    if count > MOST:
        raise DataError(
            f"its pieces lie so that chunks of one shape have at most {prod(chunk) * spec.dtype.itemsize:,} bytes: "
            f"that takes {count:,} references"
        )
    return tuple(chunk)


def references(copies: Sequence[Copy], chunk: Shape) -> Iterator[Reference]:
    """Yield the bytes of each chunk. ``chunk`` is the shape from `reference_chunk`."""
    for copy in copies:
        size = copy.extent.dtype.itemsize
        length = prod(chunk) * size
        first = [a // c for a, c in zip(copy.at, chunk, strict=True)]
        steps = [c * s for c, s in zip(chunk, copy.strides, strict=True)]
        for inner in product(*(range(n // c) for n, c in zip(copy.shape, chunk, strict=True))):
            ahead = sum(i * s for i, s in zip(inner, steps, strict=True))
            place = tuple(a + i for a, i in zip(first, inner, strict=True))
            yield Reference(place, copy.extent.path, copy.extent.offset + (copy.start + ahead) * size, length)


def _divisor(n: int, least: int) -> int:
    """Return the smallest divisor of n that is at least ``least``; n if there is none.

    >>> _divisor(12, 5), _divisor(7, 2), _divisor(12, 20)
    (6, 7, 12)
    """
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return min((k for k in (*small, *(n // k for k in small)) if k >= least), default=n)
