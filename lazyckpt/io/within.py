"""A folder inside a store, as a store of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..core.index import FileInfo
from .store import Buffer, Entry, Mapped, Store


class Within:
    """``folder`` of ``store``: names are relative to it."""

    pins: Mapping[str, FileInfo]

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        start = f"{folder}/"
        self.pins = {name[len(start) :]: info for name, info in store.pins.items() if name.startswith(start)}

    @property
    def root(self) -> str:
        return f"{self._store.root}/{self._folder}"

    @property
    def gap(self) -> int:
        return self._store.gap

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        return Within(self._store.pinned({self._full(name): info for name, info in pins.items()}), self._folder)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return self._store.list(self._full(folder) if folder else self._folder)

    def stat(self, path: str) -> FileInfo:
        return self._store.stat(self._full(path))

    def read(self, path: str, offset: int, length: int) -> Buffer:
        return self._store.read(self._full(path), offset, length)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._store.read_into(self._full(path), offset, target)

    def map(self, path: str) -> Mapped | None:
        return self._store.map(self._full(path))

    def private(self, path: str) -> Buffer | None:
        return self._store.private(self._full(path))

    def resident(self, view: torch.Tensor) -> bool:
        return self._store.resident(view)

    def _full(self, path: str) -> str:
        return f"{self._folder}/{path}"
