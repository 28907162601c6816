"""`lazyckpt diff`: the differences between two checkpoints."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..core.units import columns_of, padded, plural
from ..errors import DataError, TensorNotFoundError, printable
from ..inspect.diff import Diff
from ..runs.compare import diff as diff_views
from ..runs.compare import manifest_of
from ..show import differences
from ..view import CheckpointView
from ..view.bases import is_delta
from .console import write_line, write_text
from .options import BaseOption, FormatOption, JsonOption, RulesOption, StateOption, open_view, typed

_STYLES = {"none": "dim", "small": "green", "medium": "yellow", "large": "red"}
_KINDS = {
    "values": "Tensors that differ, relative to the norm of A's",
    "shape": "Tensors of other shapes",
    "unreadable": "Tensors that cannot be read",
    "only in a": "Only in A",
    "only in b": "Only in B",
    "equal": "Equal tensors",
}


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a file, a folder, a URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with.", show_default=False)],
    select: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only names that match: '*.norm.weight'", show_default=False)
    ] = None,
    state: StateOption = None,
    all_states: Annotated[
        bool, typer.Option("--all-states", help="Compare the weights and every other state.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="Only what is below this prefix, of each side that has it.", show_default=False
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="A line for each tensor, also for equal ones and those of repeated layers.")
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read all tensors, although manifests beside A and B have their digests.")
    ] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight: 2GB")] = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor.

    Prints a table of the tensors that differ: the norm of the difference relative to that of A, the cosine, and the
    largest difference; the tensors that differ most come first, and those of repeated layers have one line with the
    numbers of the layer that differs most.

    Works in bounded memory. Tensors of equal dtype are compared bit by bit, others by value. If both have manifests
    that still belong to their files, tensors with equal digests are not read, and the last line says so. A or B may be
    a manifest. --base is the base of those sides that are deltas.

    Exit codes: 0 all tensors are equal, 1 something differs, 2 an error.
    """
    if all_states and state is not None:
        raise typer.BadParameter("--all-states compares every state: leave out --state")
    sides = [manifest_of(path) for path in (a, b)]
    if sides != [None, None]:
        if select is not None or state is not None or prefix is not None:
            raise typer.BadParameter("a manifest is compared as a whole: leave out --select, --prefix and --state")
        opened = [
            open_view(path, None, False, None, format, rules, base) if side is None else side
            for side, path in zip(sides, (a, b), strict=True)
        ]
        found = diff_views(*opened, states="all" if all_states else None, digests=not read, memory=memory)
        _print(found, every, as_json)
        return
    bases = [base if base is not None and is_delta(path) else None for path in (a, b)]
    if base is not None and bases == [None, None]:
        raise DataError(f"neither {a} nor {b} is a delta checkpoint: leave out --base")
    views = [open_view(path, state, False, None, format, rules, one) for path, one in zip((a, b), bases, strict=True)]
    if prefix is not None:
        views = _below(views, prefix)
    if select is not None:
        parts = [view.select(select) for view in views]
        if not any(parts):
            raise TensorNotFoundError(f"--select {select!r} matches no name of either: lazyckpt ls shows them")
        views = parts
    found = diff_views(*views, states="all" if all_states else None, digests=not read, memory=memory)
    _print(found, every, as_json)


def _below(views: list[CheckpointView], prefix: str) -> list[CheckpointView]:
    """Return the parts of the views below a prefix; a view without such names stays whole. Raises
    TensorNotFoundError if neither has any."""
    start = typed(prefix).removesuffix(".") + "."
    has = [any(name.startswith(start) for name in view) for view in views]
    if not any(has):
        raise TensorNotFoundError(f"--prefix {prefix!r}: neither has names below it: lazyckpt ls shows them")
    return [view.prefix(start[:-1]) if there else view for view, there in zip(views, has, strict=True)]


def _print(found: Diff, every: bool, as_json: bool) -> None:
    """Print a diff. Raises Exit with code 1 if anything differs."""
    if as_json:
        about = {"equal": found.equal, "by_digest": found.digests, "tensors": found.as_dicts()}
        write_text(json.dumps(about, indent=2))
    else:
        _print_table(differences.lines_of(found.rows, every))
        renamed = differences.changed_prefix(found.rows)
        if renamed is not None:
            names, prefix = plural(renamed[1], "name"), printable(renamed[0])
            write_line((f"{names} differ only by the prefix {prefix!r}: --prefix {prefix} compares them", "yellow"))
        by = f"; {found.digests:,} compared by the digests of manifests (--read reads them)" if found.digests else ""
        write_line((differences.counts(found.rows), "bold"), (by, ""))
    if not found.equal:
        raise typer.Exit(1)


def _print_table(lines: list[differences.Line]) -> None:
    """Print the lines in parts by their kind, in columns that are aligned over all parts."""
    table = [(line, differences.cells(line)) for line in lines]
    widths = [max((columns_of(row[c]) for _, row in table), default=0) for c in range(6)]
    folded = any(line.of > 1 for line in lines)
    last: str | None = None
    for line, (*numbers, name, kind, count, most) in table:
        if line.kind != last:
            last = line.kind
            write_line((_KINDS[line.kind], "bold"))
            if line.kind == "values":
                heads = [
                    f"{head:>{max(width, len(head))}}"
                    for head, width in zip(differences.HEAD, widths[:3], strict=False)
                ]
                widths[:3] = map(len, heads)
                write_line(("  " + "  ".join(heads), "dim"))
        style = _STYLES[differences.degree(line.worst)] if line.kind in ("values", "equal") else "yellow"
        first = (
            ""
            if line.kind not in ("values", "equal")
            else "".join(f"{n:>{w}}  " for n, w in zip(numbers, widths[:3], strict=True))
        )
        counted = f"{count + (' tensors' if len(line.rows) > 1 else ''):<{widths[5] + 8}}  " if folded else ""
        write_line(
            ("  " + first, style), (f"{padded(name, widths[3])}  ", ""), (f"{kind:<{widths[4]}}  ", "cyan"),
            (counted, ""),
            (f"most at {most}" if line.kind == "values" and len(line.rows) > 1 and most else most, "dim"), strip=True,
        )  # fmt: skip
