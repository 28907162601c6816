"""A file of a store as a stream, for libraries that read files."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np

from ...core.requests import Ints
from ...errors import CorruptError
from ..pool import each
from .base import Buffer, Store

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class StoreFile(io.RawIOBase):
    """A file of a store as a seekable stream, for libraries such as zipfile.

    The first read within the last ``tail`` bytes, where a zip has its directory, fetches all of them; the same applies
    to the first ``head`` bytes. With ``window`` (start, length), the stream covers only this part of the file.
    """

    def __init__(
        self, store: Store, path: str, tail: int = 1 << 13, head: int = 0, window: tuple[int, int] | None = None
    ) -> None:
        self.store, self.path = store, path
        # a file read by windows was checked before, and there may be thousands of windows
        ahead = store.ahead if isinstance(store, Store) else None
        self.info = (store.pins.get(path) if window or ahead else None) or store.stat(path)
        self.start, self.size = window or (0, self.info.size)
        self._at = 0
        self._tail: Buffer | None = None
        self._head: Buffer | None = None
        if ahead is not None:  # it keeps what is read, so nothing but what it holds is kept here
            if not window:
                self._head, self._tail = ahead.ends(path, self.size)
            head, tail = len(self._head or b""), len(self._tail or b"")
        self._tail_at = max(0, self.size - tail)
        self._head_size = min(head, self._tail_at)

    @property
    def where(self) -> str:
        """The file, and the window's offset if it is not the whole file, for messages."""
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

    def refuse_pointer(self, head: bytes) -> None:
        """Raise CorruptError if the file begins as a pointer of Git LFS: a clone without `git lfs` has pointers."""
        if head.startswith(LFS_POINTER):
            raise CorruptError(f"{self.where} is a pointer of Git LFS, not the file itself: run git lfs pull")

    def at(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes from ``offset`` on, without moving the stream. Raises CorruptError past the end."""
        if offset < 0 or offset + size > self.size:
            raise CorruptError(
                f"{self.where}: bytes {offset:,} to {offset + size:,} are needed, it has {self.size:,}: truncated?"
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

    def keep(self, head: bytes) -> None:
        """Cache ``head``, bytes that were read from offset 0 on, so that they are not read again."""
        if len(head) > self._head_size:
            self._head, self._head_size = head, len(head)

    def ends_of(self, starts: Ints, width: int) -> Ints:
        """Return for each range of ``width`` bytes 1 if the cached head has it, 2 if the tail has it, else 0."""
        return np.where(starts >= self._tail_at, 2, np.where(starts + width <= self._head_size, 1, 0))

    def read_pieces(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on. Bytes of the cached head and tail need no further request."""
        far = []
        for offset, target in pieces:
            if offset + len(target) <= self._head_size or offset >= self._tail_at:
                target[:] = self.at(offset, len(target))
            else:
                far.append((self.start + offset, target))
        if isinstance(self.store, Store):
            self.store.read_pieces(self.path, far)
        else:  # a store that wraps another one
            each(lambda piece: self.store.read_into(self.path, *piece), far)
