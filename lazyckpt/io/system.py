"""What operating systems offer in different ways, or not at all: asked for here, with what is done without it.

Linux has all of it. macOS lacks `posix_fadvise` and the guard of mapped files, Windows positioned reads as well. The
environment variable ``LAZYCKPT_PORTABLE=1`` takes away whatever has a replacement, so that tests on Linux run those.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

PORTABLE = os.environ.get("LAZYCKPT_PORTABLE") == "1"

_MADV_HUGEPAGE = 14
HUGE = 4 << 20  # bytes of memory that are worth asking for
_PAGE = 2 << 20  # of a huge page
_OPEN = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not keep us waiting
    | getattr(os, "O_BINARY", 0)  # of Windows, which translates line ends otherwise
    | getattr(os, "O_NOINHERIT", 0)
)
_linux = sys.platform == "linux" and not PORTABLE
_preadv = None if PORTABLE else getattr(os, "preadv", None)
_fadvise = None if PORTABLE else getattr(os, "posix_fadvise", None)
_libc = ctypes.CDLL(None) if _linux else None


class File:
    """A file that is open for reading; closed when the last user lets go of it.

    Parameters
    ----------
    path
        Of a regular file.

    Raises
    ------
    OSError
        It cannot be opened.
    """

    __slots__ = ("_lock", "fd")

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, _OPEN)
        self._lock = threading.Lock()
        if _fadvise is not None:  # no read-ahead: a slice must not cost its neighbours
            _fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` may be gone
        if hasattr(self, "fd"):
            close(self.fd)

    def read_at(self, offset: int, target: memoryview) -> int:
        """Read into ``target`` from ``offset`` on, from any thread. Returns the number of bytes, 0 at the end."""
        if _preadv is not None:
            found: int = _preadv(self.fd, [target], offset)
            return found
        with self._lock:  # the position belongs to all threads
            os.lseek(self.fd, offset, os.SEEK_SET)
            data = os.read(self.fd, len(target))
        target[: len(data)] = data
        return len(data)

    def stat(self) -> os.stat_result:
        """What the file is now."""
        return os.fstat(self.fd)


def mapping_library() -> ctypes.CDLL | None:
    """The C library, where files can be mapped safely: where the layout of ``struct sigaction`` is known, which the
    guard of truncated files needs. None elsewhere: then files are read, not mapped."""
    if _libc is None or sys.maxsize <= 1 << 32 or os.uname().machine not in ("x86_64", "aarch64", "riscv64"):
        return None
    return _libc


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages for fresh memory, as far as it has whole ones. The system is free to say no."""
    if _libc is None:
        return
    start = -(-address // _PAGE) * _PAGE
    stop = (address + nbytes) // _PAGE * _PAGE
    if stop > start:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def after_fork(reset: Callable[[], None]) -> None:
    """Call ``reset`` in every forked child, in which threads of the parent may hold locks. Systems without fork need
    nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
