"""Plots with matplotlib, which is imported when the first plot is drawn.

A plot is drawn into ``ax``, or into a new figure if ``ax`` is None, and returns the Axes; a plot of several panels
returns its Figure. Plots do not show the figure and do not change matplotlib's settings. A new figure has a face colour
of its own, dark if matplotlib's figures are (``plt.style.use("dark_background")``). Data is read in pieces, in bounded
memory, and inspect/ computes the numbers. Without matplotlib every plot raises DataError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..core.units import plural
from ..errors import DataError
from ..inspect.expert_norms import expert_norms
from ..inspect.stats import Bins, stats_of
from ..lazy import LazyArray
from . import tensor_plots
from .by_layer import of_run, of_view
from .layer_plots import layer_map
from .model_plots import draw_architecture, draw_ranks
from .overviews import tensor_overview, view_overview
from .run_plots import steps_line
from .style import import_matplotlib
from .value_plots import bits, heatmap, side_norms

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    from ..deferred import torch

_COLUMNS = ("mean", "std", "min", "max", "absmax", "l1", "l2", "zeros", "nan", "posinf", "neginf")


class TensorPlots:
    """The plots of one tensor: ``t.plot``."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: LazyArray) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"<plots of {self._tensor.name!r}: {_kinds(self)}>"

    def __call__(self) -> Figure:
        """Plot `overview`."""
        return self.overview()

    def overview(self) -> Figure:
        """Plot a heat map of the tensor, a histogram, norms of rows, singular values of a small matrix, and which rank
        holds what.

        The tensor is read once for each of them.

        Raises
        ------
        DataError
            If the elements are no numbers, or matplotlib is not installed. Errors of reading are raised, too.
        """
        return tensor_overview(self._tensor)

    def heatmap(
        self,
        pool: Literal["mean", "absmax", "min", "max"] = "mean",
        *,
        cells: int = 512,
        dims: tuple[int, int] | None = None,
        at: Mapping[int, int] | None = None,
        exact: bool = True,
        ax: Axes | None = None,
    ) -> Axes:
        """Plot the values as a heat map. A cell pools several elements of a large tensor; the notes say how many.

        Colours end at the 99.5th percentile of the magnitudes. Cells with NaN or infinities are marked. The tensor is
        read once; a part of it (``t.lazy[:100].plot.heatmap()``) reads that part.

        Parameters
        ----------
        pool
            What a cell shows of its elements: the mean, the largest absolute value, the minimum or the maximum.
        cells
            Largest number of rows and of columns of cells, up to 2,048.
        dims
            The dimensions of rows and columns; by default the last two. A long vector is wrapped into rows.
        at
            Dimension -> index, for the other dimensions. Those without an index are pooled, too.
        exact
            False reads about 32 MiB of a larger tensor, spread over it.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the arguments do not fit the tensor, the elements are no numbers, or matplotlib is not installed. Errors
            of reading are raised, too.
        """
        return heatmap(self._tensor, pool, cells, dims, at, exact, ax)

    def row_norms(self, *, ax: Axes | None = None) -> Axes:
        """Plot the L2 norm of every row: of the slices along the last dimension but one.

        Rows whose norm is far from the median (dashed) have their number beside it. The tensor is read once. Of more
        than 8,192 rows, groups are drawn.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the tensor has fewer than two dimensions, its elements are no numbers, or matplotlib is not installed.
            Errors of reading are raised, too.
        """
        return side_norms(self._tensor, "rows", ax)

    def column_norms(self, *, ax: Axes | None = None) -> Axes:
        """Plot the L2 norm of every column: of the slices along the last dimension. See `row_norms`.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            As for `row_norms`.
        """
        return side_norms(self._tensor, "columns", ax)

    def bits(self) -> Figure:
        """Plot how often each bit of the elements is 1, and how often each exponent occurs, for numbers of 8 and 16
        bits. The tensor is read once.

        Raises
        ------
        DataError
            If the tensor has another dtype, or matplotlib is not installed. Errors of reading are raised, too.
        """
        return bits(self._tensor)

    def hist(self, bins: Bins = 100, *, log: bool = False, ax: Axes | None = None) -> Axes:
        """Plot a histogram of the finite elements.

        The tensor is read once, or twice if its elements are wider than 16 bits and ``bins`` is a number.

        Parameters
        ----------
        bins
            Number of bins of equal width, or the edges of the bins.
        log
            Whether the counts have a logarithmic axis, which shows the tails.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If matplotlib is not installed, or as `LazyTensor.stats` raises it.
        """
        return tensor_plots.hist(self._tensor, bins, log, ax)

    def singular_values(self, *, ax: Axes | None = None) -> Axes:
        """Plot the singular values of a matrix, largest first, on a logarithmic axis.

        The dashed line is at the number that have 99 % of the sum of squares. Values below the dotted line are noise;
        `lazyckpt.inspect.stats.singular_values` documents the accuracy, the memory and the largest matrix. The tensor
        is read once.

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
        return tensor_plots.spectrum(self._tensor, ax)

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
        return tensor_plots.layout(self._tensor, ax)


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
        if not callable(quantity) and column not in _COLUMNS:
            listed = ", ".join(("norm", *_COLUMNS))
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
            found = quantity(one[...]) if callable(quantity) else getattr(stats_of(one), str(column))
            values.append(_value(found) if callable(quantity) else float(found))
        what = getattr(quantity, "__name__", "quantity") if callable(quantity) else _NAMES.get(quantity, quantity)
        return steps_line(self._tensor.name, what, list(steps), values, ax)


class ViewPlots:
    """The plots of a view: ``view.plot``."""

    __slots__ = ("_view",)

    def __init__(self, view: Any) -> None:
        self._view = view

    def __repr__(self) -> str:
        return f"<plots of {plural(len(self._view), 'tensor')}: {_kinds(self)}>"

    def __call__(self) -> Figure:
        """Plot `overview`."""
        return self.overview()

    def overview(self, name: str | None = None) -> Figure:
        """Plot the parameters by kind, what each rank holds, and the L2 norms by layer and kind, in one figure.

        The view is read once for the norms, which are left out if it has more than 1 GiB or 20,000 tensors.

        Parameters
        ----------
        name
            Plot `TensorPlots.overview` of this tensor.

        Raises
        ------
        DataError
            If the view has no tensors, or matplotlib is not installed.
        """
        return view_overview(self._view) if name is None else TensorPlots(_one(self._view, name)).overview()

    def architecture(self, quantity: Literal["bytes", "parameters"] = "bytes", *, ax: Axes | None = None) -> Axes:
        """Plot the parameters as a treemap: a rectangle for each kind, as large as its tensors in all layers together.

        Colours tell what the parameters are for, by their names. No tensor data is read.

        Parameters
        ----------
        quantity
            What the areas stand for.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If there is no such quantity, the view has no tensors, or matplotlib is not installed.
        """
        return draw_architecture(self._view, quantity, ax)

    def experts(self, *, ax: Axes | None = None) -> Axes:
        """Plot the L2 norm of every expert of a mixture of experts: a row for each layer, a column for each expert.

        The norm is that of all tensors of the expert together. Colours show it in units of the median of the layer,
        which is written at the right. Cells are marked as by `layers`. The experts are read once.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the view has no experts, or matplotlib is not installed.
        """
        import_matplotlib()
        view = self._view
        found = expert_norms({view.full_name(name): t for name, t in view.once()[0].items()})
        notes = [f"{plural(len(found.layers), 'expert')} in {plural(len(found.kinds), 'layer')}", f"state {view.state}"]
        label, names = "L2 norm / median of its layer", ("layer", "expert")
        return layer_map(found, ax, "Norms of experts", notes, "kind", label, names)

    def ranks(self, *, ax: Axes | None = None) -> Axes:
        """Plot how many bytes each rank holds of all states, on the mesh of the training run.

        Ranks that miss files are hatched. If the checkpoint names no ranks, its files are drawn as bars. No
        tensor data is read.

        Parameters
        ----------
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If matplotlib is not installed.
        """
        return draw_ranks(self._view, ax)

    def difference(
        self,
        other: Any,
        name: str,
        pool: Literal["mean", "absmax", "min", "max"] = "mean",
        *,
        cells: int = 512,
        ax: Axes | None = None,
    ) -> Axes:
        """Plot the signed difference of a tensor of two views, this minus ``other``, as a heat map.

        `lazyckpt.diff` finds the tensors that differ. Both tensors are read once.

        Parameters
        ----------
        other
            The view to compare with.
        name
            The tensor's name in both views.
        pool, cells, ax
            See `TensorPlots.heatmap`.

        Raises
        ------
        DataError
            If the tensors have different shapes, or matplotlib is not installed. Errors of reading are raised, too.
        """
        import_matplotlib()
        mine, theirs = _one(self._view, name), _one(other, name)
        if mine.shape != theirs.shape:
            raise DataError(f"{name!r} has the shapes {tuple(mine.shape)} and {tuple(theirs.shape)}: no difference")
        one, two = (
            view.select({_key(view, t, name)}.__contains__) for view, t in ((self._view, mine), (other, theirs))
        )
        (apart,) = (one - two).values()
        label = "difference" if pool != "absmax" else "largest |difference|"
        return heatmap(apart, pool, cells, None, None, True, ax, f"Difference of {mine.name}", label)

    def heatmap(
        self, name: str, pool: Literal["mean", "absmax", "min", "max"] = "mean", *, ax: Axes | None = None, **how: Any
    ) -> Axes:
        """Plot `TensorPlots.heatmap` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).heatmap(pool, ax=ax, **how)

    def row_norms(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.row_norms` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).row_norms(ax=ax)

    def column_norms(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.column_norms` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).column_norms(ax=ax)

    def bits(self, name: str) -> Figure:
        """Plot `TensorPlots.bits` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).bits()

    def hist(self, name: str, bins: Bins = 100, *, log: bool = False, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.hist` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).hist(bins, log=log, ax=ax)

    def singular_values(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.singular_values` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).singular_values(ax=ax)

    def layout(self, name: str, *, ax: Axes | None = None) -> Axes:
        """Plot `TensorPlots.layout` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).layout(ax=ax)

    def norms(self, *, ax: Axes | None = None) -> Axes:
        """Plot the L2 norms of all tensors: `layers` of the quantity "norm"."""
        return self.layers("norm", ax=ax)

    def layers(self, quantity: str = "norm", *, lines: bool = False, ax: Axes | None = None) -> Axes:
        """Plot a quantity of all tensors by layer and kind of parameter, as a heat map or as curves.

        A column is a layer: the first number between dots of a full name. A row is a kind of parameter: the full name
        with "*" for every such number. Tensors of the same layer and kind (experts) are taken together. Kinds that are
        in no layer have one cell.

        Kinds differ by orders of magnitude, and each has a scale of its own: colours show a value in units of the
        median of its kind, which is written at the right. For "mean", "min" and "max" the unit is the largest magnitude
        of the kind. "zeros", "nan" and "inf" are shares of the elements, with one scale for all.

        A cell is marked "!" if it has NaN or infinities (its value is that of the other elements) or if its squares
        overflow float64, and "?" if a tensor cannot be read. The view is read once.

        Parameters
        ----------
        quantity
            "norm" (L2), "rms", "std", "absmax", "l1", "mean", "min", "max", "zeros", "nan" or "inf".
        lines
            Draw a line for each kind in place of the heat map.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If there is no such quantity, the view has no tensors, or matplotlib is not installed.
        """
        import_matplotlib()
        return of_view(self._view, quantity).plot(lines=lines, ax=ax)


class RunPlots(ViewPlots):
    """The plots of a run: ``run.plot``."""

    __slots__ = ()

    def steps(
        self, name: str, quantity: str | Callable[[torch.Tensor], Any] = "norm", *, ax: Axes | None = None
    ) -> Axes:
        """Plot `StepPlots.steps` of the tensor ``name``."""
        return StepPlots(_one(self._view, name)).steps(quantity, ax=ax)

    def overview(self, name: str | None = None) -> Figure:
        """Plot `dynamics` of the L2 norms, or `TensorPlots.overview` of the tensor ``name``.

        Parameters
        ----------
        name
            A tensor of the run, with its steps as the first dimension.

        Raises
        ------
        DataError
            If there are no tensors, or matplotlib is not installed.
        """
        return self.dynamics() if name is None else TensorPlots(_one(self._view, name)).overview()

    def dynamics(self, quantity: str = "norm") -> Figure:
        """Plot a quantity of all tensors over the steps: a panel for each kind of parameter, a line for each layer.

        One step is read after the other, in bounded memory; "change" and "cosine" read each twice.

        Parameters
        ----------
        quantity
            "growth" (L2 norm in units of that of the first step), "drift" (norm of the difference from the first step,
            in units of the norm of that step), "change" (the same for the step before), "cosine" (of the angle to the
            step before), "towards" (the cosine with the last step), or a quantity of `layers`.

        Raises
        ------
        DataError
            If there is no such quantity, the run has no tensors, or matplotlib is not installed.
        """
        import_matplotlib()
        return of_run(self._view, quantity).plot()


_NAMES = {"norm": "L2 norm", "l2": "L2 norm", "l1": "L1 norm", "std": "standard deviation", "absmax": "largest |x|"}


def _value(found: Any) -> float:
    """Convert the result of a user's function to a number, or raise DataError."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as e:
        raise DataError(
            f"a quantity is a number at every step; the function returns {type(found).__name__}: {e}"
        ) from e


def _kinds(plots: object) -> str:
    """Return the names of the plots, for ``repr``."""
    return ", ".join(f".{name}()" for name in dir(plots) if not name.startswith("_"))


def _key(view: Any, t: LazyArray, name: str) -> str:
    """Return the name that a view lists a tensor under, which ``name`` may shorten."""
    if name in view.full_names:
        return name
    return str(next(key for key, full in view.full_names.items() if t.name in (full, view.owner(key))))


def _one(view: Mapping[str, LazyArray], name: str) -> LazyArray:
    found: Any = view[name]
    if not isinstance(found, LazyArray):
        raise DataError(f"{name!r} is no tensor, {len(found):,} tensors are below it: name one of them")
    return found
