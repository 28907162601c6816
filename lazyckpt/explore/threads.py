"""Work of the server in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


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
