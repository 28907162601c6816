"""Plots with matplotlib, which is imported when the first plot is drawn.

A plot is drawn into ``ax``, or into a new figure if ``ax`` is None, and returns the Axes; a plot of several panels
returns its Figure. Plots do not show the figure and do not change matplotlib's settings. A new figure has a face colour
of its own, dark if matplotlib's figures are (``plt.style.use("dark_background")``). Data is read in pieces, in bounded
memory, and inspect/ computes the numbers. Without matplotlib every plot raises DataError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.units import plural
from ..errors import DataError
from ..inspect.stats import Bins, stats_of
from ..lazy import LazyArray
from . import tensor_plots
from .by_layer import of_run, of_view
from .run_plots import steps_line
from .style import import_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = ("mean", "std", "min", "max", "absmax", "l1", "l2", "zeros", "nan", "posinf", "neginf")


class TensorPlots:
    """The plots of one tensor: ``t.plot``."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: LazyArray) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"<plots of {self._tensor.name!r}: {_kinds(self)}>"

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

    def dynamics(self, quantity: str = "norm") -> Figure:
        """Plot a quantity of all tensors over the steps: a panel for each kind of parameter, a line for each layer.

        One step is read after the other, in bounded memory; "change" and "cosine" read each twice.

        Parameters
        ----------
        quantity
            "growth" (L2 norm in units of that of the first step), "drift" (norm of the difference from the first step,
            in units of the norm of that step), "change" (the same for the step before), "cosine" (of the angle to the
            step before), or a quantity of `layers`.

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


def _one(view: Mapping[str, LazyArray], name: str) -> LazyArray:
    found: Any = view[name]
    if not isinstance(found, LazyArray):
        raise DataError(f"{name!r} is no tensor, {len(found):,} tensors are below it: name one of them")
    return found
