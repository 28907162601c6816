"""The store interface: the folder (or bucket prefix) of a checkpoint as names, sizes and byte ranges.

Names are relative to the store's root, with "/" between folders. A store does not cache data and does not know file
formats. Its pickle holds its root, options and pins, so that a tensor can be sent to another process.

The base class checks every read: it never returns bytes of a file that changed since it was indexed. Subclasses
implement only the raw operations (names with an underscore) and cannot omit the check.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

from ...core.index import FileInfo
from ...core.requests import Ints
from ...errors import ChangedFileError, CorruptError, DataError, LazyckptError, MissingFileError
from ..checks import verify_later
from ..pool import each
from ..system import File
from .listed import ABSENT, Listed
from .mapping import Mapped
from .prefetch import Ahead
from .traffic import Traffic

Buffer = bytes | memoryview
_SEEN = 1 << 16  # maximum number of unpinned files whose first state a store remembers
_FOLDERS = 32  # files to be listed over a network by one request, on average: for fewer, it takes too many


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
    dangling
        Links to what is not there, which are not among the entries: name -> the path in the link.
    """

    __slots__ = ("changes", "dangling")

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        self.dangling: dict[str, str] = {}


# The result of a raw read: the number of bytes, and the file's state at that time (None if the response lacks it).
Fetched = tuple[int, FileInfo | None]


class Stored(NamedTuple):
    """Bytes of a local file, for calls of the system that send them without copying them here.

    Attributes
    ----------
    file
        The open file.
    offset, nbytes
        Where the bytes are in it.
    confirm
        Raises ChangedFileError if the file is not the one that was indexed. Call it after the bytes were sent.
    failed
        Returns the error for one of the system that sending them raised; raises what ``confirm`` raises.
    """

    file: File
    offset: int
    nbytes: int
    confirm: Callable[[], None]
    failed: Callable[[OSError], LazyckptError]


class Guard(Protocol):
    """A picklable check of a file that must pass before bytes of the file are used."""

    @property
    def is_loaded(self) -> bool:
        """Whether `pending` reads nothing."""

    def check(self, store: Store, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if the bytes must not be used. Called before each read; may call `Store.unguarded`."""

    def settle(self, store: Store, path: str) -> None:
        """Check what the bytes prove that an opening has read, or asked for. Requests nothing, and raises nothing."""

    def pending(self, store: Store, path: str, offsets: Ints, lengths: Ints) -> Pending | None:
        """Return what has to be read to check these runs of bytes; None if they are checked already. A store behind a
        network reads it together with the runs, and calls `Pending.compare` before the runs are used."""


class Pending(NamedTuple):
    """Runs of bytes that a check needs. ``compare`` gets them one after the other; it raises CorruptError if the bytes
    that they guard must not be used."""

    offsets: Ints
    lengths: Ints
    compare: Callable[[memoryview], None]


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
        self._unverified: set[str] = set()  # documents to verify when files of their arrays are read, see `Listed`
        self.closed = False
        self.was_replaced = False  # whether a file was replaced between two accesses while the checkpoint was opened
        self.maps: dict[str, Mapped] = {}  # the cached mappings of `map`
        self.guards: dict[str, Guard] = {}
        self.io = Traffic()
        # the number of reads of zip headers before further checks are left to guards; None: no limit
        self.reads_of_headers: int | None = None
        self._ahead: Ahead[Entry] | None = None

    # -- methods that subclasses implement

    @property
    @abstractmethod
    def root(self) -> str:
        """The path or URL that a user passes to `lazyckpt.open` for this folder."""

    def address(self, name: str) -> str:
        """Return the path or URL by which `lazyckpt.open` finds a file or folder of this one. It can contain
        credentials: do not show it."""
        return f"{self.root}/{name}" if name else self.root

    @property
    def options(self) -> Mapping[str, Any]:
        """The ``storage_options`` that were passed to `lazyckpt.open`."""
        return {}

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

    def tree(self, folder: str, limit: int) -> Mapping[str, FileInfo] | None:
        """Return the state of all files in a folder and below it, by path. None if there are more than ``limit``, or if
        listing them takes too many requests or is not possible."""
        if not self.listable:
            return None
        found: dict[str, FileInfo] = {}
        level, seen = [folder], 0
        most = max(64, limit // _FOLDERS) if self.is_remote else limit
        while level:
            seen += len(level)
            if seen > most:
                return None
            listings: dict[str, Mapping[str, Entry]] = {}

            def one(at: str, listings: dict[str, Mapping[str, Entry]] = listings) -> None:
                listings[at] = self.list(at) if self.ahead is None else self.ahead.listed(at)

            each(one, level, self.width if self.is_remote else 1)
            below = []
            for at in level:
                for name, entry in listings[at].items():
                    path = f"{at}/{name}" if at else name
                    if entry.is_dir:
                        below.append(path)
                    else:
                        found[path] = entry.info
            if len(found) > limit:
                return None
            level = below
        return found

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
    def width(self) -> int:
        """The number of small reads that are worth making at the same time (at most 64)."""
        return 8

    @property
    def key(self) -> str:
        """A string that identifies the store within this process: its root and access options."""
        return self.root

    @property
    def listable(self) -> bool:
        """Whether `list` returns all names, with the size and the time or version of each file."""
        return True

    def names(self, folder: str = "") -> Mapping[str, bool] | None:
        """Return all names in a folder, each with whether it is a folder; None if the server does not tell them, though
        `list` may find some."""
        return {name: entry.is_dir for name, entry in self.list(folder).items()}

    @property
    def joins(self) -> bool:
        """Whether `holding` makes few requests of many."""
        return False

    @contextmanager
    def holding(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[None]:
        """Read runs (offsets, lengths) of files by few requests, and keep the bytes for the reads of this thread within
        the context. Stores that do not join requests do nothing."""
        yield

    def expect(self, folder: str, entries: Mapping[str, Entry]) -> None:  # noqa: B027  # most stores need none
        """Take the states of files from a listing that was just made. A store with a block cache uses them to find what
        is cached before its first request for a file; others do nothing."""

    @property
    def maps_files(self) -> bool:
        """Whether `map` maps files."""
        return False

    @property
    def seen(self) -> Mapping[str, FileInfo]:
        """The unpinned files that this store has accessed so far, with their first state."""
        return self._seen

    def pinned(self, pins: Mapping[str, FileInfo]) -> Store:
        """Return a store like this one, with other pins. Raises ChangedFileError if a file changed since this store
        first accessed it."""
        self._compare(pins)
        store = self._with(pins)
        store.guards, store._ahead, store.was_replaced = self.guards, self.ahead, self.was_replaced
        store._seen.update((path, first) for path, first in list(self._seen.items()) if path not in pins)
        return store

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        """Read these files from now on as they were. Raises as `pinned`."""
        self._compare(pins)
        self.stop_ahead()
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
        ahead = self.ahead
        info = None if ahead is None or path in self.pins else ahead.state(path)
        if info is None:
            info = self._state(path)
        if path not in self.pins:
            self._remember(path, info)
        return info

    @property
    def ahead(self) -> Ahead[Entry] | None:
        """What is read ahead and kept while a checkpoint behind a network is opened; None at other times."""
        if self._ahead is not None and self._ahead.closed:
            self._ahead = None
        return self._ahead

    def look_ahead(self) -> None:
        """Begin to request concurrently what readers announce, and to keep what they read, until the store is pinned:
        a checkpoint is opened. Does nothing for files that are not behind a network."""
        if self.is_remote and self.ahead is None:
            self._ahead = Ahead(self)

    def stop_ahead(self) -> None:
        """End what `look_ahead` began."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

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
        ahead = self.ahead
        if ahead is None or not ahead.read(path, offset, target, self.pins.get(path)):
            self.request(path, offset, target)

    def request(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` like `unguarded`, but never from bytes that were read earlier."""
        self._look_first(path)
        try:
            count, info = self._fetch(path, offset, target)
        except OSError as e:
            raise_unreadable(self.root, path, e)
        if info is None or info != self.pins.get(path) or count != len(target):
            self._judge(path, offset, len(target), count, info)

    def read_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each target from its offset on, as `read_into` does. For many small reads; several run concurrently."""
        if self.guards:
            for offset, target in pieces:
                self.check(path, offset, len(target))
        ahead, pin = self.ahead, self.pins.get(path)
        if ahead is not None:
            pieces = [piece for piece in pieces if not ahead.take(path, *piece, pin)]
        try:
            self._fetch_pieces(path, pieces)
        except OSError as e:
            raise_unreadable(self.root, path, e)

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
            if info is None and (pin is not None or self.pins):  # without pins it is being opened, and pinned then
                verify_later(self, path)
            return
        if info is None:
            self.verify(path)
        raise CorruptError(
            f"{self.root}/{path}: expected {wanted:,} bytes from {offset:,} on, got {count:,}: truncated? Copy it "
            "again from its source."
        )

    def verify(self, path: str) -> None:
        """Compare the current state of a file with its pin or, without one, with the first state that was seen. Raises
        ChangedFileError, MissingFileError."""
        if (document := self._document_of(path)) in self._unverified:
            self.verify(document)
        pin = self.pins.get(path) or self._seen.get(path)
        if pin is not None:
            info = self._state(path)
            # a document is often written anew with the same bytes: then its time tells that its array was, too
            is_later = path in self._unverified and info.mtime_ns and pin.mtime_ns and info.mtime_ns != pin.mtime_ns
            if is_later or not info.may_be(pin):
                raise changed(self.root, path, pin, info)
            self._unverified.discard(path)

    def _document_of(self, path: str) -> str:
        """Return the document to verify after the first access to a file, see `Listed`; "" if there is none."""
        return self.pins.document(path) if isinstance(self.pins, Listed) else ""

    def settle(self, path: str) -> None:
        """Verify a file whose bytes were read and are about to be cached, if reads do not report its state. Raises as
        `verify`."""
        if not self._reports_state:
            self.verify(path)

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

    def stored(self, path: str, offset: int, length: int) -> Stored | None:
        """Return where bytes of a file are in an open local file; None if they are not in one as they are, or if its
        file system is behind a network. Raises what `read` raises before it reads."""
        if self.guards:
            self.check(path, offset, length)
        return self._stored(path, offset, length)

    def _stored(self, path: str, offset: int, length: int) -> Stored | None:
        """Return the same as `stored`, without the check of a guard."""
        return None

    def outside(self, path: str, offset: int) -> tuple[str, str, int]:
        """Return the root, the path and the offset by which other programs find a byte of a file. Raises DataError if
        it is in no file as it is."""
        return self.root, path, offset

    def close(self) -> None:
        """Release this store's files and connections; later reads raise DataError. Closing twice is allowed. Other
        stores of the same folder are not affected."""
        self.closed = True
        self.stop_ahead()

    # -- implementation

    def _state(self, path: str) -> FileInfo:
        try:
            return self._stat(path)
        except OSError as e:
            raise_unreadable(self.root, path, e)

    is_remote = False  # whether a request takes as long as reading a hundred KB, because files are behind a network
    _reports_state = True  # whether every read reports the file's state; if False, `_stat` has to be called for it

    def _remember(self, path: str, info: FileInfo) -> None:
        first = self._seen.setdefault(path, info)
        if first is not info and not first.may_be(info):
            self.was_replaced = self.was_replaced or not self.pins  # a reader may go on with other files
            raise changed(self.root, path, first, info)
        document = self._document_of(path)
        if document and (first is info or document in self._unverified):
            self._unverified.add(document)
            verify_later(self, document)
        if len(self._seen) > _SEEN:
            self._seen.pop(next(iter(self._seen)), None)


def changed(root: str, path: str, pin: FileInfo, now: FileInfo) -> ChangedFileError:
    """Return the error for a read of a file that changed since it was pinned."""
    what = f"it had {pin.size:,} bytes, now it has {now.size:,}, or it was written to since"
    if ABSENT in (pin, now):
        what = "it did not exist then, now it does" if pin == ABSENT else "it does not exist any more"
    return ChangedFileError(f"{root}/{path} is not the file that was opened: {what}. Open the checkpoint again.")


def raise_unreadable(root: str, path: str, e: OSError) -> NoReturn:
    """Raise the error for a file on which a store raised ``e``: of the disk, the network, or permissions. Other files
    of the checkpoint may be readable, so readers report it as a problem of this file."""
    if isinstance(e, LazyckptError):
        raise e
    where = f"{root}/{path}" if path else root
    what = e.strerror or str(e).removeprefix(f"{where}: ")
    error = MissingFileError(f"{where} cannot be read: {what}" if path else f"{where}: {what}")
    error.errno = e.errno or errno.EIO
    raise error from e


def closed_error(root: str) -> DataError:
    """Return the error for a read from a closed store."""
    return DataError(f"{root} is closed: its view was closed, or its with-statement has ended. Open it again to read.")
