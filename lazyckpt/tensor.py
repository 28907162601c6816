"""A tensor of a checkpoint, as users have it: a lazy array, and the methods that show, summarize and convert it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from .lazy import LazyArray

if TYPE_CHECKING:
    from .inspect.table import Stats
    from .show.plot import TensorPlots


class LazyTensor(LazyArray):
    """One tensor of a checkpoint, or a part of one: `name`, `shape`, `dtype`, and its elements when they are asked for.

    A view makes them: ``view["layers.3.up.weight"]``.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        """For Jupyter: which file holds which block of it. Reads no tensor data."""
        from .show.html import tensor_html

        return tensor_html(self)

    def show(self, histogram: bool = False) -> Any:
        """What a notebook shows of it (and a terminal, as text): what it is and which file holds which block of it.

        ``histogram``: and one of its elements, for which some 4 MiB are read, from 64 places over all of it; of a
        smaller tensor all. It says how many. Raises what reading raises (MissingFileError where a file is lost).
        """
        from .show.html import shown

        return shown(self, histogram)

    def stats(
        self,
        *,
        bins: int | Sequence[float] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Stats:
        """Count, mean, standard deviation, least, largest, norms, zeros, NaN and infinities of the elements, whatever
        the tensor's size: it is read once, in pieces, on several threads.

        NaN and infinities are counted and left out of the rest, which is in float64; `lazyckpt.inspect.table.Stats`
        says what each number is. ``bins``: a histogram as well, of so many bins of equal width from the least finite
        element to the largest (elements of more than 16 bits are read twice then), or with these edges. ``executor``,
        ``memory``, ``progress``: as for `CheckpointView.to_safetensors`.

        Raises what reading raises; DataError for packed elements that are no numbers (4-bit floats), or for bins that
        are none.
        """
        from .inspect.stats import stats_of

        return stats_of(self, bins, executor, memory, progress)

    @property
    def plot(self) -> TensorPlots:
        """Plots, with matplotlib: ``t.plot.hist()``, ``t.plot.singular_values()``, ``t.plot.layout()``."""
        from .show.plot import TensorPlots

        return TensorPlots(self)

    def to_dask(self, chunks: Any = None, *, widen: bool = True) -> Any:
        """A `dask.array.Array` of this tensor. Reads nothing: its tasks carry this description, and read where they
        run.

        ``chunks``: as dask takes them; by default 8 to 64 MiB that follow the fragments where these form a grid.
        ``widen``: floats of 8 and 16 bits become float32 when they are read, which Dask computes with correctly.
        False keeps the dtype and the bits, for arrays that are only stored: in bf16, fp8 (the dtypes of ml_dtypes) and
        fp16 sums and means are wrong.

        Raises DataError where numpy has no such dtype, and where dask is not installed.
        """
        from .interop.dask import to_dask

        return to_dask(self, chunks, widen)

    def __dask_tokenize__(self) -> object:
        from .interop.dask import token

        return token(self)
