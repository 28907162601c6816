"""Local files: positioned reads, and mappings for sparse reads and for small reads that are already in memory.

Measured (warm, 2 cores): a mapped slice of 64 KiB to 16 MiB copies about twice as fast as a positioned read of it;
above that, reads on several threads are faster and do not add file pages to the process. Cold, a positioned read
fetches exactly its pages, while a mapping faults them one by one, so a mapping is used only where it is resident or
where few pages are needed. Read-ahead is disabled: reading a slice must not read its neighbours.

A file is checked after its bytes were copied, not before, so that concurrent writes are detected, too.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from time import monotonic
from typing import Any, TypeVar

from ...core.index import FileInfo
from ...errors import ChangedFileError, CorruptError, DataError, MissingFileError
from ..system import File, after_fork
from .base import Entry, Fetched, Guard, Listing, Store, closed_error, guarded
from .mapping import Mapped, map_file

_OPEN_FILES = 128  # well under the usual limit of 1,024 descriptors
_MAPPINGS = 128  # each keeps a descriptor open, too
_JOINED = mmap.PAGESIZE - 1  # bytes of a gap that costs less to read than a second system call: no page lies in it
_VECTOR = 1024  # most targets of a vectored read, on all systems
_DISCARDED = memoryview(bytearray(_JOINED))
_RETRIES = 5  # attempts to open a file while other threads take the freed descriptors
_GONE = "{}: mapped bytes of this file are gone: the file was truncated, or its disk failed. Open the checkpoint again."

_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()
_stores_lock = threading.Lock()
T = TypeVar("T")


def _guarded(root: str, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    return guarded(LocalStore(root, pins), guards)


class LocalStore(Store):
    """A folder of the local file system (network file systems count as local if they are mounted)."""

    maps_files = True

    def __init__(self, root: str | os.PathLike[str], pins: Mapping[str, FileInfo] | None = None) -> None:
        super().__init__(pins)
        self._root = os.path.abspath(os.fspath(root))
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
            return _guarded, (self._root, dict(self.pins), dict(self.guards))
        return LocalStore, (self._root, dict(self.pins))

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def root(self) -> str:
        return self._root

    @property
    def gap(self) -> int:
        return 0  # a system call is cheap

    def below(self, folder: str) -> LocalStore:
        return LocalStore(os.path.join(self._root, folder))

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        found = Listing()
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
                for entry in entries:
                    try:
                        s = entry.stat()
                    except OSError:  # a dangling link, or removed during the scan
                        continue
                    found[entry.name] = Entry(FileInfo(s.st_size, s.st_mtime_ns), entry.is_dir())
                    found.changes.append((s.st_ctime_ns, s.st_ino))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise self._missing(folder or ".", e) from None
        return found

    def _with(self, pins: Mapping[str, FileInfo]) -> LocalStore:
        store = LocalStore(self._root, pins)
        store._changes = self._changes
        return store

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        super().pin(pins)
        with self._lock:  # a file that is replaced meanwhile must be seen: open them again
            self._files.clear()
            self.maps.clear()

    def _stat(self, path: str) -> FileInfo:
        try:
            s = os.stat(self._full(path))
        except (OSError, ValueError) as e:
            raise self._missing(path, e) from None
        self._check_kind(path, s.st_mode)
        return FileInfo(s.st_size, s.st_mtime_ns)

    def _check_kind(self, path: str, mode: int) -> None:
        if not S_ISREG(mode):
            raise CorruptError(f"{self._full(path)} is {'a folder' if S_ISDIR(mode) else 'no regular file'}")

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        file = self._open(path)
        done, wanted = 0, len(target)
        while done < wanted:
            try:
                got = file.read_at(offset + done, target[done:] if done else target)
            except OSError as e:
                raise self._missing(path, e) from None
            if got == 0:
                break
            done += got
        return done, self._info(path, file.stat())

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        file = self._open(path)
        for offset, targets, nbytes in _vectors(pieces):
            try:
                whole = file.read_vector(offset, targets) == nbytes
            except OSError:
                whole = False
            for target in () if whole else targets:  # truncated, unreadable, or a short read
                self.unguarded(path, offset, target)
                offset += len(target)
        self._judge(path, 0, 0, 0, self._info(path, file.stat()))

    def map(self, path: str) -> Mapped | None:
        mapped = self.maps.get(path)
        if mapped is None:
            file = self._open(path)
            mapped = map_file(file.fd, file.stat().st_size, file)
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

    def private(self, path: str) -> memoryview | None:
        file = self._open(path)
        s = file.stat()
        self._judge(path, 0, 0, 0, self._info(path, s))
        mapped = map_file(file.fd, s.st_size, message=_GONE.format(self._full(path)))
        return None if mapped is None else mapped.buffer

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _missing(self, path: str, e: OSError | ValueError) -> MissingFileError:
        error = MissingFileError(
            f"{self._full(path)}: {getattr(e, 'strerror', None) or e}. Is the whole checkpoint here, and readable?"
        )
        error.errno = getattr(e, "errno", None)
        return error

    def _open(self, path: str) -> File:
        if self.closed:
            raise closed_error(self._root)
        file = self._files.get(path)
        if file is None:
            if path not in self.pins and path not in self._seen:
                self._stat(path)  # raises if it is not a regular file
            try:
                file = _again_if_full(lambda: File(self._full(path)))
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    raise DataError(
                        f"{self._full(path)}: no file descriptor is left to open it with. Close files, or raise the "
                        "limit (ulimit -n)"
                    ) from None
                raise self._missing(path, e) from None
            self._check_kind(path, file.stat().st_mode)
            with self._lock:
                file = self._files.setdefault(path, file)
                while len(self._files) > _OPEN_FILES:
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
        self.maps = {}


def _vectors(pieces: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview], int]]:
    """Join pieces with small gaps into vectored reads: (offset, what to fill, bytes). Gaps are read, too, into memory
    that nobody looks at."""
    targets: list[memoryview] = []
    start = end = 0
    for offset, target in pieces:
        gap = offset - end
        if targets and (not 0 <= gap <= _JOINED or len(targets) > _VECTOR - 2):
            yield start, targets, end - start
            targets = []
        if not targets:
            start = offset
        elif gap:
            targets.append(_DISCARDED[:gap])
        targets.append(target)
        end = offset + len(target)
    if targets:
        yield start, targets, end - start


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


def split(path: str | os.PathLike[str]) -> tuple[LocalStore, str]:
    """Return the store for a user's path and the name within the store. A folder has the name ""; a file is opened in
    the store of its parent folder.

    Raises MissingFileError if the path does not exist.
    """
    if not os.fspath(path):
        raise MissingFileError("the path is empty: name a file or folder ('.' is the current folder)")
    full = Path(os.path.expanduser(os.fspath(path)))
    try:
        mode = full.stat().st_mode
    except (OSError, ValueError) as e:
        what = "no such file or folder" if isinstance(e, FileNotFoundError) else getattr(e, "strerror", None) or e
        raise MissingFileError(f"{str(full)[:300]}: {what}") from None
    return (LocalStore(full), "") if S_ISDIR(mode) else (LocalStore(full.parent), full.name)
