"""Tasks of reads: functions that move bytes, runs of a file behind a network, and waiting for a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Task = tuple[int, Callable[[], None]]  # (bytes that the task moves, the function to call)


class _Fetching(Protocol):
    """A store whose reads are requests to a server."""

    @property
    def width(self) -> int: ...
    def requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]: ...


class Fetch:
    """A task that reads runs of bytes of one file of a store behind a network, together with those of other tasks.

    Parameters
    ----------
    store, path
        The file.
    offsets, lengths
        Where the runs are in the file, in bytes.
    at
        Where each run goes to in the memory, in bytes.
    memory
        The memory, or the size in bytes of memory to allocate when the first bytes arrive.
    done
        Called with the memory when all runs have arrived.
    """

    __slots__ = ("_left", "_lock", "_memory", "_size", "at", "done", "lengths", "offsets", "path", "store")

    def __init__(
        self,
        store: _Fetching,
        path: str,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        at: NDArray[np.int64],
        memory: memoryview | int,
        done: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.store, self.path = store, path
        self.offsets, self.lengths, self.at = offsets, lengths, at
        self._memory: memoryview | None = None if isinstance(memory, int) else memory
        self._size = memory if isinstance(memory, int) else 0
        self.done = done
        self._left = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The number of bytes of all runs."""
        return int(self.lengths.sum())

    @classmethod
    def of_run(cls, store: _Fetching, path: str, offset: int, memory: memoryview) -> Fetch:
        """Return the task that fills ``memory`` from ``offset`` on."""
        one = np.array([offset, len(memory), 0], np.int64)
        return cls(store, path, one[:1], one[1:2], one[2:], memory)

    def moved(self, store: _Fetching, path: str, by: int) -> Fetch:
        """Return a task that does the same with the bytes of another file, ``by`` bytes further on."""
        memory = self._size if self._memory is None else self._memory
        return Fetch(store, path, self.offsets + by, self.lengths, self.at, memory, self.done)

    def __call__(self) -> None:
        for _, do in self.store.requests([self]):
            do()

    def begin(self, requests: int) -> None:
        """Say how many requests read the runs. With none, the task is done."""
        self._left = requests
        if not requests:
            self._left = 1
            self.arrived()

    def memory(self) -> memoryview:
        """Return the memory; allocate it at the first call."""
        with self._lock:
            if self._memory is None:
                self._memory = np.empty(self._size, np.uint8).data
            return self._memory

    def arrived(self) -> None:
        """Say that a request is complete."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self.done is not None:
            memory, self._memory = self.memory(), None
            self.done(memory)


class Wait:
    """A task that mostly waits for a server: many of them run at the same time."""

    __slots__ = ("do",)

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do

    def __call__(self) -> None:
        self.do()
