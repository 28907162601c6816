"""The threads that reads run on: started when a job is large enough to want them, shared by all views."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from ..errors import ChangedFileError, MissingFileError
from .system import after_fork

# -- Reads that are checked together: of files whose store says only when it is asked what a file is now.

_own = threading.local()


class _Verifying(Protocol):
    def verify(self, path: str) -> None: ...


class Batch:
    """The files that a job has read and not asked about yet."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], _Verifying] = {}

    def add(self, store: _Verifying, path: str) -> None:
        self._files[id(store), path] = store

    def verify(self) -> None:
        """Ask. Raises ChangedFileError, MissingFileError."""
        for (_, path), store in self._files.items():
            store.verify(path)
        self._files = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What this thread reads belongs to the batch."""
        before = getattr(_own, "batch", None)
        _own.batch = self
        try:
            yield
        finally:
            _own.batch = before


@contextmanager
def checked(apart: bool = False) -> Iterator[Batch]:
    """Check what was read within when it ends, once for each file; where the thread is in such a context already, when
    that one ends. ``apart``: in any case when this one ends, for what is kept and used again.

    Raises ChangedFileError also in place of another error: what did not fit was another file's.
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
    """Check the file when the batch of this thread ends; now if there is none."""
    batch: Batch | None = getattr(_own, "batch", None)
    if batch is None:
        store.verify(path)
    else:
        batch.add(store, path)


# -- The threads that reads run on: started when a job is large enough to want them, shared by all views.

Task = tuple[int, Callable[[], None]]  # (bytes it moves, what to do)
T = TypeVar("T")

_INLINE = 4 << 20  # bytes; below this a job is done before threads have woken up
_BATCH = 8 << 20
_THREADS = max(4, min(8, os.cpu_count() or 1))  # also on two cores: they wait for disks; each may need some 20 MiB
_LOOKERS = 8  # these need next to nothing
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_lookers: ThreadPoolExecutor | None = None
_looking = threading.local()  # ``here``: whether this thread is one of `each`


def run(tasks: Iterable[Task]) -> None:
    """Do all tasks, on several threads if they move enough bytes. Planning goes on while the first ones read.

    The first error, also one of the iterable itself, is raised when everything that was started has stopped. What was
    read is checked together (`io.batch`).
    """
    with checked() as batch:
        _run(tasks, batch)


def run_here(tasks: Iterable[Task]) -> None:
    """The same on this thread alone."""
    with checked():
        for _, do in tasks:
            do()


def _run(tasks: Iterable[Task], reads: Batch) -> None:
    futures: list[Future[None]] = []
    batch: list[Task] = []
    size, limit = 0, _INLINE
    try:
        for task in tasks:
            batch.append(task)
            size += task[0]
            if size >= limit and (futures or len(batch) > 1):
                futures.append(threads().submit(partial(_each_of, reads, batch)))
                batch, size, limit = [], 0, _BATCH
        _each(batch)
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:  # nothing to do unless something failed: let go of what has not started, wait for what has
        for future in futures:
            future.cancel()
        stopped(futures)


def each(do: Callable[[T], object], items: Sequence[T]) -> None:
    """``do`` each of the items, several at a time: small requests, which wait for a store and not for each other. They
    have threads of their own, because those of `run` wait for them. On one of these threads, one item after the other:
    what waits there for another of them may wait for ever.

    The first error is raised when everything that was started has stopped.
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
    """Wait for all, whatever happens meanwhile: they still write to memory and files of whoever called, who is going to
    close these. (A second Ctrl-C is no reason to write to a descriptor that may be another file's by then.)"""
    while True:
        try:
            wait(futures)
            return
        except KeyboardInterrupt:  # the first one is on its way up
            continue


def _each_of(reads: Batch, batch: list[Task]) -> None:
    with reads.joined():
        _each(batch)


def _each(batch: list[Task]) -> None:
    for _, do in batch:
        do()


def threads() -> ThreadPoolExecutor:
    """The threads that move tensors' bytes. What runs on them must not wait for others of them."""
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
    """A forked child has the pools' objects but none of their threads."""
    global _pool, _lookers, _lock
    _pool, _lookers, _lock = None, None, threading.Lock()


after_fork(_forget)
