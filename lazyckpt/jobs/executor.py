"""Execution of many small tasks on threads, processes or a cluster, in bounded memory.

A task reads its part of the source, writes it to the destination, and returns a small result (a checksum). Tasks are
independent of each other, and a task may run twice (a cluster repeats the tasks of a lost worker). Tasks for other
processes are pickled; the pickle of a lazy tensor contains its description, never its elements.
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

MEMORY = 1 << 30  # default limit in bytes on the memory of all running tasks
OVERHEAD = 12 << 20  # bytes that a reading task needs besides its target buffer
_MOST = 256  # maximum number of pending futures
_TOGETHER = 64  # maximum number of tasks in one future
_NEAR = 8 << 20  # maximum bytes of the tasks in one future, for threads
_FAR = 64 << 20  # the same for other processes, where a future has a higher cost


class Task(NamedTuple):
    """A unit of work.

    ``nbytes`` is the number of tensor bytes that it moves, for the progress bar; ``memory`` is the number of bytes that
    it holds while it runs. ``do`` is the function to call; for other processes it must be picklable (a
    `functools.partial` of a module-level function)."""

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
    """Run all tasks, and call ``done`` on this thread with each finished task and its result.

    ``executor`` is any executor of concurrent.futures; None uses this process's threads. ``memory`` limits the bytes
    that tasks in flight hold together (default 1 GiB); a task that holds more runs alone. The iterable is consumed
    lazily.

    The first error is raised after tasks that have not started are cancelled and running tasks have finished; ``done``
    is still called for those that succeed. Raises WorkerError if the executor lost its workers, DataError if a task
    cannot be sent to them.
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
        for future, batch in pending.items():  # report the tasks that succeeded
            if not future.cancelled() and future.exception() is None:
                for task, result in zip(batch, future.result(), strict=True):
                    done(task, result)
        raise


def runner(executor: Executor | None, memory: int | str | None) -> Run:
    """Bind `run` to an executor and a memory limit: bytes, or text such as "2GB". Raises DataError for an invalid
    size."""
    return partial(run, executor=executor, memory=None if memory is None else size_in_bytes(memory))


def shares_memory(executor: Executor | None) -> bool:
    """Return whether tasks run in this process."""
    return executor is None or isinstance(executor, ThreadPoolExecutor)


def batches(items: Iterable[Sized], nbytes: int, count: int) -> Iterator[list[Sized]]:
    """Group consecutive items into batches, each closed when it reaches ``nbytes`` bytes or ``count`` items."""
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
        # The unique text is needed because Dask treats two calls with equal arguments as one.
        return workers.submit(_unpickled, _pickled(work), uuid4().hex)
    except LazyckptError:
        raise
    except (BrokenExecutor, RuntimeError) as e:  # RuntimeError: the executor was shut down
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
        if type(e).__name__ == "KilledWorker":  # raised by distributed after several attempts
            raise _lost(e) from e
        raise


def _lost(e: BaseException) -> WorkerError:
    return WorkerError(
        f"the executor lost workers, or does not take work any more ({type(e).__name__}: {e}): were they killed, for "
        "example for lack of memory? Call again with another executor, or with a smaller memory="
    )
