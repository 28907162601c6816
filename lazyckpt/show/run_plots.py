"""Plots of runs: one tensor over the steps, and small multiples of all kinds of parameters and layers."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inspect.course import Course
from .style import axes_of, count_axis, dress, headline, log_axis, new_figure, number, plain_axis, shades, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = 24  # kinds that are drawn
_NAMED = 8  # lines that have entries in a legend; more have a bar of colours


def steps_line(name: str, label: str, steps: list[int], values: list[float], ax: Axes | None) -> Axes:
    """Draw one line over the steps. See `StepPlots.steps`."""
    ax, theme = axes_of(ax, (6.4, 3.2), grid="y")
    ax.plot(steps, values, color=theme.accent, linewidth=1.8, marker="o", markersize=4, label=short(name))
    count_axis(ax.xaxis)
    ax.margins(x=0.03)
    ax.set(xlabel="step", ylabel=label)
    notes = [f"from {number(values[0])} to {number(values[-1])} in {len(steps):,} saves"] if len(values) > 1 else []
    headline(ax, name, notes, theme)
    return ax


def multiples(found: Course, title: str) -> Figure:
    """Draw a panel for each kind of parameter, with a line for each layer over the steps."""
    from matplotlib.ticker import MaxNLocator

    kinds = found.kinds[:_PANELS]
    across = min(len(kinds), 3 if len(kinds) <= 6 else 4) or 1
    down = -(-len(kinds) // across) or 1
    figure, theme = new_figure((2.5 * across + 0.9, 1.75 * down + 0.8))
    panels: Any = figure.subplots(down, across, sharex=True, sharey=found.quantity in _SHARED, squeeze=False)
    tones = shades(len(found.layers), theme)
    log = found.quantity in ("change", "drift") and bool((found.values > 0).any())
    for n, ax in enumerate(panels.flat):
        if n >= len(kinds):
            ax.set_visible(False)
            continue
        dress(ax, theme, grid="y")
        for line, layer, tone in zip(found.values[n], found.layers, tones, strict=True):
            if np.isfinite(line).any():
                ax.plot(found.steps, line, color=tone, linewidth=1.2, label=str(layer), **_points(found))
        if kinds[n] in found.alone:
            ax.plot(found.steps, found.alone[kinds[n]], color=theme.soft, linewidth=1.5, **_points(found))
        if log:
            ax.set_yscale("log", nonpositive="mask")
            log_axis(ax.yaxis, *ax.get_ylim())
        else:
            ax.yaxis.set_major_locator(MaxNLocator(4))
            plain_axis(ax.yaxis)
        count_axis(ax.xaxis, 4)
        ax.tick_params(labelbottom=n + across >= len(kinds))
        ax.tick_params(labelsize=7.5)
        ax.set_title(short(found.labels[n], 30), x=0, ha="left", pad=4, color=theme.ink, fontsize=8.5)
    _title(figure, theme, title, found)
    _layers(figure, panels, theme, found, tones)
    return figure


_SHARED = frozenset(("drift", "change", "cosine", "towards", "zeros", "nan", "inf"))  # one axis for all kinds


def _points(found: Course) -> dict[str, Any]:
    return {"marker": "o", "markersize": 2} if len(found.steps) <= 12 else {}


def _title(figure: Any, theme: Any, title: str, found: Course) -> None:
    more = len(found.kinds) - _PANELS
    label = found.label + (f" ({more:,} more kinds are not drawn)" if more > 0 else "")
    figure.suptitle(title, x=0.01, ha="left", color=theme.ink, fontsize=10.5, fontweight="bold")
    figure.supxlabel("step", color=theme.soft, fontsize=8.5)
    lines = wrap(label, max(16, int(14 * (figure.get_size_inches()[1] - 0.6))))
    figure.supylabel("\n".join(lines), color=theme.soft, fontsize=8.5)


def _layers(figure: Any, panels: Any, theme: Any, found: Course, tones: list[Any]) -> None:
    """Say which colour is which layer: entries for a few, a bar for many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.lines import Line2D

    if not found.layers:
        return
    if len(found.layers) <= _NAMED:
        lines = [Line2D([], [], color=c, linewidth=2, label=str(n)) for c, n in zip(tones, found.layers, strict=True)]
        made = figure.legend(
            handles=lines, title="layer", loc="outside right center", frameon=False, fontsize=8, labelcolor=theme.ink
        )
        made.get_title().set(color=theme.soft, fontsize=8)
        return
    scale = ScalarMappable(Normalize(found.layers[0], found.layers[-1]), ListedColormap(tones))
    bar = figure.colorbar(scale, ax=panels, fraction=0.025, pad=0.01, aspect=40)
    bar.outline.set_visible(False)
    bar.set_label("layer", color=theme.soft, fontsize=8.5)
    bar.ax.tick_params(color=theme.line, labelcolor=theme.soft, labelsize=7.5, length=2)
    bar.ax.yaxis.get_major_locator().set_params(integer=True)
