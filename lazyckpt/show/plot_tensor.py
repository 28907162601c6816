"""The plots of one tensor and of a tensor of a run: ``t.plot``. `plot` documents what all plots have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DataError
from ..inspect.stats import Bins, stats_of
from ..lazy import LazyArray
from . import tensor_plots
from .overviews import tensor_overview
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
_NAMES = {"norm": "L2 norm", "l2": "L2 norm", "l1": "L1 norm", "std": "standard deviation", "absmax": "largest |x|"}


class TensorPlots:
    """The plots of one tensor: ``t.plot``."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: LazyArray) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"<plots of {self._tensor.name!r}: {kinds_of(self)}>"

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
        cells: int | tuple[int, int] = 512,
        dims: tuple[int, int] | None = None,
        at: Mapping[int, int] | None = None,
        window: tuple[tuple[int, int], tuple[int, int]] | None = None,
        scale: Literal["linear", "symlog", "quantile"] = "linear",
        full: bool = False,
        limits: tuple[float, float] | None = None,
        exact: bool = True,
        ax: Axes | None = None,
    ) -> Axes:
        """Plot the values as a heat map. A cell pools several elements of a large tensor; the notes say how many.

        Colours and their scales are those of the explorer. Cells with NaN or infinities are marked, elements in lost
        files are left blank. What is drawn is read once; a part of the tensor (``t.lazy[:100].plot.heatmap()``) reads
        that part.

        Parameters
        ----------
        pool
            What a cell shows of its elements: the mean, the largest absolute value, the minimum or the maximum.
        cells
            Largest number of rows and of columns of cells, up to 2,048; or one number for each.
        dims
            The dimensions of rows and columns; by default the last two. A long vector is wrapped into rows.
        at
            Dimension -> index, for the other dimensions. Those without an index are pooled, too.
        window
            The rows and the columns to draw, as ``((first, end), (first, end))``; by default all.
        scale
            How values become colours: "linear", "symlog" (logarithms of the magnitudes, of three decades, with their
            signs), or "quantile" (by rank among the cells).
        full
            Whether colours end at the least and the greatest element; by default at the 0.5th and the 99.5th percentile
            of the cells. If these have different signs, zero is in the middle.
        limits
            The values at which colours end, in place of those that ``full`` chooses; not for "quantile".
        exact
            False reads about 32 MiB of what is larger, spread over it.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the arguments do not fit the tensor, the elements are no numbers, or matplotlib is not installed. Errors
            of reading are raised, too.
        """
        return heatmap(
            self._tensor, pool, cells, dims, at, exact, ax, window=window, scale=scale, full=full, limits=limits
        )

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
            If the tensor has fewer than two dimensions or no elements, its elements are no numbers, or matplotlib is
            not installed. Errors of reading are raised, too.
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

    def hist(
        self,
        bins: Bins | Literal["powers of 2"] = 100,
        *,
        log: bool = False,
        exact: bool = True,
        ax: Axes | None = None,
    ) -> Axes:
        """Plot a histogram of the finite elements.

        The tensor is read once, or twice if its elements are wider than 16 bits and ``bins`` is a number.

        Parameters
        ----------
        bins
            Number of bins of equal width, or the edges of the bins. "powers of 2": 100 bins whose edges are the powers
            of 2, on both sides of zero, drawn as wide as each other.
        log
            Whether the counts have a logarithmic axis, which shows the tails.
        exact
            False counts about 32 MiB of a larger tensor, spread over it; the edges are then not given.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            If the tensor has no elements, matplotlib is not installed, or as `LazyTensor.stats` raises it.
        """
        return tensor_plots.hist(self._tensor, bins, log, exact, ax)

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
            If the tensor is not a matrix, is too large, has no elements, packed elements, NaN or infinities, or if
            matplotlib is not installed. Errors of reading are raised, too.
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


def _value(found: Any) -> float:
    """Convert the result of a user's function to a number, or raise DataError."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as e:
        raise DataError(
            f"a quantity is a number at every step; the function returns {type(found).__name__}: {e}"
        ) from e


def kinds_of(plots: object) -> str:
    """Return the names of the plots, for ``repr``."""
    return ", ".join(f".{name}()" for name in dir(plots) if not name.startswith("_"))
