"""Thread pools for reads: shared by all views and started by the first job that is large enough."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .cancelling import stopping_at
from .checks import Batch, checked
from .system import after_fork
from .tasks import Fetch, Task, Wait

T = TypeVar("T")

_INLINE = 4 << 20  # bytes; a smaller job finishes before threads have woken up
_BATCH = 2 << 20  # bytes that a thread takes at a time, in the order of the file
_THREADS = max(4, min(8, os.cpu_count() or 1))  # at least 4: they wait for disks; each may need some 20 MiB
_WAITERS = 24  # these wait for servers, each with a buffer of some MiB
_LOOKERS = 8  # these threads need almost no memory
_WIDE = 64  # threads that wait for servers
_FETCHED = 512 << 20  # bytes of runs that are joined to requests at once: for all threads, as large as requests get
# Seconds between two looks at futures. Without them, a Ctrl-C whose signal another thread got would not be noticed, nor
# that a cluster has cancelled one.
LOOK = 1.0
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_lookers: ThreadPoolExecutor | None = None
_waiters: ThreadPoolExecutor | None = None
_own = threading.local()  # ``here``: whether this thread must not wait for the pool of `each`


def run(tasks: Iterable[Task]) -> None:
    """Run all tasks, on several threads if they move enough bytes. The first tasks run while ``tasks`` yields more.

    Raises the first error, including one of the iterable itself, after every started task has stopped. The files read
    are verified together at the end (see `checked`).
    """
    with checked() as batch:
        Work(tasks, batch).wait()


def run_here(tasks: Iterable[Task]) -> None:
    """Run all tasks on the calling thread, except for requests to servers, which run at the same time."""
    with checked() as batch:
        fetches: list[Task] = []
        for task in tasks:
            if isinstance(task[1], Fetch):
                fetches.append(task)
            else:
                task[1]()
        if fetches:
            Work(fetches, batch).wait()


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
        self._stop = threading.Event()
        self._queue: deque[list[Task]] = deque()  # batches that no thread has taken
        self._running = 0  # threads that take batches
        self._futures: list[Future[None]] = []
        self._rest: list[Task] = []  # too little for a thread: for the caller
        self._asking: deque[Task] = deque()  # requests that no thread has taken
        self._fetches: list[Fetch] = []
        self._threads = 0  # that make requests
        size, limit, fetched = 0, _INLINE, 0
        try:
            for task in tasks:
                if isinstance(task[1], Fetch):
                    self._fetches.append(task[1])
                    fetched += task[0]
                    if fetched >= _FETCHED:
                        self._ask()
                        fetched = 0
                    continue
                if isinstance(task[1], Wait):
                    self._send([task], _WIDE)
                    continue
                self._rest.append(task)
                size += task[0]
                if size >= limit and (self._futures or len(self._rest) > 1):
                    self._put(self._rest)
                    self._rest, size, limit = [], 0, _BATCH
            if self._rest and self._futures:  # in order, too: the end of a file is read last
                self._put(self._rest)
                self._rest = []
            self._ask()
        except BaseException:
            self.cancel()
            raise

    def _ask(self) -> None:
        """Join the runs that were collected to requests, and make them."""
        for store in {id(fetch.store): fetch.store for fetch in self._fetches}.values():
            for task in store.requests([fetch for fetch in self._fetches if fetch.store is store]):
                self._send([task], store.width)
        self._fetches = []

    def _send(self, tasks: Sequence[Task], width: int) -> None:
        if getattr(_own, "here", False):  # this thread belongs to the pool, see also `inline`
            self._rest += tasks
            return
        with self._lock:
            self._asking.extend(tasks)
            more = self._threads < width
            self._threads += more
        if more:
            self._futures.append(_look_threads().submit(self._take_requests))

    def _take_requests(self) -> None:
        """Make requests until none is left."""
        _own.here = True
        with self._reads.joined(), stopping_at(self._stop):
            try:
                while True:
                    with self._lock:
                        if not self._asking:
                            self._threads -= 1
                            return
                        _, do = self._asking.popleft()
                    do()
            except BaseException:
                with self._lock:
                    self._asking.clear()
                    self._threads -= 1
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
        with self._reads.joined(), stopping_at(self._stop):
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
            _results(self._futures)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the tasks that have not started, and wait for the others, which may stop early."""
        self._stop.set()
        with self._lock:
            self._queue.clear()
            self._asking.clear()
        for future in self._futures:
            future.cancel()
        stopped(self._futures)


def each(do: Callable[[T], object], items: Sequence[T], width: int = _LOOKERS) -> None:
    """Call ``do`` for every item, ``width`` (at most 64) at a time, for small independent requests to a store.

    The calls use a separate pool, because threads of `run` wait for them. A nested call runs its items one after
    another on the calling thread: waiting for another thread of the same pool could deadlock. Raises the first error
    after every started call has stopped.
    """
    if len(items) < 2 or getattr(_own, "here", False):
        for item in items:
            do(item)
        return

    with checked() as batch:
        stop = threading.Event()

        def some(n: int) -> None:
            _own.here = True
            with batch.joined(), stopping_at(stop):
                for item in items[n::width]:
                    do(item)

        width = min(width, _WIDE, len(items))
        futures = [_look_threads().submit(some, n) for n in range(width)]
        try:
            _results(futures)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
            stopped(futures)


@contextmanager
def inline() -> Iterator[None]:
    """Make all requests of this thread within the context one after another on it. For a thread that holds a lock which
    threads of the pool may be waiting for: it must not wait for them."""
    before = getattr(_own, "here", False)
    _own.here = True
    try:
        yield
    finally:
        _own.here = before


def stopped(futures: Sequence[Future[Any]]) -> None:
    """Wait until no future runs any more, ignoring Ctrl-C: they still write to memory and files that the caller is
    about to release, and a closed descriptor may already be that of another file."""
    while left := [future for future in futures if not future.done()]:
        with suppress(KeyboardInterrupt):  # an earlier exception is already propagating
            wait(left, timeout=LOOK)


def _results(futures: Sequence[Future[None]]) -> None:
    """Wait until all futures are done. Raises the first error as soon as there is one.

    The main thread looks for Ctrl-C again and again: the system may hand the signal to another thread, and then Python
    does not wake the main thread, which alone raises KeyboardInterrupt.
    """
    left = set(futures)
    while left:
        done, left = wait(left, timeout=LOOK, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


def _each(batch: list[Task]) -> None:
    for _, do in batch:
        do()


class _Idle:
    """The count of a pool's idle threads. Unlike the semaphore that it stands in for, which is written in Python, a
    Ctrl-C at any moment leaves nothing locked: with the semaphore, all later reads would wait for ever."""

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Take one, if there is one; the pool never waits for one."""
        try:
            self._tokens.get_nowait()
        except Empty:
            return False
        return True

    def release(self) -> None:
        self._tokens.put(None)


def _pool_of(size: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(size, thread_name_prefix=name)
    pool._idle_semaphore = _Idle()  # type: ignore[assignment]
    return pool


def threads() -> ThreadPoolExecutor:
    """Return the pool that moves the bytes of tensors. A task on it must not wait for another task on it."""
    global _pool
    chosen: ThreadPoolExecutor | None = getattr(_own, "pool", None)
    if chosen is not None:
        return chosen
    with _lock:
        if _pool is None:
            _pool = _pool_of(_THREADS, "lazyckpt")
        return _pool


@contextmanager
def on(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Let what this thread starts within the context run on another pool than that of `threads`: each thread keeps
    some MiB of buffers."""
    before = getattr(_own, "pool", None)
    _own.pool = pool
    try:
        yield
    finally:
        _own.pool = before


def waiting_threads() -> ThreadPoolExecutor:
    """Return the pool for tasks that send bytes to servers. Such a task may wait for tasks on `threads`."""
    global _waiters
    with _lock:
        if _waiters is None:
            _waiters = ThreadPoolExecutor(_WAITERS, thread_name_prefix="lazyckpt-send")
        return _waiters


def _look_threads() -> ThreadPoolExecutor:
    global _lookers
    with _lock:
        if _lookers is None:
            _lookers = _pool_of(_WIDE, "lazyckpt-look")
        return _lookers


def _forget() -> None:
    """Reset the pools in a forked child, which has the pool objects but none of their threads.

    The threads of torch's OpenMP are missing as well: an operation that needs them waits for ever. The child therefore
    computes on one thread, as the workers of torch's DataLoader do.
    """
    global _pool, _lookers, _waiters, _lock
    _pool, _lookers, _waiters, _lock = None, None, None, threading.Lock()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


after_fork(_forget)
