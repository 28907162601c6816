"""Stores that make requests to a server, each for a range of bytes.

`Requesting` makes many requests at the same time, repeats those that fail for a passing reason until a deadline, and
counts what it does. Bytes go to their places as they arrive, so a request needs no buffer of its size.

With a block cache (`cache`), requests are made only for what it lacks, and what arrives is stored. It needs the version
of a file before the first request for it: that of the pin, or of a listing.

Every answer carries the state of its file, or the state is queried after the last read: bytes of a file that was
replaced meanwhile raise ChangedFileError, also between two requests of one read.
"""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from ...core.index import FileInfo
from ...core.requests import Ints, Policy, Request, join
from ...errors import MissingFileError
from ..cancelling import go_on
from ..tasks import Fetch, Task
from .base import Buffer, Entry, Fetched, closed_error, raise_unreadable
from .cache import BlockCache, Keeping, configured, object_key, place_of
from .credentials import hint
from .held import take
from .pieces import FEW, Fill, Pieces, Ranges, in_order
from .remote import Remote
from .repeating import Transient, repeated
from .segments import ObjectKey
from .traffic import Traffic

_SMALL = 1 << 20  # bytes up to which the calling thread copies them from the cache
T = TypeVar("T")
Take = Callable[[int, memoryview], None]  # called with an offset in the file and the bytes from there on


class Requesting(Remote):
    """A folder behind a network, whose server is asked for ranges of bytes.

    Parameters
    ----------
    policy
        How reads become requests.
    traffic
        The counters to add to.
    pins
        See `Store`.
    """

    def __init__(
        self, policy: Policy | None = None, traffic: Traffic | None = None, pins: Mapping[str, FileInfo] | None = None
    ) -> None:
        super().__init__(pins)
        self.policy = policy or Policy()
        if traffic is not None:
            self.io = traffic
        self._cache: BlockCache | None = configured()
        self._listed_states: dict[str, FileInfo] = {}
        self._place: str | None = None

    # -- methods that subclasses implement

    @abstractmethod
    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        """Make one request for bytes ``start`` to ``stop`` of a file, as far as the file goes. Return the state of the
        file, None if the answer does not tell it, and the bytes as they arrive. Raises Transient, or an OSError that
        repeating the request does not help."""

    @abstractmethod
    def _ask_state(self, path: str) -> FileInfo:
        """Make one request for the state of a file. Raises as `_open`, and as `Store._stat`."""

    # -- what `Remote` and `Store` need

    @property
    def cache(self) -> BlockCache | None:
        return self._cache

    @cache.setter
    def cache(self, cache: BlockCache | None) -> None:
        self._cache = cache

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        made = super().__reduce_ex__(protocol)
        state: dict[str, Any] = {} if self._cache is None else {"_cache": self._cache}
        if self.was_replaced:
            state["was_replaced"] = True
        return (*made[:2], state) if state else made

    def _stat(self, path: str) -> FileInfo:
        return self._repeated(lambda: self._ask_state(path))

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        if take(self, path, offset, target):
            return len(target), self.pins.get(path)

        def fill(at: int, data: memoryview) -> None:
            target[at - offset : at - offset + len(data)] = data

        missing = self._missing(path, offset, offset + len(target), lambda look: look(offset, target))
        return self._read_ranges(path, len(target), missing, fill)

    # -- requests

    def requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]:
        fetches = self._checked(fetches)
        if self.cache is not None:
            fetches = [fetch for fetch in fetches if not self._is_cached(fetch)]
        yield from self._requests(fetches)

    def _is_cached(self, fetch: Fetch) -> bool:
        """Fill a small fetch from the cache, without a thread; return whether all of it is there."""
        key = self._key_of(fetch.path)
        if self.cache is None or key is None or len(fetch.offsets) > FEW or fetch.nbytes > _SMALL:
            return False
        if self.closed:
            raise closed_error(self.root)
        memory = fetch.memory()
        columns = (fetch.offsets.tolist(), fetch.lengths.tolist(), fetch.at.tolist())
        for offset, length, at in zip(*columns, strict=True):
            if self.cache.fill(key, offset, memory[at : at + length]):
                return False
        self._judge(fetch.path, 0, 0, 0, self._known_state(fetch.path))
        self.io.add(hits=1)
        fetch.begin(0)
        return True

    def forecast(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[tuple[str, Request]]:
        """Yield the path and the range of each request that runs (offsets, lengths) of files take. Makes none."""
        size = self._size(sum(int(lengths.sum()) for _, lengths in wanted.values()))
        for path, (offsets, lengths) in wanted.items():
            offsets, lengths, _, _ = in_order(offsets, lengths, offsets, offsets, size)
            for request in join(offsets, lengths, self.policy, size):
                yield path, request

    def _size(self, total: int) -> int:
        """Return the largest request for so many bytes in all: with few bytes, all connections share the work."""
        share = -(-total // max(1, self.width))
        return int(min(self.policy.largest, max(self.policy.smallest, share)))

    def _requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]:
        fetches = [fetch for fetch in fetches if not self._taken(fetch)]
        size = self._size(sum(int(fetch.lengths.sum()) for fetch in fetches))
        files: dict[str, list[Fetch]] = {}
        for fetch in fetches:
            files.setdefault(fetch.path, []).append(fetch)
        found: list[tuple[str, Request, Pieces]] = []
        counts: dict[int, int] = {}
        for path, own in files.items():
            owner = np.repeat(np.arange(len(own)), [len(fetch.offsets) for fetch in own])
            offsets, lengths, at, owner = in_order(
                np.concatenate([fetch.offsets for fetch in own]),
                np.concatenate([fetch.lengths for fetch in own]),
                np.concatenate([fetch.at for fetch in own]),
                owner,
                size,
            )
            for request in join(offsets, lengths, self.policy, size):
                part = slice(request.first, request.last)
                pieces = Pieces(own, offsets[part], lengths[part], at[part], owner[part])
                for fetch in pieces.owners():
                    counts[id(fetch)] = counts.get(id(fetch), 0) + 1
                found.append((path, request, pieces))
        for fetch in fetches:
            fetch.begin(counts.get(id(fetch), 0))
        for path, request, pieces in found:
            yield request.stop - request.start, partial(self._make, path, request.start, request.stop, pieces)

    def _make(self, path: str, start: int, stop: int, pieces: Pieces) -> None:
        """Make a request and put its bytes where they belong."""
        if self.closed:
            raise closed_error(self.root)
        self._look_first(path)
        try:
            missing = self._missing(path, start, stop, lambda look: pieces.fill(start, stop, look))
            count, info = self._read_ranges(path, stop - start, missing, pieces.take)
        except OSError as e:
            raise_unreadable(self.root, path, e)
        self._judge(path, start, stop - start, count, info)
        for fetch in pieces.owners():
            fetch.arrived()

    def _missing(self, path: str, start: int, stop: int, fill: Callable[[Fill], Ranges]) -> Ranges:
        """Return the ranges to request after ``fill`` has put what is cached in its place."""
        key = self._key_of(path)
        if self.cache is None or key is None:
            return [(start, stop)]
        found = fill(partial(self.cache.fill, key))
        missing = found[:1]
        for low, high in found[1:]:
            if low - missing[-1][1] <= self.gap:
                missing[-1] = missing[-1][0], max(high, missing[-1][1])
            else:
                missing.append((low, high))
        if missing != [(start, stop)]:
            self._judge(path, start, 0, 0, self._known_state(path))  # answers have to be of this version, too
            self.io.add(hits=1)
        return missing

    def _read_ranges(self, path: str, wanted: int, missing: Ranges, take: Take) -> Fetched:
        """Request ranges of a file. Return how many there are of the ``wanted`` bytes, with those that were cached, and
        the file's state."""
        info = self._known_state(path)
        for start, stop in missing:
            count, info = self._read(path, start, stop, take)
            wanted -= stop - start - count
        return wanted, info

    def _known_state(self, path: str) -> FileInfo | None:
        """Return the state of a file by its pin, the first access or a listing; None if there was none of them."""
        return self.pins.get(path) or self._seen.get(path) or self._listed_states.get(path)

    def _key_of(self, path: str, info: FileInfo | None = None) -> ObjectKey | None:
        """Return the key of a file in the cache; None if it is not cached."""
        info = info or self._known_state(path)
        if self.cache is None or info is None:
            return None
        if self._place is None:
            self._place = place_of(self._access())
        return object_key(self._address_of(path), info.version, info.size, self._place)

    def _access(self) -> Mapping[str, Any]:
        """Return the options that say where the server is."""
        return self.options

    def _address_of(self, path: str) -> str:
        """Return the URL of a file."""
        return f"{self.root}/{path}"

    def expect(self, folder: str, entries: Mapping[str, Entry]) -> None:
        """Take the states of files from a listing that was just made: what is cached of them can be read at once."""
        if self.cache is not None:
            prefix = f"{folder}/" if folder else ""
            self._listed_states.update((prefix + name, entry.info) for name, entry in entries.items())

    def _read(self, path: str, start: int, stop: int, take: Take) -> Fetched:
        """Read bytes of a file, as far as it goes, with as many attempts as needed; return the number of bytes and the
        file's state."""
        at, state = start, None

        def ask() -> None:
            nonlocal at, state
            info, chunks = self._open(path, at, stop)
            self._judge(path, at, 0, 0, info)  # before the bytes of another version are used
            state = info
            key = None if info is None else self._key_of(path, info)
            expected = stop if info is None else min(stop, info.size)
            cache = self.cache
            kept = None if key is None or cache is None else Keeping(cache, key, at)
            before = at
            try:
                for chunk in chunks:
                    go_on()
                    data = memoryview(chunk).cast("B")
                    if at + len(data) > stop:
                        raise Transient(f"{self.root}/{path}: the server sends more bytes than it was asked for")
                    take(at, data)
                    if kept is not None:
                        kept.add(data)
                    at += len(data)
            finally:
                if kept is not None:
                    kept.finish()
                self.io.add(nbytes=at - before)
            if info is not None and at < expected:
                raise Transient(f"{self.root}/{path}: the answer ends after {at - start:,} of {stop - start:,} bytes")

        self._repeated(ask)
        return at - start, state

    def _repeated(self, ask: Callable[[], T]) -> T:
        """See `repeating.repeated`; errors of access say what the options may lack."""
        try:
            return repeated(ask, self.policy, self.io, bool(self.pins))
        except (PermissionError, MissingFileError) as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR) and (more := hint(self.options)):
                error = type(e)(f"{str(e).rstrip('.')}{more}")
                error.errno = e.errno
                raise error from None
            raise
