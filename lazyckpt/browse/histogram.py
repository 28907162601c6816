"""The pane of the histogram, which reads a sample, or all elements until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.content import Content
from textual.widgets import Static

from ..core.units import human_bytes, plural
from ..lazy import LazyArray
from ..show.values import Sample, sample
from .background import Background, Check, error_content

if TYPE_CHECKING:
    from ..inspect.table import Stats

# -- A histogram as columns of blocks.

BINS = 48
_HEIGHT = 8  # lines of the columns
_BLOCKS = " ▁▂▃▄▅▆▇█"


def of_sample(found: Sample, width: int) -> Content:
    """Draw the histogram of a sample in at most ``width`` columns."""
    return _drawn(found.counts, found.edges, found.facts, width)


def of_stats(found: Stats, nbytes: int, width: int) -> Content:
    """Draw the histogram of all elements of a tensor of ``nbytes`` bytes in at most ``width`` columns."""
    lines = [f"histogram of all {found.count:,} elements ({human_bytes(nbytes)})"]
    if found.finite:
        lines.append(f"min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}, std {found.std:.4g}")
        lines.append(f"absmax {found.absmax:.4g}, L1 norm {found.l1:.4g}, L2 norm {found.l2:.4g}")
    lines.append(f"{found.zeros:,} zeros, {found.nan:,} NaN, {found.posinf:,} +Inf, {found.neginf:,} -Inf")
    histogram = found.histogram
    edges, counts = (histogram.edges, histogram.counts) if histogram and found.finite else ((), ())
    return _drawn(counts, edges, lines, width)


def _drawn(counts: Sequence[int], edges: Sequence[float], lines: Sequence[str], width: int) -> Content:
    text = [Content(line) for line in lines]
    if not counts:
        return Content("\n").join([*text, Content(""), Content("there are no finite elements")])
    together = -(-len(counts) // max(8, width))  # bins per column
    counts = [sum(counts[n : n + together]) for n in range(0, len(counts), together)]
    top = max(counts)
    text.append(Content(f"highest column: {plural(top, 'element')}"))
    heights = [-(-8 * _HEIGHT * n // top) for n in counts]
    rows = ["".join(_BLOCKS[min(8, max(0, h - 8 * y))] for h in heights) for y in reversed(range(_HEIGHT))]
    low, high = f"{edges[0]:.4g}", f"{edges[-1]:.4g}"
    axis = low + high.rjust(max(len(high) + 1, len(counts) - len(low)))
    return Content("\n").join([*text, Content(""), *(Content.styled(r, "$text-primary") for r in rows), Content(axis)])


# -- The pane.

_MEMORY = 256 << 20  # bytes of memory for reading all elements


class Histogram(Static):
    """The pane of the histogram; ``changed`` is called when it starts or finishes reading."""

    def __init__(self, app: App[Any], changed: Callable[[], None]) -> None:
        super().__init__(markup=False)
        self._work = Background(app, changed)
        self._executor: ThreadPoolExecutor | None = None
        self._of: LazyArray | None = None  # what is drawn or being read

    @property
    def busy(self) -> bool:
        return self._work.busy

    def show(self, t: LazyArray | None) -> None:
        """Show the hint for another tensor, or for none."""
        self.drop()
        self._of = None
        self.update("choose a tensor" if t is None else f"b: a sample, a: all elements {_size(t)}")

    def read(self, t: LazyArray, whole: bool, width: int) -> None:
        """Read all elements, or a sample, and draw the histogram in at most ``width`` columns."""
        self.drop()
        self._of = t
        executor = self._executor = ThreadPoolExecutor(thread_name_prefix="lazyckpt-browse") if whole else None
        self.update(f"reading {f'all elements {_size(t)}; Esc stops' if whole else 'a sample'}…")

        def work(check: Check) -> Content:
            if executor is None:
                return of_sample(sample(t), width)
            from ..inspect.stats import stats_of

            return of_stats(stats_of(t, BINS, executor, _MEMORY, progress=False), t.nbytes, width)

        def done(found: Content) -> None:
            self.drop()
            self.update(found)

        self._work.ask(work, done, lambda e: done(error_content(e)))

    def read_from(self, t: LazyArray) -> bool:
        """Return whether a histogram of a tensor is shown or being read."""
        return self._of is t

    def stop(self) -> bool:
        """Stop reading all elements. Return whether that was in progress."""
        if self._executor is None:
            return False
        self.drop()
        self.update("stopped; b: a sample, a: all elements")
        return True

    def drop(self) -> None:
        """Discard the current read. Shutting down the executor ends the job that submits work to it."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._work.drop()


def _size(t: LazyArray) -> str:
    return f"({plural(t.numel(), 'element')}, {human_bytes(t.nbytes)})"
