"""Work that may take long, on threads: one at a time for each place of the screen, and of what is asked for meanwhile
only the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from textual.app import App
from textual.content import Content

from ..errors import LazyckptError, printable


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]


class Background:
    """The work of one place of the screen. Its threads die with the process: a read that hangs keeps nobody from
    leaving. ``changed`` is called when it begins or ends to be busy."""

    def __init__(self, app: App[Any], changed: Callable[[], None]) -> None:
        self._app = app
        self._changed = changed
        self._now: _Job | None = None
        self._next: _Job | None = None

    @property
    def busy(self) -> bool:
        return self._now is not None

    def ask(self, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Do ``work`` on a thread, then ``done`` (with what it returned) or ``failed`` on this one, unless something
        else has been asked for in the meantime."""
        job = _Job(work, done, failed)
        if self._now is None:
            self._start(job)
        else:
            self._next = job

    def drop(self) -> None:
        """What was asked for is of no use any more; what is asked for next does not wait for it."""
        if self._now is not None:
            self._now = self._next = None
            self._changed()

    def _start(self, job: _Job) -> None:
        self._now, self._next = job, None
        loop = asyncio.get_running_loop()

        def go() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = job.work()
            except Exception as e:  # whatever a file system of a URL raises, too: it is shown
                error = e
            with suppress(RuntimeError):  # the program has ended meanwhile
                loop.call_soon_threadsafe(self._app.call_later, self._end, job, result, error)

        Thread(target=go, daemon=True).start()
        self._changed()

    def _end(self, job: _Job, result: Any, error: Exception | None) -> None:
        if job is not self._now:
            return  # dropped
        self._now = None
        if self._next is not None:
            self._start(self._next)
            return
        self._changed()
        if error is None:
            job.done(result)
        else:
            job.failed(error)


def told(error: Exception) -> str:
    """An error as one line; one that is not among those that reading is known for says what it is."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, LazyckptError | OSError) else f"{type(error).__name__}: {text}"


def wrong(error: Exception) -> Content:
    """An error where what could not be read would be."""
    return Content.styled(f"cannot be read: {printable(told(error))}", "$text-error")
