"""Work that is cancelled while it runs: it asks now and then whether to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_own = threading.local()


class StoppedError(Exception):
    """The work that a task belongs to was cancelled. Nobody waits for its result."""


def go_on() -> None:
    """Raise StoppedError if the work of this thread was cancelled. Long tasks call it now and then, because who cancels
    waits for them."""
    stop: threading.Event | None = getattr(_own, "event", None)
    if stop is not None and stop.is_set():
        raise StoppedError


def pause(seconds: float) -> None:
    """Sleep. Raises StoppedError as soon as the work of this thread is cancelled."""
    stop: threading.Event | None = getattr(_own, "event", None)
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise StoppedError


@contextmanager
def stopping_at(stop: threading.Event) -> Iterator[None]:
    """Let the tasks of this thread within the context stop when ``stop`` is set."""
    before = getattr(_own, "event", None)
    _own.event = stop
    try:
        yield
    finally:
        _own.event = before
