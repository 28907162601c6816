"""A training run as one namespace: every tensor gets the saved steps as a new first dimension.

Each checkpoint is opened as a view by its own reader. Their tensors are stacked as data (core/compose.py), and the
run's folder is the store of all files. So a run is a view like any other, and its tensors read only the bytes of the
indexed steps and elements.
"""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterable, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

from ..core.compose import steps_of
from ..core.index import Index
from ..core.units import plural
from ..derive.arithmetic import average
from ..derive.sources import note_opening
from ..errors import DataError, FormatError, TensorNotFoundError, some
from ..explore.subject import Subject
from ..formats.archives import locate
from ..formats.catalog import find
from ..io.storage.base import Store
from ..namespace import Namespace
from ..show.html import view_html
from ..tensor import LazyTensor
from ..view import CheckpointView, view_of
from .line import Line
from .stacking import Stacks

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ..show.by_layer import RunTable
    from ..show.plot import RunPlots
    from ..show.plot_tensor import StepPlots
    from ..show.updates import RunUpdates


class StepTensor(LazyTensor):
    """A `LazyTensor` over the steps of a run, of shape (steps, ...). Iterating over it reads one step after the other.

    Parameters
    ----------
    store, spec, selection
        The same as for `LazyTensor`.
    """

    __slots__ = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The coordinates of the first dimension: the step of each entry, in order."""
        steps = steps_of(self.spec)
        return steps if self._selection is None else tuple(steps[int(n)] for n in self._selection.axes[0])

    @property
    def plot(self) -> StepPlots:
        """The plots of any tensor, and ``t.plot.steps()``: a quantity over the steps."""
        from ..show.plot_tensor import StepPlots

        return StepPlots(self)


class RunView(CheckpointView):
    """All checkpoints of a run, ordered by step, as one view. `lazyckpt.open_run` returns it.

    Opening lists folders, and `at` opens one checkpoint. Names, `steps`, `problems` and tensors need all checkpoints:
    they are opened once, several at a time, as by `lazyckpt.open`, and their indexes are kept. Tensor data is read only
    when a tensor is indexed, and only of the indexed steps.

    A checkpoint's step is the number that a writer put in its name (``global_step10``, ``step=10``), else the step in
    its meta (for which it is opened), else any number in its name. If several checkpoints have the same step, the first
    readable one is used. A tensor covers the steps at which it is complete and has the shape of the newest step
    (`StepTensor.steps`; `problems` lists the others), in a dtype that holds the values of all. The default state is at
    every step the default state of that checkpoint.

    Parameters
    ----------
    path
        The folder of the checkpoints, or its URL. Checkpoints are tags of DeepSpeed, ``iter_N``, ``checkpoint-N``,
        ``step-N``, files such as ``step_1000.pt``, also in folders below, of any format and parallel layout.
    steps
        The steps of checkpoints that do not record one: name -> step. The name of the folder itself is ".".
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.

    Raises
    ------
    MissingFileError
        The folder does not exist.
    FormatError
        The folder has no checkpoint in it.
    """

    __slots__ = ("_asked", "_line")

    _tensor = StepTensor

    if TYPE_CHECKING:  # its tensors are `_tensor`s

        def exact(self, name: str) -> StepTensor | None: ...
        def tensor(self, name: str) -> StepTensor: ...
        def items(self) -> ItemsView[str, StepTensor]: ...
        def values(self) -> ValuesView[StepTensor]: ...

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        steps: Mapping[str, int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        text = os.fspath(path)
        store, name = locate(os.fsdecode(text), storage_options)
        if name:
            raise FormatError(f"{text} is a file: a run is the folder of its checkpoints")
        found = find(store)
        if not found:
            raise FormatError(
                f"{store.root} has no checkpoints in it that lazyckpt knows (lazyckpt.open opens a single one)"
            )
        self._begin(Line(store, tuple(found), dict(steps or {}), storage_options), None, ())
        note_opening(self, "lazyckpt.open_run", os.fsdecode(text), {"steps": steps})

    def _begin(self, line: Line, state: str | None, steps: tuple[Any, ...]) -> None:
        self._line = line
        self._asked = state  # None: the default state, which is known only when the checkpoints are opened
        self._steps = steps
        self._of_all = False
        self._forget()

    def _other(self, state: str | None = None, steps: tuple[Any, ...] | None = None) -> Self:
        view = object.__new__(type(self))
        view._begin(self._line, state or self._asked, self._steps if steps is None else steps)
        return view

    @property
    def _store(self) -> Store:  # type: ignore[override]  # an attribute of views, computed on demand here
        return self._line.pinned

    @property
    def _index(self) -> Index:  # type: ignore[override]
        return self._line.index

    @property
    def _state(self) -> str:  # type: ignore[override]
        return self._asked or next(iter(self._index.states))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._line, self._asked, self._pickled_steps())

    def close(self) -> None:
        """Close open files and mappings, also those of the views of single steps (`at`). See `CheckpointView.close`."""
        self._line.close()

    # -- the steps

    @property
    def root(self) -> str:
        """The folder of the run."""
        return self._line.store.root

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which this view has tensors, ascending."""
        stacks = self._index.states.get(self._state)
        if not isinstance(stacks, Stacks):
            return ()
        if not self._steps:
            return stacks.steps
        found: set[int] = set()
        for name in self:
            found.update(layer.step for layer in stacks.layers[self.owner(name)])
            if len(found) == len(stacks.steps):
                break
        return tuple(sorted(found))

    @property
    def paths(self) -> Mapping[int, str]:
        """Step -> path of its checkpoint, also for checkpoints that cannot be read."""
        return {step: self._line.path(found[0]) for step, found in self._line.table.items()}

    def at(self, step: int) -> CheckpointView:
        """Return the same part of a single checkpoint of the run.

        Parameters
        ----------
        step
            One of `steps`.

        Returns
        -------
        CheckpointView
            A view of that checkpoint alone.

        Raises
        ------
        MissingFileError
            There is no such step.
        TensorNotFoundError
            The checkpoint lacks this view's state or prefix.
        LazyckptError
            What `lazyckpt.open` raises.
        """
        view = self._line.at(step)
        if self._asked is not None and self._asked != next(iter(self._index.states)):
            if self._asked not in view.states:
                raise TensorNotFoundError(f"step {step} has no state {self._asked!r}; it has: {', '.join(view.states)}")
            view = view.states[self._asked]
        part = view._other(steps=self._steps)
        if self._steps and not part:
            raise TensorNotFoundError(f"step {step} has no tensors of this part of the run")
        return part

    def mean(
        self, steps: Iterable[int] | None = None, *, missing: Literal["error", "skip", "keep"] = "error"
    ) -> CheckpointView:
        """Return the mean of the tensors over steps, as a lazy view of one checkpoint. Reads nothing.

        Reading takes one pass over the steps' bytes of what is read, and holds a piece of one step at a time.

        Parameters
        ----------
        steps
            Some of `steps`, such as ``run.steps[-5:]``. By default all.
        missing
            What to do with names that a step lacks: see `lazyckpt.mean`.

        Returns
        -------
        CheckpointView
            The view, with the metadata of the last step.

        Raises
        ------
        MissingFileError
            There is no such step.
        TensorNotFoundError
            A step lacks the state of this view.
        DataError
            What `lazyckpt.mean` raises.
        """
        return self._averaged(steps, None, missing)

    def ema(
        self,
        decay: float,
        steps: Iterable[int] | None = None,
        *,
        missing: Literal["error", "skip", "keep"] = "error",
    ) -> CheckpointView:
        """Return the exponential moving average of the tensors over steps, as a lazy view. Reads nothing.

        It begins with the first step, and becomes ``decay * average + (1 - decay) * step`` with each further one. It is
        computed as one weighted sum.

        Parameters
        ----------
        decay
            How much of the average each step leaves, from 0 to 1.
        steps, missing
            The same as for `mean`.

        Returns
        -------
        CheckpointView
            The view, with the metadata of the last step.

        Raises
        ------
        DataError
            ``decay`` is not between 0 and 1, or what `lazyckpt.mean` raises.
        MissingFileError
            There is no such step.
        """
        if not 0 <= decay <= 1:
            raise DataError(f"decay={decay}: it is between 0 and 1")
        return self._averaged(steps, decay, missing)

    def _averaged(
        self, steps: Iterable[int] | None, decay: float | None, missing: Literal["error", "skip", "keep"]
    ) -> CheckpointView:
        chosen = sorted(set(self.steps if steps is None else steps))
        weights = None
        if decay is not None:
            weights = [(1 - decay if n else 1.0) * decay ** (len(chosen) - 1 - n) for n in range(len(chosen))]
        views = [self.at(step) for step in chosen]
        for step, view in zip(chosen, views, strict=True):
            if view.state != self._state:  # the first state of a checkpoint may be another one
                raise TensorNotFoundError(
                    f"step {step} has no state {self._state!r}, which is averaged; it has: {', '.join(view.states)}. "
                    "Leave the step out, or take another state of the run, run.states[...]"
                )
        store, index = average(views, weights, missing, like=-1)
        return view_of(store, index, next(iter(index.states)), ())

    def to_xarray(self, *, chunks: Mapping[str, Any] | None = None, widen: bool = True) -> xr.DataTree:
        """Return the run as an `xarray.DataTree` whose variables have the first dimension "step", with the steps as
        coordinates. Reads nothing.

        Parameters
        ----------
        chunks, widen
            The same as for `CheckpointView.to_xarray`.

        Returns
        -------
        xarray.DataTree
            Variables that lack some of the steps have a first dimension of their own ("step_2", ...).

        Raises
        ------
        DataError, TypeError
            What `CheckpointView.to_xarray` raises.
        """
        from ..interop.xarray import Run
        from ..interop.xarray import steps_tree as tree

        return tree(cast(Run, self), chunks, widen=widen)

    def updates(  # type: ignore[override]  # of several checkpoints
        self,
        name: str | None = None,
        *,
        steps: Iterable[int] | None = None,
        optimizer: str | Mapping[str, str] | None = None,
        **options: Any,
    ) -> RunUpdates:
        """Return what the optimizer's last step before each checkpoint added to the weights. Reads no tensor data.

        `CheckpointView.updates` says how updates are computed.

        Parameters
        ----------
        name
            A name, a prefix of names or a glob. By default all parameters.
        steps
            Some of `steps`. By default all.
        optimizer, **options
            The same as for `CheckpointView.updates`, for all steps.

        Returns
        -------
        RunUpdates
            A mapping from steps to `Updates`. ``table()`` has a row for each step and parameter, ``table().layers`` for
            each step and layer, and ``plot()`` draws them as a heat map. Steps that cannot be used are in ``problems``.

        Raises
        ------
        DataError
            No checkpoint has optimizer states of these tensors, or there is no such option or optimizer.
        MissingFileError
            There is no such step.
        """
        from ..show.updates import of_run

        chosen = self.steps if steps is None else sorted(set(steps))
        views = ((step, self.at(step)) for step in chosen)
        return of_run(views, name, optimizer=optimizer, **options)

    def by_layer(  # type: ignore[override]  # of several checkpoints
        self, quantity: str = "norm", **options: Any
    ) -> RunTable:
        """Compute a quantity of every tensor at every step, by kind of parameter and layer.

        One step is read after the other, in bounded memory; "change" and "cosine" read each twice.

        Parameters
        ----------
        quantity
            "growth" (L2 norm in units of that of the first step), "drift" (norm of the difference from the first step,
            in units of the norm of that step), "change" (the same for the step before), "cosine" (of the angle to the
            step before), "towards" (the cosine with the last step), or a quantity of `CheckpointView.by_layer`.
        **options
            ``executor``, ``memory`` and ``progress`` of `WriteOptions`.

        Returns
        -------
        RunTable
            ``table.values`` is an array of kinds, layers and steps; ``pandas.DataFrame(table)`` has a row for each
            value; ``table.plot()`` draws a panel for each kind.

        Raises
        ------
        DataError
            There is no such quantity.
        WorkerError
            Workers of the executor died.
        """
        from ..show.by_layer import of_run

        return of_run(self, quantity, **options)

    @property
    def plot(self) -> RunPlots:
        """The plots of any view; ``run.plot.steps(name)``: a quantity over the steps; ``run.plot.dynamics()``: of
        all tensors."""
        from ..show.plot import RunPlots

        return RunPlots(self)

    def _subject(self, other: Namespace[Any] | None = None) -> Subject:
        if other is not None:
            raise DataError("the explorer compares checkpoints, not runs: use run.at(step).widget(other)")
        return Subject(self, run=self)

    def rename(self, *args: Any, **options: Any) -> NoReturn:
        """Raise DataError: the tensors of a run cannot be renamed. Use ``run.at(step).rename(names)``.

        Parameters
        ----------
        *args, **options
            Not used.

        Raises
        ------
        DataError
            Always.
        """
        _refuse("rename")

    def shard(self, *args: Any, **options: Any) -> NoReturn:
        """Raise DataError: the tensors of a run cannot be sharded. Use ``run.at(step).shard(...)``.

        Parameters
        ----------
        *args, **options
            Not used.

        Raises
        ------
        DataError
            Always.
        """
        _refuse("shard")

    def astype(self, dtype: torch.dtype) -> NoReturn:
        """Raise DataError: the tensors of a run cannot be converted. Use ``run.at(step).astype(dtype)``.

        Parameters
        ----------
        dtype
            Not used.

        Raises
        ------
        DataError
            Always.
        """
        _refuse("convert")

    @property
    def _head(self) -> str:
        steps = self.steps
        return f"run of {plural(len(steps), 'step')}" + (f": {some(steps, 5)}" if steps else "")

    def __repr__(self) -> str:
        return f"{self._head}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        """Return HTML for Jupyter: the steps, and a tree that opens and closes. Reads no tensor data."""
        return view_html(self, self._head)


def _restore(line: Line, state: str | None, steps: tuple[Any, ...]) -> RunView:
    view = object.__new__(RunView)
    view._begin(line, state, steps)
    return view


def _refuse(what: str) -> NoReturn:
    """Refuse what would cut stacked tensors along their steps."""
    raise DataError(f"these tensors are stacked over the steps of a run: {what} one checkpoint, run.at(step)")
