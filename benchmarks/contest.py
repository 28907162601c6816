"""Ours, the peer and the limit, called in turn: pairs, so that what disturbs the machine disturbs both alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .sample import Sample, Sampler

CALL = 1e-3  # seconds that one measurement takes at least, by repeating shorter calls
Samples = dict[str, list[Sample]]


@dataclass
class Contest:
    """What is measured in turn.

    Attributes
    ----------
    ours, peer, limit
        The samplers. ``peer`` and ``limit`` have a name.
    before
        What is done before each call, without being measured.
    calls
        How many calls make a measurement; None finds out, and 1 is for calls that cannot be repeated at once.
    rehearse
        Whether each is called once beforehand.
    count
        Called once at the end: counts to add to those of ours, such as requests and bytes of a counting store.
    once
        Samplers, ours and the peer's, that run once at the end: the same work in a fresh process, for its peak memory.
    most, least
        The largest and the smallest number of pairs; ``least`` is for pairs that take minutes.
    done
        Called at the end, to remove what the calls have written.
    """

    ours: Sampler
    peer: tuple[str, Sampler] | None = None
    limit: tuple[str, Sampler] | None = None
    before: Callable[[], object] | None = None
    calls: int | None = None
    rehearse: bool = True
    count: Callable[[], Mapping[str, float]] | None = None
    once: Sequence[Sampler] = ()
    most: int = 101
    least: int | None = None
    done: Callable[[], object] | None = None

    def run(self, seconds: float, least: int) -> Samples:
        """Measure pairs until ``seconds`` have passed, but ``least`` at least, unless the contest has its own."""
        sides: dict[str, Sampler] = {"ours": self.ours}
        sides |= {role: side[1] for role, side in (("peer", self.peer), ("limit", self.limit)) if side is not None}
        try:
            return self._run(sides, seconds, self.least or least)
        finally:
            if self.done is not None:
                self.done()

    def _run(self, sides: dict[str, Sampler], seconds: float, least: int) -> Samples:
        calls = self.calls or 1
        if self.rehearse:
            first = min(self._call(sampler, 1).seconds for sampler in sides.values())
            if self.calls is None and first < CALL:
                first = min(self._call(sampler, 3).seconds for sampler in sides.values())
                calls = max(1, min(1000, math.ceil(CALL / max(first, 1e-9))))
        gc.collect()
        found: Samples = {role: [] for role in sides}
        start, pair = time.perf_counter(), 0
        while pair < least or (pair < self.most and time.perf_counter() - start < seconds):
            for role in list(sides)[:: -1 if pair % 2 else 1]:
                found[role].append(self._call(sides[role], calls))
            pair += 1
        for role, sampler in zip(("ours", "peer"), self.once, strict=False):
            found[f"{role} once"] = [self._call(sampler, 1)]
        if self.count is not None:
            extra = self.count()
            found["ours"][-1] = found["ours"][-1]._replace(counts={**found["ours"][-1].counts, **extra})
        return found

    def _call(self, sampler: Sampler, calls: int) -> Sample:
        if self.before is not None:
            self.before()
        return sampler(calls)


@dataclass
class Sweep:
    """One program at growing sizes; the figure is the exponent of its growth.

    ``programs`` are (size, sampler), in ascending order.
    """

    unit: str
    programs: Sequence[tuple[float, Sampler]]
    done: Callable[[], object] | None = None

    def run(self, times: int = 2) -> dict[float, list[Sample]]:
        """Measure each size so many times."""
        found: dict[float, list[Sample]] = {}
        try:
            for size, sampler in self.programs:
                found[size] = [sampler(1) for _ in range(times)]
        finally:
            if self.done is not None:
                self.done()
        return found


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a straight line through the points' logarithms.

    >>> round(exponent([(1, 2), (10, 200), (100, 20000)]), 3)
    2.0
    """
    xs, ys = ([math.log(max(point[n], 1e-12)) for point in points] for n in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


@dataclass
class Skipped(Exception):
    """A row that cannot be measured here, and why."""

    reason: str = field(default="")

    def __str__(self) -> str:
        return self.reason


def need(module: str) -> Any:
    """Import a peer, or skip the row."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise Skipped(f"not measured: {module} is not installed") from None
