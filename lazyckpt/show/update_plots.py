"""Plots of the sizes of updates: heat maps of layers and steps, or of layers and kinds of parameters, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from ..inspect.architecture import layer_and_kind
from ..inspect.layers import arranged
from ..inspect.updates import UpdateSize, UpdateTable
from .layer_plots import Scale, layer_map
from .style import (
    axes_of,
    colour_bar,
    column_ticks,
    count_axis,
    headline,
    heat,
    import_matplotlib,
    legend,
    magnitudes,
    row_ticks,
    shades,
    short,
    size_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUANTITIES = {
    "ratio": "||update|| / ||weight||",
    "update": "L2 norm of the update",
    "rms": "root mean square of the update",
    "weight": "L2 norm of the weight",
    "bound": "part of the elements that move by the learning rate",
}
_LEGEND = 10  # lines that have entries in a legend; more have a colour scale


def layers_by_kind(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot one checkpoint: a row is a kind of parameter, a column a layer. See `Updates.plot`."""
    _check(table, quantity)
    import_matplotlib()
    cells: dict[tuple[str, int | None], list[UpdateSize]] = {}
    for one in table:
        cells.setdefault((layer_and_kind(one.name)[1], one.layer), []).append(one)
    found = arranged(
        quantity,
        {
            cell: (_together(some, quantity), "?" if any(one.error is not None for one in some) else "")
            for cell, some in cells.items()
        },
    )
    title, *notes = _title(table, quantity)
    scale: Scale = "linear" if quantity == "bound" else "log"
    return layer_map(found, ax, title, notes, scale, _QUANTITIES[quantity])


def layers_by_step(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot a run: a row is a layer, a column a step. See `RunUpdates.plot`."""
    _check(table, quantity)
    import_matplotlib()
    from matplotlib.colors import LogNorm

    steps, found = _by_row(table, quantity)
    values = np.array([[row.get(step, math.nan) for step in steps] for row in found.values()])
    rows = list(found)
    ax, theme = axes_of(ax, size_of(rows, len(steps)))
    positive = values[np.isfinite(values) & (values > 0)]
    scale = None
    if len(positive):
        low, high = float(positive.min()), float(positive.max())
        scale = LogNorm(low, high if high > low else low * 1.0001)
    image = heat(ax, values, magnitudes(theme).with_extremes(bad=theme.empty, under=theme.paper), scale, theme)
    row_ticks(ax, rows)
    column_ticks(ax, [f"{step}" for step in steps], slanted=len(steps) > 12)
    ax.set(xlabel="step", ylabel="layer")
    title, *notes = _title(table, quantity)
    headline(ax, title, notes, theme)
    colour_bar(ax, image, _QUANTITIES[quantity], theme)
    return ax


def curves(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot a run: a line for each layer over the steps. See `RunUpdates.plot`."""
    _check(table, quantity)
    steps, rows = _by_row(table, quantity)
    import_matplotlib()

    ax, theme = axes_of(ax, (7.4, 4), grid="y")
    layers = [label for label in rows if label.isdecimal()]
    tones = dict(zip(layers, shades(len(layers), theme), strict=True))
    for label, found in rows.items():
        known = [step for step in steps if step in found]
        own = label not in tones
        ax.plot(
            known,
            [found[step] for step in known],
            marker="o",
            markersize=3,
            linewidth=1.4,
            linestyle="--" if own else "-",
            color=theme.soft if own else tones[label],
            label=label if own or len(layers) <= _LEGEND else None,
        )
    if any(value > 0 for found in rows.values() for value in found.values()):
        ax.set_yscale("log", nonpositive="mask")
    if ax.get_legend_handles_labels()[1]:
        legend(ax, theme, title="layer" if len(layers) <= _LEGEND else "", outside=True)
    count_axis(ax.xaxis)
    if len(layers) > _LEGEND:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        scale = ScalarMappable(Normalize(int(layers[0]), int(layers[-1])), ListedColormap(list(tones.values())))
        colour_bar(ax, scale, "layer", theme)
    ax.set(xlabel="step", ylabel=_QUANTITIES[quantity])
    title, *notes = _title(table, quantity)
    headline(ax, title, notes, theme)
    return ax


def _check(table: UpdateTable, quantity: str) -> None:
    if quantity not in _QUANTITIES:
        raise DataError(f"there is no quantity {quantity!r} of updates; there are: {', '.join(_QUANTITIES)}")
    if not any(one.error is None for one in table):
        why = next((one.error for one in table if one.error is not None), "no parameter has one")
        raise DataError(f"there are no updates to plot: {why}")


def _by_row(table: UpdateTable, quantity: str) -> tuple[list[int], Mapping[str, Mapping[int, float]]]:
    """Return the steps, and label of a layer, or name of what is in none -> step -> value."""
    if quantity == "bound":
        raise DataError("'bound' is plotted for single checkpoints: run.at(step).updates().plot('bound')")
    joined = table.layers
    steps = sorted({one.step for one in joined if one.step is not None})
    outside = [one for one in joined if one.layer is None]
    inside = sorted((one for one in joined if one.layer is not None), key=lambda one: one.layer or 0)
    rows: dict[str, dict[int, float]] = {}
    for one in (*outside, *inside):
        label = short(one.name, 34) if one.layer is None else str(one.layer)
        value = getattr(one, quantity)
        row = rows.setdefault(label, {})
        if value is not None and one.step is not None:
            row[one.step] = value
    return steps, rows


def _title(table: UpdateTable, quantity: str) -> list[str]:
    """Return the title with the optimizer, and what the numbers assume."""
    good = [one for one in table if one.error is None]
    kinds = "+".join(dict.fromkeys(one.optimizer for one in good))
    first = f"Last step of {kinds}" + (" in units of the weights" if quantity == "ratio" else "")
    notes = []
    if any(one.rate == "unknown" for one in good) and quantity != "weight":
        notes.append("learning rate 1")
    if any(one.rate == "scheduled" for one in good) and quantity != "weight":
        notes.append("learning rates recorded for the next step")
    if not all(one.exact for one in good) and quantity != "weight":
        notes.append("for gradients that do not change")
    return [first, *notes]


def _together(found: Sequence[UpdateSize], quantity: str) -> float:
    """Return the quantity of several parameters together, such as experts."""
    good = [one for one in found if one.error is None]
    if len(good) == 1:
        value = getattr(good[0], quantity)
        return math.nan if value is None else float(value)
    if not good:
        return math.nan
    if quantity == "bound":
        known = [(one.bound, one.count) for one in good if one.bound is not None]
        total = sum(count for _, count in known)
        return sum(bound * count for bound, count in known) / total if total else math.nan
    update = math.hypot(*(one.update or 0.0 for one in good))
    weight = math.hypot(*(one.weight or 0.0 for one in good))
    count = sum(one.count - (one.nonfinite or 0) for one in good)
    if quantity == "ratio":
        return update / weight if weight else math.nan
    return {"update": update, "weight": weight, "rms": update / math.sqrt(count) if count else math.nan}[quantity]
