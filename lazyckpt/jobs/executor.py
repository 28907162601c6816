"""The engine of everything that is written: many small tasks, on threads, processes or a cluster, in bounded memory.

A task reads its part of the source and writes it to its place by itself; what it returns is small (a checksum). Tasks
do not depend on each other, and each may be done twice (a cluster does those of a lost worker again). For other
processes they are pickled: a lazy tensor is its description then, never its elements.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from ..core.units import size_in_bytes
from ..errors import DataError, LazyckptError, WorkerError
from ..io.pool import stopped, threads

MEMORY = 1 << 30  # bytes that running tasks hold together, if nothing else is said
OVERHEAD = 12 << 20  # bytes that a task takes to read, besides what it reads into
_MOST = 256  # futures at a time
_TOGETHER = 64  # tasks in one future, at most, ...
_NEAR = 8 << 20  # ... or so many bytes, for threads
_FAR = 64 << 20  # the same for other processes: a future costs them more


class Task(NamedTuple):
    """``nbytes``: bytes of tensors that it moves, for the bar. ``memory``: bytes it holds while it runs. ``do``: what
    to do; for other processes it has to pickle (a `functools.partial` of a function of a module)."""

    nbytes: int
    memory: int
    do: Callable[[], Any]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Sized = TypeVar("Sized", bound=_Sized)
Done: TypeAlias = Callable[[Task, Any], None]
Run: TypeAlias = Callable[[Iterable[Task], Done], None]


def run(tasks: Iterable[Task], done: Done, executor: Executor | None = None, memory: int | None = None) -> None:
    """Do all tasks; ``done`` is called here, with each that is done and what it returned.

    ``executor``: where they run, any of concurrent.futures; None for this process's own threads. ``memory``: bytes that
    the tasks in flight may hold together (1 GiB); one that holds more by itself runs alone. The tasks are asked for as
    their turn comes.

    The first error is raised when what has not started is cancelled and what has is over, of which ``done`` still hears
    if it went well. Raises WorkerError if the
    executor lost its workers, DataError if a task cannot be sent to them.
    """
    near = shares_memory(executor)
    workers = threads() if executor is None else executor
    limit = MEMORY if memory is None else memory
    pending: dict[Future[list[Any]], list[Task]] = {}
    held = 0

    def collect() -> None:
        nonlocal held
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            results = _result(future)
            batch = pending.pop(future)
            held -= _memory(batch)
            for task, result in zip(batch, results, strict=True):
                done(task, result)

    try:
        for batch in batches(tasks, _NEAR if near else _FAR, _TOGETHER):
            while pending and (held + _memory(batch) > limit or len(pending) >= _MOST):
                collect()
            pending[_submit(workers, batch, near)] = batch
            held += _memory(batch)
        while pending:
            collect()
    except BaseException:
        for future in pending:
            future.cancel()
        stopped(list(pending))
        for future, batch in pending.items():  # what is done is done
            if not future.cancelled() and future.exception() is None:
                for task, result in zip(batch, future.result(), strict=True):
                    done(task, result)
        raise


def runner(executor: Executor | None, memory: int | str | None) -> Run:
    """`run` there, with so many bytes, or text such as "2GB". Raises DataError for a size that is none."""
    return partial(run, executor=executor, memory=None if memory is None else size_in_bytes(memory))


def shares_memory(executor: Executor | None) -> bool:
    """Whether tasks run in this process."""
    return executor is None or isinstance(executor, ThreadPoolExecutor)


def batches(items: Iterable[Sized], nbytes: int, count: int) -> Iterator[list[Sized]]:
    """Items in their order, together until they move so many bytes or are so many."""
    batch: list[Sized] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.nbytes
        if size >= nbytes or len(batch) >= count:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _memory(batch: list[Task]) -> int:
    return max(task.memory for task in batch)


def _submit(workers: Executor, batch: list[Task], near: bool) -> Future[list[Any]]:
    work = [task.do for task in batch]
    try:
        if near:
            return workers.submit(_each, work)
        # The text of its own: Dask takes two calls with equal arguments for one.
        return workers.submit(_unpickled, _pickled(work), uuid4().hex)
    except LazyckptError:
        raise
    except (BrokenExecutor, RuntimeError) as e:  # RuntimeError: it has been shut down
        raise _lost(e) from e


def _pickled(work: list[Callable[[], Any]]) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise DataError(f"the work cannot be sent to other processes: {e}. Use threads (executor=None)") from e


def _unpickled(work: bytes, _: str) -> list[Any]:
    return _each(pickle.loads(work))


def _each(work: list[Callable[[], Any]]) -> list[Any]:
    return [do() for do in work]


def _result(future: Future[list[Any]]) -> list[Any]:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as e:
        raise _lost(e) from e
    except Exception as e:
        if type(e).__name__ == "KilledWorker":  # distributed's, which tried it several times
            raise _lost(e) from e
        raise


def _lost(e: BaseException) -> WorkerError:
    return WorkerError(
        f"the executor lost workers, or does not take work any more ({type(e).__name__}: {e}): were they killed, for "
        "instance for want of memory? Call again with another executor, or with a smaller memory="
    )
