"""Local files: positioned reads, and mappings for sparse reads and for small reads that are already in memory.

Measured (warm, 2 cores): a mapped slice of 64 KiB to 16 MiB copies about twice as fast as a positioned read of it;
above that, reads on several threads are faster and do not add file pages to the process. Cold, a positioned read
fetches exactly its pages, while a mapping faults them one by one, so a mapping is used only where it is resident or
where few pages are needed. Read-ahead is disabled: reading a slice must not read its neighbours.

Files of network file systems (mounts.py) are never mapped, and read with read-ahead, by few and large requests.

A file is checked after its bytes were copied, not before, so that concurrent writes are detected, too.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from time import monotonic
from typing import Any, TypeVar

from ...core.index import FileInfo
from ...core.requests import Ints
from ...errors import ChangedFileError, CorruptError, DataError, LazyckptError, MissingFileError
from ..system import File, after_fork, open_files
from .access import guarded
from .base import Entry, Fetched, Guard, Listing, Store, Stored, closed_error
from .held import Held, kept, take
from .listed import portable
from .mapping import Mapped, map_file
from .mounts import LOCAL, Access, access, mode_of
from .spellings import mistyped

_OPEN_FILES = 128  # well under the usual limit of 1,024 descriptors
_OPEN_REMOTE = 1024  # on file servers, where opening takes a request: at most a quarter of what the process may open
_MAPPINGS = 128  # each keeps a descriptor open, too
_JOINED = mmap.PAGESIZE - 1  # bytes of a gap that costs less to read than a second system call: no page lies in it
_VECTOR = 1024  # most targets of a vectored read, on all systems
_RETRIES = 5  # attempts to open a file while other threads take the freed descriptors
_STALE = "{}: the file server has no longer the file that was opened: it was replaced or removed. Open it again."
# errors of a file server that does not answer, and of the connection to it
_FAILURES = frozenset(
    getattr(errno, name, -1) for name in ("EIO", "ETIMEDOUT", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN")
)
_FAILS = "{}: {}: the file server or the disk failed. Check the mount, and read again."
_GONE = "{}: mapped bytes of this file are gone: the file was truncated, or its disk failed. Open the checkpoint again."

_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()
_stores_lock = threading.Lock()
T = TypeVar("T")


def _guarded(root: str, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard], io: str = "auto") -> Store:
    return guarded(LocalStore(root, pins, io), guards)


class LocalStore(Store):
    """A folder of a file system, also of a mounted one of a network.

    Parameters
    ----------
    root
        Path of the folder.
    pins
        See `Store`.
    io
        How to read files: one of `mounts.MODES`. "auto" is what the variable ``LAZYCKPT_IO`` says where the store is
        made or unpickled, if it is set.

    Raises
    ------
    DataError
        There is no such mode.
    """

    def __init__(
        self, root: str | os.PathLike[str], pins: Mapping[str, FileInfo] | None = None, io: str = "auto"
    ) -> None:
        super().__init__(pins)
        self._root = os.path.abspath(os.fspath(root))
        self.asked_io = io
        self._mode = mode_of(io)
        self._access: Access | None = None  # that of the root, once it is known
        # ctime and link count of each file at its first access by this process: a modification time can be set back
        self._changes: dict[str, tuple[int, int]] = {}
        self._forget()
        with _stores_lock:
            _stores.add(self)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._files.clear()
            self.maps.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.guards:
            return _guarded, (self._root, portable(self.pins), dict(self.guards), self.asked_io)
        return LocalStore, (self._root, portable(self.pins), self.asked_io)

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def root(self) -> str:
        return self._root

    @property
    def gap(self) -> int:
        return self.access.gap

    @property
    def maps_files(self) -> bool:
        return self.access.maps

    @property
    def access(self) -> Access:
        """How files of the root's file system are read. Files of another one, behind links, have their own."""
        if self._access is None:
            try:
                device = os.stat(os.path.join(self._root, ".")).st_dev  # "/.": what an automounter mounts there
            except (OSError, ValueError):  # no such folder: nothing is read
                return LOCAL
            self._access = access(self._mode, self._root, device)
        return self._access

    def _maps(self, path: str, s: os.stat_result) -> bool:
        """Return whether to map a file."""
        return access(self._mode, self._full(path), s.st_dev).maps

    def below(self, folder: str) -> LocalStore:
        return LocalStore(os.path.join(self._root, folder), io=self.asked_io)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        found = Listing()
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
                for entry in entries:
                    try:
                        s = entry.stat()
                    except OSError:  # a dangling link, or removed during the scan
                        with suppress(OSError, ValueError):
                            found.dangling[entry.name] = os.readlink(entry.path)
                        continue
                    found[entry.name] = Entry(FileInfo(s.st_size, s.st_mtime_ns), entry.is_dir())
                    found.changes.append((s.st_ctime_ns, s.st_ino))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise self._failed(folder or ".", e) from None
        return found

    def _with(self, pins: Mapping[str, FileInfo]) -> LocalStore:
        store = LocalStore(self._root, pins, self.asked_io)
        store._changes, store._access = self._changes, self._access
        return store

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        super().pin(pins)
        with self._lock:  # a file that is replaced meanwhile must be seen: open them again
            self._files.clear()
            self.maps.clear()

    def _stat(self, path: str) -> FileInfo:
        s = self._opened_status(path) if self.gap and path not in self.pins else None
        if s is None:
            try:
                s = os.stat(self._full(path))
            except (OSError, ValueError) as e:
                raise self._failed(path, e) from None
        self._check_kind(path, s.st_mode)
        return FileInfo(s.st_size, s.st_mtime_ns)

    def _check_kind(self, path: str, mode: int) -> None:
        if not S_ISREG(mode):
            raise CorruptError(f"{self._full(path)} is {'a folder' if S_ISDIR(mode) else 'no regular file'}")

    @property
    def joins(self) -> bool:
        return self.gap > 0

    @contextmanager
    def holding(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[None]:
        held: dict[tuple[int, str], Held] = {}
        for path, (offsets, lengths) in wanted.items() if self.joins else ():
            one = Held(offsets, lengths)
            try:
                self.read_pieces(path, one.pieces)
            except LazyckptError:  # the read that wants it raises it, for its tensor alone
                continue
            held[id(self), path] = one
        with kept(held):
            yield

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        if take(self, path, offset, target):
            return len(target), self.pins.get(path)
        file = self._open(path)
        done, wanted = 0, len(target)
        while done < wanted:
            try:
                got = file.read_at(offset + done, target[done:] if done else target)
            except OSError as e:
                raise self._failed(path, e) from None
            if got == 0:
                break
            done += got
        return done, self._info(path, self._status(path, file))

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        if self.joins:
            pieces = [piece for piece in pieces if not take(self, path, *piece)]
        file = self._open(path)
        for offset, targets, nbytes in _vectors(pieces, max(_JOINED, self.gap)):
            try:
                whole = file.read_vector(offset, targets) == nbytes
            except OSError:
                whole = False
            for target in () if whole else targets:  # truncated, unreadable, or a short read
                self.unguarded(path, offset, target)
                offset += len(target)
        self._judge(path, 0, 0, 0, self._info(path, self._status(path, file)))

    def map(self, path: str) -> Mapped | None:
        mapped = self.maps.get(path)
        if mapped is None:
            if not self.maps_files:
                return None
            file = self._open(path)
            s = file.stat()
            mapped = map_file(file.fd, s.st_size, file) if self._maps(path, s) else None
            if mapped is None:
                return None
            with self._lock:
                mapped = self.maps.setdefault(path, mapped)
                while len(self.maps) > _MAPPINGS:
                    self.maps.pop(next(iter(self.maps)))
        return mapped

    def confirm(self, path: str, mapped: Mapped) -> None:
        now, broken = monotonic(), mapped.addresses.broken
        assert mapped.owner is not None  # a mapping of `map`
        s = mapped.owner.stat()
        if broken or s.st_ctime_ns != mapped.state:  # else the file is untouched
            self._judge(path, 0, 0, 0, self._info(path, s))
            if broken:
                self.maps.pop(path, None)
                raise ChangedFileError(_GONE.format(self._full(path)))
            mapped.state = s.st_ctime_ns
        mapped.confirm(now)

    def _stored(self, path: str, offset: int, length: int) -> Stored | None:
        if self.gap:
            return None
        file = self._open(path)
        s = self._status(path, file)
        if access(self._mode, self._full(path), s.st_dev).gap:  # behind a link
            return None
        self._judge(path, offset, length, max(0, min(length, s.st_size - offset)), self._info(path, s))

        def confirm() -> None:
            self._judge(path, 0, 0, 0, self._info(path, self._status(path, file)))

        def failed(e: OSError) -> LazyckptError:
            confirm()
            return self._failed(path, e)

        return Stored(file, offset, length, confirm, failed)

    def private(self, path: str) -> memoryview | None:
        if not self.maps_files:
            return None
        file = self._open(path)
        s = file.stat()
        if not self._maps(path, s):
            return None
        self._judge(path, 0, 0, 0, self._info(path, s))
        mapped = map_file(file.fd, s.st_size, message=_GONE.format(self._full(path)))
        return None if mapped is None else mapped.buffer

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _failed(self, path: str, e: OSError | ValueError) -> MissingFileError | ChangedFileError:
        """Return the error for a call of the system that failed."""
        number, full = getattr(e, "errno", None), self._full(path)
        if number == errno.ESTALE:
            return ChangedFileError(_STALE.format(full))
        what = getattr(e, "strerror", None) or e
        if number in _FAILURES:
            error = MissingFileError(_FAILS.format(full, what))
        else:
            error = MissingFileError(f"{full}: {what}. Is the whole checkpoint here, and readable?")
        error.errno = number
        return error

    def _status(self, path: str, file: File) -> os.stat_result:
        try:
            return file.stat()
        except OSError as e:
            raise self._failed(path, e) from None

    def _opened_status(self, path: str) -> os.stat_result | None:
        """Return the status of a file that is about to be read, and keep it open: one request to a file server tells
        both. None if it cannot be opened, or is open: then its state now is wanted, not that of the open file. Raises
        MissingFileError if it does not exist."""
        if path in self._files:
            return None
        try:
            file = File(self._full(path))
            s = file.stat()
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._failed(path, e) from None
        except (OSError, ValueError):
            return None
        if S_ISREG(s.st_mode):
            self._keep(path, file)
        return s

    def _open(self, path: str) -> File:
        if self.closed:
            raise closed_error(self._root)
        file = self._files.get(path)
        if file is None:
            with self._lock:
                opening = self._opening.setdefault(path, threading.Lock())
            with opening:  # one thread opens it, the others wait: each opening is a request to a file server
                file = self._files.get(path) or self._opened(path)
            self._opening.pop(path, None)
        return file

    def _opened(self, path: str) -> File:
        """Open a file, and keep it open."""
        if not self.gap and path not in self.pins and path not in self._seen:
            self._stat(path)  # raises if it is not a regular file
        try:
            file = _again_if_full(lambda: File(self._full(path)))
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                raise DataError(
                    f"{self._full(path)}: no file descriptor is left to open it with. Close files, or raise the "
                    "limit (ulimit -n)"
                ) from None
            raise self._failed(path, e) from None
        s = self._status(path, file)
        self._check_kind(path, s.st_mode)
        if not access(self._mode, self._full(path), s.st_dev).gap:
            file.without_read_ahead()  # reading a slice must not read its neighbours
        return self._keep(path, file)

    def _keep(self, path: str, file: File) -> File:
        """Keep an open file for further reads; return it, or the one that another thread has opened first."""
        most = remote_files() if self.gap else _OPEN_FILES
        with self._lock:
            file = self._files.setdefault(path, file)
            while len(self._files) > most:
                self._files.pop(next(iter(self._files)))
        return file

    def _info(self, path: str, s: os.stat_result) -> FileInfo:
        """Return the state of an open file. Raises ChangedFileError if it was written to and its time was set back."""
        info = FileInfo(s.st_size, s.st_mtime_ns)
        pin = self.pins.get(path)
        if pin is None and self.pins:
            return info
        change = (s.st_ctime_ns, s.st_nlink)
        first = self._changes.setdefault(path, change)
        # adding or removing a hard link changes the ctime, too, but no bytes
        if first[0] != change[0] and first[1] == change[1]:
            if info == pin:
                raise ChangedFileError(
                    f"{self._full(path)} is not the file that was opened: its content or permissions changed since, "
                    "though size and modification time are the same. Open the checkpoint again."
                )
            self._changes[path] = change
        return info

    def _forget(self) -> None:
        """Drop all cached descriptors; reads in progress keep theirs open until they end."""
        self._lock = threading.Lock()
        self._files: dict[str, File] = {}
        self._opening: dict[str, threading.Lock] = {}  # of the files that a thread is opening
        self.maps = {}


def _vectors(pieces: Sequence[tuple[int, memoryview]], most: int) -> Iterator[tuple[int, list[memoryview], int]]:
    """Join pieces with gaps of at most ``most`` bytes into vectored reads: (offset, what to fill, bytes). The gaps are
    read, too, into memory that nobody looks at."""
    discarded = _discarded(most)
    targets: list[memoryview] = []
    start = end = 0
    for offset, target in pieces:
        gap = offset - end
        if targets and (not 0 <= gap <= most or len(targets) > _VECTOR - 2):
            yield start, targets, end - start
            targets = []
        if not targets:
            start = offset
        elif gap:
            targets.append(discarded[:gap])
        targets.append(target)
        end = offset + len(target)
    if targets:
        yield start, targets, end - start


@cache
def _discarded(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


@cache
def remote_files() -> int:
    """Return how many files of a file server a store keeps open."""
    return max(_OPEN_FILES, min(_OPEN_REMOTE, open_files() // 4))


def _all_stores() -> list[LocalStore]:
    with _stores_lock:
        return list(_stores)


def _again_if_full(make: Callable[[], T]) -> T:
    """Call ``make``; if the process is out of descriptors, retry after all stores have dropped their cached ones."""
    for _ in range(_RETRIES):
        try:
            return make()
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        for store in _all_stores():
            with store._lock:
                store._files, store.maps = {}, {}
    return make()


def _after_fork() -> None:
    """Replace the locks in a forked child: a thread of its parent may hold any of them."""
    global _stores_lock
    _stores_lock = threading.Lock()
    for store in _all_stores():
        store._forget()


after_fork(_after_fork)


def split(path: str | os.PathLike[str], io: str = "auto") -> tuple[LocalStore, str]:
    """Return the store for a user's path and the name within the store. A folder has the name ""; a file is opened in
    the store of its parent folder. ``io``: see `LocalStore`.

    Raises MissingFileError if the path does not exist, DataError if there is no such ``io``.
    """
    if not os.fspath(path):
        raise MissingFileError("the path is empty: name a file or folder ('.' is the current folder)")
    full = Path(os.path.expanduser(os.fspath(path)))
    try:
        mode = full.stat().st_mode
    except (OSError, ValueError) as e:
        what = "no such file or folder" if isinstance(e, FileNotFoundError) else getattr(e, "strerror", None) or e
        meant = mistyped(os.fspath(path)) if isinstance(e, FileNotFoundError) else None
        hint = f". As a URL, it is {meant[:300]}" if meant else ""
        with suppress(OSError, ValueError):
            hint = f". It is a link to {os.readlink(full)[:300]}, which is missing"
        raise MissingFileError(f"{str(full)[:300]}: {what}{hint}") from None
    return (LocalStore(full, io=io), "") if S_ISDIR(mode) else (LocalStore(full.parent, io=io), full.name)
