"""Execution of many small tasks on threads, processes or a cluster, in bounded memory.

`executor_of` accepts any executor of concurrent.futures (also of mpi4py and loky), a client of Dask, and Ray.

A task reads its part of the source, writes it to the destination, and returns a small result (a checksum). Tasks are
independent of each other, and a task may run twice (a cluster repeats the tasks of a lost worker). Tasks for other
processes are pickled; the pickle of a lazy tensor contains its description, never its elements.
"""

from __future__ import annotations

import pickle
import zlib
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
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from ..core.units import size_in_bytes
from ..errors import DataError, LazyckptError, WorkerError
from ..io.pool import LOOK, stopped, threads

MEMORY = 1 << 30  # default limit in bytes on the memory of all running tasks
OVERHEAD = 12 << 20  # bytes that a reading task needs besides its target buffer
_MOST = 256  # maximum number of pending futures where the number of workers is unknown
_TOGETHER = 64  # maximum number of tasks in one future
_NEAR = 8 << 20  # maximum bytes of the tasks in one future, for threads
_FIRST = 32 << 20  # the same for other processes, for the first futures, so that all workers have work at once
_FAR = 256 << 20  # the same later: a scheduler of a cluster should not have to handle more
_QUEUED = 2  # futures for each worker: one that runs, and one that waits
_PACKED = 16 << 10  # bytes of a pickle that is compressed before it is sent
_ASKED = 5.0  # seconds after which a cluster is asked again how many workers it has


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


def run(tasks: Iterable[Task], done: Done, executor: Any = None, memory: int | None = None) -> None:
    """Run all tasks, and call ``done`` on this thread with each finished task and its result.

    ``executor`` is what `executor_of` accepts; None uses this process's threads. ``memory`` limits the bytes that
    tasks in flight hold together (default 1 GiB for the threads of this process, and for each worker elsewhere); a task
    that holds more runs alone. The iterable is consumed lazily.

    The first error is raised after tasks that have not started are cancelled and running tasks have finished; ``done``
    is still called for those that succeed. Raises WorkerError if the executor lost its workers, DataError if a task
    cannot be sent to them.
    """
    executor = executor_of(executor)
    near = shares_memory(executor)
    workers = threads() if executor is None else executor
    window = _Window(executor, near, memory)
    pending: dict[Future[list[Any]], list[Task]] = {}
    held = 0

    def collect() -> None:
        nonlocal held
        while not any(future.done() for future in pending):
            wait(pending, timeout=LOOK, return_when=FIRST_COMPLETED)
        for future in [future for future in pending if future.done()]:
            results = _result(future)
            batch = pending.pop(future)
            held -= _memory(batch)
            for task, result in zip(batch, results, strict=True):
                done(task, result)

    try:
        for batch in batches(tasks, window.batch, _TOGETHER):
            while pending and window.is_full(len(pending), held + _memory(batch)):
                collect()
            pending[_submit(workers, batch, near)] = batch
            window.submitted += 1
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


class _Window:
    """How much work is handed out at a time: the futures that may be pending, and the bytes of each.

    Threads of this process get small futures within the memory limit. Other workers get two futures each, whatever
    their number, which may change while the work runs; the first ones are small, so that every worker gets some.
    """

    def __init__(self, executor: Executor | None, near: bool, memory: int | None) -> None:
        self._executor, self._near, self._memory = executor, near, memory
        self._workers: int | None = None
        self._asked = -_ASKED
        self.submitted = 0

    @property
    def workers(self) -> int | None:
        """The number of tasks that the workers run at a time; None if it is unknown."""
        if not self._near and self._executor is not None and monotonic() - self._asked > _ASKED:
            self._workers, self._asked = workers_of(self._executor), monotonic()
        return self._workers

    def batch(self) -> int:
        """Return the bytes of the next future."""
        if self._near:
            return _NEAR
        return _FIRST if self.submitted < _QUEUED * (self.workers or 1) else _FAR

    def is_full(self, pending: int, held: int) -> bool:
        """Return whether a future has to wait, with which ``held`` bytes would be held."""
        workers = self.workers
        if workers is None:
            return pending >= _MOST or held > (MEMORY if self._memory is None else self._memory)
        if pending >= _QUEUED * workers:
            return True
        # a future that waits in the queue of a worker holds nothing yet
        return self._memory is not None and held // _QUEUED > self._memory


def executor_of(executor: Any) -> Executor | None:
    """Return the executor of concurrent.futures for what a user passes as ``executor=``: such an executor, a client of
    Dask, or the module `ray`. Raises DataError for anything else."""
    if executor is None or isinstance(executor, Executor):
        return executor
    if callable(getattr(executor, "get_executor", None)):  # distributed.Client
        found: Executor = executor.get_executor()
        return found
    if getattr(executor, "__name__", "") == "ray":
        return _Ray(executor)
    raise DataError(
        f"executor={executor!r:.100} is not an executor: pass one of concurrent.futures or mpi4py.futures, a client of "
        "Dask, or the module ray"
    )


def workers_of(executor: Executor) -> int | None:
    """Return how many tasks the workers of an executor run at a time; None if it does not tell."""
    client = getattr(executor, "_client", None)  # distributed.cfexecutor.ClientExecutor
    try:
        if client is not None:
            return max(1, int(sum(client.ncores().values())))
        for name in ("num_workers", "_max_workers"):  # mpi4py.futures and Ray, concurrent.futures
            count = getattr(executor, name, None)
            if isinstance(count, int) and count > 0:
                return count
    except Exception as e:  # a scheduler that cannot be reached: the tasks will say so
        raise _lost(e) from e
    return None


class _Ray(Executor):
    """An executor over Ray's workers. ``ray`` is the module, initialized by the user."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._call = ray.remote(_called)

    @property
    def num_workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._call.remote(fn, args, kwargs).future()
        return future


def _called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def runner(executor: Any, memory: int | str | None) -> Run:
    """Bind `run` to an executor and a memory limit: bytes, or text such as "2GB". Raises DataError for an invalid
    size, and for what is not an executor."""
    return partial(run, executor=executor_of(executor), memory=None if memory is None else size_in_bytes(memory))


def shares_memory(executor: Any) -> bool:
    """Return whether tasks run in this process."""
    return executor is None or isinstance(executor, ThreadPoolExecutor)


def batches(items: Iterable[Sized], nbytes: int | Callable[[], int], count: int) -> Iterator[list[Sized]]:
    """Group consecutive items into batches, each closed when it reaches ``nbytes`` bytes or ``count`` items. A function
    returns the bytes of the batch that is being filled."""
    batch: list[Sized] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.nbytes
        if size >= (nbytes() if callable(nbytes) else nbytes) or len(batch) >= count:
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
    """Return the pickle of the work, compressed if it is large: the paths of a thousand files are alike."""
    try:
        data = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
        return zlib.compress(data, 1) if len(data) >= _PACKED else data
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise DataError(f"the work cannot be sent to other processes: {e}. Use threads (executor=None)") from e


def _unpickled(work: bytes, _: str) -> list[Any]:
    return _each(pickle.loads(work if work.startswith(pickle.PROTO) else zlib.decompress(work)))


def _each(work: list[Callable[[], Any]]) -> list[Any]:
    return [do() for do in work]


def _result(future: Future[list[Any]]) -> list[Any]:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as e:
        raise _lost(e) from e
    except Exception as e:
        if type(e).__name__ in _LOST:
            raise _lost(e) from e
        raise


# errors of Dask (a worker died several times; the scheduler went away), Ray and mpi4py
_LOST = {
    "KilledWorker", "FutureCancelledError", "FuturesCancelledError", "CommClosedError", "WorkerCrashedError",
    "NodeDiedError", "OutOfMemoryError", "BrokenExecutor",
}  # fmt: skip


def _lost(e: BaseException) -> WorkerError:
    return WorkerError(
        f"the executor lost workers, or does not take work any more ({type(e).__name__}: {e}): were they killed, for "
        "example for lack of memory? Call again with another executor, or with a smaller memory="
    )
