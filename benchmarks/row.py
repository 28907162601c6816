"""A figure as data: what was measured, against what, and whether the goal is met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

UNITS = {"seconds": "s", "peak": "B", "held": "B", "bytes": "B", "resident": "B", "growth": "B"}


class Spread(NamedTuple):
    """The median of several measurements, with the lower and the upper quartile and the number of them."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        if len(found) < 2:
            return cls(found[0], found[0], found[0], len(found))
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(statistics.median(found), low, high, len(found))


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes
    ----------
    area, what
        The area, and the text that identifies the row in it.
    quantity
        What was measured: "seconds", "peak" (memory, in bytes), "exponent" and so on.
    ours, theirs, bound
        The figures of lazyckpt, of the peer and of the limit.
    peer, limit
        The names of the peer and of the limit: the hardware's, or that of `cp`.
    ratio
        Ours divided by what the goal compares it with (``against``), pair by pair.
    goal
        The largest ratio that meets the goal; None for a row that is shown for comparison.
    against
        "peer", "limit", or the text of a constant.
    counts, peer_counts
        Bytes, requests, system calls and page faults of one call.
    points
        For a fitted exponent: pairs of the size and the figure.
    skipped, failed
        Why there is no figure.
    """

    area: str
    what: str
    quantity: str = "seconds"
    ours: Spread | None = None
    peer: str = ""
    theirs: Spread | None = None
    limit: str = ""
    bound: Spread | None = None
    ratio: Spread | None = None
    goal: float | None = None
    against: str = "peer"
    counts: Mapping[str, float] = field(default_factory=dict)
    peer_counts: Mapping[str, float] = field(default_factory=dict)
    points: Sequence[tuple[float, float]] = ()
    skipped: str = ""
    failed: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if there is no goal or no figure."""
        if self.failed:
            return False
        if self.goal is None or self.ratio is None:
            return None
        return self.ratio.median <= self.goal

    @property
    def key(self) -> tuple[str, str]:
        return self.area, self.what

    @property
    def unit(self) -> str:
        return UNITS.get(self.quantity, "")

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON objects, without what is empty, with four digits."""
        return {name: _short(value) for name, value in asdict(self).items() if value not in (None, "", {}, (), [])}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        spreads = {name: Spread(*found[name]) for name in ("ours", "theirs", "bound", "ratio") if name in found}
        points = [(x, y) for x, y in found.get("points", [])]
        return cls(**{**found, **spreads, "points": points})


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value


def show(value: float, unit: str) -> str:
    """A figure as a person reads it.

    >>> show(0.0123, "s"), show(3 << 20, "B"), show(1.04, "")
    ('12.3 ms', '3.0 MiB', '1.04')
    """
    if unit == "s":
        if value < 1e-3:
            return f"{value * 1e6:.1f} us"
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "B":
        size, names = value, ["B", "KiB", "MiB", "GiB"]
        while abs(size) >= 1024 and len(names) > 1:
            size, names = size / 1024, names[1:]
        return f"{size:,.0f} B" if names[0] == "B" else f"{size:,.1f} {names[0]}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.2f}"
