"""The store interface: the folder (or bucket prefix) of a checkpoint as names, sizes and byte ranges.

Names are relative to the store's root, with "/" between folders. A store does not cache data and does not know file
formats. Its pickle holds its root, options and pins, so that a tensor can be sent to another process.

The base class checks every read: it never returns bytes of a file that changed since it was indexed. Subclasses
implement only the raw operations (names with an underscore) and cannot omit the check.
"""

from __future__ import annotations

import errno
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

from ...core.index import FileInfo
from ...errors import ChangedFileError, CorruptError, DataError, LazyckptError, MissingFileError
from ..pool import each, verify_later
from .mapping import Mapped

Buffer = bytes | memoryview
_SEEN = 1 << 16  # maximum number of unpinned files whose first state a store remembers
_ABSENT = FileInfo(0, 0)


class Entry(NamedTuple):
    """An entry of a listing by `Store.list`."""

    info: FileInfo
    is_dir: bool


class Listing(dict[str, Entry]):
    """The listing of a local folder.

    Attributes
    ----------
    changes
        For each entry, in the same order: the time of the last change of its inode in nanoseconds, and the inode's
        number. Unlike a modification time, a program cannot set them back.
    """

    __slots__ = ("changes",)

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []


# The result of a raw read: the number of bytes, and the file's state at that time (None if the response lacks it).
Fetched = tuple[int, FileInfo | None]


class Guard(Protocol):
    """A picklable check of a file that must pass before bytes of the file are used."""

    def check(self, store: Store, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if the bytes must not be used. Called before each read; may call `Store.unguarded`."""


class Store(ABC):
    """A source of bytes, safe to use from several threads.

    ``pins`` are the states of the files when they were indexed. Reading or mapping a pinned file whose size, version or
    modification time changed raises ChangedFileError; a file that no longer exists raises MissingFileError. For
    unpinned files, a store remembers their state at the first access, and `pinned` compares it with the new pins: an
    index is never pinned to another state of a file than the one that it was built from.
    """

    def __init__(self, pins: Mapping[str, FileInfo] | None = None) -> None:
        self.pins: Mapping[str, FileInfo] = {} if pins is None else pins
        self._seen: dict[str, FileInfo] = {}
        self.closed = False
        self.maps: dict[str, Mapped] = {}  # the cached mappings of `map`
        self.guards: dict[str, Guard] = {}
        # the number of reads of zip headers before further checks are left to guards; None: no limit
        self.reads_of_headers: int | None = None

    # -- methods that subclasses implement

    @property
    @abstractmethod
    def root(self) -> str:
        """The path or URL that a user passes to `lazyckpt.open` for this folder."""

    @property
    @abstractmethod
    def gap(self) -> int:
        """The largest gap in bytes between two wanted runs that is cheaper to read than a second request."""

    @abstractmethod
    def below(self, folder: str) -> Store:
        """Return a separate store for a folder of this store."""

    @abstractmethod
    def list(self, folder: str = "") -> Mapping[str, Entry]:
        """Return the entries directly inside a folder, by name; {} if there is no such folder."""

    @abstractmethod
    def _with(self, pins: Mapping[str, FileInfo]) -> Store:
        """Return a store like this one, with other pins."""

    @abstractmethod
    def _stat(self, path: str) -> FileInfo:
        """Return the state of a file, never from a cache (see `stat`)."""

    @abstractmethod
    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        """Fill the non-empty ``target`` with bytes from ``offset`` on, as far as the file goes."""

    # -- methods that callers use

    @property
    def key(self) -> str:
        """A string that identifies the store within this process: its root and access options."""
        return self.root

    @property
    def listable(self) -> bool:
        """Whether `list` returns all names, with the size and the time or version of each file."""
        return True

    @property
    def seen(self) -> Mapping[str, FileInfo]:
        """The unpinned files that this store has accessed so far, with their first state."""
        return self._seen

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        """Return a store like this one, with other pins. Raises ChangedFileError if a file changed since this store
        first accessed it."""
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
        """Return the current size and modification time of a file. Raises MissingFileError, whose ``errno`` is ENOENT
        or ENOTDIR if there is no such file, and another value or None if its existence is unknown."""
        info = self._state(path)
        if path not in self.pins:
            self._remember(path, info)
        return info

    def read(self, path: str, offset: int, length: int) -> Buffer:
        """Read exactly ``length`` bytes from ``offset`` on. Raises CorruptError past the end of the file."""
        data = bytearray(length)
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with bytes from ``offset`` on. Raises what `read` raises."""
        if self.guards:
            self.check(path, offset, len(target))
        self.unguarded(path, offset, target)

    def check(self, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if bytes of a file must not be used. Call it before reading them or accessing them in a
        mapping."""
        guard = self.guards.get(path)
        if guard is not None:
            guard.check(self, path, offset, length)

    def unguarded(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` like `read_into`, but without the check of a guard, so that guards can read."""
        if self.closed:
            raise closed_error(self.root)
        if not len(target):
            return
        self._look_first(path)
        try:
            count, info = self._fetch(path, offset, target)
        except OSError as e:
            _raise_unreadable(self.root, path, e)
        if info is None or info != self.pins.get(path) or count != len(target):
            self._judge(path, offset, len(target), count, info)

    def read_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on, as `read_into` does. For many small reads; several run concurrently."""
        if self.guards:
            for offset, target in pieces:
                self.check(path, offset, len(target))
        try:
            self._fetch_pieces(path, pieces)
        except OSError as e:
            _raise_unreadable(self.root, path, e)

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each target without the check of a guard."""
        each(lambda piece: self.unguarded(path, *piece), pieces)

    def _look_first(self, path: str) -> None:
        """Remember the state of an unpinned file before its first read, if responses do not report it."""
        if not self._reports_state and path not in self.pins and path not in self._seen:
            self._remember(path, self._state(path))

    def _judge(self, path: str, offset: int, wanted: int, count: int, info: FileInfo | None) -> None:
        """Raise an error if a read of ``wanted`` bytes returned too few bytes, or bytes of a changed file."""
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
            f"{self.root}/{path}: expected {wanted:,} bytes from {offset:,} on, got {count:,}: truncated? Copy it "
            "again from its source."
        )

    def verify(self, path: str) -> None:
        """Compare the current state of a file with its pin. Raises ChangedFileError, MissingFileError."""
        pin = self.pins.get(path)
        if pin is not None:
            info = self._state(path)
            if not info.may_be(pin):
                raise changed(self.root, path, pin, info)

    def map(self, path: str) -> Mapped | None:
        """Map the whole file for reading; return None if the store cannot map it or the file is empty. The store caches
        the mapping, so callers must not keep it. Call `confirm` after copying from it."""
        return None

    def confirm(self, path: str, mapped: Mapped) -> None:
        """Check that bytes copied from a mapping are those of the pinned file. Raises ChangedFileError."""
        self.verify(path)

    def private(self, path: str) -> Buffer | None:
        """Map the file privately for the caller, who may write to the memory (never to the file); return None as `map`
        does. Access after the file was truncated raises ChangedFileError."""
        return None

    def close(self) -> None:
        """Release this store's files and connections; later reads raise DataError. Closing twice is allowed. Other
        stores of the same folder are not affected."""
        self.closed = True

    # -- implementation

    def _state(self, path: str) -> FileInfo:
        try:
            return self._stat(path)
        except OSError as e:
            _raise_unreadable(self.root, path, e)

    maps_files = False  # whether `map` maps files
    _reports_state = True  # whether every read reports the file's state; if False, `_stat` has to be called for it

    def _remember(self, path: str, info: FileInfo) -> None:
        first = self._seen.setdefault(path, info)
        if first is not info and not first.may_be(info):
            raise changed(self.root, path, first, info)
        if len(self._seen) > _SEEN:
            self._seen.pop(next(iter(self._seen)), None)


def changed(root: str, path: str, pin: FileInfo, now: FileInfo) -> ChangedFileError:
    """Return the error for a read of a file that changed since it was pinned."""
    return ChangedFileError(
        f"{root}/{path} is not the file that was opened: it had {pin.size:,} bytes, now it has "
        f"{now.size:,}, or it was written to since. Open the checkpoint again."
    )


def _raise_unreadable(root: str, path: str, e: OSError) -> NoReturn:
    """Raise the error for a file on which a store raised ``e``: of the disk, the network, or permissions. Other files
    of the checkpoint may be readable, so readers report it as a problem of this file."""
    if isinstance(e, LazyckptError):
        raise e
    what = e.strerror or str(e).removeprefix(f"{root}/{path}: ")
    error = MissingFileError(f"{root}/{path} cannot be read: {what}")
    error.errno = e.errno or errno.EIO
    raise error from e


def closed_error(root: str) -> DataError:
    """Return the error for a read from a closed store."""
    return DataError(f"{root} is closed: its view was closed, or its with-statement has ended. Open it again to read.")


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
    disappeared since the store first accessed it, and what `Store.stat` raises."""
    info = present(store, path)
    now = _ABSENT if info is None else info
    pin = store.pins.get(path)
    if pin is not None and not pin.may_be(now):
        raise changed(store.root, path, pin, now)
    if isinstance(store, Store) and info is None:  # the store inside a wrapper remembers its own files
        store._remember(path, _ABSENT)
    return info


def narrow(store: Store, paths: Iterable[str]) -> Store:
    """Return the store with the pins of these files only, and the remembered states of unpinned ones: the part that a
    pickled tensor needs."""
    seen = store._seen if isinstance(store, Store) else {}
    known = ((path, store.pins.get(path) or seen.get(path)) for path in paths)
    found = store.pinned({path: info for path, info in known if info is not None})
    if isinstance(store, Store):
        found.guards = {path: guard for path, guard in store.guards.items() if path in found.pins}
    return found


def check(store: Store, path: str, offset: int, length: int) -> None:
    """Call `Store.check`; skip wrappers of stores, whose inner store checks."""
    if isinstance(store, Store):
        store.check(path, offset, length)


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


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class StoreFile(io.RawIOBase):
    """A file of a store as a seekable stream, for libraries such as zipfile.

    The first read within the last ``tail`` bytes, where a zip has its directory, fetches all of them; the same applies
    to the first ``head`` bytes. With ``window`` (start, length), the stream covers only this part of the file.
    """

    def __init__(
        self, store: Store, path: str, tail: int = 1 << 13, head: int = 0, window: tuple[int, int] | None = None
    ) -> None:
        self.store, self.path = store, path
        # a file read by windows was checked before, and there may be thousands of windows
        self.info = (store.pins.get(path) if window else None) or store.stat(path)
        self.start, self.size = window or (0, self.info.size)
        self._at = 0
        self._tail_at = max(0, self.size - tail)
        self._tail: Buffer | None = None
        self._head_size = min(head, self._tail_at)
        self._head: Buffer | None = None

    @property
    def where(self) -> str:
        """The file, and the window's offset if it is not the whole file, for messages."""
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

    def refuse_pointer(self, head: bytes) -> None:
        """Raise CorruptError if the file begins as a pointer of Git LFS: a clone without `git lfs` has pointers."""
        if head.startswith(LFS_POINTER):
            raise CorruptError(f"{self.where} is a pointer of Git LFS, not the file itself: run git lfs pull")

    def at(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes from ``offset`` on, without moving the stream. Raises CorruptError past the end."""
        if offset < 0 or offset + size > self.size:
            raise CorruptError(
                f"{self.where}: bytes {offset:,} to {offset + size:,} are needed, it has {self.size:,}: truncated?"
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
        """Cache ``head``, bytes that were read from offset 0 on, so that they are not read again."""
        if len(head) > self._head_size:
            self._head, self._head_size = head, len(head)

    def read_pieces(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on. Bytes of the cached head and tail need no further request."""
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
