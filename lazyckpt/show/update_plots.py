"""Plots of the sizes of updates: heat maps of layers and steps, or of layers and kinds of parameters, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..inspect.updates import UpdateSize, UpdateTable
from .plot import axes_of, import_matplotlib, kind_labels, place_ticks, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUANTITIES = {
    "ratio": "||update|| / ||weight||",
    "update": "L2 norm of the update",
    "rms": "root mean square of the update",
    "weight": "L2 norm of the weight",
    "bound": "part of the elements that move by the learning rate",
}
_ROWS = 40  # rows of labels
_COLOURS = "cividis"  # even in lightness, and the same for eyes that do not tell red from green
_LEGEND = 10  # lines that have entries in a legend; more have a colour scale


def layers_by_kind(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot one checkpoint: a row is a layer, a column a kind of parameter. See `Updates.plot`."""
    _check(table, quantity)
    cells: dict[tuple[int | None, str], list[UpdateSize]] = {}
    for one in table:
        cells.setdefault((one.layer, _kind(one.name)), []).append(one)
    rows = sorted({row for row, _ in cells}, key=lambda row: -1 if row is None else row)
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    values = np.full((len(rows), len(kinds)), math.nan)
    for (row, kind), found in cells.items():
        values[rows.index(row), kinds.index(kind)] = _together(found, quantity)
    labels = ["-" if row is None else str(row) for row in rows]
    ax = _map(values, labels, kind_labels(kinds), quantity, ax, slanted=True)
    ax.set(title=_title(table, quantity), ylabel="layer")
    return ax


def layers_by_step(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot a run: a row is a layer, a column a step. See `RunUpdates.plot`."""
    _check(table, quantity)
    steps, rows = _by_row(table, quantity)
    values = np.array([[found.get(step, math.nan) for step in steps] for found in rows.values()])
    ax = _map(values, list(rows), [f"{step}" for step in steps], quantity, ax, slanted=len(steps) > 8)
    ax.set(title=_title(table, quantity), xlabel="step", ylabel="layer")
    return ax


def curves(table: UpdateTable, quantity: str, ax: Axes | None) -> Axes:
    """Plot a run: a line for each layer over the steps. See `RunUpdates.plot`."""
    _check(table, quantity)
    steps, rows = _by_row(table, quantity)
    plt = import_matplotlib()
    from matplotlib.ticker import MaxNLocator

    ax = axes_of((7, 4.5)) if ax is None else ax
    shades = plt.get_cmap(_COLOURS)
    layers = [label for label in rows if label.isdecimal()]
    for label, found in rows.items():
        known = [step for step in steps if step in found]
        style: dict[str, Any] = {"linestyle": "--", "color": None}
        if label.isdecimal():
            style = {"color": shades(0.95 * layers.index(label) / max(1, len(layers) - 1))}
        named = not label.isdecimal() or len(layers) <= _LEGEND
        ax.plot(
            known, [found[step] for step in known], marker="o", markersize=3, label=label if named else None, **style
        )
    if any(value > 0 for found in rows.values() for value in found.values()):
        ax.set_yscale("log", nonpositive="mask")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(title="layer" if len(layers) <= _LEGEND else None, fontsize="small")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(layers) > _LEGEND:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        bar = ax.figure.colorbar(ScalarMappable(Normalize(int(layers[0]), int(layers[-1])), shades), ax=ax)
        bar.set_label("layer")
    ax.set(title=_title(table, quantity), xlabel="step", ylabel=_QUANTITIES[quantity])
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
        label = short(one.name) if one.layer is None else str(one.layer)
        value = getattr(one, quantity)
        row = rows.setdefault(label, {})
        if value is not None and one.step is not None:
            row[one.step] = value
    return steps, rows


def _map(
    values: np.ndarray[Any, Any], rows: Sequence[str], columns: Sequence[str], quantity: str, ax: Any, slanted: bool
) -> Any:
    import_matplotlib()
    from matplotlib.colors import LogNorm

    wide = max(map(len, rows), default=0)
    if ax is None:
        high = 0.2 * len(rows) if len(rows) <= _ROWS else 0.13 * min(len(rows), 3 * _ROWS)
        ax = axes_of((3.5 + 0.08 * wide + 0.35 * min(len(columns), _ROWS), 2.5 + high))
    positive = values[np.isfinite(values) & (values > 0)]
    scale = None
    if len(positive) and quantity != "bound":
        low, high = float(positive.min()), float(positive.max())
        scale = LogNorm(low, high if high > low else low * 1.0001)
    shades = import_matplotlib().get_cmap(_COLOURS).with_extremes(bad="lightgray", under="white")
    image = ax.imshow(values, aspect="auto", interpolation="nearest", norm=scale, cmap=shades)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000, len(rows)) if len(rows) <= n * _ROWS)
    shown = [n for n, label in enumerate(rows) if not label.isdecimal() or int(label) % every == 0]
    ax.set_yticks(shown, labels=[rows[n] for n in shown], fontsize=10 if len(rows) <= _ROWS else 8)
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    place_ticks(ax.set_xticks, list(columns), turned if slanted else {})
    bar = ax.figure.colorbar(image, ax=ax)
    bar.set_label(_QUANTITIES[quantity])
    return ax


def _title(table: UpdateTable, quantity: str) -> str:
    """Return the title: the optimizer, and what the numbers assume."""
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
    return "\n".join([first, *([", ".join(notes)] if notes else [])])


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
    update = math.sqrt(math.fsum((one.update or 0.0) ** 2 for one in good))
    weight = math.sqrt(math.fsum((one.weight or 0.0) ** 2 for one in good))
    count = sum(one.count - (one.nonfinite or 0) for one in good)
    if quantity == "ratio":
        return update / weight if weight else math.nan
    return {"update": update, "weight": weight, "rms": update / math.sqrt(count) if count else math.nan}[quantity]


def _kind(name: str) -> str:
    """Return a name with "*" for every number between dots."""
    return ".".join("*" if part.isascii() and part.isdigit() else part for part in name.split("."))
