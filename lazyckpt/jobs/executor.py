"""Execution of many small tasks on threads, processes or a cluster, in bounded memory.

`executor_of` accepts any executor of concurrent.futures (also of mpi4py and loky), a client of Dask, and Ray.

A task reads its part of the source, writes it to the destination, and returns a small result (a checksum). Tasks are
independent of each other, and a task may run twice (a cluster repeats the tasks of a lost worker). Tasks for other
processes are pickled; the pickle of a lazy tensor contains its description, never its elements.
"""

from __future__ import annotations

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
from typing import Any, Protocol, TypeAlias

from ..core.units import size_in_bytes
from ..errors import DataError, LazyckptError, WorkerError
from ..io.pool import LOOK, stopped, threads, waiting_threads
from ..lazy import LazyArray
from .batching import Placer, Task, by_file, in_turn
from .sending import Sender
from .together import read_together

MEMORY = 1 << 30  # default limit in bytes on the memory of all running tasks
OVERHEAD = 12 << 20  # bytes that a reading task needs besides its target buffer
_MOST = 256  # maximum number of pending futures where the number of workers is unknown
_TOGETHER = 4096  # maximum number of tasks in one future
_FEW = 64  # the same for threads
_NEAR = 8 << 20  # maximum bytes of the tasks in one future, for threads
_FAR = 32 << 20, 512 << 20  # bytes of the tasks in one future for other processes: at least, and at most
_SPLIT = 2  # futures for each worker into which the work that is left is cut, so that all end at the same time
_QUEUED = 2  # futures for each worker: one that runs, and one that waits
_ASKED = 5.0  # seconds after which a cluster is asked again how many workers it has

Done: TypeAlias = Callable[[Task, Any], None]


class Run(Protocol):
    """`run` with an executor and a memory limit."""

    def __call__(
        self, tasks: Iterable[Task], done: Done, *, tensors: Iterable[LazyArray] = (), waits: bool = False
    ) -> None: ...


def run(
    tasks: Iterable[Task],
    done: Done,
    executor: Any = None,
    memory: int | None = None,
    tensors: Iterable[LazyArray] = (),
    waits: bool = False,
) -> None:
    """Run all tasks, and call ``done`` on this thread with each finished task and its result.

    ``executor`` is what `executor_of` accepts; None uses this process's threads. ``memory`` limits the bytes that
    tasks in flight hold together (default 1 GiB for the threads of this process, and for each worker elsewhere); a task
    that holds more runs alone. The iterable is consumed lazily. ``tensors`` are those that many tasks read a part of:
    their descriptions are sent to other processes only once. ``waits`` says that tasks spend their time
    waiting for a server, so that more threads than processors are of use.

    The first error is raised after tasks that have not started are cancelled and running tasks have finished; ``done``
    is still called for those that succeed. Raises WorkerError if the executor lost its workers, DataError if a task
    cannot be sent to them.
    """
    executor = executor_of(executor)
    workers: _Near | _Far = (
        _Near(executor, memory, waits) if shares_memory(executor) else _Far(executor, memory, tensors)
    )
    pending: dict[Future[list[Any] | None], list[Task]] = {}
    held = 0

    def collect() -> None:
        nonlocal held
        while not any(future.done() for future in pending):
            wait(pending, timeout=LOOK, return_when=FIRST_COMPLETED)
        for future in [future for future in pending if future.done()]:
            results = _result(future)
            batch = pending.pop(future)
            if results is None:  # from a worker that joined later
                pending[workers.submit(batch, again=True)] = batch
                continue
            held -= _memory(batch)
            for task, result in zip(batch, results, strict=True):
                done(task, result)

    try:
        for batch in workers.batches(tasks):
            while pending and workers.is_full(len(pending), held + _memory(batch)):
                collect()
            pending[workers.submit(batch)] = batch
            held += _memory(batch)
        while pending:
            collect()
    except BaseException:
        for future in pending:
            future.cancel()
        stopped(list(pending))
        for future, batch in pending.items():  # report the tasks that succeeded
            if not future.cancelled() and future.exception() is None:
                for task, result in zip(batch, future.result() or (), strict=False):
                    done(task, result)
        raise


class _Near:
    """Threads of this process. They get small futures within the memory limit."""

    def __init__(self, executor: Executor | None, memory: int | None, waits: bool) -> None:
        self._executor = executor or (waiting_threads() if waits else threads())
        self._memory = MEMORY if memory is None else memory

    def batches(self, tasks: Iterable[Task]) -> Iterator[list[Task]]:
        return in_turn(tasks, _NEAR, min(_FEW, _TOGETHER))

    def is_full(self, pending: int, held: int) -> bool:
        """Return whether a future has to wait, with which ``held`` bytes would be held."""
        return pending >= _MOST or held > self._memory

    def submit(self, batch: list[Task], again: bool = False) -> Future[list[Any] | None]:
        try:
            return self._executor.submit(_each_near, batch)
        except RuntimeError as e:  # the executor was shut down
            raise _lost(e) from e


class _Far:
    """Workers in other processes. They get two futures each, whatever their number, which may change while the work
    runs. The futures become smaller towards the end. A file is read by one worker, where the executor lets one
    choose."""

    def __init__(self, executor: Any, memory: int | None, tensors: Iterable[LazyArray]) -> None:
        self._executor, self._memory, self._tensors = executor, memory, tensors
        self._workers: dict[str, int] | int | None = None
        self._asked = -_ASKED
        self._sender: Sender | None = None
        self._placer = Placer()

    @property
    def workers(self) -> int | None:
        """The number of tasks that the workers run at a time; None if it is unknown."""
        if monotonic() - self._asked > _ASKED:
            self._workers, self._asked = workers_of(self._executor), monotonic()
        return max(1, sum(self._workers.values())) if isinstance(self._workers, dict) else self._workers

    def batches(self, tasks: Iterable[Task]) -> Iterator[list[Task]]:
        return by_file(tasks, self._size, _TOGETHER)

    def _size(self, left: int) -> int:
        """Return the bytes of the next future."""
        least, most = _FAR
        return max(least, min(left // (_SPLIT * (self.workers or 1)), most))

    def is_full(self, pending: int, held: int) -> bool:
        """Return whether a future has to wait, with which ``held`` bytes would be held."""
        workers = self.workers
        if workers is None:
            return pending >= _MOST or held > (MEMORY if self._memory is None else self._memory)
        if pending >= _QUEUED * workers:
            return True
        # a future that waits in the queue of a worker holds nothing yet
        return self._memory is not None and held // _QUEUED > self._memory

    def submit(self, batch: list[Task], again: bool = False) -> Future[list[Any] | None]:
        try:
            if self._sender is None:
                self._sender = Sender(self._executor, self._tensors, _QUEUED * (self.workers or 1))
            where: dict[str, Any] = {}
            if isinstance(self._workers, dict) and (name := self._placer.worker(batch, self._workers)) is not None:
                where = {"workers": [name], "allow_other_workers": True}
            found: Future[list[Any] | None] = self._sender.submit([task.do for task in batch], again, **where)
            return found
        except LazyckptError:
            raise
        except (BrokenExecutor, RuntimeError) as e:  # RuntimeError: the executor was shut down
            raise _lost(e) from e


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


def workers_of(executor: Any) -> dict[str, int] | int | None:
    """Return how many tasks the workers of an executor run at a time: of each worker by name if tasks can be sent to
    it, else of all together; None if the executor does not tell."""
    client = getattr(executor, "_client", None)  # distributed.cfexecutor.ClientExecutor
    try:
        if client is not None:
            return {str(name): int(count) for name, count in client.ncores().items()}
        for name in ("num_workers", "_max_workers"):  # mpi4py.futures and Ray, concurrent.futures
            count = getattr(executor, name, None)
            if isinstance(count, int) and count > 0:
                return count
    except Exception as e:  # a scheduler that cannot be reached
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
        future: Future[Any] = self._call.remote(fn, kwargs, *args).future()
        return future

    def put(self, data: bytes, _: str) -> Any:
        """Keep bytes for all workers; return what `submit` accepts in their place."""
        return self._ray.put(data)


def _called(fn: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> Any:
    return fn(*args, **kwargs)


def runner(executor: Any, memory: int | str | None) -> Run:
    """Bind `run` to an executor and a memory limit: bytes, or text such as "2GB". Raises DataError for an invalid
    size, and for what is not an executor."""
    return partial(run, executor=executor_of(executor), memory=None if memory is None else size_in_bytes(memory))


def shares_memory(executor: Any) -> bool:
    """Return whether tasks run in this process."""
    return executor is None or isinstance(executor, ThreadPoolExecutor)


def _memory(batch: list[Task]) -> int:
    return max(task.memory for task in batch)


def _each_near(batch: list[Task]) -> list[Any]:
    with read_together(task.reads for task in batch if task.reads is not None):
        return [task.do() for task in batch]


def _result(future: Future[list[Any] | None]) -> list[Any] | None:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as e:
        raise _lost(e) from e
    except Exception as e:
        if (type(e).__module__.split(".")[0], type(e).__name__) in _LOST:
            raise _lost(e) from e
        raise


# errors, by their packages, after a worker died or the scheduler went away
_LOST = {
    ("distributed", "KilledWorker"), ("distributed", "FutureCancelledError"), ("distributed", "FuturesCancelledError"),
    ("distributed", "CommClosedError"), ("ray", "WorkerCrashedError"), ("ray", "NodeDiedError"),
    ("ray", "OutOfMemoryError"), ("mpi4py", "BrokenExecutor"),
}  # fmt: skip


def _lost(e: BaseException) -> WorkerError:
    return WorkerError(
        f"the executor lost workers, or does not take work any more ({type(e).__name__}: {e}): were they killed, for "
        "example for lack of memory? Call again with another executor, or with a smaller memory="
    )
