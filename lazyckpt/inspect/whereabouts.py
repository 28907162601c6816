"""Where the bytes of a tensor lie: which ranges of which files reading it takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..core.extents import Extent, Hole
from ..errors import LazyckptError
from ..io.reading.gather import plan, ranges
from ..lazy import LazyArray


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file that holds elements of a tensor."""

    path: str
    """The file."""
    offset: int | None
    """Where it starts, in bytes; None if that is known only when the file is read."""
    nbytes: int
    """How many of the tensor's bytes it has; those of packed elements as they are unpacked."""
    runs: int
    """How many separate runs of bytes they are."""
    packed: str = ""
    """What packs the elements, if something does; ``offset`` then counts from the start of its unpacked bytes."""
    missing: str = ""
    """Why the bytes cannot be read; "" if they can."""


def ranges_of(t: LazyArray, most: int = 2000) -> tuple[list[Range], int]:
    """Return the ranges that reading a tensor takes, in the order of its elements. Reads no elements.

    Parameters
    ----------
    t
        The tensor.
    most
        How many ranges to list at most.

    Returns
    -------
    tuple of list of Range and int
        The first ranges, and the number of all.
    """
    found: list[Range] = []
    total = 0
    for one, selection in t._needed(t._sel):
        try:
            copies = plan(one.store, one.spec, selection.reads().want)
        except LazyckptError as e:  # a part of it is missing: say which files have the others
            held = _fragments(one, str(e))
        else:
            held = [
                Range(path, start, length * count, count, "" if copy.extent.within is None else str(copy.extent.within))
                for copy, (path, start, length, count, _) in ranges(one.store, copies[: most + 1])
            ]
            total += max(0, len(copies) - len(held))
        total += len(held)
        found += held[: max(0, most - len(found))]
    return found, total


def _fragments(t: LazyArray, why: str) -> list[Range]:
    """Return what each fragment has of a tensor of which a part cannot be read."""
    found = []
    for fragment in t.fragments:
        extent, span = fragment.extent, fragment.span
        offset = extent.offset if isinstance(extent, Extent) else None
        count = prod(fragment.local_shape) if span is None else span[1] - span[0]
        missing = (extent.reason or why) if isinstance(extent, Hole) else ""
        found.append(Range(extent.path, offset, count * t.itemsize, 1, "", missing))
    return found
