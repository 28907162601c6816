"""Functions of stores that also take wrappers of stores, which have the methods for reading but are no `Store`."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.index import FileInfo
from ...errors import ChangedFileError, LazyckptError, MissingFileError
from .base import Guard, Store, Stored, changed
from .listed import ABSENT, Listed


def lost(store: Store, error: MissingFileError) -> LazyckptError:
    """Return the error for elements that an opened checkpoint lacks: if files were replaced while it was opened, they
    are the reason, and it has to be opened again."""
    if not isinstance(store, Store) or not store.was_replaced:
        return error
    return ChangedFileError(f"files of {store.root} were replaced while it was opened: open it again. ({error})")


def present(store: Store, path: str) -> FileInfo | None:
    """Return the current size and modification time of a file, None if there is no such file. Raises MissingFileError
    if its existence is unknown."""
    try:
        return store.stat(path)
    except MissingFileError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def look(store: Store, path: str) -> FileInfo | None:
    """Return the state of a file, None if it is absent. Raises ChangedFileError if the file changed, appeared or
    disappeared since the store first accessed it, and what `Store.stat` raises.

    The state of a pinned file behind a network is its pin: a read compares it."""
    pin = store.pins.get(path)
    if pin is not None and pin != ABSENT and isinstance(store, Store) and store.is_remote:
        return pin
    info = present(store, path)
    now = ABSENT if info is None else info
    if pin is not None and not pin.may_be(now):
        raise changed(store.root, path, pin, now)
    if isinstance(store, Store) and info is None:  # the store inside a wrapper remembers its own files
        store._remember(path, ABSENT)
    return info


def narrow(store: Store, paths: Iterable[str]) -> Store:
    """Return the store with the pins of these files only, and the remembered states of unpinned ones: the part that a
    pickled tensor needs."""
    paths = list(paths)
    seen = store._seen if isinstance(store, Store) else {}
    if isinstance(store.pins, Listed):
        pins = store.pins.only(paths, seen)
    else:
        known = ((path, store.pins.get(path) or seen.get(path)) for path in paths)
        pins = {path: info for path, info in known if info is not None}
    found = store.pinned(pins)
    if isinstance(store, Store):
        found.guards = {path: guard for path, guard in store.guards.items() if path in found.pins}
    return found


def check(store: Store, path: str, offset: int, length: int) -> None:
    """Call `Store.check`; skip wrappers of stores, whose inner store checks."""
    if isinstance(store, Store):
        store.check(path, offset, length)


def outside(store: Store, path: str, offset: int) -> tuple[str, str, int]:
    """Return where other programs find bytes of a file: the root, the path and the offset; those in an archive are
    bytes of the archive."""
    return store.outside(path, offset) if isinstance(store, Store) else (store.root, path, offset)


def stored(store: Store, path: str, offset: int, length: int) -> Stored | None:
    """Call `Store.stored`; None for wrappers of stores."""
    return store.stored(path, offset, length) if isinstance(store, Store) else None


def read_pieces(store: Store, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Call `Store.read_pieces`, or `Store.read_into` for each piece of a wrapper of a store."""
    if isinstance(store, Store):
        store.read_pieces(path, pieces)
        return
    for offset, target in pieces:
        store.read_into(path, offset, target)


def guarded(store: Store, guards: Mapping[str, Guard]) -> Store:
    """Set the guards of a store and return it; used to unpickle a store."""
    store.guards = dict(guards)
    return store


class OneFile:
    """A file of a store. Its pickle has the pin of this file only."""

    __slots__ = ("path", "store")

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path

    def __reduce__(self) -> tuple[Any, ...]:
        return OneFile, (narrow(self.store, [self.path]), self.path)
