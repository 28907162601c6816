"""Decoding of pickle opcode arguments. Arguments that Python's two unpicklers decode differently are rejected."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

from ....errors import CorruptError


def exactly(data: bytes, at: int, n: int) -> bytes:
    raw = data[at : at + n]
    if len(raw) != n:
        raise CorruptError(f"{n:,} bytes are claimed at byte {at:,}, but the pickle ends at {len(data):,}: truncated?")
    return raw


def _decimal(line: bytes) -> Any:
    return line == b"01" if line in (b"00", b"01") else _integer(line)  # 00 and 01 are protocol 0's booleans


def _long(line: bytes) -> int:
    return _integer(line.removesuffix(b"L"))


def _integer(line: bytes) -> int:
    if not _INTEGER.fullmatch(line):  # Python's unpicklers differ on 010 and 0x10
        raise CorruptError(f"{line[:40]!r} is not a number as picklers write it")
    return int(line)


def place(line: bytes) -> int:
    if not line.isdigit():
        raise CorruptError(f"{line[:40]!r} is not a place in the memo")
    return int(line)


def _float(line: bytes) -> float:
    if b"_" in line or line.strip() != line:
        raise CorruptError(f"{line[:40]!r} is not a number as picklers write it")
    return float(line)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise CorruptError("a string without its quotes")
    raw: bytes = codecs.escape_decode(line[1:-1])[0]
    return raw.decode("latin1")


_INTEGER = re.compile(rb"-?(0|[1-9][0-9]*)")


def _latin1(raw: bytes) -> str:
    return raw.decode("latin1")


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


# opcode -> (bytes of the length field, decoder of the bytes that follow)
COUNTED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    0x54: (4, _latin1),  # BINSTRING
    0x55: (1, _latin1),  # SHORT_BINSTRING
    0x42: (4, bytes),  # BINBYTES
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x8D: (8, _utf8),  # BINUNICODE8
    0x96: (8, bytearray),  # BYTEARRAY8
}
# opcodes whose argument is the rest of the line
LINES: dict[int, Callable[[bytes], Any]] = {
    0x70: place,  # PUT
    0x67: place,  # GET
    0x50: bytes,  # PERSID
    0x49: _decimal,  # INT
    0x4C: _long,  # LONG
    0x46: _float,  # FLOAT
    0x53: _quoted,  # STRING
    0x56: lambda line: line.decode("raw-unicode-escape"),  # UNICODE
}


def counted(op: int, data: bytes, at: int) -> tuple[Any, int]:
    """Return the value of an opcode of `COUNTED` whose length field is at a byte offset, and the offset behind it."""
    width, value_of = COUNTED[op]
    start = at + width
    n = int.from_bytes(exactly(data, at, width), "little")
    return value_of(exactly(data, start, n)), start + n


def unknown(op: int, at: int, size: int) -> CorruptError:
    """Return the error for an opcode that no protocol has, in front of a byte offset."""
    return CorruptError(f"unknown pickle opcode 0x{op:02x} at byte {at - 1:,} of {size:,}")
