"""Statistics as a table, for display and for pandas, polars, JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..core.dtypes import FROM_NAME
from ..core.names import shortened
from ..lazy import LazyArray
from .moments import Moments, merged
from .rows import Rows, aligned, printed

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of elements in bins. NaN, infinities and elements outside the edges are not counted.

    Attributes
    ----------
    edges
        The edges of the bins, ascending; one more than there are bins.
    counts
        ``counts[i]`` elements are at least ``edges[i]`` and less than ``edges[i + 1]``. The last bin also has elements
        equal to its end.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def bars(self) -> str:
        """A character for each bin, as high as its count. Only an empty bin is blank.

        >>> Histogram((0.0, 1.0, 2.0, 3.0, 4.0), (0, 1, 100, 50)).bars
        ' ▁█▄'
        """
        most = max(self.counts, default=0) or 1
        return "".join(_BLOCKS[-(-8 * n // most)] if n * 8 < most else _BLOCKS[8 * n // most] for n in self.counts)

    def __str__(self) -> str:
        return f"{_number(self.edges[0])} |{self.bars}| {_number(self.edges[-1])}"


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """The statistics of one tensor: a row of a `Table`.

    All numbers but the counts are those of the finite elements, computed in float64. For complex tensors they are those
    of the absolute values. 64-bit integers above 2**53 are rounded to float64.

    Attributes
    ----------
    name
        The tensor's name.
    dtype
        The dtype by torch's name ("bfloat16"); "" for a total of several tensors.
    shape
        The tensor's shape.
    count
        The number of elements.
    nan, posinf, neginf, zeros
        The numbers of elements that are NaN, +Inf, -Inf and 0.
    mean, std, min, max
        Mean, standard deviation of the population (divided by the number of elements), smallest and largest element;
        NaN if no element is finite.
    absmax
        The largest absolute value; NaN if no element is finite.
    l1, l2
        The sum of absolute values, and the root of the sum of squares.
    histogram
        The histogram, if ``bins`` was given.
    error
        Why the tensor cannot be read. All numbers but ``count`` are None then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zeros: int | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    l1: float | None = None
    l2: float | None = None
    histogram: Histogram | None = None
    error: str | None = None

    @property
    def finite(self) -> int:
        """The number of elements that are neither NaN nor infinite; 0 if the tensor cannot be read."""
        return 0 if self.error is not None else self._moments.finite

    def as_dict(self) -> dict[str, Any]:
        """Return the columns as plain objects; the histogram, if any, as ``{"edges": [...], "counts": [...]}``."""
        found = {f.name: getattr(self, f.name) for f in fields(self)} | {"shape": list(self.shape)}
        if self.histogram is None:
            del found["histogram"]
        else:
            found["histogram"] = {"edges": list(self.histogram.edges), "counts": list(self.histogram.counts)}
        return found

    @property
    def _moments(self) -> Moments:
        tallies = (self.count, self.nan or 0, self.posinf or 0, self.neginf or 0, self.zeros or 0)
        whole = Moments(*tallies)
        if not whole.finite or self.mean is None or self.std is None:
            return whole
        return Moments.of_std(tallies, self.mean, self.std, self.l1 or 0.0, _plain(self.min), _plain(self.max))

    def __repr__(self) -> str:
        kind = f" {_short(self.dtype)}" if self.dtype else ""
        head = f"{printed(self.name)}:{kind} {list(self.shape)}, {self.count:,} elements"
        if self.error is not None:
            return f"{head}\n  cannot be read: {self.error}"
        lines = [
            f"mean {_number(self.mean)}, std {_number(self.std)}",
            f"min {_number(self.min)}, max {_number(self.max)}, absmax {_number(self.absmax)}",
            f"L1 norm {_number(self.l1)}, L2 norm {_number(self.l2)}",
            f"{self.zeros:,} zeros, {self.nan:,} NaN, {self.posinf:,} +Inf, {self.neginf:,} -Inf",
        ]
        if self.histogram is not None:
            lines.append(str(self.histogram))
        return "\n  ".join([head, *lines])


def row(
    name: str, tensor: LazyArray, m: Moments | None, histogram: Histogram | None, error: str | None = None
) -> Stats:
    """Return the row of a tensor; ``m`` is None if it cannot be read."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _filled(name, dtype, tuple(tensor.shape), tensor.numel(), m, histogram, error)


def _filled(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    count: int,
    m: Moments | None,
    histogram: Histogram | None,
    error: str | None,
) -> Stats:
    if m is None:
        return Stats(name, dtype, shape, count, histogram=histogram, error=error)
    n = m.finite
    return Stats(
        name,
        dtype,
        shape,
        count,
        m.nan,
        m.posinf,
        m.neginf,
        m.zeros,
        m.mean if n else math.nan,
        m.std,
        m.low if n else math.nan,
        m.high if n else math.nan,
        max(abs(m.low), abs(m.high)) if n else math.nan,
        m.l1,
        m.l2,
        histogram,
        error,
    )


class Table(Rows[Stats]):
    """The statistics of several tensors: a sequence of `Stats`.

    ``table[0]`` and ``table["name"]`` are rows, ``table[1:]`` is a table; an unknown name raises TensorNotFoundError (a
    KeyError). ``pandas.DataFrame(table)`` and ``polars.DataFrame(table)`` have the columns of `Stats`.

    Parameters
    ----------
    rows
        The rows.
    """

    __slots__ = ()

    @property
    def total(self) -> Stats:
        """The statistics of all readable tensors together, named "total", of shape (count,). The histogram is the sum
        if all have the same edges. ``error`` says how many tensors could not be read."""
        good = [one for one in self._rows if one.error is None]
        m = merged(one._moments for one in good)
        histograms = [one.histogram for one in good]
        edges = {h.edges for h in histograms if h is not None}
        histogram = None
        if len(edges) == 1 and None not in histograms:
            histogram = Histogram(edges.pop(), tuple(map(sum, zip(*(h.counts for h in histograms if h is not None)))))
        bad = len(self) - len(good)
        error = f"{bad:,} of {len(self):,} tensors could not be read" if bad else None
        return _filled("total", "", (m.count,), m.count, m, histogram, error)

    def lines(self, limit: int | None = None) -> list[tuple[str, ...]]:
        """Return header, rows and total as text, padded to columns, without ``absmax`` and ``l1``.

        Parameters
        ----------
        limit
            Show only the first and last rows if there are more than this number.

        Returns
        -------
        list of tuple of str
            A tuple of cells for each line. The line of a tensor that cannot be read has four cells, with the reason in
            the last one.
        """
        drawn = any(one.histogram for one in self._rows)
        return _lines(self._shown(limit, lambda one: _cells(one, drawn)), self, drawn)

    @property
    def _has_total(self) -> bool:
        return len(self) > 1

    def _inside(self, title: str, cell: str) -> str:
        text = super()._inside(title, cell)
        if title == "histogram":  # empty bins are spaces as wide as bars; HTML would collapse them
            return f"<code>{text.replace(' ', '&nbsp;')}</code>"
        return f"<code>{text}</code>" if title == "name" else text

    def _css(self, title: str, cell: str) -> str:
        return "l" if title in _LEFT else "bad" if is_odd(title, cell) else ""


def lines_of(rows: Sequence[Stats], table: Table, column: str | None = None) -> list[tuple[str, ...]]:
    """Return rows as `Table.lines` does, with the total of a table.

    Parameters
    ----------
    rows
        The rows, perhaps `pooled` ones of the table.
    table
        What the total is of.
    column
        A column of `Stats` that is to be there as well.
    """
    drawn = any(one.histogram for one in rows)
    more = column if column in _MORE else None
    return _lines([_cells(one, drawn, more) for one in rows], table, drawn, more)


def pooled(name: str, rows: Sequence[Stats]) -> Stats:
    """Return the statistics of the elements of readable tensors of one dtype and shape as one row, without a
    histogram."""
    m = merged(one._moments for one in rows)
    return _filled(name, rows[0].dtype, rows[0].shape, m.count, m, None, None)


def _lines(
    shown: Sequence[tuple[str, ...]], table: Table, drawn: bool, more: str | None = None
) -> list[tuple[str, ...]]:
    head = _HEAD if more is None else (*_HEAD[:_NUMBERS], _MORE[more], *_HEAD[_NUMBERS:])
    lines = [(*head, "histogram") if drawn else head, *shown]
    if len(table) > 1:
        lines.append(_cells(table.total, drawn, more))
    return aligned(lines, _LEFT)


_HEAD = ("name", "dtype", "shape", "mean", "std", "min", "max", "L2 norm", "zeros", "NaN", "Inf")
_LEFT = ("name", "dtype", "shape", "histogram")
_NUMBERS = _HEAD.index("L2 norm")  # where the column goes that is printed only if it is asked for
_MORE = {"count": "elements", "absmax": "absmax", "l1": "L1 norm", "posinf": "+Inf", "neginf": "-Inf"}


def is_odd(title: str, cell: str) -> bool:
    """Return whether a cell of a table says that a tensor has NaN or infinite elements."""
    return title.strip() in ("NaN", "Inf", "+Inf", "-Inf") and cell.strip() not in ("", "0")


def _cells(one: Stats, drawn: bool, more: str | None = None) -> tuple[str, ...]:
    kind = (printed(one.name), _short(one.dtype), shortened(str(list(one.shape))) if one.dtype else "")
    if one.mean is None:
        return (*kind, f"cannot be read: {one.error}")
    if one.error is not None:  # the total, if some tensors could not be read
        kind = (f"{kind[0]} ({one.error})", *kind[1:])
    extra = [] if more is None else [getattr(one, more)]
    numbers = (one.mean, one.std, one.min, one.max, *extra, one.l2)
    tallies = (one.zeros or 0, one.nan or 0, (one.posinf or 0) + (one.neginf or 0))
    cells = (*kind, *map(_number, numbers), *(f"{n:,}" for n in tallies))
    return (*cells, str(one.histogram or "")) if drawn else cells


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def _plain(x: float | None) -> float:
    return math.nan if x is None else x


def _short(dtype: str) -> str:
    return FROM_NAME[dtype].short if dtype else ""
