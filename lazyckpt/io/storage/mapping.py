"""Mapped files, and a guard for those that are truncated while they are touched.

Touching a page of a mapping that its file no longer has sends SIGBUS, which ends the process, and no check beforehand
prevents that. So the first mapping installs a handler of SIGBUS: where the address lies in a mapping of this module, it
puts zeros there and marks the mapping as broken, and the copy ends like any other. Who copies then looks at the mark.
Any other fault goes to the handler that was there before, or ends the process as it would have. On systems for which
this module does not know how to do that, it maps nothing.
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
from typing import Any

from ...errors import ChangedFileError
from ..system import after_fork, mapping_library

_PAGE = mmap.PAGESIZE
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_DEFAULT, _IGNORE = None, 1  # as ctypes shows the addresses SIG_DFL and SIG_IGN
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
    _state = ctypes.create_string_buffer(1)
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)

_lock = threading.Lock()
_ranges: dict[
    int, Addresses
] = {}  # by the first address; the handler reads it without the lock, which it may interrupt
_previous = _Action()
_empty = -1  # a file without bytes
_passing_on = False


class Addresses:
    """The addresses of a mapping. ``told``: the message of the error that a thread gets that touches what is gone; none
    if it is empty. ``broken``: zeros came in place of bytes that the file no longer has, or that could not be read."""

    __slots__ = ("broken", "end", "start", "told")

    def __init__(self, start: int, size: int, told: str) -> None:
        self.start, self.end, self.told = start, start + size, told
        self.broken = False

    def error(self, gone: int) -> type[Exception]:
        """What is raised when the bytes from ``gone`` on were touched."""

        def before_it_is_raised(error: ChangedFileError) -> None:
            super(ChangedFileError, error).__init__(self.told)
            if _ranges.get(self.start) is self:  # the next one who touches them gets an error, too
                _map(gone, self.end - gone, mmap.MAP_PRIVATE | _MAP_FIXED, _empty)

        names = {"__init__": before_it_is_raised, "__module__": ChangedFileError.__module__}
        return type("ChangedFileError", (ChangedFileError,), names)


class Mapped:
    """A private mapping of a file (writing to it changes memory only).

    ``buffer`` keeps the mapping alive. ``owner``: kept alive with it, for whoever maps. ``state``: for whoever checks.
    ``arrays``: tensors over it that were asked for (`io.tensors.array_over`).
    """

    __slots__ = ("addresses", "arrays", "buffer", "owner", "state")

    def __init__(self, addresses: Addresses, owner: Any) -> None:
        self.addresses, self.owner, self.state = addresses, owner, 0
        memory = (ctypes.c_char * (addresses.end - addresses.start)).from_address(addresses.start)
        weakref.finalize(memory, _unmap, addresses).atexit = False
        self.buffer = memoryview(memory).cast("B")
        self.arrays: dict[Any, Any] = {}

    def let_go(self, start: int, stop: int) -> None:
        """The pages stay in the system's cache, but count no longer as this process's memory. (Of a mapping that
        nobody writes to.)"""
        assert _libc is not None
        start = start // _PAGE * _PAGE
        _libc.madvise(self.addresses.start + start, stop - start, mmap.MADV_DONTNEED)


def map_file(fd: int, size: int, owner: Any = None, *, told: str = "") -> Mapped | None:
    """The first ``size`` bytes of a file as memory whose pages are read when touched; None if that cannot be done here.

    ``told``: a message; then ChangedFileError with it is raised in a thread (the main thread, if it is not one of
    Python's) that touches what the file no longer has. Without it, `Addresses.broken` has to be looked at.
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
        addresses = _ranges[start] = Addresses(start, size, told)
    if not told:
        _libc.madvise(start, size, mmap.MADV_RANDOM)
    return Mapped(addresses, owner)


def resident(address: int, nbytes: int) -> bool:
    """Whether bytes of a mapped file are likely in memory already: touching them costs no I/O."""
    if _libc is None or nbytes == 0:
        return nbytes == 0
    # A sample, both ends: a wrong guess costs time, never correctness (so threads may share the answer's byte).
    return _page_resident(address + nbytes - 1) and _page_resident(address)


def _page_resident(address: int) -> bool:
    return _libc is not None and _libc.mincore(address & -_PAGE, 1, _state) == 0 and bool(_state.raw[0] & 1)


def _map(start: int | None, size: int, flags: int, fd: int) -> int | None:
    """mmap(2); None if it fails."""
    assert _libc is not None
    address: int | None = _libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    return None if address == _FAILED else address


def _unmap(addresses: Addresses) -> None:
    assert _libc is not None
    _ranges.pop(addresses.start, None)  # before somebody else can have the addresses
    _libc.munmap(addresses.start, addresses.end - addresses.start)


def _guard() -> bool:
    """Have the handler in place, also if somebody has put another one there since."""
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
    """What happens on SIGBUS. This interrupts a copy, never Python's own work, so that any Python code may run here."""
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
    if _map(start, addresses.end - start, flags, -1) is None:  # what follows is gone, too
        _pass_on(signum, info, context, sent)
        return None
    if not addresses.told:
        return None
    own = sys._getframe().f_back is not None
    thread = threading.get_ident() if own else threading.main_thread().ident
    # Set while Python code runs, the error would be raised here. So what is returned sets it when it is deleted.
    return type("Raise", (), {"__del__": staticmethod(partial(_raise_in, thread, addresses.error(start)))})()


_on_fault = _HANDLER(_handle)


def _pass_on(signum: int, info: int, context: int | None, sent: bool) -> None:
    """To the handler that was there before; the default, if there was none, ends the process."""
    global _passing_on
    assert _libc is not None
    handler = _previous.handler
    if handler == _IGNORE and sent:
        return
    if handler in (_DEFAULT, _IGNORE) or _passing_on:  # the second time: the other one has passed it on to this one
        _libc.sigaction(signum, _Action(), None)
        if sent:
            signal.raise_signal(signum)
        return  # the access is tried again
    _passing_on = True
    try:
        if _previous.flags & _SA_SIGINFO:
            _HANDLER(handler)(signum, info, context)
        else:
            _PLAIN_HANDLER(handler)(signum)
    finally:
        _passing_on = False


def _after_fork() -> None:
    """A thread of a forked child's parent may hold the lock."""
    global _lock
    _lock = threading.Lock()


after_fork(_after_fork)
