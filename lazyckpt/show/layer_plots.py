"""Heat maps and curves of quantities by kind of parameter and layer: `Layers` of inspect/layers.py, drawn.

Kinds differ by orders of magnitude: norm weights are near one, embeddings are large. So each kind has a scale of its
own, which is written beside its row, and the colours show how the layers of that kind differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import DataError
from ..inspect.layers import QUANTITIES, SHARES, SIGNED, Layers, Values
from .style import (
    Theme,
    axes_of,
    colour_bar,
    colours,
    column_ticks,
    count_axis,
    folded,
    headline,
    heat,
    legend,
    log_axis,
    magnitudes,
    number,
    row_ticks,
    short,
    signed,
    size_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXTS = 60  # rows beside which their scale is written
_TONES = 8  # colours of curves, which are then repeated in dashes and dots
_LINES = 3 * _TONES  # kinds of a plot of curves

Scale = Literal["kind", "log", "linear"]


def layer_map(
    found: Layers,
    ax: Axes | None,
    title: str,
    notes: Sequence[str] = (),
    scale: Scale | None = None,
    label: str = "",
    names: tuple[str, str] = ("", "layer"),
) -> Axes:
    """Draw a row for each kind and a column for each layer. Kinds that are in no layer fill their row.

    ``scale``: "kind" colours each kind by its own median (its own largest magnitude, for signed quantities), "log" and
    "linear" all by the same scale; None chooses by the quantity. ``label`` is that of the colours, ``names`` those of
    rows and columns.
    """
    labels = [short(one, 34) for one in found.labels]
    columns = max(1, len(found.layers))
    ax, theme = axes_of(ax, size_of(labels, columns, 2.1))
    values = np.broadcast_to(found.values, (len(found.kinds), len(found.layers)))
    if not found.layers:
        values = np.full((len(found.kinds), 1), math.nan)
    values = values.copy()
    if scale is None:
        scale = "linear" if found.quantity in SHARES else "kind"
    for kind, value in found.alone.items():
        values[found.kinds.index(kind), :] = math.nan if scale == "kind" else value
    image, cut = _painted(ax, found, values, scale, theme)
    _whole_rows(ax, found, image, columns, theme)
    row_ticks(ax, labels)
    ax.set_ylabel(names[0])
    if found.layers:
        column_ticks(ax, [str(layer) for layer in found.layers])
        ax.set_xlabel(names[1])
    else:
        ax.set_xticks([])
    _marks(ax, found, columns, theme)
    below = scale == "linear" and bool((values < 0).any())
    blank = ["blank: 0"] if scale != "kind" and not below and bool((values == 0).any()) else []
    headline(ax, title, [*notes, *blank], theme)
    if scale != "kind" and not below and not bool((values > 0).any()):  # there are no colours to explain
        text = ax.text(0.5, 0.5, "all values are 0" if blank else "", transform=ax.transAxes, ha="center", va="center")
        text.set(color=theme.soft, gid="all")
        return ax
    bar = colour_bar(ax, image, label or _label(found.quantity, scale), theme, extend="both" if cut else "neither")
    if scale == "kind" and found.quantity not in SIGNED:
        places = _steps(float(image.get_clim()[1]))
        bar.set_ticks([math.log2(p) for p in places], labels=[_times(p) for p in places])
    if found.quantity in SHARES:
        bar.ax.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")
    if scale == "kind" and len(found.kinds) <= _TEXTS:
        _scales(ax, found, theme)
    return ax


def _painted(ax: Any, found: Layers, values: Values, scale: Scale, theme: Theme) -> tuple[Any, bool]:
    """Draw the cells. Return the image, and whether some values are beyond its scale of colours."""
    from matplotlib.colors import LogNorm, Normalize

    if scale == "kind":
        own = found.relative()
        values = own.values if found.layers else values
        cut = own.unit == "median" and bool((np.abs(values) > own.limit * 1.0001).any())
        return heat(ax, np.clip(values, -99, 99), signed(theme), Normalize(-own.limit, own.limit), theme), cut
    if scale == "linear" and bool((values < 0).any()):
        far = float(np.abs(values[np.isfinite(values)]).max())
        return heat(ax, values, signed(theme), Normalize(-far, far), theme), False
    good = values[np.isfinite(values) & (values > 0)]
    norm: Any = Normalize(0, float(good.max()) if good.size else 1)
    colours = magnitudes(theme).with_extremes(bad=theme.empty, under=theme.paper)
    values = np.where(values == 0, -1, values)  # blank
    if scale == "log" and good.size:
        low, high = float(good.min()), float(good.max())
        norm = LogNorm(low, high if high > low else low * 1.0001)
        values = np.where(values < 0, low / 2, values)
    return heat(ax, np.where(np.isfinite(values), values, math.nan), colours, norm, theme), False


def _whole_rows(ax: Any, found: Layers, image: Any, columns: int, theme: Theme) -> None:
    """Draw the rows of kinds that are in no layer as one cell."""
    from matplotlib.patches import Rectangle

    for kind in found.alone if len(found.alone) <= _TEXTS else ():
        n = found.kinds.index(kind)
        value = float(np.ma.filled(image.get_array(), math.nan)[n, 0])
        colour = theme.empty if math.isnan(value) else image.cmap(image.norm(value))
        ax.add_patch(Rectangle((-0.5, n - 0.46), columns, 0.92, facecolor=colour, linewidth=0, zorder=2.5))


def _steps(limit: float) -> list[float]:
    """Return the ratios that the bar of colours names, between 2**-limit and 2**limit.

    >>> _steps(2.5), _steps(0.14)
    ([0.25, 0.5, 1.0, 2.0, 4.0], [0.95, 1.0, 1.05])
    """
    if limit >= 1:
        every = -(-int(limit) // 3)
        powers = range(int(limit) // every * -every, int(limit) + 1, every)
        return [2.0**k for k in powers]
    low = 1 - 2**-limit + 1e-9
    step = next(s for s in (0.5, 0.25, 0.2, 0.1, 0.05, 0.02) if s <= low)
    return [round(1 + k * step, 4) for k in (-1, 0, 1)]


def _times(ratio: float) -> str:
    """Return a ratio as text.

    >>> [_times(x) for x in (0.25, 1.0, 1.05, 4.0)]
    ['1/4', '1', '1.05', '4']
    """
    return f"1/{1 / ratio:.0f}" if ratio <= 0.5 and (1 / ratio).is_integer() else f"{ratio:.4g}"


def _label(quantity: str, scale: Scale) -> str:
    name = QUANTITIES.get(quantity, quantity)
    if scale != "kind":
        return name
    return f"{name} / largest of its kind" if quantity in SIGNED else f"{name} / median of its kind"


def _scales(ax: Any, found: Layers, theme: Theme) -> None:
    """Write the scale of each kind at the right of its row."""
    own = found.relative()
    for n, text in enumerate(number(x) for x in own.units):
        note = ax.annotate(
            text, (1, n), (7, 0), ("axes fraction", "data"), "offset points", annotation_clip=False, va="center"
        )
        note.set(color=theme.ink, fontsize=7.5, gid="scale")
    note = ax.annotate(own.unit, (1, 1), (7, 3), "axes fraction", "offset points", annotation_clip=False, va="bottom")
    note.set(color=theme.soft, fontsize=7.5, gid="scale")


def _marks(ax: Any, found: Layers, columns: int, theme: Theme) -> None:
    """Mark the cells that have NaN, infinities, or tensors that cannot be read."""
    for (kind, layer), mark in found.marks.items():
        at = (columns - 1) / 2 if layer is None else found.layers.index(layer)
        box = {"boxstyle": "round,pad=0.15", "facecolor": theme.lost, "edgecolor": "none"}
        text = ax.text(at, found.kinds.index(kind), mark, ha="center", va="center", color=theme.paper, bbox=box)
        text.set(fontsize=7, fontweight="bold", gid="mark")


def layer_curves(
    found: Layers, ax: Axes | None, title: str, notes: Sequence[str] = (), label: str = "", log: bool | None = None
) -> Axes:
    """Draw a line for each kind over the layers, on a logarithmic axis unless the quantity is signed or a share."""
    if not found.layers:
        raise DataError("no tensor of this view is in a layer: there are no curves over layers to draw")
    ax, theme = axes_of(ax, (8.2, 4.2), grid="y")
    rows = [n for n, kind in enumerate(found.kinds) if kind not in found.alone][:_LINES]
    left = len(found.kinds) - len(found.alone) - len(rows)
    labels = found.labels
    palette = list(colours([str(n) for n in range(_TONES)]).values())
    for k, n in enumerate(rows):
        ax.plot(
            found.layers,
            found.values[n],
            color=palette[k % _TONES],
            linestyle=("-", "--", ":")[k // _TONES],
            linewidth=1.5,
            marker="os^"[k // _TONES],
            markersize=3 if len(found.layers) <= 40 else 0,
            label=short(labels[n], 34),
        )
    if log is None:
        log = found.quantity not in SIGNED | SHARES
    if log and bool((found.values > 0).any()):
        ax.set_yscale("log", nonpositive="mask")
        log_axis(ax.yaxis, *ax.get_ylim())
    count_axis(ax.xaxis)
    ax.margins(x=0.02)
    ax.set(xlabel="layer", ylabel=folded(label or QUANTITIES.get(found.quantity, found.quantity), ax))
    more = [f"{left:,} more kinds are not drawn"] if left else []
    headline(ax, title, [*notes, *more], theme)
    if rows:
        legend(ax, theme, outside=True)
    return ax
