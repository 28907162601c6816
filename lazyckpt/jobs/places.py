"""Places that hold the files of an export: local folders here, prefixes of object stores in `io.storage.uploads`.

A place writes files atomically and pickles to its path or URL, so that workers can write to it directly.
"""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

from ..errors import DestinationError
from ..formats.zarr.documents import JOB
from ..io.directories import rename_directory
from ..io.system import forget, preallocate, read_at, refuses
from .guard import Owner, entered, ignores_case, opened

# -- CRC-32, hardware-accelerated where possible, and its combination from the CRC-32s of pieces.

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # a platform without a wheel of zlib-ng
    from zlib import crc32

__all__ = ["combined", "crc32"]

_POLYNOMIAL = 0xEDB88320  # the polynomial of zip and zlib, lowest bit first

# A linear map of 32 bits: the image of each bit.
Matrix = tuple[int, ...]


def combined(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive pieces from their (CRC-32, number of bytes).

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
    """Return the linear map of a CRC that corresponds to appending 2**n zero bits."""
    if n == 0:
        return (_POLYNOMIAL, *(1 << k for k in range(31)))
    half = _zeros(n - 1)
    return tuple(_apply(half, row) for row in half)


# -- Places.

PART = ".part"  # suffix of a file that is being written
LEDGER = ".lazyckpt-ledger"  # file that lists finished work, see `ledger`
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
PIECE = 4 << 20  # bytes; a buffer of this size stays in the processor's cache between read and write


@dataclass(frozen=True, slots=True)
class Sized:
    """Pieces of a file's content, and the maximum of their size together in bytes (``most``)."""

    pieces: Iterable[bytes | memoryview]
    most: int

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self.pieces)


class Place(Protocol):
    """A place that files are written to, safe to use from several threads and processes."""

    @property
    def buffers(self) -> bool:
        """Whether a file is kept in memory until it is complete."""

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        """Write a file atomically, in pieces, and return its size in bytes. Raises OSError."""

    def get(self, key: str, offset: int, length: int) -> bytes:
        """Read bytes of an existing file; fewer than ``length`` at its end."""

    def forget(self, key: str) -> int:
        """Drop a file from caches, so that the next read returns the stored bytes; return its size in bytes."""


@dataclass(frozen=True, slots=True)
class Folder:
    """An existing folder of the local file system, in which subfolders are created on demand.

    ``owner`` is the required owner of ``root`` (see `guard`). Keys are relative to the folder ``inside`` below the
    root. If ``listed`` is true, `put` appends a line for each file to the ledger in the root.
    """

    root: str
    owner: Owner | None = None
    inside: str = ""
    listed: bool = False

    buffers = False

    def __str__(self) -> str:
        return os.path.join(self.root, self.inside) if self.inside else self.root

    def below(self, folder: str) -> Folder:
        """Return a subfolder of this folder."""
        return replace(self, inside=f"{self.inside}/{folder}" if self.inside else folder)

    def open(self, key: str, flags: int) -> int:
        """Open a file and return its descriptor; O_CREAT also creates its folders. Links are not followed."""
        with opened(self.root, self.owner) as root:
            try:  # nobody else can replace a folder below the root with a link
                return root.open(f"{self.inside}/{key}" if self.inside else key, flags)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
        *folders, name = key.split("/")
        with entered(self.root, self.owner, self._parts(folders), make=True) as at:
            return at.open(name, flags)

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        *folders, name = key.split("/")
        part = f"{name}.{uuid4().hex[:8]}{PART}"
        size = checksum = 0
        most = content.most if isinstance(content, Sized) else 0
        with entered(self.root, self.owner, self._parts(folders), make=True) as at:
            try:
                fd = at.open(part, _NEW)
                try:
                    preallocate(fd, most)
                    for piece in content:
                        _write(fd, piece)
                        size += len(piece)
                        if self.listed:
                            checksum = crc32(piece, checksum)
                    if size < most:
                        os.ftruncate(fd, size)
                finally:
                    os.close(fd)
                if self.listed:
                    self._list(key, size, checksum)  # before the rename, so that every renamed file has a checksum
                at.replace(part, name)
            except BaseException:
                with suppress(OSError):
                    at.unlink(part)
                raise
        return size

    def get(self, key: str, offset: int, length: int) -> bytes:
        fd = self.open(key, os.O_RDONLY)
        try:
            data = bytearray()
            while len(data) < length and (more := read_at(fd, min(length - len(data), PIECE), offset + len(data))):
                data += more
            return bytes(data)
        finally:
            os.close(fd)

    def forget(self, key: str) -> int:
        fd = self.open(key, os.O_RDONLY)
        try:
            forget(fd)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def size(self, key: str) -> int | None:
        """Return the size of a regular file in bytes; None if there is none of that name."""
        *folders, name = key.split("/")
        try:
            with entered(self.root, self.owner, self._parts(folders)) as at:
                info = at.stat(name)
        except FileNotFoundError:
            return None
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def remove(self, key: str) -> None:
        """Remove a file if it exists."""
        *folders, name = key.split("/")
        with suppress(FileNotFoundError), entered(self.root, self.owner, self._parts(folders)) as at:
            at.unlink(name)

    def make(self) -> None:
        """Create the folder itself below its root."""
        with entered(self.root, self.owner, self._parts(()), make=True):
            pass

    def move(self, key: str, to: Path) -> None:
        """Move a file to a path on the same file system, replacing an existing file."""
        *folders, name = key.split("/")
        with entered(self.root, self.owner, self._parts(folders)) as at:
            at.move(name, to)

    def take(self, other: Folder, key: str) -> None:
        """Move a file of another folder on the same file system to the same key of this one."""
        *folders, _ = key.split("/")
        with entered(self.root, self.owner, self._parts(folders), make=True) as at:
            other.move(key, Path(at.path, key.rpartition("/")[2]))

    def become(self, to: Path) -> None:
        """Rename the folder itself."""
        if not self.inside:
            rename_directory(self.root, to)
            return
        *folders, name = self._parts(())
        with entered(self.root, self.owner, folders) as at:
            at.become(name, to)

    def find(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by key; -1 for everything else, such as links."""
        with entered(self.root, self.owner, self._parts(())) as top:
            return {key: info.st_size if stat.S_ISREG(info.st_mode) else -1 for key, info in top.files()}

    def check_distinct(self, keys: Iterable[str]) -> None:
        """Raise DestinationError for two keys that are the same file here, and for a key with a name that this system
        reserves. A file system that ignores case or Unicode normalization would keep only the last file."""
        known: dict[str, str] = {}
        for key in keys:
            if any(map(refuses, key.split("/"))):
                raise DestinationError(
                    f"{key!r:.200}: this system cannot have a file of that name. Write to a single file, or rename "
                    "tensors (view.rename)"
                )
            first = known.setdefault(unicodedata.normalize("NFC", key).casefold(), key)
            if first != key and ignores_case(self.root, JOB):
                raise DestinationError(
                    f"{first!r:.200} and {key!r:.200} would be the same file: {self.root} is on a file system that "
                    "ignores case. Write to another one, or rename tensors (view.rename)"
                )

    def tidy(self, keep: Callable[[str], bool]) -> None:
        """Remove all files except those for whose keys ``keep`` returns true."""
        for key in self.find():
            if not keep(key):
                self.remove(key)

    def _parts(self, folders: Iterable[str]) -> list[str]:
        return [*filter(None, self.inside.split("/")), *folders]

    def _list(self, key: str, size: int, checksum: int) -> None:
        fd = replace(self, inside="").open(LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        line = json.dumps(["whole", key, size, checksum])
        try:
            os.write(fd, f"{line}\n".encode("utf-8", "surrogatepass"))  # one call, so that lines do not mix
        finally:
            os.close(fd)


class Target(NamedTuple):
    """A file in a folder."""

    folder: Folder
    key: str

    def __fspath__(self) -> str:
        return os.path.join(str(self.folder), self.key)

    def __str__(self) -> str:
        return os.fspath(self)

    def descriptor(self, flags: int) -> int:
        """Open the file and return its descriptor; O_CREAT creates the file and its folders."""
        return self.folder.open(self.key, flags)

    @property
    def size(self) -> int | None:
        """The file's size in bytes; None if it does not exist."""
        return self.folder.size(self.key)


def _write(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
