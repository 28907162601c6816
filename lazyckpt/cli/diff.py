"""`lazyckpt diff`: the differences between two checkpoints."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..errors import DataError, TensorNotFoundError
from ..inspect.diff import Diff, verdict
from ..runs.compare import diff as diff_views
from ..runs.compare import manifest_of
from ..view.bases import is_delta
from .console import write_line, write_text
from .options import BaseOption, FormatOption, JsonOption, RulesOption, StateOption, open_view

_STYLES = {"equal": "dim", "values": "red", "unreadable": "bold red"}  # every other status is yellow


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
    every: Annotated[bool, typer.Option("--all", help="Print equal tensors, too.")] = False,
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

    Works in bounded memory. Tensors of equal dtype are compared bit by bit, others by value. Where both have manifests
    that are still of their files, tensors of equal digests are not read, and the last line says so. A or B may be a
    manifest. --base is the base of those sides that are deltas.

    Exit codes: 0 all tensors are equal, 1 something differs, 2 an error.
    """
    if all_states and state is not None:
        raise typer.BadParameter("--all-states compares every state: leave out --state")
    sides = [manifest_of(path) for path in (a, b)]
    if sides != [None, None]:
        if select is not None or state is not None:
            raise typer.BadParameter("a manifest is compared as a whole: leave out --select and --state")
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
    if select is not None:
        parts = [view.select(select) for view in views]
        if not any(parts):
            raise TensorNotFoundError(f"--select {select!r} matches no name of either: lazyckpt ls shows them")
        views = parts
    found = diff_views(*views, states="all" if all_states else None, digests=not read, memory=memory)
    _print(found, every, as_json)


def _print(found: Diff, every: bool, as_json: bool) -> None:
    """Print a diff. Raises Exit with code 1 if anything differs."""
    if as_json:
        about = {"equal": found.equal, "by_digest": found.digests, "tensors": found.as_dicts()}
        write_text(json.dumps(about, indent=2))
    else:
        for row in found if every else found.differing:
            write_line((row.label, _STYLES.get(row.status, "yellow")), (f": {verdict(row)}", ""))
        equal = sum(row.status == "equal" for row in found)
        by = f", {found.digests:,} compared by the digests of manifests (--read reads them)" if found.digests else ""
        write_line((f"{equal:,} of {len(found):,} tensors are equal", "bold"), (by, ""))
    if not found.equal:
        raise typer.Exit(1)
