"""A file in memory, for code that reads through a store."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.index import FileInfo
from ...errors import CorruptError
from .base import Buffer, Entry, Fetched, Store


class Memory(Store):
    """A store of one in-memory file, called ``name``, for code that reads through a store."""

    gap = 1 << 62  # reading less saves nothing

    def __init__(self, origin: Store, name: str, data: Buffer) -> None:
        super().__init__()
        self._root = origin.root
        self._name, self._data = name, data

    @property
    def root(self) -> str:
        return self._root

    def _with(self, pins: Mapping[str, FileInfo]) -> Memory:
        return self

    def below(self, folder: str) -> Memory:
        return self

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return {self._name: Entry(self.stat(self._name), False)}

    def _stat(self, path: str) -> FileInfo:
        return FileInfo(len(self._data), 0)

    def read(self, path: str, offset: int, length: int) -> memoryview:
        if offset + length > len(self._data):
            raise CorruptError(f"{self.root}/{path}: a read goes past the end of its unpacked bytes: damaged")
        return memoryview(self._data)[offset : offset + length]

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        target[:] = self.read(path, offset, len(target))
        return len(target), self._stat(path)
