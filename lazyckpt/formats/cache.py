"""Indexes that this process made before, for files that have not changed since."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Mapping
from typing import Any

from ..core.index import Index
from ..io.store import Entry
from .reader import Source, read_index

_KEPT = 8  # checkpoints; an index is small beside what it describes, but not nothing
_lock = threading.Lock()
_indexes: dict[tuple[Any, ...], tuple[Mapping[str, Mapping[str, Entry]], Index]] = {}


def cached_index(source: Source, format: str | None) -> Index:
    """`read_index`, or what it gave before if no file or folder that it looked at has changed (names, sizes,
    modification times). With ``rules`` it is always read anew."""
    if source.rules:
        return read_index(source, format)
    key = (source.store.root, source.path, source.tag, format)
    with _lock:
        known = _indexes.get(key)
    if known is not None:
        listings, index = known
        if all(source.store.list(folder) == seen for folder, seen in listings.items()):
            return index
    listed = source.store.list()  # before reading: what changes meanwhile must not pass for known
    index = read_index(source, format)
    folders = {posixpath.dirname(path) for path in index.pins} | {""}
    with _lock:
        _indexes.pop(key, None)
        _indexes[key] = ({f: source.store.list(f) if f else listed for f in folders}, index)
        while len(_indexes) > _KEPT:
            del _indexes[next(iter(_indexes))]
    return index
