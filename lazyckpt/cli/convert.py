"""`lazyckpt convert`: a checkpoint of any layout as one of another.

Exit codes: 0 done; 2 an error, and the same call would end in it again; 3 stopped half way, what is finished is kept,
and the same call goes on; 130 the same after Ctrl-C.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from ..core.units import human_bytes, plural
from ..errors import LazyckptError, and_more
from ..export.registry import NAMES
from ..show.text import oddities
from .console import as_options, write_error, write_line, write_text
from .jobs import Job, carried_out, check_files, goes_on, kept, planned
from .options import FormatOption, PathArg, RulesOption, StateOption, StoredOption, TagOption, open_view
from .targets import Wanted, check, target_of

_PROBLEMS = 10  # lines of problems that are printed
AGAIN = 3  # exit code: stopped half way, the same call goes on
INTERRUPTED = 130

_Dest = Annotated[str, typer.Argument(metavar="DST", help="A folder, a file, or for zarr a URL.", show_default=False)]
_To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help=f"{'|'.join(n for n in NAMES if n != 'virtual')}; by default what the end of DST says."
    ),
]
_Select = Annotated[str | None, typer.Option(metavar="GLOB", help="Only tensors whose names (as ls prints) match.")]
_Dtype = Annotated[str | None, typer.Option(metavar="NAME", help="Convert floats: bf16, fp16, fp32, fp8_e4m3, ...")]
_Rename = Annotated[
    str | None, typer.Option(metavar="TABLE", help="Names of hf, megatron, llama, ..., or a .toml or .json file.")
]
_Degree = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Megatron's ranks; of safetensors and torch a folder for each.")
]
_Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="What the work in flight may hold (1GiB).")]
_Resume = Annotated[bool, typer.Option(help="Go on with what an interrupted call finished, or begin anew.")]
_Shard = Annotated[str | None, typer.Option(metavar="SIZE", help="Of safetensors and torch files in a folder (5GB).")]
_Codec = Annotated[str | None, typer.Option(metavar="NAME", help="zarr's: blosc, zstd, gzip.")]
_Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes (by default threads of this one).")]


def convert(
    src: PathArg,
    dst: _Dest,
    to: _To = None,
    select: _Select = None,
    dtype: _Dtype = None,
    state: StateOption = None,
    stored: StoredOption = False,
    rename: _Rename = None,
    tp: _Degree = None,
    pp: _Degree = None,
    ep: _Degree = None,
    max_shard_size: _Shard = None,
    codec: _Codec = None,
    memory: _Memory = None,
    workers: _Workers = None,
    resume: _Resume = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there, of the same format.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all again and compare before it appears.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Neither plan nor progress.")] = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Plan, result and error as one JSON object, once there is a plan.")
    ] = False,
) -> None:
    """Write a checkpoint in another layout.

    Prints a plan, then works in bounded memory. Nothing is visible at DST before all of it is complete.

    safetensors and torch get one state (--state), the others all that they can hold.

    Exit codes: 0 done; 2 an error, nothing was written and the same call would not help; 3 stopped half way (no space,
    dead workers): what is finished is kept and the same call goes on; 130 the same after Ctrl-C. After a kill the same
    call goes on, too.
    """
    mesh = None if tp is pp is ep is None else (tp or 1, pp or 1, ep or 1)
    wanted = Wanted(select, dtype, rename, mesh, stored, max_shard_size, codec)
    kind = target_of(dst, to)
    check(kind, dst, wanted)
    job = planned(src, open_view(src, state, stored, tag, format, rules), kind, dst, wanted, memory)
    if not quiet and not as_json:
        _print_plan(job, resume)
    begun = time.monotonic()
    result: dict[str, Any] | None = None
    error, code = None, 0
    try:
        if dry_run:
            check_files(job)
        else:
            result = carried_out(
                job,
                memory=memory,
                overwrite=overwrite,
                resume=resume,
                verify=verify,
                progress=not quiet,
                workers=workers,
            )
            result["seconds"] = time.monotonic() - begun
    except KeyboardInterrupt:
        left = None if dry_run else kept(dst)
        code, error = INTERRUPTED, "interrupted" + (f"; {_finished(left)}" if left is not None else "")
    except (LazyckptError, OSError) as e:
        left = None if dry_run else kept(dst)
        if left is not None and goes_on(job, e, left):
            code, error = AGAIN, as_options(f"{e} ({_finished(left)})")
        else:
            code, error = 2, as_options(str(e))
    if error is not None:
        write_error(error)
    if as_json:
        _print_json(job, result, error, code)
    elif result is not None and not quiet:
        _print_result(job, result)
    if code:
        raise typer.Exit(code)


def _finished(nbytes: int) -> str:
    return f"{human_bytes(nbytes)} are finished and kept: the same command goes on, --no-resume begins anew"


def _print_plan(job: Job, resume: bool) -> None:
    source, told = job.source, job.forecast
    degrees = " ".join(f"{k}={v}" for k, v in _degrees(job) if v > 1)
    _print("source", f"{job.src}: {source.format}{f' ({degrees})' if degrees else ''}, {_files(len(source.files))}")
    for state, amount in told.states.items():
        dtypes = ", ".join(amount.dtypes)
        _print("write", f"{state}: {plural(amount.tensors, 'tensor')}, {human_bytes(amount.nbytes)} as {dtypes or '-'}")
    _print(
        "to", f"{job.dest}: {job.to.name}" + (f", {_files(told.files)}" if told.files is not None else "") + _ranks(job)
    )
    _print("memory", f"{human_bytes(job.memory)} for the work in flight")
    needed = "as much as compresses" if told.room is None else f"{human_bytes(told.room)} needed"
    _print("space", needed + (f", {human_bytes(job.free)} free" if job.free is not None else ""))
    if job.kept is not None:
        what = "used, if that was the same one" if resume else "thrown away"
        _print("resume", f"{human_bytes(job.kept)} of an interrupted conversion are there: {what}")
    if job.exists:
        _print("there", f"{job.dest} exists already: only --overwrite replaces it")
    lines = oddities(job.view)
    for line in lines[:_PROBLEMS]:
        _print("problem", line, "yellow")
    if len(lines) > _PROBLEMS:
        _print("", f"{and_more(len(lines) - _PROBLEMS, 'problems')} (--json has them all)", "yellow")


def _print_result(job: Job, result: dict[str, Any]) -> None:
    for what, why in result["left_out"].items():
        _print("left out", f"{what}: {why}", "yellow")
    for what, why in result["not_loaded"].items():
        _print("note", f"{what}: {why}", "yellow")
    seconds = result["seconds"]
    rate = f", {human_bytes(int(job.forecast.nbytes / seconds))}/s" if seconds > 0 else ""
    _print("done", f"{human_bytes(job.forecast.nbytes)} in {seconds:.1f} s{rate}", "green")


def _print_json(job: Job, result: dict[str, Any] | None, error: str | None, code: int) -> None:
    write_text(json.dumps({"plan": job.as_dict(), "result": result, "error": error, "exit_code": code}, indent=2))


def _print(label: str, text: str, style: str = "bold") -> None:
    write_line((f"{label:<9}", style), (text, ""))


def _degrees(job: Job) -> list[tuple[str, int]]:
    mesh = job.source.mesh
    return [("tp", mesh.tp), ("pp", mesh.pp), ("dp", mesh.dp), ("ep", mesh.ep)]


def _files(count: int) -> str:
    return plural(count, "file")


def _ranks(job: Job) -> str:
    return f", in {plural(len(job.ranks), 'folder')}, one for each rank" if job.ranks else ""
