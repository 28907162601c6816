"""Memory-mapped files, with a guard against files that are truncated while they are mapped.

Access to a page that a truncated file no longer has raises SIGBUS, which kills the process, and no check beforehand can
prevent it. The first mapping therefore installs a SIGBUS handler. For an address inside a mapping of this module, the
handler maps zeros there and marks the mapping as broken; the copy completes, and its caller checks the mark. Any other
fault goes to the previous handler, or ends the process as usual. On systems without a known way to do this, the module
maps nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import weakref
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ChangedFileError
from ..system import File, after_fork, mapping_library

_PAGE = mmap.PAGESIZE
_BLOCK = 20  # residency is checked and remembered by blocks of 2**20 bytes
_REMEMBERED = 1.0  # seconds for which a block counts as resident after a check
_GAP, _BURST = 3e-6, 1e-3  # seconds; see `Mapped.in_burst`
_PROBE = 16 * _PAGE  # distance in bytes of the probed pages of a block, where mincore does not answer
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_DEFAULT, _IGNORE = None, 1  # ctypes' representation of the addresses SIG_DFL and SIG_IGN
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_PLAIN_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C library, on the machines that `mapping_library` knows."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = mapping_library()
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    _libc.sigaction.argtypes = (ctypes.c_int, ctypes.POINTER(_Action), ctypes.POINTER(_Action))
    _state = ctypes.create_string_buffer((1 << _BLOCK) // _PAGE)
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)

_lock = threading.Lock()
_ranges: dict[
    int, Addresses
] = {}  # by start address; the handler reads it without the lock, whose holder it may have interrupted
_previous = _Action()
_empty = -1  # descriptor of an empty file
_passing_on = False


class Addresses:
    """The address range of a mapping.

    A thread that accesses bytes that are gone gets an error with ``message``, or none if ``message`` is empty.
    ``broken`` is True once zeros have replaced bytes that the file no longer has or that could not be read.
    """

    __slots__ = ("broken", "end", "message", "start")

    def __init__(self, start: int, size: int, message: str) -> None:
        self.start, self.end, self.message = start, start + size, message
        self.broken = False

    def error(self, gone: int) -> type[Exception]:
        """Return the exception type to raise after an access to the bytes from the address ``gone`` on."""

        def before_it_is_raised(error: ChangedFileError) -> None:
            super(ChangedFileError, error).__init__(self.message)
            if _ranges.get(self.start) is self:  # so that the next access raises an error, too
                _map(gone, self.end - gone, mmap.MAP_PRIVATE | _MAP_FIXED, _empty)

        names = {"__init__": before_it_is_raised, "__module__": ChangedFileError.__module__}
        return type("ChangedFileError", (ChangedFileError,), names)


class Mapped:
    """A private mapping of a file: writes to it change memory only.

    ``buffer`` keeps the mapping alive, and the mapping keeps ``owner``, the open file, alive. The store that checks the
    file uses ``state``. ``arrays`` caches what readers make of the mapping.
    """

    __slots__ = (
        "_checked", "_ended", "_last", "_probed", "_resident", "_thread", "_until", "addresses", "arrays", "buffer",
        "owner", "state",
    )  # fmt: skip

    def __init__(self, addresses: Addresses, owner: File | None) -> None:
        self.addresses, self.owner, self.state = addresses, owner, 0
        memory = (ctypes.c_char * (addresses.end - addresses.start)).from_address(addresses.start)
        weakref.finalize(memory, _unmap, addresses).atexit = False
        self.buffer = memoryview(memory).cast("B")
        self.arrays: dict[Any, Any] = {}
        self._resident: set[int] = set()  # numbers of blocks that were resident before the time ``_until``
        self._last = 0, 0  # the last range that was resident
        self._until = 0.0
        self._probed: bool | None = None  # whether pages are probed with reads, because mincore does not answer
        self._thread = 0  # the thread that checked the file last,
        self._checked = self._ended = 0.0  # when it did, and when the last read of its burst ended

    def confirm(self, now: float) -> None:
        """Note that this thread found the file unchanged at a time (`time.monotonic`), after copying from it."""
        self._checked, self._thread, self._ended = now, get_ident(), monotonic()

    def in_burst(self, begun: float) -> bool:
        """Return whether the file needs no check after a copy that began at a time, because it was checked just before.

        Copies that a thread makes one right after the other, less than 3 us apart, are a burst: the thread itself
        cannot have written to the file in between. A burst is checked once a millisecond, for changes by others. A
        check of each copy would take as long as copying 4 to 64 KiB.
        """
        if begun - self._ended > _GAP or begun - self._checked > _BURST:
            return False
        if self._thread != get_ident() or self.addresses.broken:
            return False
        self._ended = monotonic()
        return True

    def extend_burst(self, now: float) -> None:
        """Note that a read of this thread, which checked the file, ends at a time: it reads other files, too."""
        if self._thread == get_ident():
            self._ended = now

    def resident(self, start: int, stop: int) -> bool:
        """Return whether a range of the file is probably in memory, so that access costs no I/O.

        Resident blocks and the last range are remembered for a second. A wrong result costs time, never correctness.
        """
        now = monotonic()
        if now > self._until:
            self._resident, self._last, self._until = set(), (0, 0), now + _REMEMBERED
        elif self._last[0] <= start and stop <= self._last[1]:
            return True
        known = self._resident
        blocks = range(start >> _BLOCK, (max(start, stop - 1) >> _BLOCK) + 1)
        if known.issuperset(blocks):
            return True
        for n in blocks:
            if n in known:
                continue
            low, high = n << _BLOCK, min((n + 1) << _BLOCK, len(self.buffer))
            if self._all_resident(low, high):
                known.add(n)
            elif not self._all_resident(max(low, start), min(high, stop)):
                return False
        self._last = start, stop
        return True

    def _all_resident(self, start: int, stop: int) -> bool:
        """Return whether all pages of a range inside one block are resident."""
        assert _libc is not None
        if self._probed is None:
            self._probed = self.owner is not None and not self.owner.writable()
        if self._probed and self.owner is not None:
            return all(self.owner.cached(at) for at in (*range(start, stop, _PROBE), stop - 1))
        first = (self.addresses.start + start) & -_PAGE
        count = -(-(self.addresses.start + stop - first) // _PAGE)
        # (threads share the buffer: a mixed result is a wrong guess)
        return _libc.mincore(first, count * _PAGE, _state) == 0 and b"\0" not in _state.raw[:count]

    def request(self, starts: NDArray[np.int64], nbytes: int) -> None:
        """Start reading the pages of runs of ``nbytes`` bytes that are not in memory, and wait for none of them.

        Access then finds them read or waits for one read, where access without a request reads page by page.
        """
        if self.owner is None or not len(starts):
            return
        first = int(starts.min()) // _PAGE
        count = (int(starts.max()) + nbytes - 1) // _PAGE + 1 - first
        edges = np.zeros(count + 1, np.int64)
        np.add.at(edges, starts // _PAGE - first, 1)
        np.add.at(edges, (starts + nbytes - 1) // _PAGE + 1 - first, -1)
        missing = np.cumsum(edges[:-1]) > 0
        if not self._probed:
            missing &= ~self._pages(first, count)
        bounds = np.flatnonzero(np.diff(np.concatenate(([False], missing, [False]))))
        for start, stop in (bounds.reshape(-1, 2) + first).tolist():
            self.owner.prefetch(start * _PAGE, (stop - start) * _PAGE)

    def _pages(self, first: int, count: int) -> NDArray[np.bool_]:
        """Return which pages of a range are resident."""
        assert _libc is not None
        state = ctypes.create_string_buffer(count)
        if _libc.mincore(self.addresses.start + first * _PAGE, count * _PAGE, state):
            return np.zeros(count, np.bool_)
        found: NDArray[np.bool_] = np.frombuffer(state.raw[:count], np.uint8) % 2 == 1
        return found

    def let_go(self, start: int, stop: int) -> None:
        """Release the pages of a range from this process's memory; they stay in the page cache. Discards writes."""
        assert _libc is not None
        start = start // _PAGE * _PAGE
        _libc.madvise(self.addresses.start + start, stop - start, mmap.MADV_DONTNEED)


def map_file(fd: int, size: int, owner: File | None = None, *, message: str = "") -> Mapped | None:
    """Map the first ``size`` bytes of a file; return None if that is not possible on this system.

    With ``message``, a thread that accesses bytes that the file no longer has gets a ChangedFileError with that message
    (the main thread gets it for threads not created by Python). Without it, check `Addresses.broken` after a copy.
    """
    if _libc is None or size <= 0:
        return None
    with _lock:
        if not _guard():
            return None
        # Without MAP_NORESERVE a private mapping of a file larger than memory may be refused.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        start = _map(None, size, flags, fd)
        if start is None:  # no address space is left, or the file system cannot map
            return None
        addresses = _ranges[start] = Addresses(start, size, message)
    if not message:
        _libc.madvise(start, size, mmap.MADV_RANDOM)
    return Mapped(addresses, owner)


def _map(start: int | None, size: int, flags: int, fd: int) -> int | None:
    """Call mmap(2); return None if it fails."""
    assert _libc is not None
    address: int | None = _libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    return None if address == _FAILED else address


def _unmap(addresses: Addresses) -> None:
    assert _libc is not None
    _ranges.pop(addresses.start, None)  # before the system can reuse the addresses
    _libc.munmap(addresses.start, addresses.end - addresses.start)


def _guard() -> bool:
    """Install the SIGBUS handler, again if other code has replaced it; return whether it is installed."""
    global _empty
    assert _libc is not None
    now = _Action()
    if _libc.sigaction(signal.SIGBUS, None, now):
        return False
    handler = ctypes.cast(_on_fault, ctypes.c_void_p).value
    if now.handler == handler:
        return True
    if _empty < 0:
        try:
            _empty = os.memfd_create("lazyckpt")
        except OSError:
            return False
    ctypes.memmove(ctypes.byref(_previous), ctypes.byref(now), ctypes.sizeof(_Action))
    ours = _Action(handler=handler, flags=_SA_SIGINFO | _SA_NODEFER)
    return bool(_libc.sigaction(signal.SIGBUS, ours, None) == 0)


def _handle(signum: int, info: int, context: int | None) -> object:
    """Handle SIGBUS. It interrupts a copy, never the interpreter itself, so any Python code may run here."""
    sent = ctypes.c_int.from_address(info + 8).value <= 0  # si_code: by a process, not for an access to memory
    address = ctypes.c_void_p.from_address(info + 16).value or 0  # si_addr
    for addresses in () if sent else list(_ranges.values()):
        if addresses.start <= address < addresses.end:
            break
    else:
        _pass_on(signum, info, context, sent)
        return None
    start = address & -_PAGE
    addresses.broken = True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _map(start, addresses.end - start, flags, -1) is None:  # to the end: everything after the address is gone, too
        _pass_on(signum, info, context, sent)
        return None
    if not addresses.message:
        return None
    own = sys._getframe().f_back is not None
    thread = threading.get_ident() if own else threading.main_thread().ident
    # An exception set now would be raised in this function. Return an object that sets it when it is deleted.
    return type("Raise", (), {"__del__": staticmethod(partial(_raise_in, thread, addresses.error(start)))})()


_on_fault = _HANDLER(_handle)


def _pass_on(signum: int, info: int, context: int | None, sent: bool) -> None:
    """Call the previous handler; without one, the default action ends the process."""
    global _passing_on
    assert _libc is not None
    handler = _previous.handler
    if handler == _IGNORE and sent:
        return
    if handler in (_DEFAULT, _IGNORE) or _passing_on:  # _passing_on: the previous handler called this one in turn
        _libc.sigaction(signum, _Action(), None)
        if sent:
            signal.raise_signal(signum)
        return  # the access is retried
    _passing_on = True
    try:
        if _previous.flags & _SA_SIGINFO:
            _HANDLER(handler)(signum, info, context)
        else:
            _PLAIN_HANDLER(handler)(signum)
    finally:
        _passing_on = False


def _after_fork() -> None:
    """Replace the lock in a forked child: a thread of its parent may hold it."""
    global _lock
    _lock = threading.Lock()


after_fork(_after_fork)
