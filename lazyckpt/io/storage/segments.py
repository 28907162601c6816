"""Segments of remote objects: the files of the block cache.

A *segment* of `SEGMENT` bytes of an object is a file:

    8 bytes    "LZCKBLK" and the version of the layout
    4088       the length of a description, and the description as JSON: URL, version, size, number of the segment
    16 KiB     the table: 8 bytes for each `BLOCK` bytes of the segment
    8 MiB      the maps: a bit for each byte of the segment
    the rest   the bytes of the segment, each at its place

What is not there takes no room on the disk. An entry of the table says which range of its block is there: the CRC-32 of
the range, its first byte, its last byte (4, 2 and 2 bytes); 0 if nothing is. If several ranges are, the first byte is
65,535, the last 0, the map says which, and the CRC-32 is that of the map and the ranges. Bytes are written first, then
their entries. So any number of processes may read, write
and die at any time without locks, which network file systems may not have:

- Processes that write the same version of an object write the same bytes and the same description. Whichever entry
  remains describes bytes that are there.
- A reader compares the CRC before it uses a block. If a machine lost its power, a disk fails, or two machines of a
  network file system see a file in different states, the block is missing. A process remembers which blocks it has
  compared as long as the file's times of change stay the same.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from .. import user_folder
from ..directories import Directory
from ..system import File, read_at, write_all_at, write_at
from ..user_folder import Refused

BLOCK = 32 << 10  # bytes that have a checksum of their own; at most 64 KiB by the layout
SEGMENT = 64 << 20  # bytes of an object in one file
ENDING = ".blocks"
_MAGIC = b"LZCKBLK\x01"  # the last byte is the version of the layout
_HEAD = 4 << 10  # bytes of the description
_MAP = BLOCK // 8  # bytes of the map of a block
_PIECES = 0xFFFF  # the upper half of the entry of a block with a map
_NONE = array("Q", bytes(8 * (SEGMENT // BLOCK)))  # a table without entries
_MAPS = _HEAD + len(_NONE) * 8  # where the maps begin in a file
_DATA = _MAPS + SEGMENT // 8  # where the bytes begin
_CRC = 0xFFFFFFFF
_NAMES = 256  # segments whose names and descriptions are kept: making them takes a third of a small write
_WHOLE = (BLOCK - 1) << 16  # the upper half of the entry of a whole block
_RUN = (1 << 20) // BLOCK  # blocks that are read before they are compared, while they are in the processor's cache


class ObjectKey(NamedTuple):
    """A version of an object.

    Attributes
    ----------
    url
        The URL, without user names, passwords and what signs a request (`object_key`).
    version
        The ETag, version id or commit.
    size
        The size in bytes.
    place
        What else decides which object the URL is of, such as an endpoint.
    """

    url: str
    version: str
    size: int
    place: str = ""


Pairs = list[tuple[int, int]]
State = tuple[int, ...]  # of a file: its inode and its times of change; () if it was removed


class Written(NamedTuple):
    """The state of a segment's file before and after a write, and the entries that are new."""

    before: State
    after: State
    entries: dict[int, int]


class Found(NamedTuple):
    """What a read of a segment has not found: ranges of the segment, and damaged blocks with their entries."""

    missing: Pairs
    damaged: Pairs


def _state(status: os.stat_result) -> State:
    return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns) if status.st_nlink else ()


def _covers(table: array[int], start: int, stop: int) -> bool:
    """Return whether all bytes of a range of a segment have entries."""
    first, last = start // BLOCK, (stop - 1) // BLOCK
    head, tail = table[first], table[last]
    return (
        head > 0
        and tail > 0
        and head >> 32 & 0xFFFF <= start - first * BLOCK
        and tail >> 48 >= stop - last * BLOCK - 1
        and (first == last or (head >> 48 == BLOCK - 1 and not tail >> 32 & 0xFFFF))
        and (last - first < 2 or _are_whole(table, first + 1, last))
    )


def _are_whole(table: array[int], first: int, last: int) -> bool:
    """Return whether all blocks from ``first`` to the one before ``last`` are whole."""
    entries = np.frombuffer(table, np.uint64, last - first, 8 * first)
    return bool((entries >> np.uint64(32) == _WHOLE).all())


class Segment:
    """A segment that is open for reading."""

    __slots__ = ("_compared", "file", "is_written", "name", "used")

    def __init__(self, name: str, file: File) -> None:
        self.name, self.file = name, file
        self.used = -1e9  # when its use was noted, by the monotonic clock
        self.is_written = False  # whether this process has written to it
        # the file's state, and the entries whose checksums were right in this state
        self._compared: tuple[State, array[int]] = ((), _NONE)

    @classmethod
    def of(cls, directory: Directory, key: ObjectKey, number: int) -> Segment | None:
        """Return a segment; None if its file must not be used. Raises OSError if there is none."""
        name = name_of(key, number)
        file = File.of(directory.open(name, os.O_RDONLY))
        if not is_right(file.stat(), name) or _bytes(file, _HEAD, 0) != _head(key, number):
            return None
        return cls(name, file)

    def read(self, start: int, target: memoryview, afresh: bool = False) -> Found | None:
        """Fill ``target`` with the segment's bytes from ``start`` on, as far as they are there; return None if the file
        was removed. ``afresh``: use nothing that is known of the file. Raises OSError."""
        if afresh:
            self._compared = (), _NONE
        state = _state(self.file.stat())
        if not state:
            return None
        if self._compared[0] != state:
            self._compared = state, _NONE[:]
        known = self._compared[1]
        if (
            _covers(known, start, start + len(target))
            and _fill(self.file, _DATA + start, target) == len(target)
            and _state(self.file.stat()) == state
        ):
            return Found([], [])
        found, fresh = self._attempt(start, target, known)
        if _state(self.file.stat()) == state:
            for block, entry in fresh:
                known[block] = entry
        elif any(known):  # it was written to meanwhile: compare all
            found, _ = self._attempt(start, target, _NONE)
        return found

    def wrote(self, written: Written) -> None:
        """Note that this process has written entries, whose checksums it has just computed. Writes are noted in their
        order."""
        self.is_written = True
        state, known = self._compared
        if written.before[:1] != _state(self.file.stat())[:1]:  # another file of the same name
            return
        if state != written.before:
            known = _NONE[:]
        for block, entry in written.entries.items():
            known[block] = entry
        self._compared = written.after, known

    def _attempt(self, start: int, target: memoryview, known: array[int]) -> tuple[Found, Pairs]:
        """Read blocks, and compare those that are not ``known``. Return also the right ones with their entries."""
        first, stop = start // BLOCK, start + len(target)
        last = (stop - 1) // BLOCK
        table = known[first : last + 1]
        if not all(table):
            nbytes = 8 * len(table)
            table = array("Q", _bytes(self.file, nbytes, _HEAD + 8 * first).ljust(nbytes, b"\0"))
        missing: Pairs = []
        wrong: Pairs = []
        right: Pairs = []
        at = start
        while at < stop:
            block = at // BLOCK
            after = block
            while after <= last and not table[after - first]:
                after += 1
            if after > block:  # many blocks of a segment that is being written are not there yet
                missing.append((at, min(stop, after * BLOCK)))
                at = missing[-1][1]
                continue
            count = min(_RUN, (stop - at) // BLOCK) if at == block * BLOCK else 0
            entries = table[block - first : block - first + max(count, 1)]
            if count > 1 and _are_whole(entries, 0, count):
                part = target[at - start : at - start + count * BLOCK]
                if _fill(self.file, _DATA + at, part) == len(part) and (
                    entries == known[block : block + count] or _crcs(part) == [entry & _CRC for entry in entries]
                ):
                    right += zip(range(block, block + count), entries, strict=True)
                    at += len(part)
                    continue
            end = min(stop, (block + 1) * BLOCK)
            part = target[at - start : end - start]
            good = self._block(block, entries[0], at - block * BLOCK, part, known[block] == entries[0])
            if good:
                right.append((block, entries[0]))
            else:
                missing.append((at, end))
                if good is False:
                    wrong.append((block, entries[0]))
            at = end
        return Found(missing, wrong), right

    def _block(self, block: int, entry: int, start: int, target: memoryview, known: bool) -> bool | None:
        """Fill ``target`` from a block's byte ``start`` on. Return False if the block is damaged, None if the bytes are
        not there."""
        begin, end = entry >> 32 & 0xFFFF, (entry >> 48) + 1
        stop = start + len(target)
        pieces = entry >> 32 == _PIECES
        if not entry or not (pieces or (begin <= start and stop <= end)):
            return None
        if not pieces and (known or (begin == start and end == stop)):
            got = _fill(self.file, _DATA + block * BLOCK + start, target)
            return got == len(target) and (known or crc32(target) == entry & _CRC)
        there = _checked(lambda nbytes, offset: _bytes(self.file, nbytes, offset), block, entry)
        if there is None or not there[0][start:stop].all():
            return None if there else False
        target[:] = there[1][start:stop].data
        return True


def _crcs(data: memoryview) -> list[int]:
    """Return the checksum of each block."""
    return [crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


class Buffers:
    """Bytes in several buffers, one after the other, which are not joined: the chunks of an answer of a server."""

    __slots__ = ("_buffers", "_ends", "nbytes")

    def __init__(self, buffers: Iterable[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._ends = list(accumulate(map(len, self._buffers)))
        self.nbytes = self._ends[-1] if self._ends else 0

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the buffers of a range."""
        for n in range(bisect_right(self._ends, start), len(self._ends)):
            begin = self._ends[n] - len(self._buffers[n])
            if begin >= stop:
                break
            yield self._buffers[n][max(start - begin, 0) : stop - begin]

    def joined(self, start: int, stop: int) -> memoryview:
        """Return a range, copied if it is in several buffers."""
        found = list(self.between(start, stop))
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


def write(directory: Directory, key: ObjectKey, number: int, start: int, data: Buffers) -> Written:
    """Write bytes of a segment from ``start`` on, and then their entries. Raises OSError."""
    first, stop = start // BLOCK, start + data.nbytes
    blocks = range(first, (stop - 1) // BLOCK + 1)
    fd = _made(directory, key, number)
    try:
        before = _state(os.fstat(fd))
        table = array("Q", read_at(fd, 8 * len(blocks), _HEAD + 8 * first).ljust(8 * len(blocks), b"\0"))
        entries = {}
        for n, block in enumerate(blocks):
            lo, hi = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            entry = _joined(fd, block, table[n], lo - block * BLOCK, data.joined(lo - start, hi - start))
            if entry != table[n]:
                table[n] = entries[block] = entry
        write_all_at(fd, data.between(0, data.nbytes), _DATA + start)
        write_at(fd, table.tobytes(), _HEAD + 8 * first)
        return Written(before, _state(os.fstat(fd)), entries)
    finally:
        os.close(fd)


def drop(directory: Directory, name: str, damaged: Pairs) -> None:
    """Remove blocks from the table of a segment, unless they were written anew. Raises OSError."""
    fd = directory.open(name, os.O_RDWR)
    try:
        for block, entry in damaged:
            if read_at(fd, 8, _HEAD + 8 * block) == entry.to_bytes(8, "little"):
                write_at(fd, bytes(8), _HEAD + 8 * block)
    finally:
        os.close(fd)


def _joined(fd: int, block: int, entry: int, lo: int, data: memoryview) -> int:
    """Return the entry of a block after ``data`` is written from its byte ``lo`` on; write its map, if it needs one."""
    hi = lo + len(data)
    if not entry or hi - lo == BLOCK:
        return _entry(lo, hi, crc32(data))
    begin, end = entry >> 32 & 0xFFFF, (entry >> 48) + 1
    if begin <= lo and hi <= end:
        return entry
    there = _checked(lambda nbytes, offset: read_at(fd, nbytes, offset), block, entry)
    if there is None:  # damaged
        return _entry(lo, hi, crc32(data))
    mask, values = there
    if mask[lo:hi].all():
        return entry
    mask[lo:hi] = True
    values[lo:hi] = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(mask)
    begin, end = int(places[0]), int(places[-1]) + 1
    if len(places) == end - begin:
        return _entry(begin, end, crc32(values[begin:end]))
    bits = np.packbits(mask).tobytes()
    write_at(fd, bits, _MAPS + block * _MAP)
    return _PIECES << 32 | crc32(values[mask], crc32(bits))


def _checked(
    read: Callable[[int, int], bytes | bytearray], block: int, entry: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return which bytes of a block are there, and the bytes; None if the checksum is wrong. ``read`` gets a number of
    bytes and an offset in the file."""
    mask, values = np.zeros(BLOCK, bool), np.zeros(BLOCK, np.uint8)
    if entry >> 32 == _PIECES:
        bits = read(_MAP, _MAPS + block * _MAP)
        data = read(BLOCK, _DATA + block * BLOCK)
        mask[: 8 * len(bits)] = np.unpackbits(np.frombuffer(bits, np.uint8))
        values[: len(data)] = np.frombuffer(data, np.uint8)
        good = crc32(values[mask], crc32(bits)) == entry & _CRC
    else:
        begin, end = entry >> 32 & 0xFFFF, (entry >> 48) + 1
        data = read(end - begin, _DATA + block * BLOCK + begin)
        mask[begin:end] = True
        values[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        good = crc32(data) == entry & _CRC
    return (mask, values) if good else None


def _entry(begin: int, end: int, crc: int) -> int:
    return (end - 1) << 48 | begin << 32 | crc


def _made(directory: Directory, key: ObjectKey, number: int) -> int:
    """Return the descriptor of a segment's file, which is created if there is none that may be used.

    The description depends only on the key: processes that write it at the same time write the same."""
    name, head = name_of(key, number), _head(key, number)
    for again in (False, True):
        fd = directory.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            found = read_at(fd, _HEAD, 0)
            if is_right(os.fstat(fd), name) and found in (b"", head):
                if not found:
                    write_at(fd, head, 0)
                return fd
            if again:
                raise OSError(errno.EIO, f"{name} cannot be replaced")
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        remove(directory, name)
    raise AssertionError


def is_right(status: os.stat_result, name: str) -> bool:
    """Return whether only this user can have read and written a file."""
    try:
        user_folder.check(status, name, private=True)
    except Refused:
        return False
    return True


@functools.lru_cache(_NAMES)
def _head(key: ObjectKey, number: int) -> bytes:
    """Return the description of a segment: the first bytes of its file."""
    about = {"url": key.url.partition("?")[0], "version": key.version, "size": key.size, "segment": number}
    text = json.dumps(about).encode()
    return (_MAGIC + len(text).to_bytes(4, "little") + text).ljust(_HEAD, b"\0")


def described(directory: Directory, name: str) -> dict[str, Any]:
    """Return what the description of a file says; {} if there is none."""
    try:
        fd = directory.open(name, os.O_RDONLY)
        try:
            head = read_at(fd, _HEAD, 0)
        finally:
            os.close(fd)
        size = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 4], "little")
        about = json.loads(head[len(_MAGIC) + 4 :][:size]) if head.startswith(_MAGIC) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


@functools.lru_cache(_NAMES)
def name_of(key: ObjectKey, number: int) -> str:
    text = json.dumps([*key, number]).encode()
    return hashlib.sha256(text).hexdigest()[:40] + ENDING


def remove(directory: Directory, name: str) -> int:
    """Remove a file; return 1 if it was there and could be removed, else 0."""
    try:
        directory.unlink(name)
    except OSError:  # another process has removed it, or on Windows has it open
        return 0
    return 1


def cut(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of an object into those of its segments: (number, first byte in it, byte after the last)."""
    for number in range(start // SEGMENT, -(-stop // SEGMENT)):
        base = number * SEGMENT
        yield number, max(start - base, 0), min(stop - base, SEGMENT)


def _fill(file: File, offset: int, target: memoryview) -> int:
    """Fill ``target``; return how many bytes there were."""
    done = 0
    while done < len(target):
        got = file.read_at(offset + done, target[done:])
        if not got:
            break
        done += got
    return done


def _bytes(file: File, nbytes: int, offset: int) -> bytearray:
    """Return bytes of a file, fewer at its end."""
    data = bytearray(nbytes)
    del data[_fill(file, offset, memoryview(data)) :]
    return data
