"""A table of sorted keys, as TensorFlow's `.index` files are: LevelDB's table format.

Source: leveldb/doc/table_format.md; tensorflow/core/lib/io/format.cc and block.cc. A footer of 48 bytes names the index
block, which names the data blocks; keys share prefixes. Each block is followed by its compression and a masked CRC32C,
which is compared. TensorFlow writes blocks without compression.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import CorruptError, FormatError
from ..limits import Budget
from ..storage.streams import StoreFile

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48
_LARGEST = 1 << 30  # bytes of a block


def masked(crc: int) -> int:
    """Return a CRC32C as tables store it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """Return a number of variable length and the position behind it. Raises CorruptError."""
    value = 0
    for n in range(10):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return value, at
    raise CorruptError(f"{where}: a number is cut off: damaged")


def read_table(file: StoreFile) -> Iterator[tuple[bytes, bytes]]:
    """Yield all keys with their values, in order. Raises CorruptError, FormatError (compressed blocks)."""
    where = file.where
    if file.size < FOOTER:
        raise CorruptError(f"{where} has {file.size:,} bytes, a table has at least {FOOTER}: truncated")
    footer = file.at(file.size - FOOTER, FOOTER)
    if footer[-8:] != MAGIC:
        raise CorruptError(f"{where} does not end as tables do: truncated, or no table")
    at = 0
    for _ in range(2):  # the metaindex block
        _, at = varint(footer, at, where)
    offset, at = varint(footer, at, where)
    size, _ = varint(footer, at, where)
    budget = Budget(where, file.size)
    last = None
    for _, handle in _entries(_block(file, offset, size), where, budget):
        offset, at = varint(handle, 0, where)
        size, _ = varint(handle, at, where)
        for key, value in _entries(_block(file, offset, size), where, budget):
            if last is not None and key <= last:
                raise CorruptError(f"{where}: its keys are not in order: damaged")
            last = key
            yield key, value


def _block(file: StoreFile, offset: int, size: int) -> bytes:
    import google_crc32c

    if size > _LARGEST or offset + size + 5 > file.size:
        raise CorruptError(f"{file.where}: a block of {size:,} bytes at {offset:,} is beyond its end: truncated")
    data = file.at(offset, size + 5)
    if masked(google_crc32c.value(data[:-4])) != int.from_bytes(data[-4:], "little"):
        raise CorruptError(f"{file.where}: the checksum of the block at byte {offset:,} does not match: damaged")
    if data[size]:
        raise FormatError(f"{file.where}: its blocks are compressed (type {data[size]}), TensorFlow writes none so")
    return data[:size]


def _entries(block: bytes, where: str, budget: Budget) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise CorruptError(f"{where}: a block of {len(block)} bytes: damaged")
    stop = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if stop < 0:
        raise CorruptError(f"{where}: a block has more restarts than bytes: damaged")
    at, key = 0, b""
    while at < stop:
        shared, at = varint(block, at, where)
        own, at = varint(block, at, where)
        length, at = varint(block, at, where)
        if shared > len(key) or at + own + length > stop:
            raise CorruptError(f"{where}: an entry runs over the end of its block: damaged")
        key = key[:shared] + block[at : at + own]
        budget.objects()
        budget.characters(len(key))
        yield key, block[at + own : at + own + length]
        at += own + length
