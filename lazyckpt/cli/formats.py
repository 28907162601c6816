"""`lazyckpt formats`: the formats that lazyckpt reads."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..formats.registry import builtin, readers
from ..layouts.rename.table import names
from .console import write_line, write_text
from .options import JsonOption


def formats(
    tables: Annotated[
        bool, typer.Option("--tables", help="List the tables of names that --rename accepts instead.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the formats that lazyckpt reads.

    Formats are listed in the order in which they are tried, by the names that --format accepts. Readers of other
    installed packages are included.
    """
    if tables:
        write_text(json.dumps(names(), indent=2) if as_json else "\n".join(names()))
        return
    own = {reader.name for reader in builtin()}
    rows = [{"name": r.name, "reads": r.what, "plugin": r.name not in own} for r in readers()]
    if as_json:
        write_text(json.dumps(rows, indent=2))
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        note = " (of another package)" if row["plugin"] else ""
        write_line((f"{row['name']:<{width}}", "bold"), (f"  {row['reads']}", ""), (note, "dim"))
