"""Files on this machine: positioned reads, and a mapping for what is sparse, or small and already in memory.

Measured (warm, 2 cores): a mapped slice of 64 KiB to 16 MiB copies about twice as fast as a positioned read of it;
above that, reads on several threads win, and they do not fill the process with file pages. Cold, a positioned read
fetches exactly its pages, while a mapping faults them one by one: so a mapping is touched only where it is resident
or where few pages are wanted. No read-ahead is asked for: a slice must not cost its neighbours.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar

import torch

from ..core.index import FileInfo
from ..errors import ChangedFileError, CorruptError, DataError, MissingFileError
from .store import Entry, Mapped, Store, closed_error

_OPEN_FILES = 128  # well under the usual limit of 1,024 descriptors
_MAPPINGS = 128  # each keeps one, too
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
if _libc is not None:
    _state = ctypes.create_string_buffer(1)
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()
T = TypeVar("T")


class _File:
    """An open descriptor; closed when the last user lets go of it."""

    def __init__(self, full: str) -> None:
        self.fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not keep us waiting
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def info(self) -> FileInfo:
        s = os.fstat(self.fd)
        return FileInfo(s.st_size, s.st_mtime_ns)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` may be gone
        if hasattr(self, "fd"):
            close(self.fd)


class LocalStore:
    """A folder of the local file system (network file systems count as local if they are mounted)."""

    def __init__(self, root: str | os.PathLike[str], pins: Mapping[str, FileInfo] | None = None) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self.pins: Mapping[str, FileInfo] = pins or {}
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._maps: dict[str, Mapped] = {}
        self._closed = False
        _stores.add(self)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._files.clear()
            self._maps.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self._root, dict(self.pins))

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def root(self) -> str:
        return self._root

    @property
    def gap(self) -> int:
        return 0  # a system call is cheap, and what is sparse is read through a mapping

    def pinned(self, pins: Mapping[str, FileInfo]) -> LocalStore:
        return LocalStore(self._root, pins)

    def below(self, folder: str) -> LocalStore:
        return LocalStore(os.path.join(self._root, folder))

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        found = {}
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
                for entry in entries:
                    try:
                        s = entry.stat()
                    except OSError:  # a dangling link, or removed while we look
                        continue
                    found[entry.name] = Entry(FileInfo(s.st_size, s.st_mtime_ns), entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise self._missing(folder or ".", e) from None
        return found

    def stat(self, path: str) -> FileInfo:
        try:
            s = os.stat(self._full(path))
        except (OSError, ValueError) as e:
            raise self._missing(path, e) from None
        if not S_ISREG(s.st_mode):
            raise CorruptError(f"{self._full(path)} is {'a folder' if S_ISDIR(s.st_mode) else 'no regular file'}")
        return FileInfo(s.st_size, s.st_mtime_ns)

    def read(self, path: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        file = self._open(path)
        done = 0
        while done < len(target):
            try:
                got = os.preadv(file.fd, [target[done:]], offset + done)
            except OSError as e:
                raise self._missing(path, e) from None
            if got == 0:
                raise CorruptError(
                    f"{self._full(path)}: bytes {offset:,} to {offset + len(target):,} are wanted, the file ends at "
                    f"{offset + done:,}: truncated? Copy it again from its source."
                )
            done += got

    def map(self, path: str) -> Mapped | None:
        file = self._open(path)
        mapped = self._maps.get(path)
        if mapped is None:
            try:
                buffer = _again_if_full(lambda: _mapping(file))
            except OSError:  # no descriptor or no address space is left: reading needs neither
                return None
            if buffer is None:
                return None
            buffer.madvise(mmap.MADV_RANDOM)
            mapped = Mapped(buffer)
            with self._lock:
                self._maps[path] = mapped
                while len(self._maps) > _MAPPINGS:
                    self._maps.pop(next(iter(self._maps)))
        return mapped

    def private(self, path: str) -> memoryview | None:
        size = self._open(path).info().size
        if size == 0:
            return None
        try:  # torch's mapping keeps no descriptor, which a view of a thousand files would run out of
            array = torch.from_file(self._full(path), shared=False, size=size, dtype=torch.uint8).numpy()
        except RuntimeError:  # larger than the system lets a private mapping be
            return None
        return array.data

    def resident(self, view: torch.Tensor) -> bool:
        if _libc is None or view.numel() == 0:
            return view.numel() == 0
        start = view.data_ptr()
        # A sample, both ends: a wrong guess costs time, never correctness (so threads may share the answer's byte).
        return _page_resident(start + view.nbytes - 1) and _page_resident(start)

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _missing(self, path: str, e: OSError | ValueError) -> MissingFileError:
        error = MissingFileError(
            f"{self._full(path)}: {getattr(e, 'strerror', None) or e}. Is the whole checkpoint here, and readable?"
        )
        error.errno = getattr(e, "errno", None)
        return error

    def _open(self, path: str) -> _File:
        """The open file, checked against its pin."""
        if self._closed:
            raise closed_error(self._root)
        file = self._files.get(path)
        if file is None:
            self.stat(path)  # only a regular file is opened
            try:
                file = _again_if_full(lambda: _File(self._full(path)))
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    raise DataError(
                        f"{self._full(path)}: no file descriptor is left to open it with. Close files, or raise the "
                        "limit (ulimit -n)"
                    ) from None
                raise self._missing(path, e) from None
            with self._lock:
                self._files[path] = file
                while len(self._files) > _OPEN_FILES:
                    self._files.pop(next(iter(self._files)))
        pin = self.pins.get(path)
        if pin is None:
            return file
        now = os.fstat(file.fd)
        if now.st_size != pin.size or now.st_mtime_ns != pin.mtime_ns:
            raise ChangedFileError(
                f"{self._full(path)} is not the file that was opened: it had {pin.size:,} bytes, now it has "
                f"{now.st_size:,}, or it was written to since. Open the checkpoint again."
            )
        return file


def _again_if_full(make: Callable[[], T]) -> T:
    """What ``make`` gives; if the process is out of descriptors, once more after all stores have let go of theirs."""
    try:
        return make()
    except OSError as e:
        if e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        for store in list(_stores):
            store._files.clear()
            store._maps.clear()
        return make()


def _page_resident(address: int) -> bool:
    return _libc is not None and _libc.mincore(address & -_PAGE, 1, _state) == 0 and bool(_state.raw[0] & 1)


def _mapping(file: _File) -> mmap.mmap | None:
    size = file.info().size
    if size == 0:
        return None
    # Without MAP_NORESERVE a private mapping of a file larger than memory may be refused.
    flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0)
    return mmap.mmap(file.fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def split(path: str | os.PathLike[str]) -> tuple[LocalStore, str]:
    """The store and the name inside it for a path of the user: a folder is ("" in itself), a file lies in its parent.

    Raises MissingFileError if there is nothing.
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


_check: type[Store] = LocalStore
