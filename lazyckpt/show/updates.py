"""The last steps of an optimizer, as tensors, table and plot: what ``updates`` of views and runs returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from ..derive.updates import Step
from ..errors import DataError, Problem
from ..inspect.architecture import layer_and_kind
from ..inspect.updates import Measured, UpdateSize, UpdateTable, measured
from ..lazy import LazyArray
from ..namespace import Namespace
from .update_plots import curves, layers_by_kind, layers_by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CODES = ("undecided-update", "assumed-update")


class Updates(Mapping[str, LazyArray]):
    """The updates of an optimizer's last step: a mapping from the names of parameters to lazy tensors.

    ``updates[name][...]`` is what the last step added to the weight; reading a slice reads that slice of the
    optimizer's states. `CheckpointView.updates` says how an update is computed from them.

    Parameters
    ----------
    view
        The view of the updates.
    steps
        How they are computed, by full name.
    """

    def __init__(self, view: Namespace[Any], steps: Mapping[str, Step]) -> None:
        self.view = view
        self.steps = steps
        self._table: UpdateTable | None = None

    def __getitem__(self, name: str) -> Any:
        return self.view[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.view)

    def __len__(self) -> int:
        return len(self.view)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Which updates cannot be computed and what to pass for them ("undecided-update"), and what those that can be
        computed assume ("assumed-update")."""
        return tuple(one for one in self.view.problems if one.code in CODES)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(self.steps[full].optimizer for full in self.view.full_names.values()))
        lines = [f"updates of {len(self):,} tensors" + (f" by {kinds}" if kinds else "")]
        return "\n".join([*lines, *(f"  {one}" for one in self.problems)])

    def table(
        self,
        *,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> UpdateTable:
        """Compute the norm of every update in units of the norm of its weight.

        The optimizer's states and the weights are read once, in pieces, in bounded memory. Later calls return the same
        table.

        Parameters
        ----------
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        UpdateTable
            A row for each parameter, in the order of the view. ``table.layers`` has one for each layer.

        Raises
        ------
        WorkerError
            Workers of the executor died.
        """
        if self._table is None:
            self._table = measured(list(self.measured(None, None)), executor, memory, progress)
        return self._table

    def plot(self, quantity: str = "ratio", *, ax: Axes | None = None) -> Axes:
        """Plot a quantity of the table as a heat map of layers and kinds of parameters.

        Parameters
        ----------
        quantity
            "ratio", "update", "rms", "weight" or "bound".
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            There is nothing to plot, no such quantity, or matplotlib is not installed.
        """
        return layers_by_kind(self.table(), quantity, ax)

    def measured(self, step: int | None, before: Updates | None) -> Iterator[Measured]:
        """Yield what `lazyckpt.inspect.updates.measured` takes.

        Parameters
        ----------
        step
            The step of the checkpoint in a run.
        before
            The updates of an earlier checkpoint of the run.
        """
        store = self.view._store
        for name, full in self.view.full_names.items():
            one = self.steps[full]
            row = UpdateSize(
                name, layer_and_kind(full)[0], step, one.optimizer, one.lr, one.rate, one.exact, count=one.update.numel
            )
            weight = LazyArray(store, one.weight)
            old = None if before is None else before.steps.get(full)
            earlier = None
            if before is not None and old is not None and old.weight.shape == one.weight.shape:
                earlier = LazyArray(before.view._store, old.weight)
            yield Measured(row, LazyArray(store, one.direction), weight, earlier, one.scale, one.decay, one.bounded)


class RunUpdates(Mapping[int, Updates]):
    """The updates of the last optimizer step before each checkpoint of a run: a mapping from steps to `Updates`.

    Parameters
    ----------
    found
        Step -> its updates, ascending.
    problems
        Why steps are left out.
    """

    def __init__(self, found: Mapping[int, Updates], problems: Sequence[Problem] = ()) -> None:
        self._found = dict(found)
        self._left_out = tuple(problems)
        self._table: UpdateTable | None = None

    def __getitem__(self, step: int) -> Updates:
        return self._found[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        steps = f"steps {min(self)} to {max(self)}" if self else "no steps"
        return "\n".join([f"updates at {len(self):,} checkpoints, {steps}", *(f"  {one}" for one in self.problems)])

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Which steps are left out, and the problems of each step's updates, once if they are the same."""
        inner: Iterable[Problem] = (one for updates in self._found.values() for one in updates.problems)
        return tuple(dict.fromkeys((*self._left_out, *inner)))

    def table(
        self,
        *,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> UpdateTable:
        """Compute the norm of every update in units of the norm of its weight, at all steps.

        States and weights are read once, and the weights once more as those before the next checkpoint. Later calls
        return the same table.

        Parameters
        ----------
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        UpdateTable
            A row for each step and parameter, by step. ``table.layers`` has one for each step and layer.

        Raises
        ------
        WorkerError
            Workers of the executor died.
        """
        if self._table is None:
            before: Updates | None = None
            every: list[Measured] = []
            for step, updates in self._found.items():
                every += updates.measured(step, before)
                before = updates
            self._table = measured(every, executor, memory, progress)
        return self._table

    def plot(self, quantity: str = "ratio", *, lines: bool = False, ax: Axes | None = None) -> Axes:
        """Plot a quantity of the table as a heat map of layers and steps, or as a line over the steps for each layer.

        Tensors that are in no layer have a row of their own.

        Parameters
        ----------
        quantity
            "ratio", "update", "rms" or "weight".
        lines
            Draw lines in place of the heat map.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            There is nothing to plot, no such quantity, or matplotlib is not installed.
        """
        return (curves if lines else layers_by_step)(self.table(), quantity, ax)


def of_run(views: Iterable[tuple[int, Any]], name: str | None, **options: Any) -> RunUpdates:
    """Return the updates of the checkpoints of a run. See `RunView.updates`.

    Raises DataError if no checkpoint has optimizer states of the chosen tensors; and what opening raises.
    """
    found: dict[int, Updates] = {}
    problems = []
    why: DataError | None = None
    for step, view in views:
        try:
            found[step] = chosen(view, name).updates(**options)
        except DataError as e:
            why = why or e
            problems.append(Problem("undecided-update", f"step {step} is left out: {e}", None))
    if not found:
        raise why or DataError("the run has no checkpoints: there are no updates")
    return RunUpdates(found, problems)


def chosen(view: Any, name: str | None) -> Any:
    """Return the tensors of a view that a name, a prefix or a glob chooses, under their names in the view."""
    if name is None or name == "":
        return view
    if name in view.full_names:
        return view.select({name}.__contains__)
    if set(name) & set("*?["):
        return view.select(name)
    return view.select(f"{name.removesuffix('.')}.*")
