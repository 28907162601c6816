"""Bytes that a thread has read before it needs them, so that many small reads become few requests.

A job calls `Remote.holding` with the runs that it is about to read, one after another. Reads of the same thread take
the bytes from here instead of asking the server.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ...core.requests import Ints

_own = threading.local()


class Held:
    """Runs of bytes of one file, in any order: their ``offsets`` (ascending), ``lengths``, places in the memory
    (``at``), and the ``memory``, which the caller fills."""

    def __init__(self, offsets: Ints, lengths: Ints) -> None:
        order = np.argsort(offsets, kind="stable")
        self.offsets, self.lengths = offsets[order], lengths[order]
        self.at = np.cumsum(self.lengths) - self.lengths
        self.memory = np.empty(int(lengths.sum()), np.uint8).data
        self._runs = self.offsets.tolist(), self.lengths.tolist(), self.at.tolist()

    @property
    def pieces(self) -> list[tuple[int, memoryview]]:
        """The runs, each with its memory: (offset, memory)."""
        return [(offset, self.memory[at : at + length]) for offset, length, at in zip(*self._runs, strict=True)]

    def read_into(self, offset: int, target: memoryview) -> bool:
        """Fill a target, if all of its bytes are held; return whether they were."""
        offsets, lengths, places = self._runs
        n = bisect_right(offsets, offset) - 1
        if n < 0 or offset + len(target) > offsets[n] + lengths[n]:
            return False
        start = places[n] + offset - offsets[n]
        target[:] = self.memory[start : start + len(target)]
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
