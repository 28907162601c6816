"""What readers announce before they read it: a store behind a network then requests it concurrently, ahead of them.

For other stores these functions do nothing. They skip wrappers of stores, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ...io.containers.needs import SAFETENSORS, TORCH, WHOLE
from ...io.storage.announced import Layout
from ...io.storage.base import Entry, Store

__all__ = ["announce", "announce_folders", "announce_ranges", "listing", "looking_ahead"]

_DOCUMENTS = (".json", ".metadata", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


def announce(store: Store, paths: Iterable[str], layout: Layout | None = None) -> None:
    """Announce that files are opened next, in about this order. Without ``layout``, their names tell their format."""
    if not isinstance(store, Store) or store.ahead is None:
        return
    groups: dict[int, tuple[Layout, list[str]]] = {}
    for path in paths:
        kind = layout or _layout(path)
        groups.setdefault(id(kind), (kind, []))[1].append(path)
    for kind, named in groups.values():
        store.ahead.expect(named, kind)


def announce_ranges(store: Store, ranges: Iterable[tuple[str, int, int]]) -> None:
    """Announce reads of (path, offset, length)."""
    if isinstance(store, Store) and store.ahead is not None:
        store.ahead.want(ranges)


def announce_folders(store: Store, folders: Iterable[str]) -> None:
    """List folders concurrently whose entries `listing` returns next."""
    if isinstance(store, Store) and store.ahead is not None:
        store.ahead.list_all(folders)


@contextmanager
def looking_ahead(store: Store) -> Iterator[Store]:
    """Yield a store like this one that keeps what is read within the context, and requests ahead what is announced.
    (Opening does so by itself.)"""
    if not isinstance(store, Store) or not store.is_remote or store.ahead is not None:
        yield store
        return
    own = store.pinned(store.pins) if store.pins else store  # other threads go on reading a view's store as before
    own.look_ahead()
    try:
        yield own
    finally:
        own.stop_ahead()


def listing(store: Store, folder: str = "") -> Mapping[str, Entry]:
    """Return the entries of a folder. During an opening behind a network, each folder is listed once."""
    if not isinstance(store, Store):
        return store.list(folder)
    ahead = store.ahead
    found = store.list(folder) if ahead is None else ahead.listed(folder)
    store.expect(folder, found)
    return found


def _layout(path: str) -> Layout:
    if path.endswith(".safetensors"):
        return SAFETENSORS
    return WHOLE if path.endswith(_DOCUMENTS) else TORCH
