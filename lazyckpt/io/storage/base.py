"""A store: the folder (or bucket prefix) that a checkpoint lies in, as names, sizes and byte ranges.

Names are relative to the store's root, with "/" between folders. A store does no caching of data and knows no format.
It pickles to its root and options alone, so that a tensor can travel to another process.

The base class checks what was read: bytes of a file that is not the one that was indexed are never returned. The
stores of this package implement the raw operations (names with an underscore) and cannot forget the check.
"""

from __future__ import annotations

import errno
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ...core.index import FileInfo
from ...errors import ChangedFileError, CorruptError, DataError, MissingFileError
from ..pool import each, verify_later
from .mapping import Mapped

Buffer = bytes | memoryview
_SEEN = 1 << 16  # files without pins whose first state a store remembers
_ABSENT = FileInfo(0, 0)


class Entry(NamedTuple):
    """What `Store.list` tells of a name."""

    info: FileInfo
    is_dir: bool


# What a raw read delivered: the number of bytes, and what the file was then; None if the answer does not say.
Fetched = tuple[int, FileInfo | None]


class Guard(Protocol):
    """What has to be checked of a file before its bytes are used, at the latest when they are read. It pickles."""

    def check(self, store: Store, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if the bytes must not be used. Called before each read; reads by `Store.unguarded`."""


class Store(ABC):
    """Where bytes come from. All methods may be called from several threads.

    ``pins`` are the files as they were when they were indexed. Reading or mapping a pinned file that is not the same
    any more (size, version or modification time) raises ChangedFileError; a file that is gone, MissingFileError.
    Of files without pins a store remembers what they were when it first looked at them, and `pinned` compares: an
    index is never pinned to another state of a file than the one that it was made from.
    """

    def __init__(self, pins: Mapping[str, FileInfo] | None = None) -> None:
        self.pins: Mapping[str, FileInfo] = {} if pins is None else pins
        self._seen: dict[str, FileInfo] = {}
        self.closed = False
        self.guards: dict[str, Guard] = {}
        # how many reads headers of zips may take before the rest is left to guards; None: none is left
        self.reads_of_headers: int | None = None

    # -- what a store implements

    @property
    @abstractmethod
    def root(self) -> str:
        """What a user would pass to `lazyckpt.open` for this folder."""

    @property
    @abstractmethod
    def gap(self) -> int:
        """Unwanted bytes between two wanted runs that are worth reading to save a request."""

    @abstractmethod
    def below(self, folder: str) -> Store:
        """A store of its own for a folder of this one."""

    @abstractmethod
    def list(self, folder: str = "") -> Mapping[str, Entry]:
        """The names directly inside a folder; {} if there is no such folder."""

    @abstractmethod
    def _with(self, pins: Mapping[str, FileInfo]) -> Store:
        """The same store with other pins."""

    @abstractmethod
    def _stat(self, path: str) -> FileInfo:
        """See `stat`; never from a cache."""

    @abstractmethod
    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        """Fill ``target``, which is not empty, as far as the file goes, from ``offset`` on."""

    # -- what is asked of a store

    @property
    def key(self) -> str:
        """What tells the store from others of this process: its root, and what it is read with."""
        return self.root

    @property
    def listable(self) -> bool:
        """Whether `list` gives all names, with what tells one state of a file from another."""
        return True

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        """The same store with other pins. Raises ChangedFileError if a file was written to since this store, which has
        no pins, has first looked at it."""
        self._compare(pins)
        store = self._with(pins)
        store.guards = self.guards
        store._seen.update((path, first) for path, first in list(self._seen.items()) if path not in pins)
        return store

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        """Read these files from now on as they were. Raises as `pinned`."""
        self._compare(pins)
        self.pins = pins
        for path in pins:
            self._seen.pop(path, None)

    def _compare(self, pins: Mapping[str, FileInfo]) -> None:
        """Raise ChangedFileError if a pin is another state of a file than the first that was seen."""
        for path, first in list(self._seen.items()):
            pin = pins.get(path)
            if pin is not None and not first.may_be(pin):
                raise changed(self.root, path, first, pin)

    def stat(self, path: str) -> FileInfo:
        """Size and modification time now. Raises MissingFileError; its ``errno`` is ENOENT or ENOTDIR if there is no
        such file, something else (or None) if it cannot be told."""
        info = self._stat(path)
        if path not in self.pins:
            self._remember(path, info)
        return info

    def read(self, path: str, offset: int, length: int) -> Buffer:
        """Exactly ``length`` bytes from ``offset`` on. Raises CorruptError past the end of the file."""
        data = bytearray(length)
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; errors as `read`."""
        if self.guards:
            self.check(path, offset, len(target))
        self.unguarded(path, offset, target)

    def check(self, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if bytes of a file must not be used: before they are read, or touched in a mapping."""
        guard = self.guards.get(path)
        if guard is not None:
            guard.check(self, path, offset, length)

    def unguarded(self, path: str, offset: int, target: memoryview) -> None:
        """`read_into` without what a guard checks: for guards."""
        if self.closed:
            raise closed_error(self.root)
        if not len(target):
            return
        self._look_first(path)
        count, info = self._fetch(path, offset, target)
        if info is None or info != self.pins.get(path) or count != len(target):
            self._judge(path, offset, len(target), count, info)

    def read_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on, as `read_into` does: many small ones, several at a time."""
        if self.guards:
            for offset, target in pieces:
                self.check(path, offset, len(target))
        self._fetch_pieces(path, pieces)

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """The same without what a guard checks."""
        each(lambda piece: self.unguarded(path, *piece), pieces)

    def _look_first(self, path: str) -> None:
        """What a file is before its first bytes come, where it is not pinned and answers do not say."""
        if not self._tells and path not in self.pins and path not in self._seen:
            self._remember(path, self._stat(path))

    def _judge(self, path: str, offset: int, wanted: int, count: int, info: FileInfo | None) -> None:
        """Raise what is wrong with ``count`` bytes that a file of this state delivered, if anything is."""
        pin = self.pins.get(path)
        if pin is not None and info is not None and not info.may_be(pin):
            raise changed(self.root, path, pin, info)
        if info is not None and pin is None:
            self._remember(path, info)
        if count == wanted:
            if pin is not None and info is None:
                verify_later(self, path)
            return
        if info is None:
            self.verify(path)
        raise CorruptError(
            f"{self.root}/{path}: {wanted:,} bytes from {offset:,} on are wanted, {count:,} came: truncated? Copy it "
            "again from its source."
        )

    def verify(self, path: str) -> None:
        """Ask what a file is now. Raises ChangedFileError if that is not what is pinned, MissingFileError."""
        pin = self.pins.get(path)
        if pin is not None:
            info = self._stat(path)
            if not info.may_be(pin):
                raise changed(self.root, path, pin, info)

    def map(self, path: str) -> Mapped | None:
        """The whole file as memory whose pages are read when touched; None if this store cannot, or the file is empty.
        For reading only, and not to be kept: the store keeps it as long as it has room. What was copied from it is
        right if `confirm` says so afterwards."""
        return None

    def confirm(self, path: str, mapped: Mapped) -> None:
        """Check that what was copied from a mapping are the bytes of the pinned file. Raises ChangedFileError."""
        self.verify(path)

    def resident(self, address: int, nbytes: int) -> bool:
        """Whether bytes of a mapped file are likely in memory already: touching them costs no I/O."""
        return False

    def private(self, path: str) -> Buffer | None:
        """A mapping of the caller's own, which may be written to (the file never is); None as for `map`. Who touches it
        after the file was truncated gets ChangedFileError."""
        return None

    def close(self) -> None:
        """Let go of files and connections of its own; reading raises DataError from then on. Closing twice is fine, and
        other stores of the same folder stay as they are."""
        self.closed = True

    # -- how

    _tells = True  # whether every answer says what the file was; if not, it has to be asked for

    def _remember(self, path: str, info: FileInfo) -> None:
        first = self._seen.setdefault(path, info)
        if first is not info and not first.may_be(info):
            raise changed(self.root, path, first, info)
        if len(self._seen) > _SEEN:
            self._seen.pop(next(iter(self._seen)), None)


def changed(root: str, path: str, pin: FileInfo, now: FileInfo) -> ChangedFileError:
    """What reading a file raises that is not the pinned one."""
    return ChangedFileError(
        f"{root}/{path} is not the file that was opened: it had {pin.size:,} bytes, now it has "
        f"{now.size:,}, or it was written to since. Open the checkpoint again."
    )


def closed_error(root: str) -> DataError:
    """What reading from a closed store raises."""
    return DataError(f"{root} is closed: its view was closed, or its with-statement has ended. Open it again to read.")


def present(store: Store, path: str) -> FileInfo | None:
    """Size and modification time now; None if there is no such file. Raises MissingFileError if that cannot be told."""
    try:
        return store.stat(path)
    except MissingFileError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def look(store: Store, path: str) -> FileInfo | None:
    """What a file is that may be absent (None). Raises ChangedFileError if it is not what it was when the store first
    looked at it: also if it came or went since. Other errors as `Store.stat`."""
    info = present(store, path)
    now = _ABSENT if info is None else info
    pin = store.pins.get(path)
    if pin is not None and not pin.may_be(now):
        raise changed(store.root, path, pin, now)
    if isinstance(store, Store) and info is None:  # a store that wraps another one leaves remembering to it
        store._remember(path, _ABSENT)
    return info


def narrow(store: Store, paths: Iterable[str]) -> Store:
    """The store with the pins of these files only, and what it remembers of those without: what has to travel with one
    tensor."""
    seen = store._seen if isinstance(store, Store) else {}
    known = ((path, store.pins.get(path) or seen.get(path)) for path in paths)
    found = store.pinned({path: info for path, info in known if info is not None})
    if isinstance(store, Store):
        found.guards = {path: guard for path, guard in store.guards.items() if path in found.pins}
    return found


def check(store: Store, path: str, offset: int, length: int) -> None:
    """`Store.check`; a store that wraps another one leaves it to that."""
    if isinstance(store, Store):
        store.check(path, offset, length)


def guarded(store: Store, guards: Mapping[str, Guard]) -> Store:
    """The same store object, with these guards: how a pickled store comes back."""
    store.guards = dict(guards)
    return store


class StoreFile(io.RawIOBase):
    """A file of a store as a seekable stream, for libraries that want one (zipfile).

    The last ``tail`` bytes are fetched with the first read that touches them: a zip's directory is there; and so are
    the first ``head`` bytes. ``window`` (start, length): the stream is this part of the file only.
    """

    def __init__(
        self, store: Store, path: str, tail: int = 1 << 13, head: int = 0, window: tuple[int, int] | None = None
    ) -> None:
        self.store, self.path = store, path
        # of a window the file was looked at before, and there may be thousands of them
        self.info = (store.pins.get(path) if window else None) or store.stat(path)
        self.start, self.size = window or (0, self.info.size)
        self._at = 0
        self._tail_at = max(0, self.size - tail)
        self._tail: Buffer | None = None
        self._head_size = min(head, self._tail_at)
        self._head: Buffer | None = None

    @property
    def where(self) -> str:
        """What it is, for messages."""
        whole = f"{self.store.root}/{self.path}"
        return whole if (self.start, self.size) == (0, self.info.size) else f"{whole} (at byte {self.start:,})"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self.at(self._at, size)
        self._at += size
        return data

    def at(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, without moving the stream. Raises CorruptError past the end."""
        if offset < 0 or offset + size > self.size:
            raise CorruptError(
                f"{self.where}: bytes {offset:,} to {offset + size:,} are wanted, it has {self.size:,}: truncated?"
            )
        if size == 0:
            return b""
        if offset + size <= self._head_size:
            if self._head is None:
                self._head = self.store.read(self.path, self.start, self._head_size)
            return bytes(memoryview(self._head)[offset : offset + size])
        if offset < self._tail_at:
            return bytes(self.store.read(self.path, self.start + offset, size))
        if self._tail is None:
            self._tail = self.store.read(self.path, self.start + self._tail_at, self.size - self._tail_at)
        start = offset - self._tail_at
        return bytes(memoryview(self._tail)[start : start + size])

    def keep(self, head: bytes) -> None:
        """Take what was read from byte 0 on for the head: it is not read again."""
        if len(head) > self._head_size:
            self._head, self._head_size = head, len(head)

    def read_pieces(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on. What the head and the tail hold costs no further request."""
        far = []
        for offset, target in pieces:
            if offset + len(target) <= self._head_size or offset >= self._tail_at:
                target[:] = self.at(offset, len(target))
            else:
                far.append((self.start + offset, target))
        if isinstance(self.store, Store):
            self.store.read_pieces(self.path, far)
        else:  # a store that wraps another one
            each(lambda piece: self.store.read_into(self.path, *piece), far)
