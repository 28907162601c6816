"""The plots of the documentation: how far each row is from its goal, and how figures grow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report, suite
from .row import Row

# of Okabe and Ito: told apart by people who see colours differently, and in grey
MET, MISSED, OTHER = "#0072B2", "#D55E00", "#999999"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
MARKS = ("o", "s", "^", "D")
FLOOR = 1e-2  # the smallest ratio that the bars show


def main(arguments: Sequence[str]) -> int:
    """`python -m benchmarks plots FILE --to FOLDER`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=__doc__)
    parser.add_argument("file", type=Path, help="a history (.jsonl) or a result (.json)")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for path in draw(report.newest(suite.history(options.file)), options.to):
        print(path)
    return 0


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a plot for each area that has figures. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for area in suite.areas():
        own = [row for row in rows if row.area == area.name and row.ratio is not None]
        if own:
            path = folder / f"{area.name}.svg"
            _save(_growth(own) if any(row.points for row in own) else _bars(area.title, own), path)
            found.append(path)
    return found


def _bars(title: str, rows: Sequence[Row]) -> Any:
    """A bar for each row: the ratio, on a logarithmic axis, with its quartiles and a tick at the goal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for n, row in enumerate(rows):
        assert row.ratio is not None
        value = max(row.ratio.median, FLOOR)
        colour = {True: MET, False: MISSED, None: OTHER}[row.met]
        axes.barh(n, value - FLOOR, left=FLOOR, color=colour, height=0.7)
        axes.plot([max(row.ratio.low, FLOOR), max(row.ratio.high, FLOOR)], [n, n], color="black", linewidth=0.8)
        if row.goal:
            axes.plot([row.goal, row.goal], [n - 0.45, n + 0.45], color="black", linewidth=1.6)
        verdict = {True: "", False: " (missed)", None: ""}[row.met]
        axes.text(max(value, row.ratio.high) * 1.1, n, f"{row.ratio.median:.2f}{verdict}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row.what for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=FLOOR)
    axes.margins(y=0.01)
    axes.set_xlabel("ratio to the peer; the black mark is the goal", fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _growth(rows: Sequence[Row]) -> Any:
    """Time and memory against size, each with its exponent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, quantity, unit, factor in zip(panels, ("seconds", "peak"), ("s", "MiB"), (1, 1 << 20), strict=True):
        own = [row for row in rows if row.against.startswith(quantity)]
        for n, row in enumerate(own):
            xs, ys = [x for x, _ in row.points], [y / factor for _, y in row.points]
            assert row.ours is not None
            label = f"{row.against.rpartition(' ')[2]}: exponent {row.ours.median:.2f}"
            panel.loglog(xs, ys, color=LINES[n % 4], marker=MARKS[n % 4], markersize=4, label=label)
        panel.set_xlabel("ranks, tensors, names or chunks", fontsize=8)
        panel.set_title(f"{'time' if unit == 's' else 'peak memory'} of opening, {unit}", fontsize=10)
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _save(figure: Any, path: Path) -> None:
    """As SVG with text as text, and the same bytes for the same figures."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
