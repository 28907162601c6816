"""The steps of a run: the line on which one chooses a step, and how a tensor changes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widget import Widget

from ..core.units import human_bytes, plural
from ..errors import LazyckptError, printable
from ..lazy import LazyArray, shape_of
from ..show.differences import cosine_text, relative_text
from .background import error_text
from .measures import compared, measured

if TYPE_CHECKING:
    from ..inspect.diff import Difference
    from ..inspect.table import Stats

AT_ONCE = 256 << 20  # bytes of all steps of a tensor that are read without being asked for
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Point:
    """A tensor at a step: its statistics, and its difference from the step before; or why it cannot be read."""

    step: int
    stats: Stats | None = None
    change: Difference | None = None
    error: str = ""


def points(steps: Sequence[int], tensor: Callable[[int], LazyArray]) -> Iterator[Point]:
    """Yield a point for each step. Each step's tensor is read, and compared with that of the step before."""
    before: LazyArray | None = None
    for step in steps:
        try:
            t = tensor(step)
            alike = before is not None and shape_of(before) == shape_of(t)
            change = compared(t.name, (before, t)) if alike else None
            yield Point(step, measured(t), change)
            before = t
        except (LazyckptError, OSError) as e:
            yield Point(step, error=error_text(e))
            before = None


def drawn(found: Sequence[Point], here: int, more: int, width: int) -> Content:
    """Return a table of the points, with curves of norm and change above it. ``more``: how many steps are not read
    yet."""
    heads = ("step", "norm", "largest", "mean", "std", "change", "cosine")
    rows: list[tuple[str, ...]] = [heads]
    for p in found:
        if p.stats is None:
            rows.append((f"{p.step:,}", printable(f"cannot be read: {p.error}")))
            continue
        numbers = [f"{x:.4g}" if x is not None else "" for x in (p.stats.l2, p.stats.absmax, p.stats.mean, p.stats.std)]
        change = "" if p.change is None else relative_text(p.change)
        rows.append((f"{p.step:,}", *numbers, change, "" if p.change is None else cosine_text(p.change.cosine)))
    widths = [max((len(row[c]) for row in rows if len(row) == len(heads)), default=4) for c in range(len(heads))]
    lines = []
    for label, values in (
        ("norm", [None if p.stats is None else p.stats.l2 for p in found]),
        ("change", [None if p.change is None else p.change.relative for p in found]),
    ):
        bars = curve(values, max(8, width - 24))
        if bars:
            known = [v for v in values if v is not None]
            ends = f"  {min(known):.4g} to {max(known):.4g}"
            lines.append(
                Content.assemble((f"{label:<8}", "$text-accent"), (bars, "$text-primary"), (ends, "$text-muted"))
            )
    if lines:
        lines.append(Content(""))
    for n, row in enumerate(rows):
        cells = (
            [f"{cell:>{w}}" for cell, w in zip(row, widths, strict=False)]
            if len(row) > 2
            else [f"{row[0]:>{widths[0]}}", row[1]]
        )
        text = "  ".join(cells)
        style = "$text-accent" if n == 0 else "bold" if found[n - 1].step == here else ""
        mark = "▸ " if n and found[n - 1].step == here else "  "
        lines.append(Content.assemble((mark + text, style)))
    lines.append(Content(""))
    note = "change: the norm of the difference from the step before, divided by that step's norm"
    lines.append(Content.styled(f"reading {plural(more, 'more step')}…" if more else note, "$text-muted"))
    return Content("\n").join(lines)


def hint(steps: Sequence[int], t: LazyArray) -> str:
    """Return what to do if a tensor is too large to be read at all steps without being asked for."""
    return f"a reads it at {plural(len(steps), 'step')}: about {human_bytes(2 * len(steps) * t.nbytes)}"


def curve(values: Sequence[float | None], width: int) -> str:
    """Return values as a line of bars; "" for fewer than two.

    >>> curve([0.0, 1.0, None, 3.5], 10)
    '▁▃ █'
    """
    if len(values) > width:
        values = [values[n * len(values) // width] for n in range(width)]
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if v is None else _BLOCKS[min(7, int(8 * (v - low) / span))] for v in values)


class Slider(Widget):
    """The steps on a line; a click chooses one."""

    class Moved(Message):
        """A step was chosen."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(self) -> None:
        super().__init__(id="slider")
        self.steps: Sequence[int] = ()
        self.step = 0
        self._places: list[tuple[int, int, int]] = []  # first and last column, step

    def show(self, steps: Sequence[int], step: int) -> None:
        self.steps, self.step = steps, step
        self.display = len(steps) > 0
        self.refresh()

    def render(self) -> Content:
        if not self.steps:
            return Content("")
        here = self.steps.index(self.step)
        head = f" step {self.step:,} ({here + 1} of {len(self.steps)})  ◂ "
        room = max(4, self.size.width - len(head) - 4)
        shown = range(len(self.steps))
        widest = max(len(str(step)) for step in self.steps) + 1
        labelled = widest * len(self.steps) <= room
        self._places, at = [], len(head)
        pieces: list[tuple[str, str]] = [(head, "bold")]
        if labelled:
            for n in shown:
                text = f"{self.steps[n]}"
                self._places.append((at, at + len(text), self.steps[n]))
                pieces.append((text, "reverse bold" if n == here else "$text-muted"))
                pieces.append((" ", ""))
                at += len(text) + 1
        else:
            width = min(room, 80)
            marker = here * (width - 1) // max(1, len(self.steps) - 1)
            pieces.append(("━" * marker, "$text-primary"))
            pieces.append(("●", "bold"))
            pieces.append(("─" * (width - 1 - marker), "$text-muted"))
            for c in range(width):
                step = self.steps[round(c * (len(self.steps) - 1) / max(1, width - 1))]
                self._places.append((at + c, at + c, step))
        pieces.append((" ▸  [ ]", "$text-muted"))
        return Content.assemble(*pieces)

    def on_click(self, event: Click) -> None:
        for first, last, step in self._places:
            if first <= event.x <= last:
                self.post_message(self.Moved(step))
                return
