"""Features that depend on the operating system, with their fallbacks.

Linux has all of them. macOS lacks `posix_fadvise` and the guard of mapped files; Windows also lacks positioned reads.
The environment variable ``LAZYCKPT_PORTABLE=1`` disables every feature that has a fallback, so that tests on Linux can
run the fallbacks.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

PORTABLE = os.environ.get("LAZYCKPT_PORTABLE") == "1"

_MADV_HUGEPAGE = 14
HUGE = 4 << 20  # bytes; smaller memory is not worth a request for huge pages
_PAGE = 2 << 20  # bytes of a huge page
_OPEN = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
    | getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
    | getattr(os, "O_NOINHERIT", 0)
)
_linux = sys.platform == "linux" and not PORTABLE
_preadv = None if PORTABLE else getattr(os, "preadv", None)
_fadvise = None if PORTABLE else getattr(os, "posix_fadvise", None)
_libc = ctypes.CDLL(None) if _linux else None


class File:
    """A file open for reading, closed when the last reference to it is deleted.

    Parameters
    ----------
    path
        Path of a regular file.

    Raises
    ------
    OSError
        The file cannot be opened.
    """

    __slots__ = ("_lock", "fd")

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, _OPEN)
        self._lock = threading.Lock()
        if _fadvise is not None:  # no read-ahead: reading a slice must not read its neighbours
            _fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at interpreter shutdown `os` may be None
        if hasattr(self, "fd"):
            close(self.fd)

    def read_at(self, offset: int, target: memoryview) -> int:
        """Read into ``target`` from ``offset`` on; thread-safe. Return the number of bytes read, 0 at the end."""
        if _preadv is not None:
            found: int = _preadv(self.fd, [target], offset)
            return found
        with self._lock:  # all threads share the file position
            os.lseek(self.fd, offset, os.SEEK_SET)
            data = os.read(self.fd, len(target))
        target[: len(data)] = data
        return len(data)

    def stat(self) -> os.stat_result:
        """Return the current status of the open file."""
        return os.fstat(self.fd)


def mapping_library() -> ctypes.CDLL | None:
    """Return the C library if files can be mapped safely: the guard against truncated files needs a known layout of
    ``struct sigaction``. Return None on other systems, where files are read and not mapped."""
    if _libc is None or sys.maxsize <= 1 << 32 or os.uname().machine not in ("x86_64", "aarch64", "riscv64"):
        return None
    return _libc


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for the part of new memory that consists of whole huge pages. The system may refuse."""
    if _libc is None:
        return
    start = -(-address // _PAGE) * _PAGE
    stop = (address + nbytes) // _PAGE * _PAGE
    if stop > start:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def after_fork(reset: Callable[[], None]) -> None:
    """Call ``reset`` in every forked child, where threads of the parent may hold locks. Do nothing without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
