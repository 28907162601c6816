"""Thread pools for reads: shared by all views and started by the first job that is large enough."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from ..errors import ChangedFileError, MissingFileError
from .system import after_fork

# -- Batched checks of files whose store does not report a file's state with each read.

_own = threading.local()


class _Verifying(Protocol):
    def verify(self, path: str) -> None: ...


class Batch:
    """The files that a job has read and whose state is not verified yet."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], _Verifying] = {}

    def add(self, store: _Verifying, path: str) -> None:
        self._files[id(store), path] = store

    def verify(self) -> None:
        """Verify all added files. Raises ChangedFileError, MissingFileError."""
        for (_, path), store in self._files.items():
            store.verify(path)
        self._files = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Add the files that this thread reads within the context to the batch."""
        before = getattr(_own, "batch", None)
        _own.batch = self
        try:
            yield
        finally:
            _own.batch = before


@contextmanager
def checked(apart: bool = False) -> Iterator[Batch]:
    """Verify every file that was read within the context once, when the outermost such context exits.

    With ``apart``, verify when this context exits even if it is nested, before its result goes into a cache. Raises
    ChangedFileError in place of any other error: bytes of a replaced file may have caused that error.
    """
    outer: Batch | None = getattr(_own, "batch", None)
    if outer is not None and not apart:
        yield outer
        return
    batch = Batch()
    try:
        with batch.joined():
            yield batch
    except Exception as e:
        try:
            batch.verify()
        except (ChangedFileError, MissingFileError) as changed:
            raise changed from e
        raise
    batch.verify()


def verify_later(store: _Verifying, path: str) -> None:
    """Verify the file when the current batch of this thread ends, or now if there is no batch."""
    batch: Batch | None = getattr(_own, "batch", None)
    if batch is None:
        store.verify(path)
    else:
        batch.add(store, path)


# -- Thread pools.

Task = tuple[int, Callable[[], None]]  # (bytes that the task moves, the function to call)
T = TypeVar("T")

_INLINE = 4 << 20  # bytes; a smaller job finishes before threads have woken up
_BATCH = 2 << 20  # bytes that a thread takes at a time, in the order of the file
_THREADS = max(4, min(8, os.cpu_count() or 1))  # at least 4: they wait for disks; each may need some 20 MiB
_LOOKERS = 8  # these threads need almost no memory
LOOK = 1.0  # seconds after which futures are looked at: nobody is told when a cluster cancels one
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_lookers: ThreadPoolExecutor | None = None
_looking = threading.local()  # ``here``: whether this thread belongs to the pool of `each`


def run(tasks: Iterable[Task]) -> None:
    """Run all tasks, on several threads if they move enough bytes. The first tasks run while ``tasks`` yields more.

    Raises the first error, including one of the iterable itself, after every started task has stopped. The files read
    are verified together at the end (see `checked`).
    """
    with checked() as batch:
        Work(tasks, batch).wait()


def run_here(tasks: Iterable[Task]) -> None:
    """Run all tasks on the calling thread."""
    with checked():
        for _, do in tasks:
            do()


class Work:
    """Tasks that threads of the pool run while the caller goes on. Call `wait` or `cancel` before the memory that the
    tasks fill is released.

    The threads take the tasks in the order of the iterable, 2 MiB at a time: reads of a file are in the order of the
    file, and the threads end at the same time.

    Parameters
    ----------
    tasks
        The tasks. The first ones run while the iterable yields more.
    reads
        The files that the tasks read are added to this batch.
    """

    def __init__(self, tasks: Iterable[Task], reads: Batch) -> None:
        self._reads = reads
        self._lock = threading.Lock()
        self._queue: deque[list[Task]] = deque()  # batches that no thread has taken
        self._running = 0  # threads that take batches
        self._futures: list[Future[None]] = []
        self._rest: list[Task] = []  # too little for a thread: for the caller
        size, limit = 0, _INLINE
        try:
            for task in tasks:
                self._rest.append(task)
                size += task[0]
                if size >= limit and (self._futures or len(self._rest) > 1):
                    self._put(self._rest)
                    self._rest, size, limit = [], 0, _BATCH
            if self._rest and self._futures:  # in order, too: the end of a file is read last
                self._put(self._rest)
                self._rest = []
        except BaseException:
            self.cancel()
            raise

    def _put(self, batch: list[Task]) -> None:
        with self._lock:
            self._queue.append(batch)
            more = self._running < _THREADS
            self._running += more
        if more:
            self._futures.append(threads().submit(self._take))

    def _take(self) -> None:
        """Run batches until none is left."""
        with self._reads.joined():
            try:
                while True:
                    with self._lock:
                        if not self._queue:
                            self._running -= 1
                            return
                        batch = self._queue.popleft()
                    _each(batch)
            except BaseException:
                with self._lock:
                    self._queue.clear()
                    self._running -= 1
                raise

    def wait(self) -> None:
        """Run what is left on the calling thread and wait for the threads. Raises the first error, after every started
        task has stopped."""
        try:
            _each(self._rest)
            done, _ = wait(self._futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the tasks that have not started, and wait for the others."""
        with self._lock:
            self._queue.clear()
        for future in self._futures:
            future.cancel()
        stopped(self._futures)


def each(do: Callable[[T], object], items: Sequence[T]) -> None:
    """Call ``do`` for every item, several at a time, for small independent requests to a store.

    The calls use a separate pool, because threads of `run` wait for them. A nested call runs its items one after
    another on the calling thread: waiting for another thread of the same pool could deadlock. Raises the first error
    after every started call has stopped.
    """
    if len(items) < 2 or getattr(_looking, "here", False):
        for item in items:
            do(item)
        return

    with checked() as batch:

        def some(n: int) -> None:
            _looking.here = True
            with batch.joined():
                for item in items[n::_LOOKERS]:
                    do(item)

        futures = [_look_threads().submit(some, n) for n in range(min(_LOOKERS, len(items)))]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            stopped(futures)


def stopped(futures: Sequence[Future[Any]]) -> None:
    """Wait until no future runs any more, ignoring Ctrl-C: they still write to memory and files that the caller is
    about to release, and a closed descriptor may already be that of another file."""
    while left := [future for future in futures if not future.done()]:
        with suppress(KeyboardInterrupt):  # an earlier exception is already propagating
            wait(left, timeout=LOOK)


def _each(batch: list[Task]) -> None:
    for _, do in batch:
        do()


def threads() -> ThreadPoolExecutor:
    """Return the pool that moves the bytes of tensors. A task on it must not wait for another task on it."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="lazyckpt")
        return _pool


def _look_threads() -> ThreadPoolExecutor:
    global _lookers
    with _lock:
        if _lookers is None:
            _lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="lazyckpt-look")
        return _lookers


def _forget() -> None:
    """Reset the pools in a forked child, which has the pool objects but none of their threads.

    The threads of torch's OpenMP are missing as well: an operation that needs them waits for ever. The child therefore
    computes on one thread, as the workers of torch's DataLoader do.
    """
    global _pool, _lookers, _lock
    _pool, _lookers, _lock = None, None, threading.Lock()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


after_fork(_forget)
