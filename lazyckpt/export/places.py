"""Where named pieces of an export land: a local folder, or a prefix of an object store. Each is there whole or not.

A place pickles to its path or URL, so that workers write to it by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from ..errors import DestinationError
from ..io.remote import asking
from .stream import PIECE, forget

PART = ".part"  # ends the name of a file that is being written


class Place(Protocol):
    """All methods may be called from several threads and processes."""

    @property
    def buffers(self) -> bool:
        """Whether a file is held in memory until it is complete."""

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> None:
        """Write a file, in pieces; it appears when it is complete. Raises OSError."""

    def get(self, key: str, offset: int, length: int) -> bytes:
        """Bytes of a file that is there, fewer at its end."""

    def forget(self, key: str) -> int:
        """The size of a file, which is to be read from where it is kept, not from a cache."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the local file system. It has to be there: what is below it is made."""

    root: str

    buffers = False

    def __str__(self) -> str:
        return self.root

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> None:
        path = os.path.join(self.root, key)
        part = f"{path}.{uuid4().hex[:8]}{PART}"
        try:
            fd = self._new(part)
            try:
                for piece in content:
                    _write(fd, piece)
            finally:
                os.close(fd)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def get(self, key: str, offset: int, length: int) -> bytes:
        fd = os.open(os.path.join(self.root, key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = bytearray()
            while len(data) < length and (more := os.pread(fd, min(length - len(data), PIECE), offset + len(data))):
                data += more
            return bytes(data)
        finally:
            os.close(fd)

    def forget(self, key: str) -> int:
        fd = os.open(os.path.join(self.root, key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            forget(fd)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            return os.open(path, flags, 0o666)
        self._make(os.path.dirname(path))
        return os.open(path, flags, 0o666)

    def _make(self, folder: str) -> None:
        """A folder below the root, and those above it as far as they are missing. Not the root: a straggler must not
        make it again."""
        if len(folder) <= len(self.root):
            return
        try:
            os.mkdir(folder)
        except FileNotFoundError:
            self._make(os.path.dirname(folder))
            with suppress(FileExistsError):
                os.mkdir(folder)
        except FileExistsError:
            pass


@dataclass(frozen=True, slots=True)
class Bucket:
    """A prefix of what fsspec reaches by a URL. Object stores show a file when it is complete, so it is held in memory
    until it is."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    buffers = True

    def __str__(self) -> str:
        return self.url

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> None:
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
