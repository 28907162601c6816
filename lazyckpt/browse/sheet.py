"""A window of the elements of a tensor, as rows and columns of text. Only the window is read.

The rows are the tensor's last dimension but one, those of all leading indices one after the other; a vector is broken
into lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..show.values import as_numbers
from ..tensor import LazyTensor

_MOST = 20_000  # elements of a window, whatever the terminal's size


@dataclass(frozen=True, slots=True)
class Window:
    """``labels`` of the rows, ``heads`` of the columns, ``cells``: what is in them; ``first``, ``last``: the index of
    the first element and of the last."""

    labels: tuple[str, ...]
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def cell_width(t: LazyTensor) -> int:
    """Characters of a column: as many as the widest value of its dtype has."""
    if t.dtype.is_complex:
        return 23
    if t.dtype.is_floating_point:
        return 10
    return {1: 5, 2: 6, 4: 11}.get(t.itemsize, 20)


def extent(t: LazyTensor, width: int) -> tuple[int, int]:
    """(rows, columns) of all of it; ``width``: columns that a line of a vector has."""
    if t.ndim < 2:
        return -(-t.numel() // width), min(width, t.numel())
    return prod(t.shape[:-1]), t.shape[-1]


def label_width(t: LazyTensor) -> int:
    """Characters of a row's label."""
    return sum(len(str(n)) + 1 for n in (t.shape if t.ndim < 2 else t.shape[:-1])) or 1


def window(t: LazyTensor, row: int, col: int, height: int, width: int) -> Window:
    """Read so many rows and columns from there on, or as many as there are. Raises what reading raises."""
    height = max(1, min(height, _MOST // max(1, width)))
    if not t.numel():
        return Window((), (), (), (), ())
    if t.ndim < 2:
        return _line(t, row, height, width)
    rows, cols = extent(t, width)
    end, right = min(rows, row + height), min(cols, col + width)
    labels, cells, at = [], [], row
    while at < end:
        lead, inner = _lead(t, at)
        stop = min(t.shape[-2], inner + end - at)
        array = as_numbers(t[(*lead, slice(inner, stop), slice(col, right))])
        labels += [",".join(map(str, (*lead, n))) for n in range(inner, stop)]
        cells += [tuple(map(_text, line)) for line in array]
        at += stop - inner
    (above, first), (below, last) = _lead(t, row), _lead(t, end - 1)
    heads = tuple(map(str, range(col, right)))
    return Window(tuple(labels), heads, tuple(cells), (*above, first, col), (*below, last, right - 1))


def _line(t: LazyTensor, row: int, height: int, width: int) -> Window:
    if t.ndim == 0:
        return Window(("",), ("",), ((_text(as_numbers(t[...])[()]),),), (), ())
    start, stop = row * width, min(t.numel(), (row + height) * width)
    texts = list(map(_text, as_numbers(t[start:stop])))
    cells = tuple(tuple(texts[n : n + width]) for n in range(0, len(texts), width))
    labels = tuple(str(start + n * width) for n in range(len(cells)))
    return Window(labels, tuple(f"+{n}" for n in range(len(cells[0]))), cells, (start,), (stop - 1,))


def _lead(t: LazyTensor, row: int) -> tuple[Sequence[int], int]:
    """(the leading indices, the index along the last dimension but one) of a row."""
    outer, inner = divmod(row, t.shape[-2])
    lead = []
    for n in reversed(t.shape[:-2]):
        outer, at = divmod(outer, n)
        lead.append(at)
    return lead[::-1], inner


def _text(value: Any) -> str:
    if isinstance(value, np.complexfloating):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.4g}" if isinstance(value, np.floating) else str(value)
