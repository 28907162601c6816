"""Plots with matplotlib, which is imported when the first plot is drawn.

Every plot is drawn into ``ax``, or into a new figure if ``ax`` is None, and returns the Axes. Plots do not show the
figure and do not change matplotlib's settings. Data is read in pieces, in bounded memory. Without matplotlib every
plot raises DataError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.names import natural
from ..core.units import plural
from ..errors import DataError, printable
from ..inspect.stats import ACCURACY, Bins, singular_values, stats_of, stats_of_all
from ..inspect.table import Stats, Table
from ..lazy import LazyArray
from .layout import Cell, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TICKS = 40  # labels along an axis
_LABEL = 40  # characters of a label
_LEGEND = 16  # maximum number of entries of a legend, and of distinct colours
_TEXTS = 80  # labels are written on the cells of drawings with at most this many
_QUANTITIES = ("mean", "std", "min", "max", "absmax", "l1", "l2", "zeros", "nan", "posinf", "neginf")


class TensorPlots:
    """The plots of one tensor: ``t.plot``."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: LazyArray) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"<plots of {self._tensor.name!r}: {_kinds(self)}>"

    def hist(self, bins: Bins = 100, *, ax: Axes | None = None) -> Axes:
        """Plot a histogram of the finite elements.

        The tensor is read once, or twice if its elements are wider than 16 bits and ``bins`` is a number.

        Parameters
        ----------
        bins
            Number of bins of equal width, or the edges of the bins.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If matplotlib is not installed, or as `LazyTensor.stats` raises it.
        """
        import_matplotlib()
        found = stats_of(self._tensor, bins)
        assert found.histogram is not None  # because bins were given
        ax = axes_of() if ax is None else ax
        ax.stairs(found.histogram.counts, found.histogram.edges, fill=True)
        lines = [_title(self._tensor)]
        odd = {"NaN": found.nan, "+Inf": found.posinf, "-Inf": found.neginf}
        if any(odd.values()):
            lines.append("not drawn: " + ", ".join(f"{n:,} {what}" for what, n in odd.items() if n))
        ax.set(title="\n".join(lines), xlabel="value", ylabel="elements in a bin")
        return ax

    def singular_values(self, *, ax: Axes | None = None) -> Axes:
        """Plot the singular values of a matrix, largest first, on a logarithmic axis.

        Values below the dotted line are noise; `lazyckpt.inspect.stats.singular_values` documents the accuracy, the
        memory and the largest matrix. The tensor is read once.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the tensor is not a matrix, is too large, has packed elements, NaN or infinities, or if matplotlib is not
            installed. Errors of reading are raised, too.
        """
        import_matplotlib()
        values = singular_values(self._tensor)
        ax = axes_of() if ax is None else ax
        ax.plot(range(1, len(values) + 1), values.tolist())
        largest = float(values[0]) if len(values) else 0.0
        if largest > 0:
            ax.set_yscale("log", nonpositive="mask")
            if float(values[-1]) < ACCURACY * largest:
                ax.axhline(ACCURACY * largest, color="gray", linestyle=":", label="accuracy")
                ax.set_ylim(bottom=ACCURACY * largest / 10)
                ax.legend()
        ax.set(title=_title(self._tensor), xlabel="number, largest first", ylabel="singular value")
        return ax

    def layout(self, *, ax: Axes | None = None) -> Axes:
        """Plot which rank holds which block of the tensor.

        The fragments are boxes, coloured by rank, along the two dimensions that the tensor is cut along, or its longest
        ones. Blocks that cannot be read are hatched. No tensor data is read.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If matplotlib is not installed.
        """
        import_matplotlib()
        from matplotlib.patches import Patch, Rectangle

        drawn = drawing(self._tensor)
        ax = axes_of() if ax is None else ax
        labels = sorted({h.label for h in drawn.holders}, key=natural)
        colours = _colours(labels)
        (top, bottom), (left, right) = drawn.rows, drawn.cols
        for cell in drawn.cells:
            (r0, r1), (c0, c1) = cell.rows, cell.cols
            box = Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=colours[cell.holders[0].label])
            box.set(hatch="///" if cell.missing else None, edgecolor="red" if cell.missing else "white")
            ax.add_patch(box)
            if len(drawn.cells) <= _TEXTS and _roomy(cell, drawn.rows, drawn.cols):
                ax.text((c0 + c1) / 2, (r0 + r1) / 2, _holder_text(cell), ha="center", va="center", fontsize="small")
        ax.set(xlim=(left, right or 1), ylim=(bottom or 1, top), title=_title(self._tensor))
        ax.set_xlabel("" if drawn.col_dim is None else f"dimension {drawn.col_dim} (elements)")
        ax.set_ylabel("" if drawn.row_dim is None else f"dimension {drawn.row_dim} (elements)")
        ax.locator_params(integer=True)
        if drawn.row_dim is None:
            ax.set_yticks([])
        if 1 < len(labels) <= _LEGEND:
            patches = [Patch(color=colours[label], label=short(label)) for label in labels]
            ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        notes = []
        if len(labels) > _LEGEND:
            notes.append(f"{len(labels):,} ranks, from {short(labels[0])} to {short(labels[-1])}")
        if any(cell.missing for cell in drawn.cells):
            notes.append("hatched: its file is missing")
        if drawn.merged:
            notes.append(f"{drawn.blocks:,} blocks, neighbours drawn together")
        if drawn.undrawn:
            notes.append(f"also cut along dimension {', '.join(map(str, drawn.undrawn))}")
        if notes:
            ax.set_title(_title(self._tensor) + "\n" + "; ".join(notes))
        return ax


class StepPlots(TensorPlots):
    """The plots of a tensor of a run."""

    __slots__ = ()

    def steps(self, quantity: str | Callable[[torch.Tensor], Any] = "norm", *, ax: Axes | None = None) -> Axes:
        """Plot a quantity of the tensor over the steps of the run.

        The steps are read one after the other. A function is called with the whole tensor of a step in memory.

        Parameters
        ----------
        quantity
            "norm" (L2), a column of `LazyTensor.stats` ("std", "absmax", "zeros", ...), or a function that maps the
            tensor of a step to a number.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If there is no such quantity, the function does not return a number, the first dimension of the tensor is
            not the steps, or matplotlib is not installed. Errors of reading are raised, too.
        """
        column = "l2" if quantity == "norm" else quantity
        if not callable(quantity) and column not in _QUANTITIES:
            listed = ", ".join(("norm", *_QUANTITIES))
            raise DataError(f"there is no quantity {quantity!r}: it is one of {listed}, or a function of a tensor")
        import_matplotlib()
        steps: tuple[int, ...] = getattr(self._tensor, "steps", ())
        if self._tensor.shape[:1] != (len(steps),):
            raise DataError(
                f"this part of {self._tensor.name!r} has no dimension of steps: take t.lazy[:, ...] instead"
            )
        values = []
        for n in range(len(steps)):
            one = self._tensor.lazy[n]
            values.append(_value(quantity(one[...])) if callable(quantity) else getattr(stats_of(one), str(column)))
        ax = axes_of() if ax is None else ax
        ax.plot(steps, values, marker="o", label=_plain(printable(self._tensor.name)))
        what = getattr(quantity, "__name__", "quantity") if callable(quantity) else _QUANTITY.get(quantity, quantity)
        ax.set(title=short(self._tensor.name), xlabel="step", ylabel=what)
        return ax


class ViewPlots:
    """The plots of a view: ``view.plot``."""

    __slots__ = ("_view",)

    def __init__(self, view: Any) -> None:
        self._view = view

    def __repr__(self) -> str:
        return f"<plots of {plural(len(self._view), 'tensor')}: {_kinds(self)}>"

    def hist(self, name: str, bins: Bins = 100, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.hist` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).hist(bins, ax=ax)

    def singular_values(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.singular_values` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).singular_values(ax=ax)

    def layout(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.layout` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).layout(ax=ax)

    def norms(self, *, ax: Axes | None = None) -> Axes:
        """Plot the L2 norms of all tensors as a heat map of layers and kinds of parameters.

        A row is a layer: the first number between dots of a full name. A column is a kind of parameter: the full name
        with "*" for every such number. Tensors of the same layer and kind (experts) share a cell. Names without a
        number share the row "-". A cell is marked "!" if it has NaN or infinities (the norm is that of the other
        elements) or if its squares overflow float64, and "?" if a tensor cannot be read. The view is read once.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the view has no tensors, or matplotlib is not installed.
        """
        import_matplotlib()
        from matplotlib.colors import LogNorm

        rows, kinds, cells = _grid({self._view.full_name(one.name): one for one in stats_of_all(self._view.once()[0])})
        if not cells:
            raise DataError("there are no tensors in this view: there are no norms to draw")
        norms = torch.full((len(rows), len(kinds)), torch.nan, dtype=torch.float64, device="cpu")
        marks: list[tuple[int, int, str]] = []
        for (row, kind), found in cells.items():
            at = rows.index(row), kinds.index(kind)
            good = [s for s in found if s.error is None]
            if good:
                norms[at] = Table(good).total.l2 or 0.0
            odd = bool(norms[at].isinf()) or any(s.finite < s.count for s in good)
            mark = "?" if len(good) < len(found) else "!" if odd else ""
            if mark:
                marks.append((*at, mark))
        size = (2.5 + 0.45 * min(len(kinds), _TICKS), 3 + 0.2 * min(len(rows), _TICKS))
        ax = axes_of(size) if ax is None else ax
        positive = norms[(norms > 0) & norms.isfinite()]
        scale = LogNorm(float(positive.min()), float(positive.max())) if len(positive) else None
        image = ax.imshow(norms.numpy(), aspect="auto", interpolation="nearest", norm=scale)
        for r, k, mark in marks:
            ax.text(k, r, mark, ha="center", va="center", color="white", backgroundcolor="red", fontsize="x-small")
        place_ticks(ax.set_yticks, [str(row) if row is not None else "-" for row in rows], {})
        place_ticks(ax.set_xticks, kind_labels(kinds), {"rotation": 45, "ha": "right", "rotation_mode": "anchor"})
        ax.set(title="L2 norms", ylabel="layer")
        bar = ax.figure.colorbar(image, ax=ax)
        bar.set_label("L2 norm")
        return ax


class RunPlots(ViewPlots):
    """The plots of a run: ``run.plot``."""

    __slots__ = ()

    def steps(
        self, name: str, quantity: str | Callable[[torch.Tensor], Any] = "norm", *, ax: Axes | None = None
    ) -> Axes:
        """Plot `StepPlots.steps` of the tensor ``name``."""
        return StepPlots(_one(self._view, name)).steps(quantity, ax=ax)


def _value(found: Any) -> float:
    """Convert the result of a user's function to a number, or raise DataError."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as e:
        raise DataError(
            f"a quantity is a number at every step; the function returns {type(found).__name__}: {e}"
        ) from e


_QUANTITY = {"norm": "L2 norm", "l2": "L2 norm", "l1": "L1 norm", "std": "standard deviation", "absmax": "largest |x|"}


def _kinds(plots: object) -> str:
    """Return the names of the plots, for ``repr``."""
    return ", ".join(f".{name}()" for name in dir(plots) if not name.startswith("_"))


def import_matplotlib() -> Any:
    """Import matplotlib.pyplot, or raise a DataError that says what to install."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise DataError(f"plots need matplotlib: pip install 'lazyckpt[plot]' ({e})") from None
    return plt


def axes_of(size: tuple[float, float] | None = None) -> Any:
    """Return the Axes of a new figure; the constrained layout makes room for its labels."""
    return import_matplotlib().subplots(figsize=size, layout="constrained")[1]


def _one(view: Mapping[str, LazyArray], name: str) -> LazyArray:
    found: Any = view[name]
    if not isinstance(found, LazyArray):
        raise DataError(f"{name!r} is no tensor, {len(found):,} tensors are below it: name one of them")
    return found


def _grid(
    found: Mapping[str, Stats],
) -> tuple[list[int | None], list[str], dict[tuple[int | None, str], list[Stats]]]:
    """Return the layers, the kinds in order of appearance, and the statistics of each (layer, kind)."""
    cells: dict[tuple[int | None, str], list[Stats]] = {}
    for name, one in found.items():
        parts = name.split(".")
        layer = next((int(part) for part in parts if _is_number(part)), None)
        kind = ".".join("*" if _is_number(part) else part for part in parts)
        cells.setdefault((layer, kind), []).append(one)
    rows = sorted({row for row, _ in cells}, key=lambda row: -1 if row is None else row)
    return rows, list(dict.fromkeys(kind for _, kind in cells)), cells


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10


def kind_labels(kinds: list[str]) -> list[str]:
    """Shorten each kind to the part after the layer's number where that part is unique."""
    tails = [kind.partition("*")[2].lstrip(".") or kind for kind in kinds]
    return [short(t if tails.count(t) == 1 else k) for t, k in zip(tails, kinds)]


def place_ticks(place: Callable[..., Any], labels: list[str], style: dict[str, Any]) -> None:
    """Place at most ``_TICKS`` of the labels."""
    step = -(-len(labels) // _TICKS) or 1
    place(range(0, len(labels), step), labels=labels[::step], **style)


def _colours(labels: list[str]) -> dict[str, Any]:
    """Return a colour for each label: distinct colours for few labels, a colour scale for many."""
    colours = import_matplotlib().get_cmap("tab20" if len(labels) <= _LEGEND else "viridis")
    if len(labels) <= _LEGEND:
        return {label: colours((2 * n + 1) % 20 if n < 10 else 2 * n % 20) for n, label in enumerate(labels)}
    return {label: colours(n / (len(labels) - 1)) for n, label in enumerate(labels)}


def _roomy(cell: Cell, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    """Estimate whether the label of a cell fits into it."""
    high = (cell.rows[1] - cell.rows[0]) / max(1, rows[1] - rows[0])
    wide = (cell.cols[1] - cell.cols[0]) / max(1, cols[1] - cols[0])
    return high >= 0.05 and wide >= 0.015 * len(_holder_text(cell))


def _holder_text(cell: Cell) -> str:
    more = f" +{len(cell.holders) - 1} more" if len(cell.holders) > 1 else ""
    return short(cell.holders[0].label) + more


def _title(t: LazyArray) -> str:
    return f"{short(t.name)}  {t.spec.dtype.short} [{', '.join(map(str, t.shape))}]"


def short(text: str) -> str:
    """Shorten a text to its end, which is more specific than its beginning."""
    text = printable(text)
    return _plain(text if len(text) <= _LABEL else "\N{HORIZONTAL ELLIPSIS}" + text[1 - _LABEL :])


def _plain(text: str) -> str:
    """Escape "$", which starts mathematics in matplotlib."""
    return text.replace("$", r"\$")
