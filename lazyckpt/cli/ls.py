"""`lazyckpt ls`: the tensors of a checkpoint as a tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from ..errors import and_more
from ..show.text import Row, each_row, oddities, rows, summary
from ..view import CheckpointView
from . import completing
from .console import Piece, write_line, write_lines
from .options import (
    BaseOption,
    FormatOption,
    JsonOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    open_view,
    part_of,
)

_PROBLEMS = 20  # maximum number of problems that `ls` prints


def ls(
    path: PathArg,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="Prefix, name or glob: layers.3.mlp",
            show_default=False,
            autocompletion=completing.tensors,
        ),
    ] = "",
    depth: Annotated[int | None, typer.Option(min=1, metavar="N", help="Levels of the tree to print.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Do not fold equal layers into one line.")] = False,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint as a tree.

    Prints names, dtypes, shapes, sizes and parameter counts. Equal layers are folded into one line. No tensor data is
    read.
    """
    view = open_view(path, state, stored, tag, format, rules, base)
    part = part_of(view, prefix)
    if as_json:
        pieces = _json(part)
        while some := "".join(islice(pieces, 100)):
            sys.stdout.write(some)
        return
    write_line((summary(part), "bold"))
    lines = oddities(view)
    for line in lines[:_PROBLEMS]:
        write_line(("problem: ", "yellow"), (line, ""))
    if len(lines) > _PROBLEMS:
        write_line((f"{and_more(len(lines) - _PROBLEMS, 'problems')} (--json has them all)", "yellow"))
    sys.stdout.flush()  # the tree of very many names takes seconds
    table = rows(part, depth, fold=not everything)
    write_lines(map(_pieces, table), strip=True)
    if not table:
        write_line(("(no tensors)", "dim"))


_BETWEEN = "  ", ""


def _pieces(row: Row) -> tuple[Piece, ...]:
    name, shape, size, note = row.cells
    styles = ("", "cyan") if row.leaf else ("bold", "dim")
    return (name, styles[0]), _BETWEEN, (shape, styles[1]), _BETWEEN, (size, ""), _BETWEEN, (note, "dim")


def _json(view: CheckpointView) -> Iterator[str]:
    """Yield everything that `ls` shows as JSON, with a line for each tensor."""
    about: dict[str, Any] = {
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
    }
    yield f'{json.dumps(about, indent=2)[:-2]},\n  "tensors": ['
    comma = ""
    for row in each_row(view):
        yield f"{comma}\n    {json.dumps(row)}"
        comma = ","
    yield "\n  ]\n}\n"
