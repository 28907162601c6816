"""What an explorer shows: a checkpoint, a run, or two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..derive.sources import opening_of
from ..errors import DataError, TensorNotFoundError
from ..lazy import LazyArray
from ..namespace import Namespace
from .query import Query

View = Namespace[Any]


class Run(Protocol):
    """What the explorer asks of a run: its steps, and the checkpoint of each."""

    @property
    def steps(self) -> tuple[int, ...]: ...

    def at(self, step: int) -> View: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """The checkpoint, run or comparison that an explorer shows."""

    view: View
    """The checkpoint; of a comparison the first one; of a run its view, whose tensors have a dimension of steps."""
    other: View | None = None
    """The second checkpoint of a comparison."""
    run: Run | None = None
    """The run, if ``view`` is one."""
    title: str = ""
    """A name for people; by default the view's root."""

    @property
    def kind(self) -> str:
        """ "checkpoint", "comparison" or "run"."""
        return "comparison" if self.other is not None else "run" if self.run is not None else "checkpoint"

    def checkpoint(self, query: Query) -> View:
        """Return the checkpoint that a request is about.

        Parameters
        ----------
        query
            ``side``: "a" (default) or "b" of a comparison. ``step``: of a run; by default the last one.

        Raises
        ------
        DataError
            There is no such side or step.
        """
        if query.one_of("side", ("a", "b")) == "b":
            if self.other is None:
                raise DataError("side=b is for comparisons, and this explorer shows one checkpoint")
            return self.other
        if self.run is not None:
            steps = self.run.steps
            step = query.number("step", steps[-1], min(steps), max(steps))
            if step not in steps:
                raise DataError(f"the run has no step {step}: the request 'about' lists its steps")
            return self.run.at(step)
        return self.view

    def part(self, query: Query) -> View:
        """Return the state that a request is about.

        Parameters
        ----------
        query
            ``state``: a state's name, or "stored" for all tensors under their raw names; by default the state of the
            view that was opened. The parameters of `checkpoint`.

        Raises
        ------
        DataError
            As `checkpoint` raises it.
        TensorNotFoundError
            There is no such state.
        """
        view = self.checkpoint(query)
        state = query.text("state", "")
        if not state:
            return view
        if state == "stored":
            return view.stored
        if state not in view.states:
            raise TensorNotFoundError(f"there is no state {state!r:.60}: the request 'about' lists the states")
        return view.states[state]

    def tensor(self, query: Query) -> LazyArray:
        """Return the tensor that a request is about.

        Parameters
        ----------
        query
            ``name``: the full name. The parameters of `part`.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        DataError
            As `part` raises it.
        """
        name = query.text("name")
        part = self.part(query)
        found = part.exact(name)
        if found is None:
            raise TensorNotFoundError(f"there is no tensor {name!r:.200} in this state")
        return cast("LazyArray", found)


def python_of(subject: Subject, view: View) -> str:
    """Return the expression of Python for a checkpoint of a subject: the call that opens it, or a variable's name if
    the explorer was given a view that no such call returns."""
    return opening_of(view) or ("other" if view is subject.other else "view")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose answer a report should hold."""

    path: str
    """The path."""
    values: Mapping[str, str]
    """The parameters."""
    reads: int = 0
    """How many bytes of tensors the answer reads."""
