"""Where the work of a command is done: threads, processes, a cluster of Dask, or jobs of Slurm."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TypeAlias

from ..errors import DataError, FormatError, WorkerError
from ..jobs.shares import Share, share_of

Workers: TypeAlias = AbstractContextManager[Executor | None]
_JOBS = 1  # jobs of Slurm by default
_CONNECT = "30s"


def target_of_work(workers: int | None, cluster: str | None) -> Workers:
    """Return what to enter for an executor, or for None: threads of this process.

    Raises DataError for a cluster that is none of those of ``--cluster``; when entered, FormatError if a package is
    missing, WorkerError if a cluster does not answer."""
    if cluster is None:
        return _threads() if workers is None else _processes(workers)
    if cluster == "slurm":
        return _slurm(workers or _JOBS)
    kind, _, rest = cluster.partition(":")
    if kind == "processes" and rest.isdecimal() and int(rest) and workers is None:
        return _processes(int(rest))
    if kind == "dask" and rest.startswith("//") and re.fullmatch(r"[^/]+:\d+/?", rest[2:]) and workers is None:
        return _dask(f"tcp://{rest[2:].rstrip('/')}")
    raise DataError(
        f"--cluster {cluster!r:.100}: give dask://HOST:PORT of a scheduler, slurm, or processes:N"
        + (" (--workers is for processes of this machine, and for the jobs of slurm)" if workers is not None else "")
    )


def parse_share(text: str) -> tuple[int, int]:
    """Return the share of ``I/N``. Raises DataError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if found is None:
        raise DataError(f"--shard-of-work {text!r:.100}: give I/N, share I of N, counted from 0: 0/4 to 3/4")
    share: Share = share_of((int(found[1]), int(found[2])))
    return share.index, share.count


@contextmanager
def _threads() -> Iterator[None]:
    yield None


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Yield an executor of processes that leave Ctrl-C to this process."""
    ignored = signal.SIGINT, signal.SIG_IGN
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    with ProcessPoolExecutor(count, context, initializer=signal.signal, initargs=ignored) as executor:
        yield executor


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Yield the executor of a running scheduler of Dask."""
    distributed = _imported("distributed", "dask://")
    try:
        client = distributed.Client(address, timeout=_CONNECT)
    except OSError as e:
        raise WorkerError(f"--cluster: the scheduler at {address} does not answer ({e}). Is it running?") from e
    with client:
        yield client.get_executor()


@contextmanager
def _slurm(jobs: int) -> Iterator[Executor]:
    """Start jobs of Slurm, as the configuration of dask-jobqueue describes them, and yield the executor over them."""
    jobqueue = _imported("dask_jobqueue", "slurm")
    distributed = _imported("distributed", "slurm")
    try:
        cluster = jobqueue.SLURMCluster()
    except (ValueError, TypeError) as e:
        raise DataError(
            f"--cluster slurm: {e}. Describe a job (cores, memory, queue, walltime) in ~/.config/dask/jobqueue.yaml"
        ) from e
    with cluster, distributed.Client(cluster) as client:
        cluster.scale(jobs=jobs)
        yield client.get_executor()


def _imported(package: str, cluster: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        name = package.replace("_", "-")
        raise FormatError(f"--cluster {cluster} needs {name}: pip install {name}") from None
