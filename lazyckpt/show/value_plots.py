"""Plots of the values of a tensor: heat maps, norms of rows and columns, bit patterns. inspect/ pools and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.units import plural
from ..errors import DataError
from ..inspect.bits import Bits, bits_of
from ..inspect.norms import GROUPS, norms
from ..inspect.numbers import number_shape
from ..inspect.pixels import Pixels, pooled, row_length
from ..inspect.planes import Window
from ..lazy import LazyArray
from .style import (
    Theme,
    axes_of,
    bare,
    colour_bar,
    count_axis,
    headline,
    import_matplotlib,
    magnitudes,
    new_figure,
    number,
    plain_axis,
    signed,
)
from .tensor_plots import check_drawable, facts_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ORANGE, _GREEN = "#d55e00", "#009e73"
_ROBUST = 99.5  # percentile at which the colours end; below, 100 minus it
_SCALES = ("linear", "symlog", "quantile")
_DECADES = 3  # of a symmetric logarithmic scale, below its greatest value
_LONG, _SHORT = 5.2, 1.3  # inches of the longer side of a heat map, and of the shorter one at least
_POOLS = {"mean": "mean", "absmax": "largest |x|", "min": "minimum", "max": "maximum"}
_NAMED = 3  # rows or columns that are named because they stand out
_POINTS = 40  # norms up to which each has a point on the line
_FAR = 4.0  # how far they stand out: times the median

Pool = Literal["mean", "absmax", "min", "max"]


def heatmap(
    t: LazyArray,
    pool: str,
    cells: int | tuple[int, int] = 512,
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    exact: bool = True,
    ax: Axes | None = None,
    title: str = "",
    label: str = "",
    window: Window | None = None,
    scale: str = "linear",
    full: bool = False,
    limits: tuple[float, float] | None = None,
) -> Axes:
    """See `TensorPlots.heatmap`."""
    if pool not in _POOLS:
        raise DataError(f"there is no pooling {pool!r}: it is one of {', '.join(_POOLS)}")
    if scale not in _SCALES:
        raise DataError(f"there is no scale {scale!r}: it is one of {', '.join(_SCALES)}")
    if limits is not None:
        low, high = limits
        if scale == "quantile" or full:
            raise DataError(f"limits={limits!r} with {'full=True' if full else 'colours by rank'}: give one of the two")
        if not (low < high and math.isfinite(high - low)):
            raise DataError(f"limits={limits!r}: colours go from a number to a larger one")
    import_matplotlib()
    if not t.numel():
        raise DataError(f"{t.name!r} has no elements: there is nothing to draw")
    rows, cols = (cells, cells) if isinstance(cells, int) else cells
    wrap = row_length(number_shape(t))
    found = pooled(t, rows, cols, dims=dims, at=at, wrap=wrap, window=window, exact=exact, lost=True)
    return _draw(t, found, pool, ax, title or title_of(t), label, scale, full, limits)


def _draw(
    t: LazyArray,
    found: Pixels,
    pool: str,
    ax: Axes | None,
    title: str,
    label: str,
    scale: str,
    full: bool,
    limits: tuple[float, float] | None,
) -> Axes:
    """Draw pooled elements, with rows and columns in elements."""
    values = found.values(pool)
    high, wide = (int(edges[-1] - edges[0]) for edges in (found.row_edges, found.col_edges))
    ax, theme = axes_of(ax, _size(high, wide))
    good = values[np.isfinite(values)]
    low, top = limits or _ends(found, good, pool, full)
    two = low < 0 < top
    if two and limits is None:
        low, top = min(low, -top), max(-low, top)
    beyond = bool(good.size) and (good.min() < low, good.max() > top)
    norm = _norm(scale, low, top, good)
    edges = found.row_edges, found.col_edges
    extent = (float(edges[1][0]) - 0.5, float(edges[1][-1]) - 0.5, float(edges[0][-1]) - 0.5, float(edges[0][0]) - 0.5)
    image = ax.imshow(
        values,
        aspect="auto",
        interpolation="nearest" if values.size < 400 * 400 else "auto",
        cmap=signed(theme) if two and scale != "quantile" else magnitudes(theme),
        norm=norm,
        extent=extent,
    )
    bare(ax)
    _mark_odd(ax, found, theme)
    count_axis(ax.xaxis, 6)
    count_axis(ax.yaxis, 6)
    plane = found.plane
    ax.set_xlabel(
        ""
        if plane.col_dim is None
        else f"{'elements, in rows of' if plane.wrap else f'dimension {plane.col_dim} of'} {plane.width:,}"
    )
    ax.set_ylabel(
        "row" if plane.wrap else "" if plane.row_dim is None else f"dimension {plane.row_dim} of {plane.height:,}"
    )
    if plane.height == 1:
        ax.set_yticks([])
    extend = {(False, True): "max", (True, False): "min", (True, True): "both"}.get(beyond or (False, False), "neither")
    bar = colour_bar(ax, image, label or (_POOLS[pool] if _cell(found) != "1" else "value"), theme, extend=extend)
    if scale != "linear":
        ticks = np.asarray(norm.inverse(np.linspace(0, 1, 5)))
        bar.set_ticks(ticks, labels=[number(float(x)) for x in ticks])
        bar.minorticks_off()
    headline(ax, title, [facts_of(t), *_notes(t, found, pool)], theme)
    return ax


def _ends(found: Pixels, good: Any, pool: str, full: bool) -> tuple[float, float]:
    """Return the values at which the colours end: those of nearly all cells, or of all elements."""
    if not good.size:
        return 0.0, 1.0
    if full:
        lows, highs = (x[np.isfinite(x)] for x in (found.low, found.high))
        low, high = float(lows.min()), float(highs.max())
        return (0.0, max(-low, high)) if pool == "absmax" else (low, high)
    low, high = (float(x) for x in np.percentile(good, (100 - _ROBUST, _ROBUST)))
    return (0.0 if pool == "absmax" else low), high


def _norm(scale: str, low: float, high: float, good: Any) -> Any:
    """Return where values lie on a map of colours, as the explorer's pages have it."""
    from matplotlib.colors import FuncNorm, Normalize

    if low == high:
        margin = max(abs(low) * 1e-6, 1e-12)
        low, high = low - margin, high + margin
    if scale == "quantile" and good.size > 1 and good.min() < good.max():
        known = np.unique(good)
        at = np.searchsorted(np.sort(good, axis=None), known) / (good.size - 1)
        at[-1] = 1.0
        return FuncNorm(
            (lambda x: np.interp(x, known, at), lambda y: np.interp(y, at, known)), float(known[0]), float(known[-1])
        )
    if scale == "symlog":
        least = max(abs(low), abs(high)) / 10**_DECADES
        return FuncNorm(
            (
                lambda x: np.sign(x) * np.log1p(np.abs(x) / least),
                lambda y: np.sign(y) * np.expm1(np.abs(y)) * least,
            ),
            low,
            high,
        )
    return Normalize(low, high)


def _size(high: int, wide: int) -> tuple[float, float]:
    """Return the size of the figure of a heat map: to scale, unless a side would be too short."""
    scale = _LONG / max(high, wide, 1)
    return max(_SHORT, wide * scale, 2.7) + 1.9, max(0.5 if high == 1 else _SHORT, high * scale * 0.82) + 1.15


def _cell(found: Pixels) -> str:
    """Return how many elements a cell has, as text: "16 x 4"; "1" if each has its own."""
    sizes = [int(np.diff(edges).max(initial=1)) for edges in (found.row_edges, found.col_edges)]
    return "1" if sizes == [1, 1] else f"{sizes[0]:,} x {sizes[1]:,}"


def _notes(t: LazyArray, found: Pixels, pool: str) -> list[str]:
    cell = _cell(found)
    notes = [] if cell == "1" else [f"{_POOLS[pool]} of {cell} elements in a cell"]
    if found.plane.at:
        notes.append("at " + ", ".join(f"{n} of dimension {d}" for d, n in sorted(found.plane.at.items())))
    rest = t.ndim - 2 - len(found.plane.at)
    if rest > 0 and not found.plane.wrap:
        notes.append(f"pooled over {plural(rest, 'more dimension')}")
    if not found.exact:
        notes.append(f"a sample of {found.read:,} elements")
    odd = [(found.nan, "NaN"), (found.inf, "infinite"), (found.lost, "lost")]
    texts = [f"{int(n.sum()):,} {what}" for n, what in odd if n is not None and n.any()]
    return [*notes, *texts]


def _mark_odd(ax: Any, found: Pixels, theme: Theme) -> None:
    """Mark the cells that have NaN or infinities."""
    odd = [one for one in (found.nan, found.inf) if one is not None]
    if not odd:
        return
    rows, columns = np.nonzero(np.sum(odd, axis=0))
    y = (found.row_edges[rows] + found.row_edges[rows + 1] - 1) / 2
    x = (found.col_edges[columns] + found.col_edges[columns + 1] - 1) / 2
    ax.plot(x, y, linestyle="", marker="x", markersize=5, color=theme.lost, markeredgewidth=1.4)


def side_norms(t: LazyArray, side: Literal["rows", "columns"], ax: Axes | None) -> Axes:
    """See `TensorPlots.row_norms` and `TensorPlots.column_norms`."""
    if t.ndim < 2:
        raise DataError(f"{t.name!r} has {plural(t.ndim, 'dimension')}: norms of {side} are of matrices")
    check_drawable(t)
    found = norms(t, GROUPS if side == "rows" else 1, GROUPS if side == "columns" else 1)
    values, edges = (found.rows, found.row_edges) if side == "rows" else (found.cols, found.col_edges)
    total = found.plane.height if side == "rows" else found.plane.width
    one = side.removesuffix("s")
    ax, theme = axes_of(ax, (6.8, 3.0), grid="y")
    middles = (edges[:-1] + edges[1:] - 1) / 2
    good = values[np.isfinite(values)]
    median = float(np.median(good)) if good.size else math.nan
    points: dict[str, Any] = {"marker": "o", "markersize": 3} if len(values) <= _POINTS else {}
    ax.plot(middles, values, color=theme.accent, linewidth=0.9 if len(values) > 200 else 1.4, **points)
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    count_axis(ax.xaxis)
    plain_axis(ax.yaxis)
    notes = [facts_of(t)]
    if good.size:
        ax.axhline(median, color=theme.soft, linewidth=0.9, linestyle=(0, (4, 3)))
        notes.append(f"median {number(median)}, dashed")
        _name_outliers(ax, values, middles, median, theme)
    zeros = int((values == 0).sum())
    if zeros:
        notes.append(f"{plural(zeros, one)} of norm 0")
    if len(values) < total:
        notes.append(f"root mean square of groups of {-(-total // len(values)):,} {side}")
    ax.set(xlabel=one, ylabel=f"L2 norm of the {one}")
    headline(ax, title_of(t), notes, theme)
    return ax


def _name_outliers(ax: Any, values: Any, middles: Any, median: float, theme: Theme) -> None:
    """Write the numbers of the rows or columns that stand far out."""
    order = np.argsort(-np.where(np.isfinite(values), values, -1))[:_NAMED]
    far = [n for n in order if math.isfinite(values[n]) and values[n] > _FAR * median > 0]
    for n in far:
        ax.plot([middles[n]], [values[n]], "o", color=_ORANGE, markersize=4)
        text = ax.annotate(
            f"{middles[n]:.0f}", (middles[n], values[n]), (5, 0), textcoords="offset points", va="center"
        )
        text.set(color=theme.ink, fontsize=7.5, gid="outlier")


def bits(t: LazyArray) -> Figure:
    """See `TensorPlots.bits`."""
    import_matplotlib()
    from matplotlib.patches import Patch

    found = bits_of(t)
    figure, theme = new_figure((8.4, 3.1))
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    left, _ = axes_of(left, grid="y")
    layout = found.layout
    parts = [*["sign"] * layout.sign, *["exponent"] * layout.exponent, *["mantissa"] * layout.mantissa]
    if not layout.exponent:
        parts = [*["sign"] * layout.sign, *["number"] * layout.mantissa]
    tones = {"sign": _ORANGE, "exponent": theme.accent, "mantissa": _GREEN, "number": theme.accent}
    left.bar(range(layout.width), found.ones, color=[tones[part] for part in parts], width=0.82)
    left.axhline(0.5, color=theme.soft, linewidth=0.9, linestyle=(0, (4, 3)))
    left.set_xticks(range(layout.width), labels=[str(n) for n in reversed(range(layout.width))])
    left.set_yticks([0, 0.25, 0.5, 0.75, 1])
    left.set(ylim=(0, 1.2), xlabel="bit, the highest first", ylabel="share of elements in which it is 1")
    handles = [Patch(color=tones[part], label=part) for part in dict.fromkeys(parts)]
    made = left.legend(
        handles=handles, frameon=False, fontsize=8, ncols=3, loc="upper left", borderaxespad=0.1, labelcolor=theme.ink
    )
    made.set_in_layout(False)
    share = f"{found.distinct:,} of {1 << layout.width:,} patterns occur, {found.entropy:.1f} bits of entropy"
    headline(left, title_of(t), [facts_of(t), share], theme)
    right, _ = axes_of(right, grid="y")
    _exponents(right, found, theme)
    return figure


def _exponents(ax: Any, found: Bits, theme: Theme) -> None:
    """Draw how often each exponent occurs or, for integers, each value."""
    layout = found.layout
    if found.exponents is None:
        ax.bar(found.values, found.counts, color=theme.accent, width=max(0.8, float(np.ptp(found.values)) / 200))
        ax.set(xlabel="value", ylabel="elements")
    else:
        used = np.flatnonzero(found.exponents)
        ax.bar(used - layout.bias, found.exponents[used], color=theme.accent, width=0.85)
        ax.set(xlabel=f"exponent: |x| is near 2 to this power (bias {layout.bias})", ylabel="elements")
    ax.set_yscale("log", nonpositive="clip")
    ax.set_ylim(bottom=0.5)
    count_axis(ax.xaxis)
    headline(ax, "exponents" if found.exponents is not None else "values", (), theme)
