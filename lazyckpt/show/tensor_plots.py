"""Plots of one tensor. `TensorPlots` of plot.py documents them; inspect/ computes what they draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.names import natural
from ..core.units import human_bytes
from ..errors import DataError
from ..inspect.histogram import histogram_of
from ..inspect.stats import Bins, noise, singular_values, stats_of
from ..lazy import LazyArray
from .layout import Cell, drawing
from .style import (
    axes_of,
    colours,
    count_axis,
    headline,
    import_matplotlib,
    legend,
    log_axis,
    number,
    on,
    plain_axis,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND = 16  # maximum number of entries of a legend, and of distinct colours
_TEXTS = 80  # labels are written on the cells of drawings with at most this many
_POINTS = 40  # singular values up to which each has a point on the line
_POWERS = "powers of 2"  # what asks for bins of such edges
_ENERGY = 0.99  # share of the squares of the singular values that is marked


def title_of(t: LazyArray) -> str:
    """Return the name of a tensor as a title."""
    return t.name


def facts_of(t: LazyArray) -> str:
    """Return dtype, shape and size of a tensor as a note."""
    return f"{t.spec.dtype.short} [{', '.join(map(str, t.shape))}], {human_bytes(t.nbytes)}"


def check_drawable(t: LazyArray) -> None:
    """Raise a DataError if there is nothing to draw, or nothing to draw it with."""
    import_matplotlib()
    if not t.numel():
        raise DataError(f"{t.name!r} has no elements: there is nothing to draw")


class _Counts(NamedTuple):
    """A histogram, and what its notes say."""

    edges: Any
    counts: Any
    finite: int
    mean: float | None
    std: float | None
    absmax: float | None
    odd: dict[str, int | None]
    read: int | None
    """How many elements were read, if not all."""


def _counted(t: LazyArray, bins: Bins | str, exact: bool) -> _Counts:
    powers = isinstance(bins, str)
    if isinstance(bins, str) and bins != _POWERS:
        raise DataError(f"there are no bins {bins!r}: give their number, their edges or {_POWERS!r}")
    if powers or not exact:
        if not isinstance(bins, int | str):
            raise DataError("exact=False counts in bins of equal width: give their number, or take exact=True")
        d = histogram_of(t, 100 if isinstance(bins, str) else bins, powers, exact)
        m, some = d.moments, d.moments.finite > 0
        odd: dict[str, int | None] = {"NaN": m.nan, "+Inf": m.posinf, "-Inf": m.neginf}
        mean, most = (m.mean, max(abs(m.low), abs(m.high))) if some else (None, None)
        return _Counts(d.edges, d.counts, m.finite, mean, m.std, most, odd, None if d.exact else m.count)
    found = stats_of(t, bins)  # type: ignore[arg-type]  # no text
    assert found.histogram is not None  # because bins were given
    odd = {"NaN": found.nan, "+Inf": found.posinf, "-Inf": found.neginf}
    edges, counts = found.histogram.edges, found.histogram.counts
    return _Counts(edges, counts, found.finite, found.mean, found.std, found.absmax, odd, None)


def hist(t: LazyArray, bins: Bins | str, log: bool, exact: bool, ax: Axes | None) -> Axes:
    """See `TensorPlots.hist`."""
    check_drawable(t)
    found = _counted(t, bins, exact)
    ax, theme = axes_of(ax, (6.4, 3.4), grid="y")
    powers = isinstance(bins, str)
    places = np.arange(len(found.edges)) if powers else found.edges
    ax.stairs(found.counts, places, fill=True, color=theme.accent, linewidth=0)
    if log and found.finite:
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(bottom=0.5)
    else:
        ax.set_ylim(bottom=0)
        _in_thousands(ax.yaxis)
    if powers:
        shown = np.unique(np.linspace(0, len(places) - 1, 7).astype(int))
        ax.set_xticks(shown, labels=[number(float(found.edges[n])) for n in shown])
    else:
        plain_axis(ax.xaxis)
    ax.margins(x=0.01)
    odd = found.odd
    notes = [facts_of(t)]
    if found.read is not None:
        notes.append(f"a sample of {found.read:,} elements")
    if found.mean is not None and found.finite:
        notes.append(
            f"mean {number(found.mean)}, std {number(found.std or 0.0)}, largest |x| {number(found.absmax or 0.0)}"
        )
    if any(odd.values()):
        notes.append("not drawn: " + ", ".join(f"{n:,} {what}" for what, n in odd.items() if n))
    ax.set(xlabel="value", ylabel="elements in a bin")
    headline(ax, title_of(t), notes, theme)
    return ax


def _in_thousands(axis: Any) -> None:
    """Write large counts as "20k"."""
    from matplotlib.ticker import EngFormatter

    count_axis(axis)
    axis.set_major_formatter(EngFormatter(sep=""))


def spectrum(t: LazyArray, ax: Axes | None) -> Axes:
    """See `TensorPlots.singular_values`."""
    check_drawable(t)
    found = singular_values(t)
    values, least = found.numpy(), noise(found)
    ax, theme = axes_of(ax, (6.4, 3.4), grid="y")
    points: dict[str, Any] = {"marker": "o", "markersize": 3} if len(values) <= _POINTS else {}
    ax.plot(np.arange(1, len(values) + 1), values, color=theme.accent, linewidth=1.8, **points)
    count_axis(ax.xaxis)
    notes = [facts_of(t)]
    largest = float(values[0]) if len(values) else 0.0
    if largest > 0:
        ax.set_yscale("log", nonpositive="mask")
        log_axis(ax.yaxis, *ax.get_ylim())
        if float(values[-1]) < least:
            ax.axhline(least, color=theme.soft, linestyle=":", linewidth=1.2, label="accuracy")
            ax.set_ylim(bottom=least / 10)
            notes.append("noise below the dotted line")
        share = np.cumsum(values**2) / np.sum(values**2)
        enough = int(np.searchsorted(share, _ENERGY)) + 1
        ax.axvline(enough, color=theme.soft, linewidth=0.9, linestyle=(0, (4, 3)))
        notes.append(f"the first {enough:,} of {len(values):,} have {_ENERGY:.0%} of the squares")
        notes.append(f"largest {number(largest)}")
    ax.margins(x=0.01)
    ax.set(xlabel="number, largest first", ylabel="singular value")
    headline(ax, title_of(t), notes, theme)
    return ax


def layout(t: LazyArray, ax: Axes | None) -> Axes:
    """See `TensorPlots.layout`."""
    import_matplotlib()
    from matplotlib.patches import Patch, Rectangle

    drawn = drawing(t)
    ax, theme = axes_of(ax, (6.8, 3.6 if drawn.row_dim is not None else 1.7))
    labels = sorted({h.label for h in drawn.holders}, key=natural)
    palette = colours(labels)
    (top, bottom), (left, right) = drawn.rows, drawn.cols
    for cell in drawn.cells:
        (r0, r1), (c0, c1) = cell.rows, cell.cols
        colour = theme.empty if cell.missing else palette[cell.holders[0].label]
        box = Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=colour, linewidth=0.8)
        box.set(hatch="////" if cell.missing else None, edgecolor=theme.lost if cell.missing else theme.paper)
        ax.add_patch(box)
        if len(drawn.cells) <= _TEXTS and _roomy(cell, drawn.rows, drawn.cols):
            ink = theme.ink if cell.missing else on(colour)
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
            if cell.missing:
                style["bbox"] = {"facecolor": theme.paper, "edgecolor": "none", "boxstyle": "round,pad=0.2"}
            ax.text((c0 + c1) / 2, (r0 + r1) / 2, _holder_text(cell), **style)
    ax.set(xlim=(left, right or 1), ylim=(bottom or 1, top))
    ax.set_xlabel("" if drawn.col_dim is None else f"dimension {drawn.col_dim} (elements)")
    ax.set_ylabel("" if drawn.row_dim is None else f"dimension {drawn.row_dim} (elements)")
    count_axis(ax.xaxis)
    count_axis(ax.yaxis)
    if drawn.row_dim is None:
        ax.set_yticks([])
    if 1 < len(labels) <= _LEGEND:
        legend(ax, theme, [Patch(color=palette[label], label=short(label)) for label in labels], outside=True)
    notes = [facts_of(t)]
    if len(labels) > _LEGEND:
        notes.append(f"{len(labels):,} ranks, from {labels[0]} to {labels[-1]}")
    if any(cell.missing for cell in drawn.cells):
        notes.append("hatched: its file is missing")
    if drawn.merged:
        notes.append(f"{drawn.blocks:,} blocks, neighbours drawn together")
    if drawn.undrawn:
        notes.append(f"also cut along dimension {', '.join(map(str, drawn.undrawn))}")
    headline(ax, title_of(t), notes, theme)
    return ax


def _roomy(cell: Cell, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    """Estimate whether the label of a cell fits into it."""
    high = (cell.rows[1] - cell.rows[0]) / max(1, rows[1] - rows[0])
    wide = (cell.cols[1] - cell.cols[0]) / max(1, cols[1] - cols[0])
    return high >= 0.06 and wide >= 0.018 * len(_holder_text(cell))


def _holder_text(cell: Cell) -> str:
    more = f" +{len(cell.holders) - 1} more" if len(cell.holders) > 1 else ""
    return short(cell.holders[0].label) + more
