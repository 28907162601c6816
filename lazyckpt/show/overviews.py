"""Overviews: several plots of a checkpoint, or of a tensor, in one figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.units import human_bytes, plural
from ..errors import DataError
from ..inspect.layers import QUANTITIES
from ..inspect.ranks import ranks_of
from ..inspect.stats import stats_of
from ..lazy import LazyArray
from .by_layer import of_view
from .layer_plots import layer_map
from .layout import holders
from .model_plots import draw_architecture, draw_ranks
from .style import closed_on_error, import_matplotlib, new_figure, size_of
from .tensor_plots import check_drawable, facts_of, hist, layout, spectrum
from .value_plots import heatmap, side_norms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READ, _TENSORS = 1 << 30, 20_000  # bytes and tensors up to which the overview of a view reads it
_MATRIX = 512  # smaller side of a matrix whose singular values an overview computes, at most


def view_overview(view: Any) -> Figure:
    """See `ViewPlots.overview`."""
    import_matplotlib()
    if not len(view):
        raise DataError("there are no tensors in this view: there is nothing to draw")
    found = of_view(view, "norm").found if view.nbytes <= READ and len(view) <= _TENSORS else None
    several = sum(held.rank is not None for held in ranks_of([view]).ranks) > 1
    down = [3.6]
    if found is not None:
        down.append(min(6.0, size_of(found.labels, len(found.layers))[1] + 0.2))
    figure, theme = new_figure((11.5, sum(down)))
    with closed_on_error(figure):
        grid = figure.add_gridspec(len(down), 2, height_ratios=down, width_ratios=[1.5, 1])
        draw_architecture(view, "bytes", figure.add_subplot(grid[0, 0] if several else grid[0, :]))
        if several:
            draw_ranks(view, figure.add_subplot(grid[0, 1]))
        if found is not None:
            name = QUANTITIES["norm"]
            layer_map(found, figure.add_subplot(grid[1, :]), f"{name} by layer and kind", [f"state {view.state}"])
        else:
            size = f"{human_bytes(view.nbytes)} of {plural(len(view), 'tensor')}"
            text = f"norms are not drawn, as that reads {size}: view.plot.norms()"
            figure.text(0.01, 0.005, text, color=theme.soft, fontsize=8)
    return figure


def tensor_overview(t: LazyArray) -> Figure:
    """See `TensorPlots.overview`."""
    check_drawable(t)
    panels: list[tuple[str, Callable[[Any], Any]]] = [("Values", lambda ax: hist(t, 100, True, True, ax))]
    if t.ndim >= 2:
        panels.append(("Norms of rows", lambda ax: side_norms(t, "rows", ax)))
    found = stats_of(t) if t.ndim == 2 and min(t.shape) <= _MATRIX and t.spec.dtype.is_number else None
    if found is not None and found.finite == found.count:
        panels.append(("Singular values", lambda ax: spectrum(t, ax)))
    held = len(holders(t)) > 1
    figure, _ = new_figure((11.5, 0.5 + max(4.4, 2.5 * len(panels))))
    with closed_on_error(figure):
        grid = figure.add_gridspec(6, 2, width_ratios=[1.1, 1])
        heatmap(t, "mean", 256, None, None, True, figure.add_subplot(grid[: 4 if held else 6, 0]))
        if held:
            _panel(lambda ax: layout(t, ax), t, figure.add_subplot(grid[4:, 0]), "Which rank holds what")
        for n, (title, draw) in enumerate(panels):
            rows = slice(n * 6 // len(panels), (n + 1) * 6 // len(panels))
            _panel(draw, t, figure.add_subplot(grid[rows, 1]), title)
    return figure


def _panel(draw: Callable[[Any], Any], t: LazyArray, ax: Any, title: str) -> None:
    """Draw a plot under a title of its own, without the facts that another panel has."""
    draw(ax)
    ax.title.set_text(title)
    for text in ax.texts:
        if text.get_gid() == "note":
            text.set_text(text.get_text().removeprefix(facts_of(t)).lstrip(" \n\N{MIDDLE DOT}"))
