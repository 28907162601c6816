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
from ..derive.arithmetic import difference
from ..errors import DataError
from ..inspect.expert_likeness import nearest_experts
from ..inspect.expert_norms import expert_norms
from ..inspect.stats import Bins
from ..lazy import LazyArray
from .by_layer import of_run, of_view
from .layer_plots import layer_map
from .model_plots import draw_architecture, draw_ranks
from .overviews import view_overview
from .plot_tensor import StepPlots, TensorPlots, kinds_of
from .style import import_matplotlib
from .value_plots import heatmap

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    from ..deferred import torch


class ViewPlots:
    """The plots of a view: ``view.plot``."""

    __slots__ = ("_view",)

    def __init__(self, view: Any) -> None:
        self._view = view

    def __repr__(self) -> str:
        return f"<plots of {plural(len(self._view), 'tensor')}: {kinds_of(self)}>"

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

    def architecture(
        self,
        quantity: Literal["bytes", "parameters"] = "bytes",
        *,
        by: Literal["role", "layers"] = "role",
        ax: Axes | None = None,
    ) -> Axes:
        """Plot the parameters as a treemap: a rectangle for each kind, as large as its tensors in all layers together.

        Colours tell what the parameters are for, by their names. No tensor data is read.

        Parameters
        ----------
        quantity
            What the areas stand for.
        by
            "layers" draws a rectangle for each layer, and colours layers that are alike in the same way.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If there is no such quantity or order, the view has no tensors, or matplotlib is not installed.
        """
        return draw_architecture(self._view, quantity, ax, by)

    def experts(self, quantity: Literal["norm", "likeness"] = "norm", *, ax: Axes | None = None) -> Axes:
        """Plot a quantity of every expert of a mixture of experts: a row for each layer, a column for each expert.

        The norm is that of all tensors of the expert together. Colours show it in units of the median of the layer,
        which is written at the right. The likeness is the largest cosine of the angles to the other experts of the
        layer: twins have 1. Cells are marked as by `layers`. The experts are read once; for the likeness at most
        256 MiB of a layer, of more evenly spaced rows.

        Parameters
        ----------
        quantity
            "norm" (L2) or "likeness".
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the view has no experts, there is no such quantity, or matplotlib is not installed.
        """
        if quantity not in ("norm", "likeness"):
            raise DataError(f"experts have no quantity {quantity!r}: it is 'norm' or 'likeness'")
        import_matplotlib()
        view = self._view
        tensors = {view.full_name(name): t for name, t in view.once()[0].items()}
        norms = quantity == "norm"
        found = expert_norms(tensors) if norms else nearest_experts(tensors)
        notes = [f"{plural(len(found.layers), 'expert')} in {plural(len(found.kinds), 'layer')}", f"state {view.state}"]
        title = "Norms of experts" if norms else "The most alike expert"
        label = "L2 norm / median of its layer" if norms else "largest cosine to another expert"
        return layer_map(found, ax, title, notes, "kind" if norms else "linear", label, ("layer", "expert"))

    def ranks(
        self,
        quantity: Literal["bytes", "tensors", "files"] = "bytes",
        *,
        states: Literal["all", "own"] = "all",
        ax: Axes | None = None,
    ) -> Axes:
        """Plot how much each rank holds, on the mesh of the training run.

        Ranks that miss files are hatched. If the ranks of files are not known, the files are drawn as bars. No
        tensor data is read.

        Parameters
        ----------
        quantity
            What is counted. "files" is for checkpoints that name ranks.
        states
            Whether all states of the checkpoint count, or only that of this view.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If there is no such quantity, or matplotlib is not installed.
        """
        if states not in ("all", "own"):
            raise DataError(f"states={states!r}: it is 'all' or 'own'")
        return draw_ranks(self._view, ax, quantity, states == "all")

    def difference(
        self,
        other: Any,
        name: str,
        pool: Literal["mean", "absmax", "min", "max"] = "mean",
        *,
        ax: Axes | None = None,
        **how: Any,
    ) -> Axes:
        """Plot the signed difference of a tensor of two views, this minus ``other``, in float64, as a heat map.

        `lazyckpt.diff` finds the tensors that differ. Both tensors are read once.

        Parameters
        ----------
        other
            The view to compare with.
        name
            The tensor's name in both views.
        pool, ax, **how
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
        apart = LazyArray(*difference(self._view, other, _key(self._view, mine, name)))
        label = "difference" if pool != "absmax" else "largest |difference|"
        return heatmap(apart, pool, ax=ax, title=f"Difference of {mine.name}", label=label, **how)

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

    def hist(
        self,
        name: str,
        bins: Bins | Literal["powers of 2"] = 100,
        *,
        log: bool = False,
        exact: bool = True,
        ax: Axes | None = None,
    ) -> Axes:
        """Plot `TensorPlots.hist` of the tensor ``name``."""
        return TensorPlots(_one(self._view, name)).hist(bins, log=log, exact=exact, ax=ax)

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

    def dynamics(self, quantity: str = "norm", kinds: str = "") -> Figure:
        """Plot a quantity of all tensors over the steps: a panel for each kind of parameter, a line for each layer.

        One step is read after the other, in bounded memory; "change" and "cosine" read each twice.

        Parameters
        ----------
        quantity
            "growth" (L2 norm in units of that of the first step), "drift" (norm of the difference from the first step,
            in units of the norm of that step), "change" (the same for the step before), "cosine" (of the angle to the
            step before), "towards" (the cosine with the last step), or a quantity of `layers`.
        kinds
            The kind to draw, as `RunView.by_layer` names it; or a part of the names of those to draw. Others are not
            read.

        Raises
        ------
        DataError
            If there is no such quantity, the run has no such tensors, or matplotlib is not installed.
        """
        import_matplotlib()
        return of_run(self._view, quantity, kinds).plot()


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
