"""The comparison of two checkpoints with its table for notebooks and its plot: what `lazyckpt.diff` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError, and_more
from ..inspect import diff as inspected
from ..inspect.course import differences
from ..inspect.layers import Layers
from ..markup import cell, page, safe, table, tag
from .differences import cells, changed_prefix, counts, degree, lines_of
from .layer_plots import layer_curves, layer_map
from .style import import_matplotlib, new_figure, size_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 60  # lines of the table for notebooks
_SHORT = 40  # characters that stand in one line
_HEAD = (
    ("tensor", "w"), ("relative", ""), ("cosine", ""), ("maximum", ""), ("dtype and shape", "l"), ("tensors", ""),
    ("most at", "l"),
)  # fmt: skip
_LABELS = {"relative": "norm of the difference / norm of the first", "cosine": "1 - cosine"}


class Diff(inspected.Diff):
    """The comparison of two checkpoints: a sequence of `Difference`s, in the order of the first checkpoint.

    ``pandas.DataFrame(diff)`` is a table of the rows. A diff is true if anything differs. Notebooks show the tensors
    that differ, those that differ most first, and those of repeated layers in one line.

    Attributes
    ----------
    rows
        A row for each tensor.
    """

    __slots__ = ()

    def plot(self, *, lines: bool = False) -> Figure:
        """Plot the relative difference and the cosine of all tensors by layer and kind of parameter, in two panels.

        The relative difference is the norm of the difference divided by the norm of the first tensor. In place of the
        cosine, 1 minus it is drawn. Both have a logarithmic scale. Cells of equal tensors are blank; "?" marks those
        that one side lacks or that cannot be read.

        Parameters
        ----------
        lines
            Draw a line for each kind in place of heat maps.

        Raises
        ------
        DataError
            No elements were compared, or matplotlib is not installed.
        """
        import_matplotlib()
        found = [differences(self.rows, quantity) for quantity in _LABELS]
        if not any(row.relative is not None for row in self.rows):
            raise DataError("no elements of the two checkpoints were compared: there is nothing to draw")
        return _two_panels(found, counts(self.rows), lines)

    def _repr_html_(self) -> str:
        found = lines_of(self)
        rows = []
        for line in found[:_ROWS]:
            relative, cosine, maximum, name, kind, count, most = cells(line)
            css = {"none": "", "small": "", "medium": "warning", "large": "bad"}[degree(line.worst)]
            rows.append(
                [
                    cell(tag("code", safe(name)), "w"),
                    cell(safe(relative if line.kind in ("values", "equal") else line.kind), css),
                    *(cell(safe(text)) for text in (cosine, maximum)),
                    cell(safe(kind), "l"),
                    cell(safe(count)),
                    cell(tag("code", safe(most, 200), "dim") if most else "", "l" if len(most) < _SHORT else "w"),
                ]
            )
        notes = []
        if self.digests:
            notes.append(f"{self.digests:,} compared by the digests of manifests")
        moved = changed_prefix(self.rows)
        if moved is not None:
            notes.append(f"{moved[1]:,} names of one checkpoint begin with {moved[0]!r} in the other")
        if len(found) > _ROWS:
            notes.append(f"{and_more(len(found) - _ROWS, 'lines')}: pandas.DataFrame(diff)")
        head = tag("div", tag("b", safe(counts(self.rows), 300)), "head")
        below = [tag("div", safe(note, 300), "note") for note in notes]
        return page([head, table(_HEAD, rows) if rows else "", *below])


def _two_panels(found: Sequence[Layers], notes: str, lines: bool) -> Figure:
    """Draw relative differences and cosines beside or below each other."""
    relative, cosine = found
    cosine = replace(
        cosine,
        values=np.maximum(1 - cosine.values, 0),
        alone={kind: max(0.0, 1 - value) if value == value else value for kind, value in cosine.alone.items()},
    )
    wide, high = size_of(relative.labels, max(1, len(relative.layers)), 1.9)
    side_by_side = wide < 6 and not lines
    size = (2 * wide - 0.4, high) if side_by_side else (8.2, 6.6) if lines else (wide, 2 * high)
    figure, _ = new_figure(size)
    axes = figure.subplots(1, 2, sharey=True) if side_by_side else figure.subplots(2, 1, sharex=True)
    titles = ("Relative difference by layer and kind", "Angle (1 - cosine) by layer and kind")
    for n, (ax, one, title, label) in enumerate(zip(axes, (relative, cosine), titles, _LABELS.values(), strict=True)):
        shown = [notes] if n == 0 else []
        if lines:
            layer_curves(one, ax, title, shown, label, log=True)
        else:
            layer_map(one, ax, title, shown, "log", label)
        if side_by_side and n:
            ax.tick_params(labelleft=False)
        if not side_by_side and not n:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    return figure
