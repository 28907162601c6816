"""A conversion: what it is going to do, as data, and doing it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

from ..core.names import natural
from ..core.units import size_in_bytes
from ..errors import DestinationError, LazyckptError, WorkerError
from ..export import forecast
from ..export.forecast import FILES, Forecast
from ..export.ranks import export_ranks, rank_folders
from ..export.shards import is_of_family
from ..export.training import NotLoaded
from ..formats.zarr.documents import JOB
from ..io.storage.fsspec import is_url
from ..jobs.destination import local_path
from ..jobs.executor import MEMORY
from ..jobs.places import Bucket
from ..jobs.publish import discard, unfinished
from ..view import CheckpointView, check_whole
from .targets import Wanted, prepared

_SHARD = "5GB"


@dataclass(frozen=True, slots=True)
class Job:
    """``src``: what was opened, as it was called; ``view``: what of it is written, of all ranks; ``ranks``: folder ->
    the view of each rank, if each gets one; ``free``: bytes at the target, None if that cannot be known; ``kept``:
    bytes that an interrupted conversion has finished, None if there is none; ``exists``: whether something has to be
    replaced."""

    src: str
    source: CheckpointView
    view: CheckpointView
    ranks: dict[str, CheckpointView]
    to: str
    dest: str
    wanted: Wanted
    memory: int
    forecast: Forecast
    free: int | None
    kept: int | None
    exists: bool

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain objects; sizes in bytes."""
        source, mesh, amounts = self.source, self.source.mesh, self.forecast.states
        return {
            "source": {
                "path": self.src,
                "format": source.format,
                "mesh": {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep},
                "files": len(source.files),
            },
            "to": self.to,
            "dest": self.dest,
            "options": self.wanted.describe(),
            "states": {s: {"tensors": a.tensors, "nbytes": a.nbytes, "dtypes": a.dtypes} for s, a in amounts.items()},
            "tensors": self.forecast.tensors,
            "nbytes": self.forecast.nbytes,
            "files": self.forecast.files,
            "ranks": list(self.ranks),
            "memory": self.memory,
            "room": self.forecast.room,
            "free": self.free,
            "exists": self.exists,
            "kept": self.kept,
            "problems": list(self.view.problems),
            "unreadable": dict(self.view.unreadable),
        }


def planned(src: str, source: CheckpointView, to: str, dest: str, wanted: Wanted, memory: str | None) -> Job:
    """Decide what is written, and find what cannot be. Reads no tensor data. Raises what `targets.prepared` and
    `CheckpointView.shard` raise, and DataError."""
    view = prepared(source, wanted)
    limit = MEMORY if memory is None else size_in_bytes(memory)
    ranks: dict[str, CheckpointView] = {}
    if wanted.mesh is not None and to in FILES:
        tp, pp, ep = wanted.mesh
        ranks = {name: view.shard(tp=tp, pp=pp, ep=ep, rank=rank) for name, rank in rank_folders(tp, pp, ep)}
    shown = cast(forecast.View, view)
    if to in FILES:
        views = [cast(forecast.View, v) for v in ranks.values()] or [shown]
        told = forecast.of_files(to, views, dest, wanted.max_shard_size or _SHARD)
    elif to == "zarr":
        told = forecast.of_zarr(shown, dest, wanted.codec, None if memory is None else limit)
    else:
        told = forecast.of_universal(shown) if to == "universal" else forecast.of_dcp(shown)
    there = _exists(to, dest, bool(ranks))
    return Job(src, source, view, ranks, to, dest, wanted, limit, told, forecast.free_at(dest), kept(dest), there)


def check_files(job: Job) -> None:
    """Raise the error that reading would raise because a file is missing."""
    check_whole(job.view)
    for state in job.view.states.values() if job.to not in FILES else [job.view]:
        for name in sorted(state, key=natural):
            state[name].check()


def carried_out(
    job: Job, *, memory: str | None, overwrite: bool, verify: bool, progress: bool | None, workers: int | None
) -> dict[str, Any]:
    """Do it. Returns what there is to tell: ``files`` (paths), ``left_out`` and ``not_loaded``, which is written (what
    -> reason). Raises what the view's `to_...` methods raise."""
    with _executor(workers) as executor:
        options: dict[str, Any] = {"memory": memory, "verify": verify, "progress": progress, "executor": executor}
        if job.to in FILES:
            options["max_shard_size"] = job.wanted.max_shard_size or _SHARD
        if job.to == "zarr":
            options["codec"] = job.wanted.codec
        if job.to == "megatron":
            options |= dict(zip(("tp", "pp", "ep"), job.wanted.mesh or (1, 1, 1), strict=True))
        if job.ranks:
            of_one = options | {"overwrite": True}  # within a folder that is not complete
            writers = {name: partial(_write, view, job.to, options=of_one) for name, view in job.ranks.items()}
            tensors = job.view.once()[0].values()
            about = repr((job.to, job.wanted.dtype, options["max_shard_size"]))
            answer: Any = export_ranks(writers, job.dest, tensors, about, overwrite)
        else:
            answer = _write(job.view, job.to, job.dest, options | {"overwrite": overwrite})
    told = answer if isinstance(answer, dict) else {}
    return {
        "files": [str(path) for path in answer] if isinstance(answer, list) else [],
        "left_out": {what: why for what, why in told.items() if not isinstance(why, NotLoaded)},
        "not_loaded": {what: why for what, why in told.items() if isinstance(why, NotLoaded)},
    }


def goes_on(job: Job, error: Exception, left: int) -> bool:
    """Whether the same call may finish what an error has stopped, with ``left`` bytes of it kept."""
    if isinstance(error, WorkerError):
        return True
    if not isinstance(error, DestinationError):
        return isinstance(error, OSError) and not isinstance(error, LazyckptError)
    free = forecast.free_at(job.dest)
    short = free is not None and job.forecast.room is not None and job.forecast.room - left > free
    return short or isinstance(error.__cause__, OSError)  # and not: something is there already


def kept(dest: str) -> int | None:
    """Bytes that an interrupted conversion to ``dest`` has finished; None if there is none."""
    if not _remote(dest):
        return unfinished(dest.removeprefix("file://"))
    there = Bucket(dest).find()
    return sum(there.values()) - there[JOB] if JOB in there else None


def throw_away(dest: str) -> None:
    """Remove what an interrupted conversion has left. Raises DestinationError."""
    if not _remote(dest):
        discard(dest.removeprefix("file://"))
    elif JOB in Bucket(dest).find():
        Bucket(dest).remove_all()


def _write(view: CheckpointView, to: str, dest: Path | str, options: dict[str, Any]) -> Any:
    return getattr(view, f"to_{to}")(dest, **options)


@contextmanager
def _executor(workers: int | None) -> Iterator[Executor | None]:
    """Processes that leave Ctrl-C to this one; None for its own threads."""
    if workers is None:
        yield None
        return
    ignored = signal.SIGINT, signal.SIG_IGN
    context = get_context("forkserver")
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignored) as executor:
        yield executor


def _remote(dest: str) -> bool:
    return is_url(dest) and not dest.startswith("file://")


def _exists(to: str, dest: str, ranks: bool) -> bool:
    """Whether something is there already that would have to be replaced."""
    if _remote(dest):
        there = Bucket(dest).find()
        return bool(there) and JOB not in there
    path = local_path(dest.removeprefix("file://"))
    if not path.is_dir():
        return path.exists()
    form = FILES.get(to) if not ranks else None  # other files may stand beside these
    return any(form is None or is_of_family(name, form.stem, form.suffix) for name in os.listdir(path))
