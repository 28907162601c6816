"""Where named pieces of an export land: a local folder, or a prefix of an object store. Each is there whole or not.

A place pickles to its path or URL, so that workers write to it by themselves.
"""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from ..errors import DestinationError
from ..formats.zarr.documents import JOB
from ..io.storage.fsspec import asking
from .guard import Owner, entered, ignores_case, opened

# -- CRC-32: by the processor's own instructions, and of a whole from the CRC-32s of its pieces.

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


# -- Where named pieces of an export land: a local folder, or a prefix of an object store. Each is there whole
# or not.

PART = ".part"  # ends the name of a file that is being written
LEDGER = ".lazyckpt-ledger"  # lists what is finished, see `ledger`
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PIECE = 4 << 20  # bytes; a buffer of this size stays in the processor's cache between read and write


class Place(Protocol):
    """All methods may be called from several threads and processes."""

    @property
    def buffers(self) -> bool:
        """Whether a file is held in memory until it is complete."""

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        """Write a file, in pieces, and return its size; it appears when it is complete. Raises OSError."""

    def get(self, key: str, offset: int, length: int) -> bytes:
        """Bytes of a file that is there, fewer at its end."""

    def forget(self, key: str) -> int:
        """The size of a file, which is to be read from where it is kept, not from a cache."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the local file system. It has to be there: what is below it is made.

    ``owner``: who has to own ``root``, see `guard`. ``inside``: the folder below the root that keys are relative to.
    ``listed``: whether the ledger in the root gets a line for each file that `put` writes.
    """

    root: str
    owner: Owner | None = None
    inside: str = ""
    listed: bool = False

    buffers = False

    def __str__(self) -> str:
        return os.path.join(self.root, self.inside) if self.inside else self.root

    def below(self, folder: str) -> Folder:
        """A folder of this one."""
        return replace(self, inside=f"{self.inside}/{folder}" if self.inside else folder)

    def open(self, key: str, flags: int) -> int:
        """The descriptor of a file; the folders that it is in are made if it is. Links are not followed."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        root = opened(self.root, self.owner)
        try:  # nobody else can have made a folder below the root a link
            return os.open(f"{self.inside}/{key}" if self.inside else key, flags, 0o666, dir_fd=root)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        finally:
            os.close(root)
        *folders, name = key.split("/")
        with entered(self.root, self.owner, self._parts(folders), make=True) as at:
            return os.open(name, flags, 0o666, dir_fd=at)

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        *folders, name = key.split("/")
        part = f"{name}.{uuid4().hex[:8]}{PART}"
        size = checksum = 0
        with entered(self.root, self.owner, self._parts(folders), make=True) as at:
            try:
                fd = os.open(part, _NEW, 0o666, dir_fd=at)
                try:
                    for piece in content:
                        _write(fd, piece)
                        size += len(piece)
                        if self.listed:
                            checksum = crc32(piece, checksum)
                finally:
                    os.close(fd)
                if self.listed:
                    self._list(key, size, checksum)  # first: what has its name has its checksum
                os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=at)
                raise
        return size

    def get(self, key: str, offset: int, length: int) -> bytes:
        fd = self.open(key, os.O_RDONLY)
        try:
            data = bytearray()
            while len(data) < length and (more := os.pread(fd, min(length - len(data), PIECE), offset + len(data))):
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
        """The bytes of a file; None if there is none of that name."""
        *folders, name = key.split("/")
        try:
            with entered(self.root, self.owner, self._parts(folders)) as at:
                info = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def remove(self, key: str) -> None:
        """Remove a file, if it is there."""
        *folders, name = key.split("/")
        with suppress(FileNotFoundError), entered(self.root, self.owner, self._parts(folders)) as at:
            os.unlink(name, dir_fd=at)

    def make(self) -> None:
        """Make the folder itself, below its root."""
        with entered(self.root, self.owner, self._parts(()), make=True):
            pass

    def move(self, key: str, to: Path) -> None:
        """Give a file another name, in any folder of the same file system; one that has it is replaced."""
        *folders, name = key.split("/")
        with entered(self.root, self.owner, self._parts(folders)) as at:
            os.replace(name, to, src_dir_fd=at)

    def become(self, to: Path) -> None:
        """Give the folder itself another name."""
        if not self.inside:
            os.rename(self.root, to)
            return
        *folders, name = self._parts(())
        with entered(self.root, self.owner, folders) as at:
            os.rename(name, to, src_dir_fd=at)

    def find(self) -> dict[str, int]:
        """The keys of all files in it, and their bytes; -1 for what is no regular file."""
        found: dict[str, int] = {}
        with entered(self.root, self.owner, self._parts(())) as top:
            for where, _, files, at in os.fwalk(".", dir_fd=top):
                for name in files:
                    info = os.stat(name, dir_fd=at, follow_symlinks=False)
                    size = info.st_size if stat.S_ISREG(info.st_mode) else -1
                    found[os.path.normpath(os.path.join(where, name))] = size
        return found

    def check_distinct(self, keys: Iterable[str]) -> None:
        """Raise DestinationError for two keys that are one file here: file systems that do not tell upper from lower
        case, or composed from decomposed characters, would keep the last of them."""
        known: dict[str, str] = {}
        for key in keys:
            first = known.setdefault(unicodedata.normalize("NFC", key).casefold(), key)
            if first != key and ignores_case(self.root, JOB):
                raise DestinationError(
                    f"{first!r:.200} and {key!r:.200} would be the same file: {self.root} is on a file system that "
                    "does not tell upper from lower case. Write to another one, or rename tensors (view.rename)"
                )

    def tidy(self, keep: Callable[[str], bool]) -> None:
        """Remove all files but those whose keys are to be kept."""
        for key in self.find():
            if not keep(key):
                self.remove(key)

    def _parts(self, folders: Iterable[str]) -> list[str]:
        return [*filter(None, self.inside.split("/")), *folders]

    def _list(self, key: str, size: int, checksum: int) -> None:
        fd = replace(self, inside="").open(LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        line = json.dumps(["whole", key, size, checksum])
        try:
            os.write(fd, f"{line}\n".encode("utf-8", "surrogatepass"))  # in one call: not mixed with others' lines
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
        """The file, opened; it is made with O_CREAT, and so are the folders that it is in."""
        return self.folder.open(self.key, flags)

    @property
    def size(self) -> int | None:
        """Its bytes; None if it is not there."""
        return self.folder.size(self.key)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A prefix of what fsspec reaches by a URL. Object stores show a file when it is complete, so it is held in memory
    until it is."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    buffers = True

    def __str__(self) -> str:
        return self.url

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        whole = bytearray()
        for piece in content:  # good until the next is asked for
            whole += piece
        data = bytes(whole)
        del whole
        with self._fs() as (fs, base):
            path = f"{base}/{key}"
            try:
                fs.pipe_file(path, data)
            except FileNotFoundError:  # one that has folders
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                fs.pipe_file(path, data)
        return len(data)

    def get(self, key: str, offset: int, length: int) -> bytes:
        with self._fs() as (fs, base):
            data: bytes = fs.cat_file(f"{base}/{key}", start=offset, end=offset + length) if length else b""
        return data

    def forget(self, key: str) -> int:
        with self._fs() as (fs, base):
            fs.invalidate_cache(f"{base}/{key}")
            return int(fs.info(f"{base}/{key}")["size"])

    def remove(self, key: str) -> None:
        with self._fs() as (fs, base):
            fs.rm_file(f"{base}/{key}")

    def remove_all(self) -> None:
        with self._fs() as (fs, base):
            fs.rm(base, recursive=True)

    def find(self) -> dict[str, int]:
        """The keys of all that is there, and its bytes."""
        with self._fs() as (fs, base):
            fs.invalidate_cache(base)
            try:
                found = fs.find(base, detail=True)
            except FileNotFoundError:
                return {}
        return {str(path).removeprefix(base).lstrip("/"): int(info["size"] or 0) for path, info in found.items()}

    @contextmanager
    def _fs(self) -> Iterator[tuple[Any, str]]:
        """The file system, and the prefix there. What it raises becomes an OSError, see `asking`."""
        import fsspec  # which keeps its file systems

        try:
            fs, base = fsspec.core.url_to_fs(self.url, **self.options)
        except (ImportError, ValueError) as e:  # the protocol's package is not installed, or there is no such protocol
            raise DestinationError(f"{self.url}: {e}") from None
        with asking(self.url):
            yield fs, str(base).rstrip("/")


def _write(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def forget(fd: int) -> None:
    """Bring a file to the disk and out of the system's cache, so that what is read next comes from the disk."""
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
