"""A pickle without its large byte strings, which are left in the file.

`skim` copies the opcodes of a pickle, and puts the number of each large byte string in its place, as a persistent id.
The machine then makes a `Distant` record of it. A pickle of gigabytes of arrays costs little memory, and its elements
are not read. Frames, which would have other lengths, are checked and left out.

Opcodes: CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import pickletools
from functools import lru_cache
from typing import Any, NamedTuple

from ....errors import CorruptError, FormatError
from ...limits import Budget
from ...storage.streams import StoreFile
from .records import Distant, short

LEAST = 4 << 10  # bytes of a byte string that is left in the file
_FIRST, _WINDOW = 4 << 10, 1 << 18  # bytes of the first read behind a byte string, and of the largest
_BYTES = {0x42: 4, 0x8E: 8, 0x96: 8}  # BINBYTES, BINBYTES8, BYTEARRAY8 -> bytes of the length
_FRAME, _STOP, _PERSISTENT = 0x95, 0x2E, (0x50, 0x51)
_MOST = 1 << 31  # byte strings, which are numbered by a signed int of 32 bits


class Skimmed(NamedTuple):
    """A pickle without its large byte strings: its opcodes, the byte strings by number, and where it ends."""

    data: bytes
    distant: list[Distant]
    end: int

    def persistent(self, pid: Any) -> Distant:
        """Return the byte string with a number."""
        if type(pid) is not int or not 0 <= pid < len(self.distant):
            raise CorruptError(f"it refers to {short(pid)}, an object outside of the file")
        return self.distant[pid]


class _Widths(NamedTuple):
    """Opcode -> bytes of its argument; bytes of the length of its argument; number of lines of its argument."""

    fixed: dict[int, int]
    counted: dict[int, int]
    lines: dict[int, int]


@lru_cache(1)
def _widths() -> _Widths:
    found = _Widths({}, {}, {})
    counts = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    for one in pickletools.opcodes:
        code, n = ord(one.code), one.arg.n if one.arg is not None else 0
        if n >= 0:
            found.fixed[code] = n
        elif n == pickletools.UP_TO_NEWLINE:
            found.lines[code] = 2 if one.name in ("GLOBAL", "INST") else 1
        else:
            found.counted[code] = counts[n]
    return found


def skim(file: StoreFile) -> Skimmed:
    """Return the pickle that a file begins with.

    Raises CorruptError if it breaks off or its frames contradict it, FormatError if it refers to objects outside."""
    where = file.where
    budget = Budget(where, file.size)
    fixed, counted, lines = _widths()
    out = bytearray()
    distant: list[Distant] = []
    base, data, window = 0, b"", _FIRST  # a window of the file, and the size of the next one
    i = run = 0  # the next opcode, and where the opcodes begin that are to be copied, in the window
    frame = 0  # where the frame ends, in the file; 0 if there is none

    def need(size: int) -> None:
        """Have so many bytes of the file from the next opcode on in the window."""
        nonlocal base, data, i, run, window
        if i + size <= len(data):
            return
        out.extend(data[run:i])
        base, i, run = base + i, 0, 0
        if base + size > file.size:
            raise _broken(where, base, file.size)
        budget.time()
        data = file.at(base, min(max(size, window), file.size - base))
        window = min(2 * window, _WINDOW)

    while True:
        need(1)
        op = data[i]
        if op in _BYTES:
            need(1 + _BYTES[op])
            head = 1 + _BYTES[op]
            size = int.from_bytes(data[i + 1 : i + head], "little")
            end = base + i + head + size
            if end > file.size:
                raise _broken(where, base + i, file.size)
            _check_frame(where, frame, base + i, end)
            if size >= LEAST:
                if len(distant) == _MOST:
                    raise CorruptError(f"{where}: it has more byte strings than any pickle")
                out += data[run:i]
                out += b"J" + len(distant).to_bytes(4, "little") + b"Q"
                distant.append(Distant(base + i + head, size, op == 0x96))
                budget.objects()
                if end <= base + len(data):
                    i = run = end - base
                else:
                    base, data, i, run, window = end, b"", 0, 0, _FIRST
                continue
            length = head + size
        elif op == _FRAME:
            need(9)
            at = base + i
            if at < frame:
                raise CorruptError(f"{where}: a frame begins at byte {at:,}, within another one: damaged")
            frame = at + 9 + int.from_bytes(data[i + 1 : i + 9], "little")
            if frame > file.size:
                raise CorruptError(f"{where}: a frame at byte {at:,} is longer than the file: truncated?")
            out += data[run:i]
            i = run = i + 9
            continue
        elif op in fixed:
            length = 1 + fixed[op]
        elif op in counted:
            need(1 + counted[op])
            length = 1 + counted[op] + int.from_bytes(data[i + 1 : i + 1 + counted[op]], "little")
        elif op in lines:
            length = 0
            while not length:
                at = i
                for _ in range(lines[op]):
                    at = data.find(b"\n", at + 1)
                    if at < 0:
                        break
                have = len(data) - i
                if at >= 0:
                    length = at + 1 - i
                elif base + len(data) == file.size:
                    raise _broken(where, base + i, file.size)
                else:
                    need(min(2 * have + 64, file.size - base - i))
        else:
            raise CorruptError(f"{where}: unknown pickle opcode 0x{op:02x} at byte {base + i:,}: damaged")
        if op in _PERSISTENT:
            raise FormatError(
                f"{where}: its pickle refers to objects outside of it (a persistent id at byte {base + i:,}): it is a "
                "part of another format. Save its arrays again with numpy.savez"
            )
        need(length)
        _check_frame(where, frame, base + i, base + i + length)
        i += length
        if op == _STOP:
            if base + i < frame:
                raise CorruptError(f"{where}: the pickle ends at byte {base + i:,}, within a frame: damaged")
            out += data[run:i]
            return Skimmed(bytes(out), distant, base + i)


def _check_frame(where: str, frame: int, begin: int, end: int) -> None:
    """Raise CorruptError for an opcode that is only partly within a frame, on which unpicklers differ."""
    if begin < frame < end:
        raise CorruptError(f"{where}: an opcode at byte {begin:,} goes on behind the end of its frame: damaged")


def _broken(where: str, at: int, size: int) -> CorruptError:
    return CorruptError(f"{where}: the pickle breaks off near byte {at:,} of {size:,}: truncated? Copy it again")
