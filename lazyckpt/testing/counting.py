"""A store that counts what is read through it. It cannot map files, as a bucket cannot: every byte is a request.

A read through a mapping leaves no trace in a process; behind this store there is none, so what the counts say is all
that was read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

from ..core.index import FileInfo
from ..io.storage.base import Buffer, Entry, Store
from ..io.storage.local import LocalStore, split
from ..view import CheckpointView

__all__ = ["CountingStore", "Counts", "Request", "opened"]


class Request(NamedTuple):
    path: str
    offset: int
    length: int


class Counts:
    """Every read since the last `clear`, of a store and of all stores made from it by `pinned`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.log: list[Request] = []

    def add(self, request: Request) -> None:
        with self._lock:
            self.log.append(request)

    def clear(self) -> None:
        with self._lock:
            self.log.clear()

    @property
    def requests(self) -> int:
        return len(self.log)

    @property
    def bytes(self) -> int:
        return sum(request.length for request in self.log)

    @property
    def paths(self) -> set[str]:
        return {request.path for request in self.log}

    def __repr__(self) -> str:
        return f"<{self.bytes:,} bytes in {self.requests} requests of {len(self.paths)} files: {self.log[:5]}>"


class CountingStore:
    """Passes reads on to ``inner`` and counts them. ``gap``: what the store states as its own."""

    def __init__(self, inner: Store, counts: Counts | None = None, gap: int = 0) -> None:
        self.inner = inner
        self.counts = Counts() if counts is None else counts
        self._gap = gap
        self.pins = inner.pins

    @property
    def root(self) -> str:
        return self.inner.root

    @property
    def gap(self) -> int:
        return self._gap

    def pinned(self, pins: Mapping[str, FileInfo]) -> CountingStore:
        return CountingStore(self.inner.pinned(pins), self.counts, self._gap)

    def below(self, folder: str) -> CountingStore:
        return CountingStore(self.inner.below(folder), self.counts, self._gap)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return self.inner.list(folder)

    def stat(self, path: str) -> FileInfo:
        return self.inner.stat(path)

    def read(self, path: str, offset: int, length: int) -> Buffer:
        self.counts.add(Request(path, offset, length))
        return self.inner.read(path, offset, length)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self.counts.add(Request(path, offset, len(target)))
        self.inner.read_into(path, offset, target)

    def map(self, path: str) -> None:
        return None

    def private(self, path: str) -> None:
        return None

    def resident(self, address: int, nbytes: int) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return CountingStore, (self.inner, None, self._gap)


def opened(path: str | os.PathLike[str], *, gap: int = 0, **options: Any) -> tuple[CheckpointView, Counts]:
    """A view like ``lazyckpt.open(path, **options)`` over a counting store, and its counts: what opening has read.

    The counts are those of the view and of all tensors and views that come from it.
    """
    counts = Counts()

    def counted(where: str | os.PathLike[str]) -> tuple[CountingStore, str]:
        store: LocalStore
        store, name = split(where)
        return CountingStore(store, counts, gap), name

    with mock.patch("lazyckpt.formats.opening.split", counted):
        view = CheckpointView(path, **{"cache": False, **options})
    return view, counts
