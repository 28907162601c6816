"""CRC-32: by the processor's own instructions, and of a whole from the CRC-32s of its pieces.

Measured: zlib 1.2.13 takes 0.5 s for a GiB, as much as reading and writing it; zlib-ng 0.06 s. Combining is what zlib's
C function crc32_combine does, which Python's zlib lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # a platform that it has no wheel for
    from zlib import crc32

__all__ = ["combined", "crc32"]

_POLYNOMIAL = 0xEDB88320  # of zip and zlib, lowest bit first

# A linear map of 32 bits: what becomes of each of them.
Matrix = tuple[int, ...]


def combined(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces that follow each other: (CRC-32, bytes) of each.

    >>> import zlib
    >>> combined([(zlib.crc32(b"lazy"), 4), (zlib.crc32(b"ckpt!"), 5)]) == zlib.crc32(b"lazyckpt!")
    True
    """
    total = 0
    for crc, nbytes in pieces:
        for n in range((8 * nbytes).bit_length()):
            if 8 * nbytes >> n & 1:
                total = _apply(_zeros(n), total)
        total ^= crc
    return total


def _apply(matrix: Matrix, vector: int) -> int:
    result = 0
    for row in matrix:
        if vector & 1:
            result ^= row
        vector >>= 1
    return result


@lru_cache
def _zeros(n: int) -> Matrix:
    """What appending 2**n zero bits does to a CRC."""
    if n == 0:
        return (_POLYNOMIAL, *(1 << k for k in range(31)))
    half = _zeros(n - 1)
    return tuple(_apply(half, row) for row in half)
