"""The garbage collector while very many objects are made that all stay: it looks for cyclic garbage less often."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .system import after_fork

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


after_fork(_after_fork)
