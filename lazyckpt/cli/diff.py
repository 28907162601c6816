"""`lazyckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..errors import TensorNotFoundError
from ..inspect.diff import verdict
from ..runs.compare import diff as diff_views
from .console import write_line, write_text
from .options import FormatOption, JsonOption, RulesOption, StateOption, open_view

_STYLES = {"equal": "dim", "values": "red", "unreadable": "bold red"}  # the others: yellow


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a file, a folder, a URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.", show_default=False)],
    select: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only names that match: '*.norm.weight'", show_default=False)
    ] = None,
    state: StateOption = None,
    all_states: Annotated[bool, typer.Option("--all-states", help="The weights and every state.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print tensors that are equal, too.")] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes to hold at most: 2GB")] = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor.

    Works in bounded memory. Tensors of one dtype are compared bit by bit, others by their numbers. Exit codes: 0 all
    tensors are equal, 1 something differs, 2 an error.
    """
    if all_states and state is not None:
        raise typer.BadParameter("--all-states compares every state: leave out --state")
    views = [open_view(path, state, False, None, format, rules) for path in (a, b)]
    if select is not None:
        parts = [view.select(select) for view in views]
        if not any(parts):
            raise TensorNotFoundError(f"--select {select!r} matches no name of either: lazyckpt ls shows them")
        views = parts
    found = diff_views(*views, states="all" if all_states else None, memory=memory)
    if as_json:
        write_text(json.dumps({"equal": found.equal, "tensors": found.as_dicts()}, indent=2))
    else:
        for row in found if every else found.differing:
            write_line((row.label, _STYLES.get(row.status, "yellow")), (f": {verdict(row)}", ""))
        equal = sum(row.status == "equal" for row in found)
        write_line((f"{equal:,} of {len(found):,} tensors are equal", "bold"))
    if not found.equal:
        raise typer.Exit(1)
