"""`lazyckpt formats`: the formats that lazyckpt reads."""

from __future__ import annotations

import json

from ..formats.registry import builtin, readers
from .console import write_line, write_text
from .options import JsonOption


def formats(as_json: JsonOption = False) -> None:
    """List the formats that lazyckpt reads.

    Formats are listed in the order in which they are tried, by the names that --format accepts. Readers of other
    installed packages are included.
    """
    own = {reader.name for reader in builtin()}
    rows = [{"name": r.name, "reads": r.what, "plugin": r.name not in own} for r in readers()]
    if as_json:
        write_text(json.dumps(rows, indent=2))
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        note = " (of another package)" if row["plugin"] else ""
        write_line((f"{row['name']:<{width}}", "bold"), (f"  {row['reads']}", ""), (note, "dim"))
