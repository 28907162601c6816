"""The members of archives, for a scan: leniently, since an archive that one reader refuses is read by another.

Flags, checksums and names in the headers are not compared. A record's data is looked at wherever a reader may look for
it: at the place that the directory names, and behind each header in a row from the start of the file.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...errors import CorruptError
from ...io.containers.pickle.trace import Bytes, Held
from ...io.containers.zip import DEFLATED, HEADER_SIZE, STORED, ZIP_MAGIC, read_zip
from ...io.limits import Budget
from ...io.storage.streams import StoreFile

_HEADER = struct.Struct("<4s5H3I2H")
_BLOCK = 512  # bytes of a block of a tar
_CHUNK = 1 << 16
_NUMBERED = re.compile(r"^(.*/)?data/\d+$")
_END = 22 + (1 << 16)  # bytes at the end in which readers look for the end record
_UNPACKED = 256 << 20  # bytes of one member that are unpacked at most
_SEARCHED = 1 << 20  # bytes that are searched for the end of a zip at a time


class Member(NamedTuple):
    """A member of an archive: its name, and its bytes (None if they cannot be had; ``why`` says why)."""

    name: str
    data: Bytes | None
    why: str = ""


def part(file: Bytes, offset: int, size: int) -> Bytes:
    """Return a range of bytes, cut at the end of the file."""
    offset = min(max(0, offset), file.size)
    size = max(0, min(size, file.size - offset))
    if isinstance(file, StoreFile):
        return StoreFile(file.store, file.path, tail=0, window=(file.start + offset, size))
    return Held(file.at(offset, size))


def is_zip(file: Bytes, head: bytes) -> bool:
    """Return whether a reader of zip files accepts the file: by its start, or by the end record in its last bytes."""
    if head.startswith((ZIP_MAGIC, b"PK\x05\x06")):
        return True
    size = min(_END, file.size)
    return b"PK\x05\x06" in file.at(file.size - size, size)


def zips(file: Bytes) -> Iterator[Zipped]:
    """Yield the zips of a file: one, or several behind each other, as in the files of DCP."""
    whole = _directory(file)
    if whole is not None and whole.first == 0 and file.at(file.size - 22, 4) == b"PK\x05\x06":
        yield whole
        return
    begin, found = 0, 0
    for end in _ends(file):
        one = _directory(part(file, begin, end - begin))
        if one is not None:
            yield one
            begin, found = end, found + 1
    if not found and file.at(0, min(4, file.size)) == ZIP_MAGIC:
        yield Zipped(file, [], 0, "is a zip whose directory cannot be read")


class Zipped(NamedTuple):
    """A zip: its bytes, its records (name, offset of the header, method, size), and where the first one begins."""

    data: Bytes
    records: list[tuple[str, int, int, int]]
    first: int
    why: str = ""


def _directory(file: Bytes) -> Zipped | None:
    """Return the records that the directory of a zip names, None if there is no directory at the end."""
    stream: Any = file if isinstance(file, StoreFile) else io.BytesIO(file.at(0, file.size))
    try:
        with zipfile.ZipFile(stream) as archive:
            records = [(i.filename, i.header_offset, i.compress_type, i.compress_size) for i in archive.infolist()]
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        EOFError,
        NotImplementedError,
        struct.error,
        CorruptError,
        KeyError,
    ):
        return None
    return Zipped(file, records, min((header for _, header, _, _ in records), default=0))


def _ends(file: Bytes) -> Iterator[int]:
    """Yield where zips in a file may end: behind every end record."""
    at = 0
    while at < file.size:
        data = file.at(at, min(_SEARCHED, file.size - at))
        place = data.find(b"PK\x05\x06")
        while place >= 0:
            end = at + place + 22
            if end <= file.size:
                yield end + int.from_bytes(file.at(end - 2, 2), "little")
            place = data.find(b"PK\x05\x06", place + 4)
        at += len(data) - 3 if at + len(data) < file.size else len(data)


def zip_members(zipped: Zipped, budget: Budget) -> Iterator[Member]:
    """Yield the records of a zip that are not the data of tensors."""
    file = zipped.data
    if zipped.why:
        yield Member("", None, zipped.why)
    torch = any(name.endswith("data.pkl") for name, *_ in zipped.records)
    for name, header, method, stored in zipped.records:
        if (name.endswith("/") and not stored) or (torch and _NUMBERED.match(name)):
            continue  # a folder; or the data of a tensor, of which torch unpickles none
        head = file.at(header, min(HEADER_SIZE, file.size - header)) if 0 <= header < file.size else b""
        if len(head) < HEADER_SIZE:
            yield Member(name, None, "is a record that is not in the file")
            continue
        lengths = _HEADER.unpack(head)[-2:]
        yield from _record(file, name, header + HEADER_SIZE + sum(lengths), stored, method, budget)
    refusal = _refusal(file)
    if refusal is not None:
        if refusal:
            yield Member("", None, refusal)
        yield from _in_a_row(file, {header for _, header, _, _ in zipped.records}, budget)


def _refusal(file: Bytes) -> str | None:
    """Return why readers of zip files may see different records, "" if that is not known, None if they do not."""
    if not isinstance(file, StoreFile):
        return ""
    try:
        read_zip(file)
    except CorruptError as e:
        text = str(e).removeprefix(f"{file.where}: ").split(". The zip is damaged")[0]
        return f"is a zip in which readers may see different records: {text}"
    return None


def _in_a_row(file: Bytes, known: set[int], budget: Budget) -> Iterator[Member]:
    """Yield the records behind each other from the start of the file that the directory does not name."""
    at = 0
    while at + HEADER_SIZE <= file.size:
        head = file.at(at, HEADER_SIZE)
        if not head.startswith(ZIP_MAGIC):
            return
        _, _, flags, method, _, _, _, stored, _, n_name, n_extra = _HEADER.unpack(head)
        begin = at + HEADER_SIZE + n_name + n_extra
        if stored == 0xFFFFFFFF or (flags & 8 and not stored) or begin > file.size:
            return  # the size is elsewhere
        if at not in known:
            name = file.at(at + HEADER_SIZE, min(n_name, file.size - at - HEADER_SIZE)).decode("utf-8", "replace")
            yield Member(name, None, "is a record that the directory of its zip does not name")
            yield from _record(file, name, begin, stored, method, budget)
        at = begin + stored


def _record(file: Bytes, name: str, begin: int, stored: int, method: int, budget: Budget) -> Iterator[Member]:
    raw = part(file, begin, stored)
    if method == STORED:
        yield Member(name, raw)
    elif method == DEFLATED:
        yield unpacked(name, raw, lambda: zlib.decompressobj(-15), budget)
    elif method == 12:
        yield unpacked(name, raw, bz2.BZ2Decompressor, budget)
    else:
        yield Member(name, None, f"is compressed by method {method}, which is not unpacked")


_STREAMS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31), b"BZh": bz2.BZ2Decompressor, b"\xfd7zXZ": lzma.LZMADecompressor,
    b"x\x01": zlib.decompressobj, b"x\x9c": zlib.decompressobj, b"x\xda": zlib.decompressobj,
    b"x\x5e": zlib.decompressobj,
    b"]\0\0": lzma.LZMADecompressor,
}  # fmt: skip
_ALSO_PICKLES = (b"BZh", b"]\0\0", b"MSCF")  # their first byte is an opcode
_CLOSED = {
    b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!": "rar", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\0\0sNaP": "snappy", b"MSCF": "cabinet",
}  # fmt: skip


def is_archive(head: bytes) -> bool:
    """Return whether a file begins as an archive or a compressed file whose first bytes are no pickle."""
    return head.startswith((b"PK", *(magic for magic in (*_CLOSED, *_STREAMS) if magic not in _ALSO_PICKLES)))


def stream_of(file: Bytes, head: bytes, budget: Budget) -> Member | None:
    """Return the content of a compressed file; None if the file is not one."""
    for magic, name in _CLOSED.items():
        if head.startswith(magic):
            return Member("", None, f"is compressed ({name}), which is not unpacked")
    for magic, make in _STREAMS.items():
        if head.startswith(magic):
            member = unpacked("", file, make, budget, several=True)
            sure = len(magic) > 2 or magic == b"\x1f\x8b"
            return member if sure or (member.data is not None and member.data.size) else None
    return None


def unpacked(name: str, raw: Bytes, make: Callable[[], Any], budget: Budget, several: bool = False) -> Member:
    """Return what a compressed member contains, as far as the budget goes; ``several`` streams in a row are one."""
    out, unpack, at, why = [], make(), 0, ""
    limit = min(budget.inflated_left, _UNPACKED)
    try:
        while limit > 0:
            if unpack.eof:  # readers append another stream that follows
                at -= len(unpack.unused_data)
                if not several or not raw.at(at, min(8, raw.size - at)).strip(b"\0"):
                    break
                unpack = make()
            if at >= raw.size:
                break
            piece = raw.at(at, min(_CHUNK, raw.size - at))
            at += len(piece)
            while piece and limit > 0 and not unpack.eof:
                made = unpack.decompress(piece, min(limit, 1 << 20))
                limit -= len(made)
                out.append(made)
                piece = getattr(unpack, "unconsumed_tail", b"")
                if not piece and not getattr(unpack, "needs_input", True):
                    piece = b""
                    while limit > 0 and not unpack.eof and not unpack.needs_input:
                        made = unpack.decompress(b"", min(limit, 1 << 20))
                        limit -= len(made)
                        out.append(made)
    except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError):
        why = "is compressed and damaged from some place on"
    if limit <= 0:
        why = "holds more than is unpacked for a file of its size"
    data = b"".join(out)
    budget.inflated(min(len(data), budget.inflated_left))
    return Member(name, Held(data), why)


def is_tar(head: bytes) -> bool:
    """Return whether a file is a tar, by the checksum of its first header."""
    return len(head) >= _BLOCK and _tar_size(head[:_BLOCK]) is not None


def _tar_size(block: bytes) -> int | None:
    """Return the size of the member that a header of a tar describes, None if it is no header."""
    try:
        return max(0, tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size)
    except (tarfile.TarError, ValueError):
        return None


def tar_members(file: Bytes) -> Iterator[Member]:
    """Yield the members of a tar, such as torch 0.1 wrote."""
    at, count = 0, 0
    while at + _BLOCK <= file.size and count < 1 << 16:
        block = file.at(at, _BLOCK)
        size = _tar_size(block)
        if size is None:
            if block.strip(b"\0"):  # a reader that knows another size continues here
                why = "has bytes that no header of its tar describes"
                yield Member("", part(file, at, file.size - at), why)
            return
        name = block[:100].split(b"\0")[0].decode("utf-8", "replace")
        if block[156:157] in (b"1", b"2"):
            target = block[157:257].split(b"\0")[0].decode("utf-8", "replace")
            outside = target.startswith("/") or ".." in target.split("/")
            yield Member(name, None, f"is a link to {target}, outside of the folder" if outside else "")
        elif size:
            yield Member(name, part(file, at + _BLOCK, size))
        at += _BLOCK + -(-size // _BLOCK) * _BLOCK
        count += 1
