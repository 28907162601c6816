"""Fresh memory for tensors that are about to be overwritten."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from ..errors import DataError

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty` on the CPU, in huge pages where it is large. Raises DataError if there is not so much memory.

    First touch of fresh memory is most of the cost of a large read (measured: 64 MiB in 4 KiB pages 8.6 ms, in huge
    pages 2.4 ms, the copy itself 2 ms), so the kernel is asked for huge pages. It is free to say no.
    """
    try:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except RuntimeError as e:  # torch's way to say that there is not so much memory
        nbytes = prod(shape) * dtype.itemsize
        raise DataError(
            f"{nbytes:,} bytes for a tensor of shape {tuple(shape)} cannot be had: read it in slices"
        ) from e
    nbytes = tensor.nbytes
    if _libc is not None and nbytes >= 2 * _HUGE:
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        stop = (tensor.data_ptr() + nbytes) // _HUGE * _HUGE
        if stop > start:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
    return tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


# -- Cyclic garbage is looked for less often, but still, while very many objects are made that all stay.

_THRESHOLD = 50_000  # new objects between two looks; Python's own, 700 (2,000 since 3.13), nearly doubles some openings
_lock = threading.Lock()
_running = 0
_before = gc.get_threshold()


@contextmanager
def many_objects() -> Iterator[None]:
    """Raise the threshold of the garbage collector, for all threads, until the last such context ends.

    Garbage of other threads is collected meanwhile. What somebody else sets meanwhile is left as it is, and so is a
    collector that is switched off or has a higher threshold.
    """
    global _running, _before
    with _lock:
        _running += 1
        now = gc.get_threshold()
        if _running == 1:
            _before = now
            if 0 < now[0] < _THRESHOLD:
                gc.set_threshold(_THRESHOLD, *now[1:])
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0 and gc.get_threshold() == (_THRESHOLD, *_before[1:]):
                gc.set_threshold(*_before)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
