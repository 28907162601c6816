"""Which rows there are: a case prepares a contest, and each of its goals makes a row of the samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .contest import Contest, Samples, Skipped, Sweep, exponent
from .row import Row, Spread
from .sample import Sample


@dataclass(frozen=True)
class Settings:
    """Where the data are, and whether the run is a quick one, with smaller data."""

    folder: Path
    quick: bool = False

    @property
    def data(self) -> Path:
        """The folder of the files that are measured; they are kept between runs."""
        folder = self.folder / "quick" if self.quick else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def out(self, name: str = "out") -> Path:
        """A path for what a call writes, in which nothing is."""
        path = self.data / f"{name}.written"
        remove(path)
        return path

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Goal(NamedTuple):
    """One row of a case.

    ``of`` is the quantity: "seconds" or a count. It is divided by that of the "peer" or the "limit", or by a constant.
    ``at_most`` is the largest ratio that meets the goal; None shows the row for comparison. ``label`` is added to the
    text of the row. ``against`` may be a constant; ``budget`` is then its text. ``fastest`` compares the fastest call
    of each side, not the median of the pairs: for calls whose time depends on what new memory costs at the moment.
    """

    at_most: float | None
    of: str = "seconds"
    against: str | float = "peer"
    label: str = ""
    budget: str = "a budget"
    fastest: bool = False


@dataclass(frozen=True)
class Case:
    """A contest or a sweep, which ``make`` prepares, and the goals of its rows. ``quick``: also in a quick run."""

    what: str
    make: Callable[[], Contest | Sweep]
    goals: Sequence[Goal] = (Goal(1.0),)
    quick: bool = True

    def texts(self) -> list[str]:
        return [_text(self, goal) for goal in self.goals]

    def rows(self, area: str, seconds: float, least: int) -> list[Row]:
        """Measure."""
        try:
            made = self.make()
            if isinstance(made, Sweep):
                found = made.run()
                return [_fitted(area, _text(self, goal), goal, made, found) for goal in self.goals]
            samples = made.run(seconds, least)
        except Skipped as reason:
            return [Row(area, text, goal=goal.at_most, skipped=str(reason)) for text, goal in self._each()]
        return [_compared(area, text, goal, made, samples) for text, goal in self._each()]

    def failed(self, area: str, error: BaseException) -> list[Row]:
        """The rows of a case that raised."""
        why = f"{type(error).__name__}: {error}".strip().splitlines()[-1][:200]
        return [Row(area, text, goal=goal.at_most, failed=why) for text, goal in self._each()]

    def _each(self) -> list[tuple[str, Goal]]:
        return [(_text(self, goal), goal) for goal in self.goals]


@dataclass(frozen=True)
class Area:
    """A part of the suite: what it measures, as a paragraph for the documentation, and its cases."""

    name: str
    title: str
    about: str
    cases: Callable[[Settings], list[Case]] = field(repr=False)


def _text(case: Case, goal: Goal) -> str:
    return case.what + (f": {goal.label}" if goal.label else "")


def _compared(area: str, what: str, goal: Goal, made: Contest, samples: Samples) -> Row:
    def series(role: str) -> list[float]:
        own, once = samples.get(role, []), samples.get(f"{role} once", [])
        return [s.quantity(goal.of) for s in (own if _has(own, goal.of) else once) if _has([s], goal.of)]

    ours, theirs, bound = series("ours"), series("peer"), series("limit")
    constant = goal.against if isinstance(goal.against, int | float) else None
    others = [float(constant)] * len(ours) if constant is not None else theirs if goal.against == "peer" else bound
    if constant is not None:
        against, peer = goal.budget, goal.budget
        theirs = [float(constant)]
    else:
        against, peer = str(goal.against), made.peer[0] if made.peer and theirs else ""
    if goal.fastest:
        ours, theirs, bound, others = ([min(each)] if each else [] for each in (ours, theirs, bound, others))
    pairs = [a / b if b else float(a > 0) for a, b in zip(ours, others, strict=False)]
    return Row(
        area, what, goal.of, Spread.of(ours),
        peer, Spread.of(theirs) if theirs else None,
        made.limit[0] if made.limit and bound else "", Spread.of(bound) if bound else None,
        Spread.of(pairs) if pairs else None, goal.at_most, against,
        _medians(samples["ours"]), _medians(samples.get("peer", [])),
    )  # fmt: skip


def _has(samples: Sequence[Sample], quantity: str) -> bool:
    return bool(samples) and (quantity == "seconds" or quantity in samples[-1].counts)


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample.counts)
    return {name: Spread.of(s.counts[name] for s in samples if name in s.counts).median for name in names}


def _fitted(area: str, what: str, goal: Goal, sweep: Sweep, found: dict[float, list[Sample]]) -> Row:
    points = [(size, min(s.quantity(goal.of) for s in samples)) for size, samples in found.items()]
    fitted = exponent(points)
    one = Spread.of([fitted])
    text = f"{goal.of} against {sweep.unit}"
    return Row(area, what, "exponent", one, "proportional", Spread.of([1.0]), ratio=one, goal=goal.at_most,
               against=text, points=points)  # fmt: skip
