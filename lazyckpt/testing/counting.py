"""A store that counts reads. Like a bucket, it cannot map files, so every byte that is read belongs to a request.

Reads through a mapping cannot be counted. This store has no mappings, so its counts are complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from ..core.index import FileInfo
from ..core.requests import Ints
from ..io.storage.base import Buffer, Entry, Store
from ..io.storage.local import LocalStore, split
from ..io.storage.traffic import Traffic
from ..view import CheckpointView

__all__ = ["CountingStore", "Counts", "Request", "opened"]


class Request(NamedTuple):
    path: str
    offset: int
    length: int


class Counts:
    """All reads since the last `clear`, of a store and of all stores that `pinned` derives from it.

    ``listed`` and ``looked`` are the folders and files that `Store.list` and `Store.stat` were called with; ``made``
    counts the stores that `pinned` has made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.log: list[Request] = []
        self.listed: list[str] = []
        self.looked: list[str] = []
        self.made = 0

    def add(self, request: Request) -> None:
        with self._lock:
            self.log.append(request)

    def clear(self) -> None:
        with self._lock:
            self.log.clear()
            self.listed.clear()
            self.looked.clear()
            self.made = 0

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
    """A wrapper that forwards reads to ``inner`` and counts them. ``gap`` is the gap that it reports."""

    is_remote = False  # reads are planned as for a local store

    def __init__(self, inner: Store, counts: Counts | None = None, gap: int = 0) -> None:
        self.inner = inner
        self.counts = Counts() if counts is None else counts
        self._gap = gap
        self.pins = inner.pins

    @property
    def root(self) -> str:
        return self.inner.root

    def address(self, name: str) -> str:
        return self.inner.address(name)

    @property
    def key(self) -> str:
        return self.inner.key

    @property
    def listable(self) -> bool:
        return self.inner.listable

    @property
    def gap(self) -> int:
        return self._gap

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def joins(self) -> bool:
        return False  # every read is counted

    @contextmanager
    def holding(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[None]:
        yield

    @property
    def io(self) -> Traffic:
        return self.inner.io

    def pinned(self, pins: Mapping[str, FileInfo]) -> CountingStore:
        self.counts.made += 1
        return CountingStore(self.inner.pinned(pins), self.counts, self._gap)

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        self.inner.pin(pins)
        self.pins = self.inner.pins

    def below(self, folder: str) -> CountingStore:
        return CountingStore(self.inner.below(folder), self.counts, self._gap)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        self.counts.listed.append(folder)
        return self.inner.list(folder)

    def stat(self, path: str) -> FileInfo:
        self.counts.looked.append(path)
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

    def __reduce__(self) -> tuple[Any, ...]:
        return CountingStore, (self.inner, None, self._gap)


def opened(path: str | os.PathLike[str], *, gap: int = 0, **options: Any) -> tuple[CheckpointView, Counts]:
    """Open a view like ``lazyckpt.open(path, **options)`` over a counting store; return it with the counts so far.

    The counts include later reads of the view and of all tensors and views derived from it.
    """
    counts = Counts()

    def counted(where: str | os.PathLike[str], io: str = "auto") -> tuple[CountingStore, str]:
        store: LocalStore
        store, name = split(where, io)
        return CountingStore(store, counts, gap), name

    with mock.patch("lazyckpt.formats.archives.split", counted):
        view = CheckpointView(path, **{"cache": False, **options})
    return view, counts
