"""Results as tables in Markdown, as JSON, and as a history: one line of JSON for each run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .row import Row, show

HEAD = "| what | lazyckpt | peer | | limit | ratio | goal | |\n|---|---|---|---|---|---|---|---|"


def line(row: Row) -> str:
    """One line of the table.

    Its columns: the text, ours, the peer's figure and name, the limit, the median ratio with its quartiles, the goal,
    and whether it is met.
    """
    if row.ours is None or row.ratio is None:
        goal = "" if row.goal is None else f"<= {row.goal:g}"
        return f"| {row.what} | | | {row.skipped or f'failed: {row.failed}'} | | | {goal} | {_verdict(row)} |"
    theirs = show(row.theirs.median, row.unit) if row.theirs else ""
    limit = f"{show(row.bound.median, row.unit)} ({row.limit})" if row.bound else ""
    low, high = f"{row.ratio.low:.2f}", f"{row.ratio.high:.2f}"
    spread = f" ({low} to {high})" if low != high else ""
    against = " of the limit" if row.against == "limit" else ""
    goal = "" if row.goal is None else f"<= {row.goal:.3g}{against}"
    what = row.what + _points(row)
    ours, ratio = show(row.ours.median, row.unit), f"{row.ratio.median:.2f}{spread}"
    return f"| {what} | {ours} | {theirs} | {row.peer} | {limit} | {ratio} | {goal} | {_verdict(row)} |"


def table(rows: Iterable[Row]) -> str:
    """The rows as a table in Markdown."""
    return "\n".join([HEAD, *map(line, rows)])


def summary(rows: Sequence[Row]) -> str:
    met, missed = (sum(row.met is value for row in rows) for value in (True, False))
    skipped = sum(bool(row.skipped) for row in rows)
    return f"{met} of {met + missed} goals met; {skipped} rows not measured"


def _verdict(row: Row) -> str:
    return {True: "met", False: "**missed**", None: ""}[row.met]


def _points(row: Row) -> str:
    if not row.points:
        return ""
    unit = {"seconds": "s", "peak": "B", "held": "B"}.get(row.against.partition(" ")[0], "")
    return " (" + ", ".join(f"{size:,.0f}: {show(value, unit)}" for size, value in row.points) + ")"


def describe(machine: dict[str, Any]) -> str:
    """The machine as a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']} of memory, {machine['kernel']}, "
        f"{machine['file system']}, accelerator: {machine['accelerator']}; Python {machine['Python']}, {versions}."
    )


# -- files


def result(rows: Iterable[Row], machine: dict[str, Any], revision: dict[str, Any], quick: bool) -> dict[str, Any]:
    """A run as JSON objects."""
    return {**revision, "quick": quick, "machine": machine, "rows": [row.to_dict() for row in rows]}


def append(history: Path, found: dict[str, Any]) -> None:
    """Add a run to a history."""
    history.parent.mkdir(parents=True, exist_ok=True)
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found, separators=(",", ":")) + "\n")


def runs(path: Path) -> list[dict[str, Any]]:
    """The runs of a history, or the one run of a JSON file, oldest first."""
    text = path.read_text("utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return [json.loads(text)]


def newest(found: Sequence[dict[str, Any]]) -> list[Row]:
    """The newest figure of each row, in the order of the newest run that has it.

    Of an area that a full run has measured, quick runs do not count.
    """
    return [row for _, row in _newest(found)]


def used(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that have the newest figure of some row, oldest first."""
    return [found[n] for n in sorted({n for n, _ in _newest(found)})]


def _newest(found: Sequence[dict[str, Any]]) -> Iterable[tuple[int, Row]]:
    """The newest figure of each row, with the number of its run."""
    full = {row["area"] for one in found if not one["quick"] for row in one["rows"]}
    rows: dict[tuple[str, str], tuple[int, Row]] = {}
    for n, one in reversed(list(enumerate(found))):
        for row in map(Row.from_dict, one["rows"]):
            if not one["quick"] or row.area not in full:
                rows.setdefault(row.key, (n, row))
    return rows.values()


def only_quick(found: Sequence[dict[str, Any]], area: str) -> bool:
    """Whether only quick runs have measured an area."""
    return all(one["quick"] for one in found if any(row["area"] == area for row in one["rows"]))
