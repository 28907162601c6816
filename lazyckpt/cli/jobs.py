"""The plan of a conversion as data, and its execution."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import typer

from ..core.names import natural
from ..core.units import human_bytes, size_in_bytes
from ..errors import DestinationError, LazyckptError, WorkerError
from ..export.manifest import with_manifest
from ..export.megatron import is_rank_folder, rank_folder, ranks_with_files
from ..export.options import WriteOptions, complete
from ..export.training import NotLoaded
from ..export.writer import Forecast, Writer, carry_out, check_whole, free_at, plan_of_ranks
from ..formats.zarr.documents import JOB
from ..io.storage.uploads import is_bucket, uploads_of
from ..io.storage.urls import is_remote
from ..jobs.executor import MEMORY
from ..jobs.guard import local_path
from ..jobs.remote import Remote
from ..jobs.shares import folder_of_share, share_of
from ..jobs.unfinished import record_of, unfinished
from ..recipes.unquantized import SideFiles, with_config
from ..reshaping import division
from ..view import CheckpointView
from .console import write_error
from .targets import Wanted, prepared
from .workers import Workers, target_of_work


@dataclass(frozen=True, slots=True)
class Job:
    """The plan of a conversion."""

    src: str
    """Path of the source, as the user typed it."""
    place: str
    """The checkpoint that has the configuration and the tokenizer: the source, or a step of the run."""
    source: CheckpointView
    """The source as opened."""
    view: CheckpointView
    """The selected, renamed and converted part of the source, of all ranks."""
    ranks: dict[str, CheckpointView]
    """Folder -> view of each rank; empty unless every rank gets a folder."""
    to: Writer
    dest: str
    wanted: Wanted
    memory: int
    """Limit of the work in flight, in bytes."""
    forecast: Forecast
    free: int | None
    """Free bytes at the destination; None if unknown."""
    kept: int | None
    """Bytes that an interrupted conversion has finished; None if there is none."""
    exists: bool
    """Whether the destination has an output that would have to be replaced."""

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain objects, with sizes in bytes."""
        source, mesh, amounts = self.source, self.source.mesh, self.forecast.states
        return {
            "source": {
                "path": self.src,
                "format": source.format,
                "mesh": {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep},
                "files": len(source.files),
            },
            "to": self.to.name,
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


def planned(
    src: str,
    source: CheckpointView,
    to: Writer,
    dest: str,
    wanted: Wanted,
    memory: str | None,
    place: str | None = None,
) -> Job:
    """Plan a conversion without reading tensor data. ``place``: see `Job`; by default the source.

    Raises DataError for tensors that cannot be written, and the errors of `targets.prepared` and
    `CheckpointView.shard`."""
    place = src if place is None else place
    view = prepared(with_config(source, place) if wanted.restacks else source, wanted, to)
    limit = MEMORY if memory is None else size_in_bytes(memory)
    ranks: dict[str, CheckpointView] = {}
    if to.by_rank and wanted.division:
        whole = division(**wanted.division)
        for rank in ranks_with_files(whole):
            folder = rank_folder(rank.tp, rank.pp, rank.ep, whole.mesh.pp, whole.mesh.ep)
            ranks[folder] = view.shard(**wanted.division, rank=tuple(rank))
    assert to.forecast is not None
    options = complete({"memory": memory}, "convert")
    forecasts = [to.forecast(one, dest, options, **wanted.own(to)) for one in ranks.values() or [view]]
    forecast = reduce(Forecast.plus, forecasts)
    there = _exists(to, dest, bool(ranks))
    return Job(src, place, source, view, ranks, to, dest, wanted, limit, forecast, free_at(dest), kept(dest), there)


def side_files(job: Job) -> SideFiles | None:
    """Return the files that a folder for transformers gets beside its weights, if these are dequantized, quantized,
    averaged, or the model has an adapter or other layers or experts; None if the output is another one."""
    one_file = job.dest.endswith(job.to.endings)
    wanted = job.wanted
    changed = wanted.dequantize or wanted.quantize or wanted.restacks or wanted.lora or job.place != job.src
    if not changed or job.to.name not in ("safetensors", "torch") or one_file:
        return None
    if job.ranks or is_remote(job.dest):
        return None
    dtype = wanted.weights if wanted.dequantize or wanted.dtype is not None else None
    return SideFiles(
        job.place,
        job.view,
        job.source.root,
        dtype,
        settings=job.view.meta["config"]["quantization_config"] if wanted.quantize is not None else None,
        plain=wanted.dequantize,
        restacked=wanted.restacks,
    )


def check_files(job: Job) -> None:
    """Raise the error that reading would raise for a missing file."""
    check_whole(job.view)
    for state in job.view.states.values() if not job.to.by_rank else [job.view]:
        for name in sorted(state, key=natural):
            state[name]._check()


def run_job(
    job: Job,
    *,
    memory: str | None,
    overwrite: bool,
    resume: bool,
    verify: bool,
    progress: bool | None,
    workers: int | None,
    cluster: str | None = None,
    share: tuple[int, int] | None = None,
    manifest: bool = False,
) -> dict[str, Any]:
    """Execute the plan, or a share of it, and return a report, or raise as the view's `to_...` methods do.

    The report has ``files`` (paths), ``manifest`` (its path, or None), ``nbytes``, ``published`` (False for a share
    that is not the last one), ``left_out`` (item -> reason why it is not written) and ``not_loaded`` (item -> reason
    why the trainer does not load it although it is written)."""
    own = job.wanted.own(job.to)
    with _executor(workers) if cluster is None else target_of_work(workers, cluster) as executor:
        given: WriteOptions = {
            "memory": memory, "overwrite": overwrite, "resume": resume, "verify": verify, "progress": progress,
            "executor": executor, "share": share, "manifest": manifest,
        }  # fmt: skip
        options = complete(given, "convert")
        check_whole(job.view)
        if job.ranks:
            plans = {
                name: job.to.plan(view, f"{job.dest.rstrip('/')}/{name}", options, **own)
                for name, view in job.ranks.items()
            }
            if manifest:
                plans = {name: with_manifest(plan) for name, plan in plans.items()}
            plan = plan_of_ranks(plans, job.dest, options, is_rank_folder)
        else:
            plan = job.to.plan(job.view, job.dest, options, **own)
        written = carry_out(plan, options)
    reasons = written.left_out
    return {
        "files": [str(plan.destination)] if isinstance(plan.destination, Remote) else list(map(str, written.paths)),
        "manifest": written.manifest,
        "nbytes": written.nbytes,
        "published": share is None or bool(written.paths),
        "left_out": {what: why for what, why in reasons.items() if not isinstance(why, NotLoaded)},
        "not_loaded": {what: why for what, why in reasons.items() if isinstance(why, NotLoaded)},
    }


def can_resume(job: Job, error: Exception, left: int) -> bool:
    """Return whether the same call may finish a job that an error has stopped, of which ``left`` bytes are kept."""
    if isinstance(error, WorkerError):
        return True
    if not isinstance(error, DestinationError):
        return isinstance(error, OSError) and not isinstance(error, LazyckptError)
    free = free_at(job.dest)
    short = free is not None and job.forecast.room is not None and job.forecast.room - left > free
    return short or isinstance(error.__cause__, OSError)  # other errors, such as an existing output, would recur


def kept(dest: str, share: tuple[int, int] | None = None) -> int | None:
    """Return the number of bytes that an interrupted conversion to ``dest``, or a share of it, has finished; None if
    there is none."""
    if not is_remote(dest):
        if share is not None:
            return unfinished(folder_of_share(local_path(dest), share_of(share)))
        return unfinished(dest)
    return unfinished(dest)


@contextmanager
def interruptible(dest: str) -> Iterator[None]:
    """Say after Ctrl-C what is kept of the output to ``dest``, and exit with 130. For commands that always resume."""
    try:
        yield
    except KeyboardInterrupt:
        left = kept(dest)
        about = (
            ""
            if left is None
            else f"; {human_bytes(left)} are finished and kept beside {dest}: the same command goes on"
        )
        write_error(f"interrupted{about}")
        raise typer.Exit(130) from None


def _executor(workers: int | None) -> Workers:
    """Return what to enter for an executor of so many processes, or for None: threads of this process."""
    return target_of_work(workers, None)


def _exists(to: Writer, dest: str, ranks: bool) -> bool:
    """Return whether the destination has an output that would have to be replaced."""
    if is_remote(dest):
        place = uploads_of(dest.rstrip("/"))
        if record_of(place, JOB) is not None:
            return False
        name = dest.rstrip("/").rpartition("/")[2]
        if not is_bucket(dest) and name in place.beside.list(name):
            return True
        return any(ranks or to.replaces(key.partition("/")[0]) for key in place.list())
    path = local_path(dest)
    if not path.is_dir():
        return path.exists()
    return any(ranks or to.replaces(name) for name in os.listdir(path))
