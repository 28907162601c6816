"""What opening a file of tensors takes: how many of its first and of its last bytes its parser reads.

Stores request these bytes before a parser does (`Ahead.expect`). Nothing here is a check: whatever is odd is left to
the parser, which reads the file as if nobody had looked at it before.
"""

from __future__ import annotations

import struct

from ..storage.announced import SMALL, Held, Layout, Needs

_END = 22  # bytes of a zip's last record, which torch writes without a comment
_END64 = 20 + 56  # bytes of the two zip64 records in front of it
_ENTRY = 46  # bytes of a directory's entry before its name
_FIRST = 8  # entries among which data.pkl is searched
_HEADER = 512  # bytes for the header of a record and its padding
_LAST = 1 << 10  # bytes for the records behind the storages: the version, and the identity of the serialization
_MOST = 64 << 20  # bytes; a larger index is left to the parser


def _needs_of_zip(size: int, held: Held) -> Needs:
    """A zip of torch.save: data.pkl at its start, the directory at its end."""
    end = held(size - _END, _END)
    if end is None or not end.startswith(b"PK\x05\x06"):
        return Needs()
    length, start = struct.unpack_from("<2I", end, 12)
    if start == 0xFFFFFFFF or length == 0xFFFFFFFF or end[8:12] == b"\xff" * 4:
        end64 = held(size - _END - _END64, _END64)
        if end64 is None or not end64.startswith(b"PK\x06\x06"):
            return Needs()
        length, start = struct.unpack_from("<2Q", end64, 40)
    elif (end64 := held(size - _END - _END64, 4)) == b"PK\x06\x06":
        length, start = struct.unpack_from("<2Q", held(size - _END - _END64, _END64) or bytes(56), 40)
    if not 0 <= start <= start + length <= size or size - start > _MOST:
        return Needs()
    tail = min(size, size - start + _LAST)
    directory = held(start, length)
    return Needs(0 if directory is None else _pickle_end(directory), tail)


def _pickle_end(directory: bytes) -> int:
    """Return the offset of the end of data.pkl and of the small records behind it; 0 if it is not found."""
    at = 0
    for _ in range(_FIRST):
        if at + _ENTRY > len(directory):
            break
        nbytes, name, extra, comment = struct.unpack_from("<I3H", directory, at + 24)
        (header,) = struct.unpack_from("<I", directory, at + 42)
        if directory[at + _ENTRY : at + _ENTRY + name].endswith(b"/data.pkl"):
            end: int = header + nbytes + 4 * _HEADER
            return end if end <= _MOST else 0
        at += _ENTRY + name + extra + comment
    return 0


def _needs_of_safetensors(size: int, held: Held) -> Needs:
    length = held(0, 8)
    head = 8 + int.from_bytes(length or b"", "little")
    return Needs(head if head <= min(size, 2 * _MOST) else 8)


TORCH = Layout(Needs(SMALL, SMALL), _needs_of_zip)
SAFETENSORS = Layout(Needs(SMALL), _needs_of_safetensors)
ZIP_END = Layout(Needs(0, _END))  # whether a file is complete
WHOLE = Layout(Needs(1 << 30))  # documents
