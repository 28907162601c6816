"""The stores of several checkpoints as one, for tensors that are computed from all of them.

A path is the number of a store, a slash, and the path in that store. Reads of operands go to their store directly
(`stores_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.index import FileInfo
from ...errors import MissingFileError
from .access import narrow
from .base import Buffer, Entry, Fetched, Store, Stored
from .mapping import Mapped


class Joined(Store):
    """Several stores, by number.

    Parameters
    ----------
    stores
        The stores, with their own pins.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__({f"{n}/{path}": info for n, one in enumerate(stores) for path, info in one.pins.items()})
        self.stores = tuple(stores)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self.stores,)

    def __repr__(self) -> str:
        return f"Joined({', '.join(map(repr, self.stores))})"

    @property
    def root(self) -> str:
        return " + ".join(dict.fromkeys(one.root for one in self.stores))

    @property
    def key(self) -> str:
        return " + ".join(one.key for one in self.stores)

    @property
    def gap(self) -> int:
        return min(one.gap for one in self.stores)

    def _split(self, path: str) -> tuple[Store, str]:
        number, _, rest = path.partition("/")
        if not number.isdecimal() or int(number) >= len(self.stores):
            raise MissingFileError(f"{path}: no such file in {self.root}")
        return self.stores[int(number)], rest

    def below(self, folder: str) -> Store:
        store, rest = self._split(folder)
        return store.below(rest) if rest else store

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        if folder.partition("/")[0].isdecimal():
            store, rest = self._split(folder)
            return store.list(rest)
        if folder:
            return {}
        return {str(n): Entry(FileInfo(0, 0), True) for n in range(len(self.stores))}

    def _with(self, pins: Mapping[str, FileInfo]) -> Store:
        own: list[dict[str, FileInfo]] = [{} for _ in self.stores]
        for path, info in pins.items():
            number, _, rest = path.partition("/")
            own[int(number)][rest] = info
        return Joined([one.pinned(part) for one, part in zip(self.stores, own, strict=True)])

    def only(self, paths: Sequence[set[str]]) -> Joined:
        """Return the stores with the pins of some files only, as `narrow`: a set of paths for each store."""
        return Joined([narrow(one, sorted(part)) for one, part in zip(self.stores, paths, strict=True)])

    def _stat(self, path: str) -> FileInfo:
        store, rest = self._split(path)
        return store.stat(rest)

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        store, rest = self._split(path)
        store.read_into(rest, offset, target)
        return len(target), self.pins.get(path)

    def map(self, path: str) -> Mapped | None:
        store, rest = self._split(path)
        return store.map(rest)

    def private(self, path: str) -> Buffer | None:
        store, rest = self._split(path)
        return store.private(rest)

    def _stored(self, path: str, offset: int, length: int) -> Stored | None:
        store, rest = self._split(path)
        return store.stored(rest, offset, length)

    def outside(self, path: str, offset: int) -> tuple[str, str, int]:
        store, rest = self._split(path)
        return store.outside(rest, offset)

    def close(self) -> None:
        """Close all stores."""
        super().close()
        for one in self.stores:
            one.close()


def stores_of(store: Store) -> Sequence[Store]:
    """Return the stores that the operands of expressions are in, by their numbers."""
    return store.stores if isinstance(store, Joined) else (store,)


def joined(stores: Sequence[Store]) -> tuple[Store, list[int]]:
    """Return one store of several, and the number that each of them has in it. The same store is in it once."""
    flat: list[Store] = []
    numbers = []
    for store in stores:
        first = None
        for one in stores_of(store):
            at = next((n for n, known in enumerate(flat) if known is one), None)
            if at is None or isinstance(store, Joined):
                at = len(flat)
                flat.append(one)
            first = at if first is None else first
        numbers.append(first or 0)
    return (flat[0] if len(flat) == 1 else Joined(flat)), numbers
