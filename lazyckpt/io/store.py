"""A store: the folder (or bucket prefix) that a checkpoint lies in, as names, sizes and byte ranges.

Names are relative to the store's root, with "/" between folders. A store does no caching of data and knows no format.
It pickles to its root and options alone, so that a tensor can travel to another process.
"""

from __future__ import annotations

import errno
import io
import mmap
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple, Protocol

import torch

from ..core.box import Shape
from ..core.index import FileInfo
from ..errors import CorruptError, DataError, MissingFileError

Buffer = bytes | memoryview | mmap.mmap


class Entry(NamedTuple):
    """What `Store.list` tells of a name."""

    info: FileInfo
    is_dir: bool


class Mapped:
    """A mapped file, and the arrays over it that were asked for."""

    __slots__ = ("_arrays", "buffer")

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self._arrays: dict[tuple[int, torch.dtype, Shape], torch.Tensor] = {}

    def array(self, offset: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
        """The bytes from ``offset`` on (a multiple of the item size) as a C-order array that is not empty."""
        key = (offset, dtype, shape)
        array = self._arrays.get(key)
        if array is None:
            flat = torch.frombuffer(self.buffer, dtype=dtype, count=prod(shape), offset=offset)
            array = self._arrays[key] = flat.view(shape)
        return array


class Store(Protocol):
    """Where bytes come from. All methods may be called from several threads.

    ``pins`` are the files as they were when they were indexed. Reading or mapping a pinned file that is not the same
    any more (size or modification time) raises ChangedFileError; a file that is gone, MissingFileError.
    """

    pins: Mapping[str, FileInfo]

    @property
    def root(self) -> str:
        """What a user would pass to `lazyckpt.open` for this folder."""

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        """The same store with other pins."""

    def below(self, folder: str) -> Store:
        """A store of its own for a folder of this one."""

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        """The names directly inside a folder; {} if there is no such folder."""

    def stat(self, path: str) -> FileInfo:
        """Size and modification time now. Raises MissingFileError; its ``errno`` is ENOENT or ENOTDIR if there is no
        such file, something else (or None) if it cannot be told."""

    def read(self, path: str, offset: int, length: int) -> Buffer:
        """Exactly ``length`` bytes from ``offset`` on. Raises CorruptError past the end of the file."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; errors as `read`."""

    def map(self, path: str) -> Mapped | None:
        """The whole file as memory whose pages are read when touched; None if this store cannot, or the file is empty.
        For reading only, and not to be kept: the store keeps it as long as it has room."""

    def private(self, path: str) -> Buffer | None:
        """A mapping of the caller's own, which may be written to (the file never is); None as for `map`."""

    def resident(self, view: torch.Tensor) -> bool:
        """Whether a contiguous view into a mapped file is likely in memory already: touching it costs no I/O."""

    @property
    def gap(self) -> int:
        """Unwanted bytes between two wanted runs that are worth reading to save a request."""

    def close(self) -> None:
        """Let go of files and connections of its own; reading raises DataError from then on. Closing twice is fine, and
        other stores of the same folder stay as they are."""


class CannotMap:
    """What a store says whose files are not memory: everything is read."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def map(self, path: str) -> None:
        return None

    def private(self, path: str) -> None:
        return None

    def resident(self, view: torch.Tensor) -> bool:
        return False


def closed_error(root: str) -> DataError:
    """What reading from a closed store raises."""
    return DataError(f"{root} is closed: its view was closed, or its with-statement has ended. Open it again to read.")


def present(store: Store, path: str) -> FileInfo | None:
    """Size and modification time now; None if there is no such file. Raises MissingFileError if that cannot be told."""
    try:
        return store.stat(path)
    except MissingFileError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def narrow(store: Store, paths: Iterable[str]) -> Store:
    """The store with the pins of these files only: what has to travel with one tensor."""
    return store.pinned({p: store.pins[p] for p in paths if p in store.pins})


class StoreFile(io.RawIOBase):
    """A file of a store as a seekable stream, for libraries that want one (zipfile).

    The last ``tail`` bytes are fetched with the first read that touches them: a zip's directory is there; and so are
    the first ``head`` bytes. ``window`` (start, length): the stream is this part of the file only.
    """

    def __init__(
        self, store: Store, path: str, tail: int = 1 << 13, head: int = 0, window: tuple[int, int] | None = None
    ) -> None:
        self.store, self.path = store, path
        # of a window the file was looked at before, and there may be thousands of them
        self.info = (store.pins.get(path) if window else None) or store.stat(path)
        self.start, self.size = window or (0, self.info.size)
        self._at = 0
        self._tail_at = max(0, self.size - tail)
        self._tail: Buffer | None = None
        self._head_size = min(head, self._tail_at)
        self._head: Buffer | None = None

    @property
    def where(self) -> str:
        """What it is, for messages."""
        whole = f"{self.store.root}/{self.path}"
        return whole if (self.start, self.size) == (0, self.info.size) else f"{whole} (at byte {self.start:,})"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self.at(self._at, size)
        self._at += size
        return data

    def at(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, without moving the stream. Raises CorruptError past the end."""
        if offset < 0 or offset + size > self.size:
            raise CorruptError(
                f"{self.where}: bytes {offset:,} to {offset + size:,} are wanted, it has {self.size:,}: truncated?"
            )
        if size == 0:
            return b""
        if offset + size <= self._head_size:
            if self._head is None:
                self._head = self.store.read(self.path, self.start, self._head_size)
            return bytes(memoryview(self._head)[offset : offset + size])
        if offset < self._tail_at:
            return bytes(self.store.read(self.path, self.start + offset, size))
        if self._tail is None:
            self._tail = self.store.read(self.path, self.start + self._tail_at, self.size - self._tail_at)
        start = offset - self._tail_at
        return bytes(memoryview(self._tail)[start : start + size])
