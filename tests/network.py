"""A folder as if it were behind a network: every request takes its time and is counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import lazyckpt
from lazyckpt.core.index import FileInfo
from lazyckpt.io.storage.access import guarded
from lazyckpt.io.storage.base import Buffer, Entry, Guard, Store
from lazyckpt.io.storage.local import LocalStore, split
from lazyckpt.io.storage.requesting import Requesting


class Get(NamedTuple):
    path: str
    offset: int
    length: int


@dataclass
class Traffic:
    """What a network carried: ``gets`` are ranges of files, ``lists`` and ``heads`` other questions. ``most``: the
    largest number of requests at the same time. ``delay`` is the time of a request, in seconds."""

    delay: float = 0.0
    gets: list[Get] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    most: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def request(self, kind: list[Any], what: Any) -> Iterator[None]:
        with self._lock:
            kind.append(what)
            self._open += 1
            self.most = max(self.most, self._open)
        try:
            time.sleep(self.delay)
            yield
        finally:
            with self._lock:
                self._open -= 1

    def clear(self) -> None:
        self.gets.clear()
        self.lists.clear()
        self.heads.clear()
        self.most = 0

    @property
    def requests(self) -> int:
        return len(self.gets) + len(self.lists) + len(self.heads)

    @property
    def nbytes(self) -> int:
        return sum(get.length for get in self.gets)

    @property
    def twice(self) -> list[tuple[Get, Get]]:
        """The pairs of requests for the same bytes."""
        found = []
        ordered = sorted(self.gets)
        for a, b in pairwise(ordered):
            if a.path == b.path and b.offset < a.offset + a.length:
                found.append((a, b))
        return found

    def of(self, *endings: str) -> list[Get]:
        return [get for get in self.gets if get.path.endswith(endings)]


class Network(Requesting):
    """A store that forwards its requests to a local one. Listings and answers tell the state of a file, as those of a
    bucket do."""

    def __init__(self, inner: LocalStore, carried: Traffic, pins: Mapping[str, FileInfo] | None = None) -> None:
        super().__init__(pins=pins)
        self.inner, self.carried = inner, carried

    @property
    def root(self) -> str:
        return f"net://{self.inner.root}"

    def below(self, folder: str) -> Network:
        return type(self)(self.inner.below(folder), self.carried)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        with self.carried.request(self.carried.lists, f"{self.inner.root}/{folder}".rstrip("/")):
            return {
                name: Entry(FileInfo(0, 0) if is_dir else _versioned(info), is_dir)
                for name, (info, is_dir) in self.inner.list(folder).items()
            }

    def tree(self, folder: str, limit: int) -> Mapping[str, FileInfo] | None:
        with self.carried.request(self.carried.lists, f"{self.inner.root}/{folder}/**"):
            found = self.inner.tree(folder, limit)
            return None if found is None else {path: _versioned(info) for path, info in found.items()}

    def _with(self, pins: Mapping[str, FileInfo]) -> Network:
        return type(self)(self.inner, self.carried, pins)

    def _ask_state(self, path: str) -> FileInfo:
        with self.carried.request(self.carried.heads, f"{self.inner.root}/{path}"):
            return _versioned(self.inner._stat(path))

    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        with self.carried.request(self.carried.gets, Get(f"{self.inner.root}/{path}", start, stop - start)):
            data = bytearray(stop - start)
            count, info = self.inner._fetch(path, start, memoryview(data))
            return _versioned(info or self.inner._stat(path)), [bytes(data[:count])]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.inner, dict(self.pins), dict(self.guards))


def _unpickled(inner: LocalStore, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    return guarded(Network(inner, Traffic(), pins), guards)


def _versioned(info: FileInfo) -> FileInfo:
    return info._replace(version=f"{info.size:x}-{info.mtime_ns:x}")


@contextmanager
def behind(traffic: Traffic, kind: type[Network] = Network) -> Iterator[None]:
    """Within the context, every path is opened as if it were behind a network."""

    def there(path: str | os.PathLike[str], options: Any = None) -> tuple[Network, str]:
        store, name = split(os.fspath(path).removeprefix("net://"))
        return kind(store, traffic), name

    with ExitStack() as patches:
        patches.enter_context(mock.patch("lazyckpt.formats.archives.split_url", there))
        for module in ("lazyckpt.formats.archives", "lazyckpt.formats.opening"):
            patches.enter_context(mock.patch(f"{module}.is_url", lambda path: True))
        yield


def opened(path: Any, delay: float = 0.0, **options: Any) -> tuple[lazyckpt.CheckpointView, Traffic]:
    """Open a view through a network; return it with the traffic so far, which goes on to count."""
    traffic = Traffic(delay)
    with behind(traffic):
        return lazyckpt.open(path, **{"cache": False, **options}), traffic
