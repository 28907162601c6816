"""`LazyTensor`: a lazy array with the methods that show, summarize and convert a tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from .lazy import LazyArray

if TYPE_CHECKING:
    from .inspect.table import Stats
    from .show.plot_tensor import TensorPlots


class LazyTensor(LazyArray):
    """A tensor of a checkpoint, or a part of one. Indexing reads elements; `name`, `shape` and `dtype` read nothing.

    A view returns it: ``view["layers.3.up.weight"]``.

    Parameters
    ----------
    store
        The store that the bytes are read from.
    spec
        The files and byte ranges of the tensor.
    selection
        The part of the tensor to read; None for the whole.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return HTML for Jupyter that shows which file holds which block. Reads no tensor data."""
        from .show.html import tensor_html

        return tensor_html(self)

    def show(self, histogram: bool = False, *, values: bool = False) -> Any:
        """Show the tensor in a notebook, or as text on a terminal: its properties, and which file holds which block.

        Parameters
        ----------
        histogram
            Show a histogram of the elements, too. It reads some 4 MiB, from 64 places of the tensor, or all of a
            smaller tensor, says how many elements it counts, and shows values, too.
        values
            Show the first and last rows and columns. Only these elements are read.

        Returns
        -------
        object
            An object with an HTML and a text representation.

        Raises
        ------
        LazyckptError
            What reading raises, with ``histogram`` or ``values`` (MissingFileError for a lost file).
        """
        from .show.html import shown

        return shown(self, histogram, values)

    def stats(
        self,
        *,
        bins: int | Sequence[float] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Stats:
        """Compute count, mean, standard deviation, extremes, norms, zeros, NaN and infinities of the elements.

        The tensor is read once, in pieces, on several threads, in bounded memory. NaN and infinities are counted and
        left out of all other numbers, which are computed in float64.

        Parameters
        ----------
        bins
            Compute a histogram, too: of this number of bins of equal width between the smallest and the largest finite
            element (elements of more than 16 bits are then read twice), or with these edges.
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        Stats
            The numbers; `lazyckpt.inspect.table.Stats` defines each.

        Raises
        ------
        DataError
            The elements are packed and not numbers (4-bit floats), or ``bins`` is not a number of bins or a rising
            sequence of edges.
        LazyckptError
            What reading raises.
        """
        from .inspect.stats import stats_of

        return stats_of(self, bins, executor, memory, progress)

    @property
    def plot(self) -> TensorPlots:
        """Plots with matplotlib: ``t.plot()`` for an overview, ``t.plot.heatmap()``, ``t.plot.hist()``, and others
        (`TensorPlots`)."""
        from .show.plot_tensor import TensorPlots

        return TensorPlots(self)

    def to_dask(self, chunks: Any = None, *, widen: bool = True) -> Any:
        """Return the tensor as a Dask array. Reads nothing: its tasks carry the tensor's description and read where
        they run.

        Parameters
        ----------
        chunks
            Chunks in any form that dask accepts. By default 8 to 64 MiB that follow the fragments where these form a
            grid.
        widen
            Convert floats of 8 and 16 bits to float32 when they are read, so that Dask computes correctly. False keeps
            dtype and bits, for arrays that are only stored: sums and means in bf16, fp8 (the dtypes of ml_dtypes) and
            fp16 are wrong.

        Returns
        -------
        dask.array.Array
            An array of the same shape.

        Raises
        ------
        DataError
            numpy lacks the dtype, or dask is not installed.
        """
        from .interop.dask import to_dask

        return to_dask(self, chunks, widen)

    def __dask_tokenize__(self) -> object:
        from .interop.dask import token

        return token(self)
