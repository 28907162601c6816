"""`lazyckpt convert`: write a checkpoint in another format.

Exit codes: 0 done; 2 an error that the same call would raise again; 3 stopped half way, the finished part is kept and
the same call resumes; 130 the same after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

import typer

from ..core.units import human_bytes, plural
from ..derive.arithmetic import Missing
from ..derive.quantize import is_dequantized
from ..errors import DataError, FormatError, LazyckptError, and_more, some
from ..export.registry import NAMES
from ..io.storage.urls import is_remote
from ..recipes.unquantized import SideFiles
from ..runs.view import RunView
from ..show.text import oddities
from ..view import CheckpointView
from . import completing
from .choices import steps_of
from .console import as_options, write_error, write_line, write_text
from .jobs import Job, can_resume, check_files, kept, planned, run_job, side_files
from .options import (
    BaseOption,
    FormatOption,
    MissingOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    open_view,
)
from .targets import Wanted, check, target_of
from .workers import parse_share, target_of_work

_PROBLEMS = 10  # maximum number of problems that are printed
AGAIN = 3  # exit code: stopped half way, the same call resumes
INTERRUPTED = 130

_Dest = Annotated[
    str, typer.Argument(metavar="DST", help="Destination: a folder, a file, or a URL.", show_default=False)
]
_To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help=f"{'|'.join(n for n in NAMES if n != 'virtual')}; default: by the ending of DST.",
        autocompletion=completing.targets,
    ),
]
_Select = Annotated[str | None, typer.Option(metavar="GLOB", help="Only tensors whose names, as printed by ls, match.")]
_Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Convert floats to bf16, fp16, fp32, fp8_e4m3, ...", autocompletion=completing.dtypes
    ),
]
_Rename = Annotated[
    str | None,
    typer.Option(
        metavar="TABLE",
        help="Rename for hf, megatron, llama, ..., or by a .toml or .json file.",
        autocompletion=completing.tables,
    ),
]
_Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Write the unquantized model: weights of FP8, MXFP4, GPTQ, ... as --dtype (default: bf16).",
    ),
]
_Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Quantize matrices to fp8-block, int8, nf4, nf4-double or mxfp4, rounding to nearest.",
        autocompletion=completing.quantizations,
    ),
]
_Skip = Annotated[
    str | None,
    typer.Option(
        "--quantize-skip",
        metavar="GLOBS",
        help="With --quantize, modules that stay as they are (default: heads, embeddings, norms and routers).",
    ),
]
_Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="PATH[=SCALE]", help="Put an adapter into the weights: LoRA, DoRA, LoHa, LoKr."),
]
_Layers = Annotated[
    str | None,
    typer.Option(metavar="[STACK=]LIST", help="The model of these layers, in this order: 0-11,8-19 repeats layers."),
]
_Keep = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Only these experts: 0-3,6; or those of each layer: '1:0,2;2:1,3'."),
]
_Drop = Annotated[str | None, typer.Option(metavar="LIST", help="All experts but these.")]
_Upcycle = Annotated[
    str | None,
    typer.Option(metavar="N", help="The mixture of N copies of each MLP; options follow: 8,top_k=2,router=zeros."),
]
_Average = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS",
        help="If PATH is a run, the mean of steps: all, last:5, or 100,200-400.",
        autocompletion=completing.steps,
    ),
]
_Ema = Annotated[
    float | None,
    typer.Option(metavar="DECAY", help="With --average: the exponential moving average in place of the mean."),
]
_Degree = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Parallel degree to shard to: megatron, or safetensors and torch with a folder per rank.",
    ),
]
_Etp = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="How many ranks cut an expert's tensors (default: --tp).")
]
_Vpp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Model chunks of each pipeline stage.")]
_Layout = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Layers of the stages, if not all the same: 'Ett|(tt|)*6,tL', or 3,4,4,3."),
]
_Multiple = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Pad the rows of the vocabulary with zeros to a multiple of N times --tp."),
]
_CkptFormat = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of megatron: torch (rank files, the default), torch_dist, fsdp_dtensor.",
        autocompletion=completing.words("torch", "torch_dist", "fsdp_dtensor"),
    ),
]
_Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight (default: 1GiB).")]
_Resume = Annotated[bool, typer.Option(help="Resume an interrupted conversion, or discard it.")]
_Shard = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest safetensors or torch file in a folder (default: 5GB).")
]
_Codec = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Compression of zarr: blosc, zstd, gzip.",
        autocompletion=completing.words("blosc", "zstd", "gzip"),
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Worker processes (default: threads); with --cluster slurm, its jobs."),
]
_Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="WHERE",
        help="dask://HOST:PORT, slurm (jobs as the configuration of dask-jobqueue says), or processes:N.",
    ),
]
_Share = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Do share I of N of the work, from 0: N processes write together, the last one publishes.",
    ),
]


def convert(
    src: PathArg,
    dst: _Dest,
    to: _To = None,
    select: _Select = None,
    dtype: _Dtype = None,
    state: StateOption = None,
    stored: StoredOption = False,
    dequantize: _Dequantize = False,
    quantize: _Quantize = None,
    quantize_skip: _Skip = None,
    rename: _Rename = None,
    lora: _Lora = None,
    layers: _Layers = None,
    keep_experts: _Keep = None,
    drop_experts: _Drop = None,
    upcycle: _Upcycle = None,
    average: _Average = None,
    ema: _Ema = None,
    missing: MissingOption = "error",
    base: BaseOption = None,
    tp: _Degree = None,
    pp: _Degree = None,
    ep: _Degree = None,
    etp: _Etp = None,
    vpp: _Vpp = None,
    layout: _Layout = None,
    vocab_multiple: _Multiple = None,
    ckpt_format: _CkptFormat = None,
    max_shard_size: _Shard = None,
    codec: _Codec = None,
    memory: _Memory = None,
    workers: _Workers = None,
    cluster: _Cluster = None,
    shard_of_work: _Share = None,
    resume: _Resume = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output of the same format.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the output back and compare before publishing.")
    ] = False,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Also write a manifest: digests of all tensors, for verify --against.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print neither plan nor progress.")] = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print plan, result and error as one JSON object, once there is a plan.")
    ] = False,
) -> None:
    """Write a checkpoint in another format.

    Prints a plan, then works in bounded memory. DST appears only when the output is complete.

    safetensors and torch contain one state (--state); the other formats contain every state that they can hold.

    --dequantize writes the weights that the codes and scales of a quantized model mean, under the names of the
    unquantized model. Other tensors keep their dtypes. A folder of safetensors or torch also gets config.json without
    quantization_config, and the tokenizer, if they are beside PATH.

    --quantize writes codes and scales that transformers loads, with their quantization_config in config.json.
    Quantized models need --dequantize, too.

    Exit codes: 0 done; 2 an error: nothing was written and the same call would fail again; 3 stopped half way (no
    space, dead workers): the finished part is kept and the same call resumes; 130 the same after Ctrl-C. After a kill
    the same call resumes, too.

    --layers, --keep-experts, --drop-experts and --upcycle write the model with other layers or experts, numbered anew.
    A folder of safetensors or torch also gets the config.json beside PATH, changed accordingly.

    --average writes an average of the checkpoints of a run, in one pass, a piece of one step at a time.

    Several machines: --cluster hands the work to their workers; --shard-of-work $SLURM_PROCID/$SLURM_NTASKS needs only
    a shared file system.
    """
    wanted = Wanted(
        select,
        dtype,
        rename,
        stored,
        max_shard_size,
        codec,
        dequantize,
        quantize,
        quantize_skip,
        tuple(lora or ()),
        layers,
        keep_experts,
        drop_experts,
        upcycle,
        tp,
        pp,
        ep,
        etp,
        vpp,
        layout,
        vocab_multiple,
        ckpt_format,
    )
    if ema is not None and average is None:
        raise DataError("--ema is an average of steps of a run: add --average all, or --average last:5")
    if ema is not None and not 0 <= ema <= 1:
        raise DataError(f"--ema {ema:g}: it is how much of the average each step leaves, a number from 0 to 1")
    if missing != "error" and average is None:
        raise DataError("--missing is for an average of steps of a run: add --average all, or --average last:5")
    if average is not None and (stored or state or tag or format or rules or base):
        raise DataError("--average takes a run: leave out --stored, --state, --tag, --format, --rules and --base")
    kind = target_of(dst, to)
    check(kind, dst, wanted)
    target_of_work(workers, cluster)  # raises for what is no cluster, before anything is read
    share = None if shard_of_work is None else parse_share(shard_of_work)
    steps: list[int] = []
    if average is None:
        job = planned(src, open_view(src, state, stored, tag, format, rules, base), kind, dst, wanted, memory)
    else:
        averaged, place, steps = _averaged(src, average, ema, missing)
        if not is_remote(dst) and os.path.realpath(dst) == os.path.realpath(src):
            raise DataError(f"{dst} is the folder of the run, which would be taken for a model: choose another folder")
        job = planned(src, averaged, kind, dst, wanted, memory, place)
    if dequantize and not any(is_dequantized(spec) for spec in job.view.specs.values()):
        _note("no tensor that is written is quantized: --dequantize changes nothing (--dtype without it converts all)")
    beside = side_files(job)
    if beside is not None:
        beside.check(dst, overwrite)
    if not quiet and not as_json:
        if steps:
            text = "mean" if ema is None else f"exponential moving average ({ema:g})"
            _print("average", f"{text} of {plural(len(steps), 'step')}: {some(steps, 8)}")
        _print_plan(job, resume, beside)
    begun = time.monotonic()
    result: dict[str, Any] | None = None
    error, code = None, 0
    try:
        if dry_run:
            check_files(job)
        else:
            result = run_job(
                job,
                memory=memory,
                overwrite=overwrite,
                resume=resume,
                verify=verify,
                progress=not quiet,
                workers=workers,
                cluster=cluster,
                share=share,
                manifest=manifest,
            )
            if beside is not None and result["published"]:
                result["files"] += map(str, beside.write(dst))
            result["seconds"] = time.monotonic() - begun
    except KeyboardInterrupt:
        left = None if dry_run else kept(dst, share)
        code, error = INTERRUPTED, "interrupted" + (f"; {_finished(left)}" if left is not None else "")
    except (LazyckptError, OSError) as e:
        left = None if dry_run else kept(dst, share)
        if left is not None and can_resume(job, e, left):
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


def _averaged(run: str, text: str, decay: float | None, missing: Missing) -> tuple[CheckpointView, str, list[int]]:
    """Return the average of steps of a run, the path of the last of them, and the steps."""
    found = RunView(run)
    try:
        steps = steps_of(text, found.steps)
    except FormatError as e:
        raise FormatError(f"--average takes the folder of a run, with a checkpoint for each step: {e}") from None
    view = found.mean(steps, missing=missing) if decay is None else found.ema(decay, steps, missing=missing)
    return view, found.at(steps[-1]).root, steps


def _finished(nbytes: int) -> str:
    return f"{human_bytes(nbytes)} are finished and kept: the same command goes on, --no-resume begins anew"


def _print_plan(job: Job, resume: bool, beside: SideFiles | None) -> None:
    source, forecast = job.source, job.forecast
    degrees = " ".join(f"{k}={v}" for k, v in _degrees(job) if v > 1)
    _print("source", f"{job.src}: {source.format}{f' ({degrees})' if degrees else ''}, {_files(len(source.files))}")
    for state, amount in forecast.states.items():
        dtypes = ", ".join(amount.dtypes)
        _print("write", f"{state}: {plural(amount.tensors, 'tensor')}, {human_bytes(amount.nbytes)} as {dtypes or '-'}")
    files = f", {_files(forecast.files)}" if forecast.files is not None else ""
    _print("to", f"{job.dest}: {job.to.name}{files}{_ranks(job)}")
    if beside is not None and not beside.names:
        _print("beside", f"no config.json is beside {job.place}, or it is a URL: only weights are written")
    if beside is not None and beside.names:
        says = ["how the model is quantized"] if beside.quantized else []
        says += ["that the model is not quantized"] if beside.plain and not beside.quantized else []
        says += ["which layers and experts it has"] if beside.restacked else []
        _print("beside", ", ".join(beside.names) + (f"; config.json says {' and '.join(says)}" if says else ""))
    _print("memory", f"{human_bytes(job.memory)} for the work in flight")
    needed = "depends on the compression" if forecast.room is None else f"{human_bytes(forecast.room)} needed"
    _print("space", needed + (f", {human_bytes(job.free)} free" if job.free is not None else ""))
    if job.kept is not None:
        what = "used if it was the same conversion" if resume else "discarded"
        _print("resume", f"{human_bytes(job.kept)} of an interrupted conversion are there: {what}")
    if job.exists:
        _print("exists", f"{job.dest} exists already: only --overwrite replaces it")
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
    if not result["published"]:
        _print("share", f"{human_bytes(result['nbytes'])} in {seconds:.1f} s: done, the last share publishes", "green")
        return
    if result["manifest"] is not None:
        _print("manifest", result["manifest"])
    rate = f", {human_bytes(int(job.forecast.nbytes / seconds))}/s" if seconds > 0 else ""
    _print("done", f"{human_bytes(job.forecast.nbytes)} in {seconds:.1f} s{rate}", "green")


def _print_json(job: Job, result: dict[str, Any] | None, error: str | None, code: int) -> None:
    write_text(json.dumps({"plan": job.as_dict(), "result": result, "error": error, "exit_code": code}, indent=2))


def _note(text: str) -> None:
    write_line(("note: ", "yellow"), (text, ""), err=True)


def _print(label: str, text: str, style: str = "bold") -> None:
    write_line((f"{label:<9}", style), (text, ""))


def _degrees(job: Job) -> list[tuple[str, int]]:
    mesh = job.source.mesh
    return [("tp", mesh.tp), ("pp", mesh.pp), ("dp", mesh.dp), ("ep", mesh.ep)]


def _files(count: int) -> str:
    return plural(count, "file")


def _ranks(job: Job) -> str:
    return f", in {plural(len(job.ranks), 'folder')}, one for each rank" if job.ranks else ""
