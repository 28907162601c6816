"""`lazyckpt stats`: statistics of the elements of tensors."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Annotated, Any

import typer

from ..core.names import natural
from ..core.units import plural
from ..errors import DataError, printable
from ..inspect.table import Stats, Table, is_odd, lines_of, pooled
from ..show.repeated import ALIKE, joined, place_of, template
from ..show.text import LINES
from . import completing
from .console import write_line, write_text
from .options import (
    BaseOption,
    FormatOption,
    JsonOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    matching,
    open_view,
    part_of,
)

_COLUMNS = (
    "name",
    "dtype",
    "count",
    "nan",
    "posinf",
    "neginf",
    "zeros",
    "mean",
    "std",
    "min",
    "max",
    "absmax",
    "l1",
    "l2",
)


def stats(
    path: PathArg,
    names: Annotated[
        str,
        typer.Argument(
            metavar="NAMES",
            help="A prefix or a glob: layers.3.mlp, '*.norm.weight'",
            show_default=False,
            autocompletion=completing.tensors,
        ),
    ] = "",
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Sort, largest first: std, absmax, nan, l2, zeros, ...")
    ] = None,
    bins: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Add histograms; elements wider than 16 bits are read twice.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A line for each tensor, also for those of repeated layers.")
    ] = False,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV, without histograms.")] = False,
) -> None:
    """Compute statistics of every tensor.

    Prints mean, standard deviation, range, norms and counts of zeros, NaN and infinities. All data is read once.

    The other statistics exclude NaN and infinities. The row of a tensor that cannot be read says why. If there are more
    than 100 lines, the tensors of repeated layers have one line, with the layer of the largest element, or of the first
    NaN or infinite one; --all and --sort print a line for each tensor.
    """
    if sort is not None and sort not in _COLUMNS:  # before everything is read
        raise DataError(f"there is no column {sort!r} to sort by; there are: {', '.join(_COLUMNS)}")
    view = open_view(path, state, stored, tag, format, rules, base)
    chosen = matching(view, names, "NAMES") if set(names) & set("*?[") and names not in view else part_of(view, names)
    table = _ordered(chosen.stats(bins=bins), sort)
    if as_json or as_csv:
        write_text(_json(table) if as_json else _csv(table))
    elif len(table):
        _print(table, sort, fold=not everything and sort is None and bins is None)
    else:
        write_line(("(no tensors)", "dim"))
    lost = len(chosen.unreadable)
    if lost and not (as_json or as_csv):
        write_line((f"{plural(lost, 'tensor')} without a row cannot be read: lazyckpt ls says why", "yellow"))


def _ordered(table: Table, column: str | None) -> Table:
    """Sort a table by a column: texts ascending; numbers descending, with missing numbers last. None keeps the
    order."""
    if column is None:
        return table

    def key(row: Stats) -> tuple[bool, Any]:
        value = getattr(row, column)
        if isinstance(value, str):
            return False, value
        none = value is None or math.isnan(value)
        return none, 0 if none else -value

    return Table(sorted(table, key=key))


def _print(table: Table, column: str | None, fold: bool) -> None:
    shown = _folded(table) if fold and len(table) + 2 > LINES else [(row, "") for row in table]
    head, *lines = lines_of([row for row, _ in shown], table, column)
    write_line(*((f"{cell}  ", "bold") for cell in head), strip=True)
    total = len(shown) if len(lines) > len(shown) else None
    for n, line in enumerate(lines):
        error = len(line) < len(head)
        pieces = []
        for c, cell in enumerate(line):
            odd = is_odd(head[c], cell) or (error and c == 3)
            style = "bold red" if odd else "bold" if n == total else "cyan" if c in (1, 2) else ""
            pieces.append((f"{cell}  ", style))
        write_line(*pieces, ("" if n == total else shown[n][1], "dim"), strip=True)
    if len(shown) < len(table):
        write_line((f"{len(table):,} tensors, those of repeated layers in one line (--all prints each)", "dim"))


def _folded(table: Table) -> list[tuple[Stats, str]]:
    """Return the rows with one row for the tensors of repeated layers that have the same dtype and shape, each with the
    place of what stands out in it: the first NaN or infinite element, else the largest."""
    groups: dict[tuple[object, ...], list[Stats]] = {}
    for row in table:
        parts, numbers = template(row.name)
        own = row.name if row.error is not None or not numbers else None
        groups.setdefault((parts, row.dtype, row.shape, own), []).append(row)
    found: list[tuple[Stats, str]] = []
    for rows in groups.values():
        if len(rows) < ALIKE:
            found += [(row, "") for row in rows]
            continue
        rows.sort(key=lambda row: natural(row.name))
        name = joined([row.name for row in rows])
        found.append((pooled(name, rows), _standing_out(rows)))
    return found


def _standing_out(rows: list[Stats]) -> str:
    strange = {"NaN": [row for row in rows if row.nan], "Inf": [row for row in rows if row.posinf or row.neginf]}
    for what, odd in strange.items():
        if odd:
            others = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
            return f"{what} at {place_of(odd[0].name)}{others}"
    largest = {row.name: row.absmax for row in rows if row.absmax is not None and not math.isnan(row.absmax)}
    if len(set(largest.values())) < 2:
        return ""
    return f"largest at {place_of(max(largest, key=largest.__getitem__))}"


def _json(table: Table) -> str:
    """Return rows and total as JSON. NaN becomes null; infinities become the strings "Infinity" and "-Infinity"."""
    found = {"tensors": table.as_dicts(), "total": table.total.as_dict()}
    return json.dumps(_plain(found), indent=2, allow_nan=False)


def _csv(table: Table) -> str:
    """Return a header and a line for every tensor as CSV, with shapes as "4x5" and without histograms."""
    out = io.StringIO()
    names = [name for name in Stats.__dataclass_fields__ if name != "histogram"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in table:
        cells = {name: getattr(row, name) for name in names} | {"shape": "x".join(map(str, row.shape))}
        writer.writerow([printable(x) if isinstance(x, str) else x for x in cells.values()])
    return out.getvalue().removesuffix("\n")


def _plain(what: Any) -> Any:
    if isinstance(what, dict):
        return {key: _plain(value) for key, value in what.items()}
    if isinstance(what, list):
        return [_plain(value) for value in what]
    if isinstance(what, float) and not math.isfinite(what):
        return None if math.isnan(what) else "Infinity" if what > 0 else "-Infinity"
    return what
