"""Bytes that a thread has read before it needs them, so that many small reads become few requests.

A job calls `Remote.holding` with the runs that it is about to read, one after another. Reads of the same thread take
the bytes from here instead of asking the server.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...core.requests import Ints

_own = threading.local()


class Held:
    """Runs of bytes of one file: their offsets (ascending), lengths, places in the memory, and the memory."""

    def __init__(self, offsets: Ints, lengths: Ints, at: Ints, memory: memoryview) -> None:
        self._offsets, self._lengths, self._at = offsets.tolist(), lengths.tolist(), at.tolist()
        self._memory = memory

    def read_into(self, offset: int, target: memoryview) -> bool:
        """Fill a target, if all of its bytes are held; return whether they were."""
        n = bisect_right(self._offsets, offset) - 1
        if n < 0 or offset + len(target) > self._offsets[n] + self._lengths[n]:
            return False
        start = self._at[n] + offset - self._offsets[n]
        target[:] = self._memory[start : start + len(target)]
        return True


Files = Mapping[tuple[int, str], Held]  # by the number of the store, and the path


@contextmanager
def kept(files: Files) -> Iterator[None]:
    """Keep bytes for the reads of this thread within the context."""
    before = getattr(_own, "files", {})
    _own.files = {**before, **files}
    try:
        yield
    finally:
        _own.files = before


def take(store: object, path: str, offset: int, target: memoryview) -> bool:
    """Fill a target with bytes that this thread holds; return whether it does."""
    files: Files = getattr(_own, "files", {})
    if not files:
        return False
    found = files.get((id(store), path))
    return found is not None and found.read_into(offset, target)
