"""The tables of the documentation, filled in from results: no figure is typed.

A page has, for each table, a pair of comments: ``<!-- benchmarks: NAME -->`` and ``<!-- end -->``. NAME is an area,
"machine", "missed", or "readme", whose rows `README` chooses.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report, suite
from .row import Row, show

ROOT = Path(__file__).parents[1]
PAGES = ("docs/explanation/speed.md", "README.md")
# (area, a part of the row's text): the first row that fits
README = (
    ("ranks", "ranks, ZeRO-3"),
    ("converting", "to safetensors"),
    ("converting", "to safetensors: peak memory"),
    ("converting", "DCP to safetensors"),
    ("whole", "in 16 tensors, peer torch"),
    ("slices", "64 KiB of rows, warm, peer torch"),
)
_BLOCK = re.compile(r"(<!-- benchmarks: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SHORT = "| what | lazyckpt | peer | | ratio |\n|---|---|---|---|---|"


def main(arguments: Sequence[str]) -> int:
    """`python -m benchmarks page FILE`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks page", description=__doc__)
    parser.add_argument("file", type=Path, help="a history (.jsonl) or a result (.json)")
    options = parser.parse_args(arguments)
    runs = suite.history(options.file)
    for name in PAGES:
        path = ROOT / name
        path.write_text(fill(path.read_text("utf-8"), runs), "utf-8")
        print(path)
    return 0


def fill(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """The page with the tables of these runs: the newest figure of each row.

    Raises ValueError if the page names a table that does not exist.
    """
    rows = report.newest(runs)

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{_content(found[2], rows, runs)}\n\n{found[3]}"

    return _BLOCK.sub(block, text)


def _content(name: str, rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    if name == "machine":
        used = report.used(runs) or runs
        dates = " to ".join(dict.fromkeys((used[0]["date"][:10], used[-1]["date"][:10])))
        commits = " to ".join(dict.fromkeys(f"`{one['commit']}`" for one in (used[0], used[-1])))
        when = f"Measured from commit {commits}, on {dates}; each row is its newest figure"
        return f"{when}. The machine: {report.describe(runs[-1]['machine'])} {report.summary(rows)}."
    if name == "missed":
        missed = [row for row in rows if row.met is False]
        return report.table(missed) if missed else "Every goal is met."
    if name == "readme":
        chosen = [next((row for row in rows if row.area == area and text in row.what), None) for area, text in README]
        return "\n".join([_SHORT, *(_short(row) for row in chosen if row is not None)])
    if name not in suite.NAMES:
        raise ValueError(f"no table {name!r}; there are {', '.join(suite.NAMES)}, machine, missed, readme")
    own = [row for row in rows if row.area == name]
    if not own:
        return "No figures yet."
    note = "From a quick run, with smaller data.\n\n" if report.only_quick(runs, name) else ""
    return note + report.table(own)


def _short(row: Row) -> str:
    """A row without its limit and goal."""
    if row.ours is None or row.ratio is None:
        return f"| {row.what} | | | {row.skipped or row.failed} | |"
    theirs = show(row.theirs.median, row.unit) if row.theirs else ""
    ours = show(row.ours.median, row.unit)
    return f"| {row.what} | {ours} | {theirs} | {row.peer} | {row.ratio.median:.2f} |"
