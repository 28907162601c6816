"""`lazyckpt lora`: write the difference of two models as a LoRA adapter. (`convert --lora` applies one.)"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..adapting import Extraction, adaptable, extract_lora
from ..core.dtypes import dtype_named
from ..core.units import human_bytes, plural
from ..errors import DataError, and_more
from ..view import CheckpointView
from . import completing
from .console import write_line, write_text
from .options import typed

_SHOWN = 10  # tensors that are printed


def lora(
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The tuned model, in any format.", show_default=False)],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that it was made of.", show_default=False)],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)],
    rank: Annotated[int, typer.Option(min=1, metavar="N", help="The rank; with --energy the largest rank.")] = 64,
    energy: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The smallest ranks with this share of the differences: 0.95.")
    ] = None,
    select: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only weights whose names, as printed by ls, match.")
    ] = None,
    others: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Other tensors that differ: save (as a whole), skip, error.",
            autocompletion=completing.words("save", "skip", "error"),
        ),
    ] = "save",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the random directions.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write matrices as bf16, fp16 (default: fp32).",
            autocompletion=completing.words("bf16", "fp16", "fp32"),
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an adapter in DST.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print neither plan nor progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and result as JSON.")] = False,
) -> None:
    """Write the difference of two models as a LoRA adapter.

    Each weight gets the best approximation that randomized singular value decomposition finds, in bounded memory.
    `lazyckpt convert BASE DST --lora ADAPTER` puts an adapter into the weights.

    Exit codes: 0 done, 2 an error.
    """
    if others not in ("save", "skip", "error"):
        raise DataError(f"--others {others!r}: it is save, skip or error")
    if energy is not None and not 0 < energy <= 1:
        raise DataError(f"--energy {energy:g}: it is a share of the differences, more than 0 and at most 1")
    models = CheckpointView(tuned), CheckpointView(base)
    glob = None if select is None else typed(select)
    kind = None if dtype is None else dtype_named(dtype).torch
    names, most = adaptable(*models, glob, rank, kind)
    plan = {
        "tuned": tuned,
        "base": base,
        "rank": rank,
        "energy": energy,
        "weights": len(names),
        "nbytes": most,
        "to": dst,
    }
    if not quiet and not as_json:
        write_line(("decompose ", "bold"), (f"{plural(len(names), 'weight')} of {tuned} less {base}", ""))
        write_line(("write     ", "bold"), (f"at most {human_bytes(most)} of matrices, to {dst}", ""))
    found: Extraction | None = None
    if not dry_run:
        found = extract_lora(
            *models, dst, rank=rank, energy=energy, select=glob, others=others,  # type: ignore[arg-type]  # checked above
            seed=seed, dtype=kind, overwrite=overwrite, progress=None if not quiet and not as_json else False,
        )  # fmt: skip
    if as_json:
        write_text(json.dumps({"plan": plan, "result": None if found is None else _as_dict(found)}, indent=2))
    elif found is not None and not quiet:
        _print(found, dst)


def _as_dict(found: Extraction) -> dict[str, Any]:
    rows = [
        {"name": row.name, "shape": list(row.shape), "rank": row.rank, "energy": row.energy} for row in found.tensors
    ]
    files = [str(path) for path in found.files]
    return {"energy": found.energy, "tensors": rows, "files": files, "left_out": dict(found.left_out)}


def _print(found: Extraction, dst: str) -> None:
    least = sorted((row for row in found.tensors if row.rank), key=lambda row: row.energy)
    for row in least[:_SHOWN]:
        write_line((f"{row.energy:>8.2%}  ", ""), (f"rank {row.rank:<5}", ""), (row.name, ""))
    if len(least) > _SHOWN:
        write_line((f"{'':>10}", ""), (and_more(len(least) - _SHOWN, "weights, with more of theirs"), ""))
    whole = len(found.tensors) - len(least)
    if whole:
        write_line(("whole     ", "bold"), (f"{plural(whole, 'other tensor')} that differ", ""))
    for name, why in list(found.left_out.items())[:_SHOWN]:
        write_line(("left out  ", "yellow"), (f"{name}: {why}", ""))
    write_line(("done      ", "green"), (f"{found.energy:.2%} of the energy of the differences, in {dst}", ""))
