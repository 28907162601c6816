"""What the browser looks at: one checkpoint, the steps of a run, or two checkpoints that are compared.

A subject lists the names of one view, has a lazy tensor for each, and the line of Python that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.index import Index
from ..core.specs import TensorSpec
from ..errors import FormatError, LazyckptError, MissingFileError, TensorNotFoundError, printable
from ..namespace import plain_meta
from ..runs.view import RunView
from ..show.text import facts, oddities
from ..tensor import LazyTensor
from ..view import CheckpointView, view_of
from .detail import of_state, quoted

STORED = "stored"
_TRIED = 8  # steps of a run that are tried, the newest first


@dataclass(frozen=True, slots=True)
class One:
    """A checkpoint in one of its states. ``opened`` is the line of Python that opens it."""

    base: CheckpointView
    view: CheckpointView
    opened: str

    @property
    def states(self) -> Sequence[str]:
        return [*self.base.states, STORED]

    def of(self, state: str) -> One:
        """Return the same checkpoint in another state."""
        if state == self.base.state:
            return replace(self, view=self.base)
        return replace(self, view=self.base.stored if state == STORED else self.base.states[state])

    @property
    def code(self) -> str:
        """The line of Python of the state."""
        return of_state(self.opened, None if self.view.state == self.base.state else self.view.state)

    def line(self, name: str, leaf: bool) -> str:
        if not name and not leaf:
            return self.code
        return f"{self.code}[{quoted(name)}]" + ("" if leaf else '.to("cpu")')

    @property
    def facts(self) -> str:
        """Format, mesh and counts."""
        return " | ".join(facts(self.view)[:3])


class Subject:
    """One checkpoint: the base of the other subjects, too."""

    sides: Sequence[str] = ()
    """What a pair can show of a tensor; empty for others."""
    steps: Sequence[int] = ()
    """The steps of a run; empty for others."""

    def __init__(self, one: One) -> None:
        self.one = one

    @property
    def view(self) -> CheckpointView:
        """The view whose names are listed."""
        return self.one.view

    @property
    def facts(self) -> str:
        return self.one.facts

    @property
    def problems(self) -> list[str]:
        return [str(problem) for problem in oddities(self.view)]

    @property
    def metas(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """The metadata, with a title each."""
        return [("", plain_meta(self.one.base))]

    @property
    def states(self) -> Sequence[str]:
        return self.one.states

    def of(self, state: str) -> Subject:
        """Return the same subject in another state. Raises TensorNotFoundError if it has no such state."""
        return Subject(self.one.of(state))

    def tensor(self, name: str, side: str = "") -> LazyTensor:
        """Return a tensor; of a pair that of a side. Raises LazyckptError if there is none."""
        found: LazyTensor = self.view.tensor(name)
        return found

    def line(self, name: str, leaf: bool, side: str = "") -> str:
        """Return the line of Python of a tensor or of a prefix."""
        return self.one.line(name, leaf)


class Run(Subject):
    """The steps of a run, of which one is shown."""

    def __init__(self, run: RunView, opened: str, step: int, state: str | None = None) -> None:
        self.run, self.opened, self.step = run, opened, step
        base = run.at(step)
        one = One(base, base, f"{opened}.at({step})")
        super().__init__(one if state is None or state == base.state else one.of(state))
        self.steps = tuple(run.paths)

    def at(self, step: int) -> Run:
        """Return the run at another step, in the same state if that step has it."""
        state = self.view.state
        base = self.run.at(step)
        return Run(self.run, self.opened, step, state if state == STORED or state in base.states else None)

    def of(self, state: str) -> Run:
        return Run(self.run, self.opened, self.step, state)

    def tensor_at(self, step: int, name: str) -> LazyTensor:
        """Return a tensor of a step, in the state that is shown. Raises LazyckptError if the step lacks it."""
        found: LazyTensor = self.at(step).view.tensor(name)
        return found


def run_of(path: str, address: str, state: str | None) -> Run | None:
    """Open a folder of several checkpoints at the newest step that can be read; None if it is anything else. The
    folder is listed, and one checkpoint is opened. Raises TensorNotFoundError if no step has the state."""
    try:
        run = RunView(path)
        steps = tuple(run.paths)
    except (FormatError, MissingFileError):
        return None
    if len(steps) < 2:
        return None
    opened = f"lazyckpt.open_run({quoted(address)})"
    for step in reversed(steps[-_TRIED + 1 :]):
        try:
            return Run(run, opened, step, state)
        except TensorNotFoundError:
            raise
        except LazyckptError:  # a step that is damaged or unfinished: an earlier one may be whole
            continue
    return Run(run, opened, steps[max(0, len(steps) - _TRIED)], state)


class Pair(Subject):
    """Two checkpoints. Their names are listed together; a tensor is that of A, that of B, or the difference B - A."""

    sides = ("B - A", "A", "B")

    def __init__(self, a: One, b: One) -> None:
        super().__init__(a)
        self.a, self.b = a, b
        self._both = _union(a.view, b.view)

    @property
    def view(self) -> CheckpointView:
        return self._both

    @property
    def facts(self) -> str:
        return f"A: {self.a.facts} | B: {self.b.facts}"

    @property
    def problems(self) -> list[str]:
        return [f"{side}: {p}" for side, one in (("A", self.a), ("B", self.b)) for p in oddities(one.view)]

    @property
    def metas(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return [("A", plain_meta(self.a.base)), ("B", plain_meta(self.b.base))]

    @property
    def states(self) -> Sequence[str]:
        return [state for state in self.a.states if state in self.b.states]

    def of(self, state: str) -> Pair:
        return Pair(self.a.of(state), self.b.of(state))

    def both(self, name: str) -> tuple[LazyTensor | None, LazyTensor | None]:
        """Return the tensor of A and that of B; None where there is none."""
        a, b = (one.view.exact(name) for one in (self.a, self.b))
        return a, b

    def tensor(self, name: str, side: str = "B - A") -> LazyTensor:
        a, b = self.both(name)
        if side in ("A", "B"):
            found = a if side == "A" else b
            if found is None:
                raise TensorNotFoundError(f"{side} has no {printable(name)!r}: w shows the other one")
            return found
        if a is None or b is None:
            return a if a is not None else self.b.view.tensor(name)
        parent = name.rpartition(".")[0]
        sides = [one.view.prefix(parent) if parent else one.view for one in (self.b, self.a)]
        short = name[len(parent) + 1 :] if parent else name
        one, other = (side.select({short}.__contains__) for side in sides)
        difference: LazyTensor = (one - other).tensor(short)
        return difference

    def line(self, name: str, leaf: bool, side: str = "B - A") -> str:
        lines = [one.line(name, leaf) for one in (self.a, self.b)]
        if side in ("A", "B"):
            return lines[side == "B"]
        if not leaf:
            parts = [one.line(name, leaf).removesuffix('.to("cpu")') for one in (self.a, self.b)]
            return f"lazyckpt.diff({', '.join(parts)})"
        a, b = self.both(name)
        if a is None or b is None:
            return lines[a is None]
        part = quoted(name)
        return f"({self.b.code}.select({part}) - {self.a.code}.select({part}))[{part}]"


def _union(a: CheckpointView, b: CheckpointView) -> CheckpointView:
    """Return a view of the names of both, for listing them: of a name that both have, it describes the tensor of A."""
    specs: dict[str, TensorSpec] = {}
    for view in (b, a):
        of, full = view.specs, view.full_names
        for name in view:
            owner = view.owner(name)
            spec = of.get(full[name]) or of.get(owner)
            if spec is not None:
                specs[name] = spec
    ordered = {name: specs[name] for name in dict.fromkeys([*a, *b]) if name in specs}
    index = Index(format="compared", states={a.state: ordered}, stored=ordered, files={})
    return view_of(a._store, index, a.state, ())


def same_shape(pair: tuple[LazyTensor | None, LazyTensor | None]) -> bool:
    """Return whether both tensors are there and can be compared element by element."""
    a, b = pair
    return a is not None and b is not None and tuple(a.shape) == tuple(b.shape)
