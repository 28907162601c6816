"""Slow work on threads: one job at a time for each part of the screen, and only the last of the waiting jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from textual.app import App
from textual.content import Content

from ..errors import LazyckptError, printable

Check = Callable[[], None]


class Unwanted(Exception):
    """The result of a job is no longer wanted."""


class _Job(NamedTuple):
    work: Callable[[Check], Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]


class Background:
    """The jobs of one part of the screen.

    Its threads are daemons, so that a read that hangs does not keep the process alive. ``changed`` is called when
    ``busy`` changes."""

    def __init__(self, app: App[Any], changed: Callable[[], None]) -> None:
        self._app = app
        self._changed = changed
        self._now: _Job | None = None
        self._next: _Job | None = None

    @property
    def busy(self) -> bool:
        return self._now is not None

    def ask(
        self, work: Callable[[Check], Any], done: Callable[[Any], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run ``work`` on a thread, then call ``done`` with its result, or ``failed`` with its error, on this thread.

        Neither is called if another job has been requested in the meantime. ``work`` takes a function that raises
        `Unwanted` from then on: long work calls it now and then."""
        job = _Job(work, done, failed)
        if self._now is None:
            self._start(job)
        else:
            self._next = job

    def drop(self) -> None:
        """Discard the current and the waiting job; the next job does not wait for them."""
        if self._now is not None:
            self._now = self._next = None
            self._changed()

    def _start(self, job: _Job) -> None:
        self._now, self._next = job, None
        loop = asyncio.get_running_loop()

        def check() -> None:
            if self._now is not job or self._next is not None:
                raise Unwanted

        def go() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = job.work(check)
            except Exception as e:  # file systems of URLs raise their own types; every error is shown
                error = e
            with suppress(RuntimeError):  # the program has ended and its loop is closed
                loop.call_soon_threadsafe(self._app.call_later, self._end, job, result, error)

        Thread(target=go, daemon=True).start()
        self._changed()

    def _end(self, job: _Job, result: Any, error: Exception | None) -> None:
        if job is not self._now:
            return  # the job was discarded
        self._now = None
        if self._next is not None:
            self._start(self._next)
            return
        self._changed()
        if error is None:
            job.done(result)
        else:
            job.failed(error)


def error_text(error: Exception) -> str:
    """Return an error as one line, with its type unless it is an expected error of reading."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, LazyckptError | OSError) else f"{type(error).__name__}: {text}"


def error_content(error: Exception) -> Content:
    """Return the content to show in place of data that could not be read."""
    return Content.styled(f"cannot be read: {printable(error_text(error))}", "$text-error")
