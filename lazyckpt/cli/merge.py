"""`lazyckpt merge`: merge models, by a merge file of mergekit or by options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.dtypes import dtype_named
from ..core.units import human_bytes, plural
from ..derive.merges import method_of
from ..errors import DataError, and_more
from ..recipes.merging import Merge, read_merge, write_merge
from ..show.text import oddities
from . import completing
from .console import write_line, write_text
from .jobs import interruptible
from .options import MissingOption

_FILES = (".yml", ".yaml", ".json")  # endings of merge files
_PROBLEMS = 10  # maximum number of problems that are printed

_Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE OUT or MODEL...", help="A merge file and the folder to write; or the models, with -o."
    ),
]
_Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weight", metavar="X", help="Weight of a model, for each in order; X,Y,Z is a gradient over layers."
    ),
]
_Params = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=X", help="Parameter of the method: t=0.3, density=0.5, lambda=1.2, seed=7."),
]


def merge(
    paths: _Paths,
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="DST", help="The folder to write.")] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="linear, slerp, task_arithmetic, ties, dare_ties, model_stock, ...",
            autocompletion=completing.methods,
        ),
    ] = "linear",
    base: Annotated[str | None, typer.Option(metavar="PATH", help="The base model.")] = None,
    weight: _Weights = None,
    set_: _Params = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write floats as bf16, fp16, fp32, ...", autocompletion=completing.dtypes),
    ] = None,
    missing: MissingOption = "error",
    config: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder with config.json (default: that of the base model).")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and result as JSON.")] = False,
) -> None:
    """Merge models to a folder for transformers, in bounded memory.

    `lazyckpt merge config.yml OUT` takes mergekit's YAML: models or slices, with filters and gradients.
    `lazyckpt merge A B --method slerp --set t=0.3 -o OUT` merges two models without a file. The models may be of any
    format: Hugging Face, ZeRO, FSDP, DCP, Megatron.

    Exit codes: 0 done, 2 an error.
    """
    if paths[0].endswith(_FILES) and not Path(paths[0]).is_dir():
        if len(paths) + (out is not None) != 2:
            raise DataError("a merge file takes one destination: lazyckpt merge config.yml OUT")
        if base or weight or set_ or dtype or method != "linear":
            raise DataError("--method, --base, --weight, --set and --dtype are in the merge file: leave them out")
        found, dest = read_merge(paths[0], config=config, missing=missing), out or paths[1]
    else:
        if out is None:
            raise DataError("where should the result be written? Say -o OUT")
        table = _table(paths, method, base, weight, set_, dtype)
        found, dest = read_merge(table, config=config, missing=missing), out
    plan = _plan(found, dest)
    if not quiet and not as_json:
        _print(plan, found)
    with interruptible(dest):
        written = [] if dry_run else write_merge(found, dest, max_shard_size=max_shard_size, overwrite=overwrite)
    if as_json:
        result = None if dry_run else {"files": [str(path) for path in written]}
        write_text(json.dumps({"plan": plan, "result": result}, indent=2))
    elif written and not quiet:
        write_line(("done      ", "green"), (f"{plural(len(written), 'file')} in {dest}", ""))


def _table(
    models: list[str],
    method: str,
    base: str | None,
    weights: list[str] | None,
    given: list[str] | None,
    dtype: str | None,
) -> dict[str, Any]:
    """Return the options as the table of a merge file."""
    known = method_of(method).parameters
    shown = ", ".join(key for key in known if key != "weight")
    if weights and "weight" not in known:
        raise DataError(f"--weight: {method} has no weights; --set gives what it has: {shown or 'nothing'}")
    if method == "slerp" and base is None:
        base = models[0]
    others = [model for model in models if model != base or method == "slerp"]
    values = [_setting(text, "--weight") for text in weights or ["1"]]
    values = values * len(others) if len(values) == 1 else values
    if len(values) != len(others):
        raise DataError(
            f"--weight is given {len(values)} times for {len(others)} models: once for each, or once for all"
        )
    parameters: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise DataError(f"--set {text!r}: write NAME=VALUE, as in --set t=0.3")
        name = name.strip()
        if name == "weight":
            raise DataError("--set weight: weights are given by --weight, for each model in order, or once for all")
        if name not in known:
            raise DataError(f"--set {name}: {method} has no such parameter; it has: {shown or 'none'}")
        parameters[name] = value if known[name].convert is str else _setting(value, f"--set {name}")
    table: dict[str, Any] = {"merge_method": method, "parameters": parameters}
    entries = [{"model": m, "parameters": {"weight": v}} for m, v in zip(others, values, strict=True)]
    table["models"] = entries if "weight" in known else [{"model": m} for m in others]
    if base is not None:
        table["base_model"] = base
    if dtype is not None:
        table["out_dtype"] = dtype_named(dtype).name
    return table


def _setting(text: str, option: str) -> Any:
    """Return a number, true or false, or a list of numbers for ``0,0.5,1``."""
    if text in ("true", "false"):
        return text == "true"
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise DataError(f"{option} {text!r}: a number, a list of numbers such as 0,0.5,1, or true or false") from None
    return values if len(values) > 1 else values[0]


def _plan(found: Merge, dest: str) -> dict[str, Any]:
    view = found.view
    dtypes = sorted({t.spec.dtype.short for t in view.values()})
    return {
        "method": found.method,
        "models": list(found.models),
        "tensors": len(view),
        "nbytes": view.nbytes,
        "dtypes": dtypes,
        "config": None if found.beside is None else str(found.beside),
        "destination": dest,
        "problems": [str(problem) for problem in view.problems],
    }


def _print(plan: dict[str, Any], found: Merge) -> None:
    def line(label: str, text: str, style: str = "bold") -> None:
        write_line((f"{label:<10}", style), (text, ""))

    line("method", plan["method"])
    for model in plan["models"]:
        line("model", model)
    amount = f"{plural(plan['tensors'], 'tensor')}, {human_bytes(plan['nbytes'])} as {', '.join(plan['dtypes'])}"
    line("write", f"{amount}, to {plan['destination']}")
    line("config", plan["config"] or "there is no config.json: only weights are written (--config names a folder)")
    lines = oddities(found.view)
    for text in lines[:_PROBLEMS]:
        line("problem", text, "yellow")
    if len(lines) > _PROBLEMS:
        line("", and_more(len(lines) - _PROBLEMS, "problems"), "yellow")
