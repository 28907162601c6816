"""A histogram as columns of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from ..inspect.table import Stats
from ..show.sample import Sample
from ..show.text import human_bytes

BINS = 48
_HEIGHT = 8  # lines
_BLOCKS = " ▁▂▃▄▅▆▇█"


def of_sample(found: Sample) -> Content:
    """Of the elements that were looked at."""
    told, numbers = found.lines
    return _drawn(found.counts, found.edges, [told, *numbers.split("; ")])


def of_stats(found: Stats, nbytes: int) -> Content:
    """Of all elements; ``nbytes``: of the tensor."""
    lines = [f"histogram of all {found.count:,} elements ({human_bytes(nbytes)})"]
    if found.finite:
        lines.append(f"min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}, std {found.std:.4g}")
        lines.append(f"absmax {found.absmax:.4g}, L1 norm {found.l1:.4g}, L2 norm {found.l2:.4g}")
    lines.append(f"{found.zeros:,} zeros, {found.nan:,} NaN, {found.posinf:,} +Inf, {found.neginf:,} -Inf")
    histogram = found.histogram
    edges, counts = (histogram.edges, histogram.counts) if histogram and found.finite else ((), ())
    return _drawn(counts, edges, lines)


def _drawn(counts: Sequence[int], edges: Sequence[float], lines: Sequence[str]) -> Content:
    text = [Content(line) for line in lines]
    if not counts:
        return Content("\n").join([*text, Content(""), Content("there are no finite elements")])
    top = max(counts)
    heights = [-(-8 * _HEIGHT * n // top) for n in counts]
    rows = ["".join(_BLOCKS[min(8, max(0, h - 8 * y))] for h in heights) for y in reversed(range(_HEIGHT))]
    low, high = f"{edges[0]:.4g}", f"{edges[-1]:.4g}"
    axis = low + high.rjust(max(len(high) + 1, len(counts) - len(low)))
    rows = [f"{row} {top:,}" if n == 0 else row for n, row in enumerate(rows)]
    return Content("\n").join([*text, Content(""), *(Content.styled(r, "$text-primary") for r in rows), Content(axis)])
