"""A histogram as columns of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from ..inspect.table import Stats
from ..show.sample import Sample
from ..show.text import human_bytes, plural

BINS = 48
_HEIGHT = 8  # lines
_BLOCKS = " ▁▂▃▄▅▆▇█"


def of_sample(found: Sample, width: int) -> Content:
    """Of the elements that were looked at, in at most so many columns."""
    told, numbers = found.lines
    return _drawn(found.counts, found.edges, [told, *numbers.split("; ")], width)


def of_stats(found: Stats, nbytes: int, width: int) -> Content:
    """Of all elements; ``nbytes``: of the tensor."""
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
    together = -(-len(counts) // max(8, width))  # bins that are one column
    counts = [sum(counts[n : n + together]) for n in range(0, len(counts), together)]
    top = max(counts)
    text.append(Content(f"highest column: {plural(top, 'element')}"))
    heights = [-(-8 * _HEIGHT * n // top) for n in counts]
    rows = ["".join(_BLOCKS[min(8, max(0, h - 8 * y))] for h in heights) for y in reversed(range(_HEIGHT))]
    low, high = f"{edges[0]:.4g}", f"{edges[-1]:.4g}"
    axis = low + high.rjust(max(len(high) + 1, len(counts) - len(low)))
    return Content("\n").join([*text, Content(""), *(Content.styled(r, "$text-primary") for r in rows), Content(axis)])
