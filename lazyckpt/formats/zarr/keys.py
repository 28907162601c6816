"""The existing keys of an array's chunks. If most chunks are absent, their list is short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...io.storage.base import Store


class Keys:
    """The names below the folder of an array, down to the depth of the keys of its chunks. They are listed once, on
    first use, unless a listing told them before."""

    def __init__(self, store: Store, folder: str, prefix: str, separator: str, ndim: int) -> None:
        self._store = store
        self._folder = folder
        self._prefix = prefix
        self._levels = ndim + bool(prefix) if separator == "/" else 1
        self._found: list[str] | None = None
        self._are_kept = False

    def take(self, names: list[str]) -> None:
        """Use names of a listing that was made when the hierarchy was opened; pickles have them, too."""
        self._found, self._are_kept = names, True

    def __iter__(self) -> Iterator[str]:
        if self._found is None:
            self._found = list(self._below("", self._levels))
        return iter(self._found)

    def _below(self, folder: str, levels: int) -> Iterator[str]:
        at = "/".join(filter(None, (self._folder, folder)))
        for name, entry in self._store.list(at).items():
            key = f"{folder}/{name}" if folder else name
            if levels == 1:
                yield key
            elif entry.is_dir and (name.isdecimal() or name == self._prefix):
                yield from self._below(key, levels - 1)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._are_kept else self.__dict__ | {"_found": None}
