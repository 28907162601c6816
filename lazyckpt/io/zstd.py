"""Zstandard frames, unpacked by numcodecs, and not more of them than there can honestly be.

The format: RFC 8878, section 3.1.1. A frame of a few bytes may stand for gigabytes, so its blocks are counted first.
"""

from __future__ import annotations

from ..errors import CorruptError

_MAGIC = 0xFD2FB528
_BLOCK = 128 << 10  # bytes that a block unpacks to at most
_LOOSE = 64 << 20  # bytes; a block may hold less than it could


def unpack_zstd(data: bytes, where: str, limit: int, out: memoryview | None = None) -> bytes | memoryview:
    """What the frames hold; in ``out`` if they say that they are as long as that.

    Raises CorruptError if they are damaged, or would hold far more than ``limit`` bytes.
    """
    try:
        most, told = _most(data)
    except IndexError:
        raise CorruptError(f"{where}: its zstd frame is truncated") from None
    if most is None:
        raise CorruptError(f"{where}: it is no zstd frame, or a damaged one")
    if most > 4 * limit + _LOOSE:
        raise CorruptError(
            f"{where}: its zstd frame unpacks to up to {most:,} bytes, where {limit:,} are all that can be needed: "
            "damaged or hostile"
        )
    into = out if told and out is not None and len(out) == most else None
    from numcodecs import zstd  # heavy to import, and seldom needed

    try:
        found: bytes = zstd.decompress(data, into)
    except (RuntimeError, MemoryError, ValueError) as e:
        raise CorruptError(f"{where}: its zstd frame cannot be unpacked ({e}): the file is damaged") from None
    return found if into is None else into


def _most(data: bytes) -> tuple[int | None, bool]:
    """Bytes that the frames unpack to at most, by their block headers and by what they say themselves; None if they are
    none. And whether all of them say it. Raises IndexError past the end."""
    at, total, said = 0, 0, True
    while at < len(data):
        magic = _number(data, at, 4)
        if 0x184D2A50 <= magic <= 0x184D2A5F:  # a frame to be skipped
            at += 8 + _number(data, at + 4, 4)
            continue
        if magic != _MAGIC:
            return None, False
        descriptor = _number(data, at + 4, 1)
        single = bool(descriptor & 0x20)
        at += 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        width = (int(single), 2, 4, 8)[descriptor >> 6]
        told = _number(data, at, width) + (256 if width == 2 else 0) if width else None
        at += width
        size, last = 0, False
        while not last:
            header = _number(data, at, 3)
            last, kind, count = bool(header & 1), header >> 1 & 3, header >> 3
            size += count if kind < 2 else _BLOCK
            at += 3 + (1 if kind == 1 else count)
        at += 4 * bool(descriptor & 4)
        said = said and told is not None
        total += size if told is None else told  # memory for what is told is taken before a block is seen
    return (total if at == len(data) else None), said


def _number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + width], "little")
