"""The doors from a view to what looks at its elements: statistics, plots."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from .writing import Writing

if TYPE_CHECKING:
    from .inspect.table import Table
    from .show.plot import ViewPlots


class Inspecting(Writing):
    """What can be found out of the elements of a view."""

    __slots__ = ()

    def stats(
        self,
        *,
        bins: int | Sequence[float] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Table:
        """Statistics of every tensor, tied ones once, as a table: a row each, in order (`LazyTensor.stats` tells of
        what), and ``table.total``. ``pandas.DataFrame(view.stats())`` and ``polars.DataFrame(view.stats())`` have its
        columns; ``view.select("*.norm.weight").stats()`` is of a part.

        Everything is read once, in pieces, on several threads, in bounded memory. A tensor that cannot be read (the
        file of a rank is lost) has a row whose ``error`` says why. ``bins``: of every tensor a histogram of its own
        range, or with these edges, for all. ``executor``, ``memory``, ``progress``: as for `to_safetensors`.

        Raises DataError for bins that are none, WorkerError (workers died).
        """
        from .inspect.stats import stats_of_all

        return stats_of_all(self.once()[0], bins, executor, memory, progress)

    @property
    def plot(self) -> ViewPlots:
        """Plots, with matplotlib: ``view.plot.norms()``, ``view.plot.hist(name)``, ``view.plot.layout(name)``,
        ``view.plot.singular_values(name)``."""
        from .show.plot import ViewPlots

        return ViewPlots(self)
