"""Work of the server in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_going: set[asyncio.Task[Any]] = set()  # the loop keeps no reference to its tasks


async def in_threads(threads: Executor, work: Callable[[], T]) -> T:
    """Return what ``work`` returns in one of the threads. Nothing ends a thread: if the loop ends, it waits for it."""
    found = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(found)
    except asyncio.CancelledError:
        while not found.done():
            with suppress(asyncio.CancelledError):  # the end of the loop cancels what was cancelled before, too
                await asyncio.wait({found})
        found.exception()  # nobody waits for it any more
        raise


async def apart(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns. It runs in a task of its own, which goes on if this one is cancelled.

    anyio cancels the tasks of a group again at every turn of the loop until they end. A task that waits for a thread
    would keep the loop busy meanwhile.
    """
    task = asyncio.create_task(work)
    _going.add(task)
    task.add_done_callback(_gone)
    await asyncio.wait({task})
    return task.result()


def _gone(task: asyncio.Task[Any]) -> None:
    _going.discard(task)
    if not task.cancelled():
        task.exception()  # there may be nobody who waits for it any more
