"""Indexes that this process made before, for files that have not changed since."""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Mapping
from typing import Any

from ..core.index import Index
from ..io.store import Entry, Store, present
from .reader import Source
from .registry import read_index

_KEPT = 8  # checkpoints; an index is small beside what it describes, but not nothing
_lock = threading.Lock()
Listings = Mapping[str, Mapping[str, Entry]]
_indexes: dict[tuple[Any, ...], tuple[Listings, Index]] = {}


def cached_index(source: Source, format: str | None) -> Index:
    """`read_index`, or what it gave before if no file or folder that it looked at has changed (names, sizes,
    modification times, versions). With ``rules`` it is always read anew."""
    if source.rules:
        return read_index(source, format)
    key = (source.store.key, source.path, source.tag, format)
    with _lock:
        known = _indexes.get(key)
    if known is not None:
        listings, index = known
        if _unchanged(source.store, listings, index):
            return index
    listable = source.store.listable
    listed = source.store.list() if listable else {}  # before reading: what changes meanwhile must not pass for known
    index = read_index(source, format)
    folders = {posixpath.dirname(path) for path in index.pins} | {""} if listable else set()
    with _lock:
        _indexes.pop(key, None)
        _indexes[key] = ({f: source.store.list(f) if f else listed for f in folders}, index)
        while len(_indexes) > _KEPT:
            del _indexes[next(iter(_indexes))]
    return index


def _unchanged(store: Store, listings: Listings, index: Index) -> bool:
    """Whether the folders hold what they held; over http, which lists none, whether the files are the same, which takes
    that the server tells more of them than their size."""
    if store.listable:
        return all(store.list(folder) == seen for folder, seen in listings.items())
    for path, pin in index.pins.items():
        now = present(store, path)
        if now is None or not (pin.version or pin.mtime_ns) or not now.may_be(pin):
            return False
    return True


def _forget() -> None:
    """A thread of a forked child's parent may hold the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
