"""A file behind a network, read in blocks: a scan looks at few bytes in many places that are near to each other."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.index import FileInfo
from ...io.storage.base import Buffer, Store

_BLOCK = 64 << 10  # bytes; a request for them takes little longer than one for a few bytes
_KEPT = 64  # blocks that are kept, those that were read last


class Blocks:
    """The part of a `Store` that `StoreFile` uses, for one file, which is pinned.

    Parameters
    ----------
    store
        The store of the file.
    path
        The file.

    Raises
    ------
    MissingFileError
        There is no such file.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._info = store.stat(path)
        self._store = store.pinned({path: self._info})
        self._blocks: dict[int, memoryview] = {}

    @property
    def root(self) -> str:
        return self._store.root

    @property
    def pins(self) -> Mapping[str, FileInfo]:
        return self._store.pins

    @property
    def gap(self) -> int:
        return self._store.gap

    def stat(self, path: str) -> FileInfo:
        """Return the state of the file when it was pinned."""
        return self._info

    def read(self, path: str, offset: int, length: int) -> Buffer:
        """Read bytes; those of blocks that are kept without a request."""
        if not length:
            return b""
        first, last = offset // _BLOCK, (offset + length - 1) // _BLOCK
        if last - first >= _KEPT:
            return self._store.read(path, offset, length)
        missing = [n for n in range(first, last + 1) if n not in self._blocks]
        if missing:
            self._fetch(path, missing[0], missing[-1])
        found = b"".join(self._blocks[n] for n in range(first, last + 1))
        for n in range(first, last + 1):
            self._blocks[n] = self._blocks.pop(n)
        for old in list(self._blocks)[:-_KEPT]:
            del self._blocks[old]
        return found[offset - first * _BLOCK :][:length]

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill a target."""
        target[:] = memoryview(self.read(path, offset, len(target)))

    def _fetch(self, path: str, first: int, last: int) -> None:
        start, stop = first * _BLOCK, min((last + 1) * _BLOCK, self._info.size)
        data = memoryview(self._store.read(path, start, stop - start))
        for n in range(first, last + 1):
            self._blocks[n] = data[(n - first) * _BLOCK :][:_BLOCK]
