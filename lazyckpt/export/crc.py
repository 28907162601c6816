"""CRC-32 of a whole from the CRC-32s of its pieces, as zlib's C function crc32_combine does, which Python's lacks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
        total = _apply(_zeros(nbytes), total) ^ crc
    return total


def _apply(matrix: Matrix, vector: int) -> int:
    result = 0
    for row in matrix:
        if vector & 1:
            result ^= row
        vector >>= 1
    return result


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Matrix:
    """What appending so many zero bytes does to a CRC: the map of one zero bit to the power of 8 * nbytes."""
    power: Matrix = (_POLYNOMIAL, *(1 << n for n in range(31)))
    result: Matrix = tuple(1 << n for n in range(32))
    bits = 8 * nbytes
    while bits:
        if bits & 1:
            result = tuple(_apply(power, row) for row in result)
        bits >>= 1
        power = tuple(_apply(power, row) for row in power)
    return result
