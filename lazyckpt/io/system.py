"""Features that depend on the operating system, with their fallbacks.

Linux has all of them. macOS lacks `posix_fadvise` and the guard of mapped files; Windows also lacks positioned reads
and writes, access to files relative to an open directory, and POSIX locks. The environment variable
``LAZYCKPT_PORTABLE=1`` disables every feature that has a fallback, so that tests on Linux can run the fallbacks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # not Windows
    msvcrt = None  # type: ignore[assignment]

PORTABLE = os.environ.get("LAZYCKPT_PORTABLE") == "1"

_MADV_HUGEPAGE = 14
_M_ARENA_MAX = -8  # of glibc's malloc.h
HUGE = 4 << 20  # bytes; smaller memory is not worth a request for huge pages
_PAGE = 2 << 20  # bytes of a huge page
PLAIN = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
    | getattr(os, "O_NOINHERIT", 0)
)
_RESERVED_FROM = 1 << 20  # bytes; a smaller file is written in less time than its blocks are reserved in
_READ = 1 << 20  # bytes that are read at a time of a file that the system cannot send
# errors of file systems whose files the system cannot send
_NOT_SENT = frozenset((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP))
_AHEAD = 128 << 10  # bytes; Linux reads no more than the device's read-ahead, by default this, per request
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
OPEN = os.O_RDONLY | PLAIN | NONBLOCK
_linux = sys.platform == "linux" and not PORTABLE
_preadv = None if PORTABLE else getattr(os, "preadv", None)
_fadvise = None if PORTABLE else getattr(os, "posix_fadvise", None)
_VECTORS = 0 if PORTABLE or not hasattr(os, "pwritev") else 256  # buffers that one call writes; POSIX allows 16
_POSITIONED = not PORTABLE and hasattr(os, "pread") and hasattr(os, "pwrite")
# Whether files can be opened relative to an open directory, and open files removed and renamed.
SENDS_FILES = _linux and hasattr(os, "sendfile")
POSIX = not PORTABLE and os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY") and hasattr(os, "O_NOFOLLOW")
NOFOLLOW = os.O_NOFOLLOW if POSIX else 0
DIRECTORY = os.O_RDONLY | PLAIN | os.O_DIRECTORY if POSIX else 0
_LOCKED_BYTE = 1 << 30  # Windows' locks also keep others from reading the locked bytes; this one has no content
_libc = ctypes.CDLL(None) if _linux else None
_trim = getattr(_libc, "malloc_trim", None)  # not in musl
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if _linux and sys.maxsize > 1 << 32 else None


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
        self.fd = os.open(path, OPEN)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, fd: int) -> File:
        """Return the file of a descriptor, which is closed with it."""
        file = cls.__new__(cls)
        file.fd, file._lock = fd, threading.Lock()
        return file

    # the defaults, because the names of a module may be None at interpreter shutdown
    def __del__(self, close: Callable[[int], None] = os.close, failing: type[suppress] = suppress) -> None:
        if hasattr(self, "fd"):
            with failing(OSError):  # of a file server that is gone; the descriptor is free all the same
                close(self.fd)

    def without_read_ahead(self) -> None:
        """Let the system read only what is asked for, not what follows it, where it can."""
        if _fadvise is not None:
            _fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

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

    def read_vector(self, offset: int, targets: list[memoryview]) -> int:
        """Fill several targets from ``offset`` on, one after the other; return the number of bytes read."""
        if _preadv is not None:
            found: int = _preadv(self.fd, targets, offset)
            return found
        done = 0
        for target in targets:
            got = self.read_at(offset + done, target)
            done += got
            if got < len(target):
                break
        return done

    def writable(self) -> bool:
        """Return whether this process may write to the file. (It never does, but Linux tells only those who may write
        which pages of a mapping are in the page cache.)"""
        return os.access(f"/proc/self/fd/{self.fd}", os.W_OK)

    def cached(self, offset: int) -> bool:
        """Return whether the page of a byte is in the system's cache; False if the system cannot tell."""
        if _preadv is None or not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return bool(_preadv(self.fd, [bytearray(1)], offset, os.RWF_NOWAIT))
        except OSError:  # the page is not cached, or the file system cannot tell
            return False

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Start reading a range into the system's cache, without waiting for it."""
        if _fadvise is None:
            return
        for at in range(offset, offset + nbytes, _AHEAD):
            _fadvise(self.fd, at, min(_AHEAD, offset + nbytes - at), os.POSIX_FADV_WILLNEED)

    def send(self, out: int, offset: int, nbytes: int) -> int:
        """Send bytes from ``offset`` on over a connection that does not block, where `SENDS_FILES` is true. Return how
        many it takes now, 0 at the end of the file. Raises BlockingIOError if it takes none."""
        try:
            return os.sendfile(out, self.fd, offset, nbytes)
        except OSError as e:
            if e.errno not in _NOT_SENT:
                raise
            return os.write(out, os.pread(self.fd, min(nbytes, _READ), offset))

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


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps up to 64 MiB of it for each thread. The
    call takes some 50 us, and up to 1 ms if there is much to return."""
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


def share_heap() -> None:
    """Let the threads that this process starts from now on allocate from one heap, where the C library is glibc. Each
    has a heap of its own otherwise, and `trim_memory` returns no memory from the end of those.

    This is for processes that run one program of ours: `lazyckpt serve` takes 30 MiB less.
    """
    if _libc is not None and _trim is not None and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


@contextmanager
def without_openmp() -> Iterator[None]:
    """Let torch compute on the calling thread alone within the context; other threads are not affected.

    Several threads that each start as many threads of OpenMP as there are cores wait for each other: on a busy machine
    of 2 cores a block took 25 times as long (585 ms instead of 24 ms for 16 million elements). `torch.set_num_threads`
    would change the number for the whole process. Does nothing where torch's OpenMP cannot be called.
    """
    library = _openmp()
    if library is None:
        yield
        return
    before = library.omp_get_max_threads()
    if before == 1:
        yield
        return
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch has loaded; None if there is none."""
    if PORTABLE or "torch" not in sys.modules:
        return None
    try:
        library = ctypes.CDLL(None)
        return library if library.omp_get_max_threads and library.omp_set_num_threads else None
    except (AttributeError, OSError, TypeError):  # another library, or Windows
        return None


def open_files() -> int:
    """Return how many files this process may have open; 512 where the system cannot tell."""
    if resource is None:
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft < 0 else soft  # no limit


def widen_pipe(fd: int, nbytes: int) -> None:
    """Let a pipe hold so many bytes, where the system can and allows it."""
    if fcntl is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, nbytes)


def after_fork(reset: Callable[[], None]) -> None:
    """Call ``reset`` in every forked child, where threads of the parent may hold locks. Do nothing without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


# -- files that are written


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read up to ``nbytes`` bytes from ``offset`` on. No other thread may use the descriptor."""
    if _POSITIONED:
        return os.pread(fd, nbytes, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, nbytes)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at byte ``offset``. No other thread may use the descriptor."""
    rest = memoryview(data)
    while rest:
        if _POSITIONED:
            count = os.pwrite(fd, rest, offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            count = os.write(fd, rest)
        rest, offset = rest[count:], offset + count


def write_all_at(fd: int, buffers: Iterable[memoryview], offset: int) -> None:
    """Write buffers one after the other from byte ``offset`` on, with as few calls as possible. No other thread may use
    the descriptor."""
    rest = list(buffers)
    while _VECTORS and len(rest) > 1:
        some = rest[:_VECTORS]
        count = os.pwritev(fd, some, offset)
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    for buffer in rest:
        write_at(fd, buffer, offset)
        offset += len(buffer)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve the disk blocks of a file's first ``nbytes`` bytes, and extend it to this size; its content is kept. Do
    nothing where the file system cannot.

    Measured (ext4, Linux 6.18): writing a file whose blocks are reserved takes 0.6 of the time. Raises OSError, such as
    ENOSPC and EDQUOT: the disk has no room.
    """
    if _fallocate is None or nbytes < _RESERVED_FROM:
        return
    while _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        error = ctypes.get_errno()
        if error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(error, os.strerror(error))
        if error != errno.EINTR:
            return


def forget(fd: int) -> None:
    """Flush a file to disk and drop it from the page cache where the system can, so that the next read comes from the
    disk."""
    os.fsync(fd)
    if _fadvise is not None:
        _fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def user_id() -> int:
    """Return the number of the user that owns what this process creates; 0 on systems without such numbers, where
    every file has the owner 0."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


_RESERVED = re.compile(
    r"(?i:con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³]) *(\..*)?"  # devices, also with an ending
    r"|.*[. ]"
    r"|.*[<>:\"|?*\x00-\x1f].*",
    re.S,
)


def is_reserved(name: str) -> bool:
    """Return whether Windows cannot have a file with this name.

    >>> [is_reserved(name) for name in ("aux", "Con.weight", "nul .x", "a:b", "dot.", "auxiliary", "a.con")]
    [True, True, True, True, True, False, False]
    """
    return _RESERVED.fullmatch(name) is not None


def refuses(name: str) -> bool:
    """Return whether this system cannot have a file with this name."""
    return os.name == "nt" and is_reserved(name)


def lock(fd: int) -> None:
    """Lock an open file for this process, without waiting. The lock ends when the process closes the file; forked
    children do not have it.

    Raises
    ------
    BlockingIOError
        Another process has the lock.
    OSError
        The file system has no locks.
    """
    try:
        if fcntl is not None:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise BlockingIOError(e.errno, e.strerror) from None
        raise


def lock_directory(fd: int) -> bool:
    """Wait until no other process has an open directory locked, and lock it. Return False if this system cannot lock
    directories; on file systems without locks, do not wait."""
    if fcntl is None:
        return False
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    return True
