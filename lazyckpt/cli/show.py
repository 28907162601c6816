"""`lazyckpt show`: the values of a tensor or of a slice of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..core.units import human_bytes
from ..show.text import kind
from ..show.values import LIMIT, json_values, values
from . import completing
from .console import console, write_line, write_text
from .options import (
    BaseOption,
    FormatOption,
    JsonOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    find,
    open_view,
)

_PLAIN_WIDTH = 100  # columns for values if stdout is not a terminal


def show(
    path: PathArg,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[INDEX]",
            help="'layers.3.mlp.up.weight[0:4, ::8]'; optional if there is only one tensor",
            show_default=False,
            autocompletion=completing.tensors,
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which bytes of which files would be read, and read none.")
    ] = False,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a tensor or a slice of it.

    INDEX is as in Python: ints, slices, ..., None and a list of ints. Only the printed elements are read; a large
    tensor is printed as its edges.
    """
    view = open_view(path, state, stored, tag, format, rules, base)
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
