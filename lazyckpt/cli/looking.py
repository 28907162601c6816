"""`lazyckpt ls` and `lazyckpt show`: what is in a checkpoint."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..show.text import human_bytes, kind, oddities, rows, rows_of, summary
from ..show.values import LIMIT, json_values, values
from ..view import CheckpointView
from .console import console, write_line, write_text
from .opening import (
    FormatOption,
    JsonOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    find,
    open_view,
    part_of,
)

_PROBLEMS = 20  # lines of problems that `ls` prints
_PLAIN_WIDTH = 100  # columns for values where there is no terminal


def ls(
    path: PathArg,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A part: layers.3.mlp", show_default=False)] = "",
    depth: Annotated[int | None, typer.Option(min=1, metavar="N", help="Levels of the tree to print.")] = None,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint as a tree.

    Names, dtypes, shapes, sizes, parameter counts. Reads no data.
    """
    view = open_view(path, state, stored, tag, format, rules)
    part = part_of(view, prefix)
    if as_json:
        write_text(json.dumps(_described(part), indent=2))
        return
    write_line((summary(part), "bold"))
    lines = oddities(view)
    for line in lines[:_PROBLEMS]:
        write_line(("problem: ", "yellow"), (line, ""))
    if len(lines) > _PROBLEMS:
        write_line((f"... and {len(lines) - _PROBLEMS:,} more problems (--json has them all)", "yellow"))
    table = rows(part, depth)
    for leaf, (name, shape, size, note) in table:
        cells = ((name, "" if leaf else "bold"), (shape, "cyan" if leaf else "dim"), (size, ""), (note, "dim"))
        write_line(*(piece for cell in cells for piece in (cell, ("  ", ""))), strip=True)
    if not table:
        write_line(("(no tensors)", "dim"))


def show(
    path: PathArg,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[INDEX]",
            help="'layers.3.mlp.up.weight[0:4, ::8]'; not needed where there is one tensor only",
            show_default=False,
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Which bytes of which files it takes; reads none.")
    ] = False,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a tensor or, as in Python, a part of it.

    The index may have ints, slices, ..., None, a list of ints. Reads what it prints; of a large tensor that is its
    edges.
    """
    view = open_view(path, state, stored, tag, format, rules)
    whole, key, text = find(view, name)
    t = whole if text is None else whole.lazy[key]
    if as_json:
        described: dict[str, Any] = {"name": whole.name, "index": text, "dtype": str(t.dtype).removeprefix("torch.")}
        described |= {"shape": list(t.shape), "nbytes": t.nbytes}
        described |= {"explain": t.explain()} if explain else {"values": json_values(t)}
        write_text(json.dumps(described, allow_nan=False))
        return
    if explain:
        for line in t.explain().splitlines():
            write_line((line, ""))
        return
    screen = console()
    printed = values(t, screen.width if screen.is_terminal else _PLAIN_WIDTH)
    notes = [human_bytes(t.nbytes)]
    if text is not None:
        notes.append(f"of {kind(whole)}")
    if t.numel() > LIMIT:
        notes.append("the edges of it")
    label = (whole.name or "''") + (f"[{text}]" if text is not None else "")
    write_line((label, "bold"), ("  ", ""), (kind(t), "cyan"), ("  " + ", ".join(notes), "dim"))
    if whole.spec.rule:
        write_line((whole.spec.rule, "dim"))
    for line in printed.splitlines():
        write_line((line, ""))


def _described(view: CheckpointView) -> dict[str, Any]:
    """Everything that `ls` shows, as plain objects."""
    return {
        "root": view.root,
        "format": view.format,
        "mesh": {"tp": view.mesh.tp, "pp": view.mesh.pp, "dp": view.mesh.dp, "ep": view.mesh.ep},
        "state": view.state,
        "states": list(view.states),
        "numel": view.numel,
        "nbytes": view.nbytes,
        "files": {path: info.size for path, info in view.files.items()},
        "problems": list(view.problems),
        "unreadable": dict(view.unreadable),
        "tensors": rows_of(view),
    }
