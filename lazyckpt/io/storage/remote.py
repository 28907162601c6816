"""Stores behind a network: reads of many runs of bytes are joined to few requests.

`Remote` is what the rest of lazyckpt knows of them. Who makes the requests is left open: a store that asks a server
(`requesting.Requesting`), or an archive, which passes them on to the store that has it (`archive.RemoteArchive`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from ...core.index import FileInfo
from ...core.requests import GAP, Ints, Policy, Request
from ...errors import LazyckptError
from ..pool import each, run
from ..tasks import Fetch, Task
from .base import Store
from .cache import BlockCache
from .held import Held, kept, take

T = TypeVar("T")


class Remote(Store):
    """A folder behind a network. The reads of a job become few requests for the server.

    Attributes
    ----------
    policy
        How reads become requests.
    """

    is_remote = True
    policy: Policy

    # -- methods that subclasses implement

    @property
    @abstractmethod
    def cache(self) -> BlockCache | None:
        """The block cache; None if there is none."""

    @cache.setter
    @abstractmethod
    def cache(self, cache: BlockCache | None) -> None: ...

    @abstractmethod
    def _requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]:
        """Yield tasks that each make one request, for what all fetches want."""

    @abstractmethod
    def forecast(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[tuple[str, Request]]:
        """Yield the path and the range of each request that runs (offsets, lengths) of files take. Makes none."""

    # -- what `Store` needs

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        return self._like_this(super().pinned(pins))

    @property
    def gap(self) -> int:
        return GAP if self.policy.gap is None else self.policy.gap

    @property
    def width(self) -> int:
        """The number of requests at the same time."""
        return self.policy.concurrency

    @property
    def joins(self) -> bool:
        return True

    @contextmanager
    def holding(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[None]:
        fetches: list[Task] = []
        held: dict[tuple[int, str], Held] = {}
        for path, (offsets, lengths) in wanted.items():
            one = held[id(self), path] = Held(offsets, lengths)
            fetches.append((len(one.memory), Fetch(self, path, one.offsets, one.lengths, one.at, one.memory)))
        try:
            run(fetches)
        except LazyckptError:  # the read that wants it raises it, for its tensor alone
            held.clear()
        with kept(held):
            yield

    def unguarded(self, path: str, offset: int, target: memoryview) -> None:
        if len(target) <= self.policy.smallest:
            super().unguarded(path, offset, target)
        else:
            self._fetch_pieces(path, [(offset, target)])

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        if path in self.guards and self.ahead is None and len(target):
            self._fetch_guarded(path, [(offset, target)])
        else:
            super().read_into(path, offset, target)

    def read_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        if path in self.guards and self.ahead is None:
            self._fetch_guarded(path, pieces)
        else:
            super().read_pieces(path, pieces)

    def _fetch_guarded(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each target, and read what the guard of the file compares along with it."""
        tasks = list(self.requests([Fetch.of_run(self, path, *piece) for piece in pieces if len(piece[1])]))
        each(lambda task: task[1](), tasks, self.width)

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        tasks = list(self._requests([Fetch.of_run(self, path, *piece) for piece in pieces]))
        each(lambda task: task[1](), tasks, self.width)

    # -- requests

    def requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]:
        """Yield tasks that each make one request, for what all fetches want. Raises what guards raise."""
        yield from self._requests(self._checked(fetches))

    def _checked(self, fetches: Sequence[Fetch]) -> Sequence[Fetch]:
        """Return the fetches with what guards need to read for them. It is compared as it arrives, before the job
        ends."""
        if not self.guards:
            return fetches
        guarded: dict[str, list[Fetch]] = {}
        for fetch in fetches:
            if fetch.path in self.guards:
                guarded.setdefault(fetch.path, []).append(fetch)
        found: list[Fetch] = []

        def look(path: str) -> None:
            offsets = np.concatenate([fetch.offsets for fetch in guarded[path]])
            lengths = np.concatenate([fetch.lengths for fetch in guarded[path]])
            pending = self.guards[path].pending(self, path, offsets, lengths)
            if pending is not None:
                size = int(pending.lengths.sum())
                at = np.cumsum(pending.lengths) - pending.lengths
                found.append(Fetch(self, path, pending.offsets, pending.lengths, at, size, pending.compare))

        each(look, list(guarded), self.width)  # guards that came with a pickle read directories first
        return [*fetches, *found]

    def with_checks(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> dict[str, tuple[Ints, Ints]]:
        """Return runs of files with those that guards read along, as far as they tell without reading."""
        found = dict(wanted)
        for path, (offsets, lengths) in wanted.items():
            guard = self.guards.get(path)
            if guard is not None and guard.is_loaded:
                pending = guard.pending(self, path, offsets, lengths)
                if pending is not None:
                    found[path] = (
                        np.concatenate([offsets, pending.offsets]),
                        np.concatenate([lengths, pending.lengths]),
                    )
        return found

    def _taken(self, fetch: Fetch) -> bool:
        """Complete a fetch of one run with bytes that this thread holds; return whether it does."""
        if len(fetch.offsets) != 1:
            return False
        at, length = int(fetch.at[0]), int(fetch.lengths[0])
        if not take(self, fetch.path, int(fetch.offsets[0]), fetch.memory()[at : at + length]):
            return False
        fetch.begin(0)
        return True

    def _like_this(self, store: T) -> T:
        """Return another store with this store's cache."""
        if isinstance(store, Remote):
            store.cache = self.cache
        return store
