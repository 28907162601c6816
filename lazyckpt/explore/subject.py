"""What an explorer shows: a checkpoint, a run, or two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, cast

from ..derive.arithmetic import difference
from ..derive.updates import Steps, steps_of
from ..errors import DataError, TensorNotFoundError
from ..inspect.loaded import is_far, is_whole, loaded
from ..lazy import LazyArray
from ..namespace import Namespace
from .query import Query

View = Namespace[Any]
_KEY = "steps"  # of `Namespace.kept`
_LOADED, _LOADING = "loaded tensor", "loading a tensor"  # of `Namespace.kept`
_PATIENCE = 0.1  # seconds between two looks whether an answer is still wanted
_KEPT = 4  # steps whose views are kept with what is computed for them


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
        return self.view if self.run is None else self.at(self.step(query))

    def at(self, step: int) -> View:
        """Return the checkpoint of a step of a run: the same view for one request after another."""
        if self.run is None:
            raise DataError("this explorer shows no run")
        kept: dict[int, View] = self.view.kept.get(_KEY, {})
        found = kept.get(step)
        if found is None:
            found = self.run.at(step)
        if next(iter(kept), None) != step:  # the steps that were asked for last are kept
            rest = [pair for pair in kept.items() if pair[0] != step]
            self.view.kept[_KEY] = dict([(step, found), *rest][:_KEPT])
        return found

    def step(self, query: Query) -> int:
        """Return the step of a run that a request is about: ``step``, by default the last one. Raises DataError."""
        steps = self._steps()
        return self._known(query.number("step", steps[-1], steps[0], steps[-1]))

    def other_step(self, query: Query) -> int:
        """Return the step that a request compares ``step`` with: ``with``, by default the step before, or that after
        the first one. Raises DataError."""
        steps, step = self._steps(), self.step(query)
        if len(steps) < 2:
            raise DataError("the run has one step, and nothing to compare it with")
        place = steps.index(step)
        return self._known(query.number("with", steps[place - 1 if place else 1], steps[0], steps[-1]))

    def _steps(self) -> tuple[int, ...]:
        if self.run is None or not self.run.steps:
            raise DataError("this explorer shows no run")
        return self.run.steps

    def _known(self, step: int) -> int:
        if step not in self._steps():
            raise DataError(f"the run has no step {step}: the request 'about' lists its steps")
        return step

    def pair(self, query: Query) -> tuple[View, View]:
        """Return what a request compares: both sides of a comparison, or two steps of a run.

        Parameters
        ----------
        query
            ``step`` and ``with``, of a run (`step`, `other_step`).

        Raises
        ------
        DataError
            There is one checkpoint, or no such step.
        """
        if self.other is not None:
            return self.view, self.other
        if self.run is None:
            raise DataError("this explorer shows one checkpoint, and nothing to compare it with")
        return self.at(self.step(query)), self.at(self.other_step(query))

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
            ``name``: the full name. ``of``: "update" is what the last step of the optimizer added to the weight, as its
            states tell; "change" is the tensor minus that of the step before in a run, in float64; by default the
            tensor itself. The parameters of `part`.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor.
        DataError
            As `part` raises it; there is no such update or change.
        """
        name = query.text("name")
        part = self.part(query)
        found = part.exact(name)
        if found is None:
            raise TensorNotFoundError(f"there is no tensor {name!r:.200} in this state")
        of = query.one_of("of", ("", "update", "change"))
        if of == "update":
            return self._updated(part, name)
        if of == "change":
            return self._changed(query, part, name)
        return cast("LazyArray", found)

    def whole(self, query: Query, reads: bool = True) -> LazyArray:
        """Return the tensor of a request that needs all of its elements.

        One that is behind a network is read once, if it has at most `AUTO` bytes: the last one stays in memory for the
        other requests of its page, and of a report.

        Parameters
        ----------
        query
            The parameters of `tensor`.
        reads
            False if the request needs only some elements: then nothing is read before they are needed.

        Raises
        ------
        DataError, TensorNotFoundError
            As `tensor` raises them.
        LazyckptError
            What reading raises.
        """
        t = self.tensor(query)
        if t.nbytes > AUTO or not is_far(t):
            return t
        names = ("side", "state", "of", "name")
        step = self.step(query) if self.run is not None else None
        key = (step, *(query.text(name, "") for name in names))
        kept = self.view.kept
        found: tuple[object, LazyArray] | None = kept.get(_LOADED)
        if found is not None and found[0] == key:
            return found[1]
        if not reads or not is_whole(t):
            return t
        lock = kept.setdefault(_LOADING, Lock())
        while not lock.acquire(timeout=_PATIENCE):
            query.check()
        try:
            found = kept.get(_LOADED)  # another request may have read it meanwhile
            if found is None or found[0] != key:
                query.check()
                kept.pop(_LOADED, None)
                found = kept[_LOADED] = key, loaded(t)
        finally:
            lock.release()
        return found[1]

    def forget(self) -> None:
        """Forget the elements that are in memory for further requests."""
        self.view.kept.pop(_LOADED, None)

    def last_steps(self, part: View, name: str) -> Steps:
        """Return how the last step of a parameter is computed. Raises DataError if it has no optimizer states."""
        return steps_of(part, None, None, {}, only=part.full_name(name))

    def _updated(self, part: View, name: str) -> LazyArray:
        found = self.last_steps(part, name)
        if not found.steps:
            raise DataError("; ".join(str(one) for one in found.index.problems if one.code == "undecided-update"))
        (step,) = found.steps.values()
        return LazyArray(found.store, step.update)

    def before(self, query: Query) -> int | None:
        """Return the step of a run before that of a request; None if there is none."""
        if self.run is None:
            return None
        now = self.step(query)
        return max((step for step in self.run.steps if step < now), default=None)

    def _changed(self, query: Query, part: View, name: str) -> LazyArray:
        step = self.before(query)
        if step is None:
            if self.run is None:
                raise DataError(f"{name!r:.200} has no change: this is one checkpoint, and only a run has steps")
            first = self.step(query)
            raise DataError(f"{name!r:.200} has no change at step {first:,}, the first of the run: choose a later step")
        old = self.at(step)
        if part.state != old.state:
            if part.state not in old.states:
                raise TensorNotFoundError(f"step {step} has no state {part.state!r:.60}")
            old = old.states[part.state]
        if old.exact(name) is None:
            raise TensorNotFoundError(f"step {step} has no tensor {name!r:.200} in this state")
        return LazyArray(*difference(part, old, name))


FIRST, MORE, TENSORS, REST = range(4)
"""How useful an answer is in a report: what pages show at first sight; what they show on demand; the picture of each
tensor; further values of tensors."""


AUTO = 64 << 20
"""Largest window of a tensor, in bytes, that pages read whole without being asked; of larger ones a sample is read."""
_EACH = 64 << 10  # bytes that could be read in the time that one more tensor takes


def effort(nbytes: int, tensors: int) -> int:
    """Return what reading tensors costs, in bytes: many small ones cost more than their bytes."""
    return nbytes + tensors * _EACH


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose answer a report should hold."""

    path: str
    """The path."""
    values: Mapping[str, str]
    """The parameters."""
    reads: int = 0
    """How many bytes of tensors the answer reads (`effort`)."""
    level: int = FIRST
    """How useful the answer is: `FIRST`, `MORE`, `TENSORS` or `REST`."""
    heard: Callable[[bytes], None] | None = None
    """Is called with the answer, if there is one: what is wanted next may depend on it."""
    same: Mapping[str, str] | None = None
    """The parameters of another request for this path that has the same answer. The answer is then held once."""
