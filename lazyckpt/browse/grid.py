"""The widget that shows a movable window of a tensor's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from ..lazy import LazyArray
from ..show.values import as_numbers
from .background import Check

# -- A window of the elements of a tensor, as rows and columns of text. Only the window is read.

_MOST = 20_000  # maximum number of elements of a window, whatever the terminal's size


@dataclass(frozen=True, slots=True)
class Window:
    """The text of a window: the labels of its rows, the heads of its columns, its cells, and the indices of its first
    and last elements."""

    labels: tuple[str, ...]
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def cell_width(t: LazyArray) -> int:
    """Return the width of a column: the number of characters of the widest value of the dtype."""
    if t.dtype.is_complex:
        return 23
    if t.dtype.is_floating_point:
        return 10
    return {1: 5, 2: 6, 4: 11}.get(t.itemsize, 20)


def extent(t: LazyArray, width: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of the whole tensor; a vector is wrapped at ``width`` columns."""
    if t.ndim < 2:
        return -(-t.numel() // width), min(width, t.numel())
    return prod(t.shape[:-1]), t.shape[-1]


def label_width(t: LazyArray) -> int:
    """Return the number of characters of a row's label."""
    return sum(len(str(n)) + 1 for n in (t.shape if t.ndim < 2 else t.shape[:-1])) or 1


def window(t: LazyArray, row: int, col: int, height: int, width: int) -> Window:
    """Read at most ``height`` rows and ``width`` columns from (``row``, ``col``) on. Raises the errors of reading."""
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


def _line(t: LazyArray, row: int, height: int, width: int) -> Window:
    if t.ndim == 0:
        return Window(("",), ("",), ((_text(as_numbers(t[...])[()]),),), (), ())
    start, stop = row * width, min(t.numel(), (row + height) * width)
    texts = list(map(_text, as_numbers(t[start:stop])))
    cells = tuple(tuple(texts[n : n + width]) for n in range(0, len(texts), width))
    labels = tuple(str(start + n * width) for n in range(len(cells)))
    return Window(labels, tuple(f"+{n}" for n in range(len(cells[0]))), cells, (start,), (stop - 1,))


def _lead(t: LazyArray, row: int) -> tuple[Sequence[int], int]:
    """Return the leading indices of a row and its index along the second to last dimension."""
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


# -- The widget that shows a movable window of a tensor's elements.


class Grid(Widget, can_focus=True):
    """A view of a window of elements. It posts `Wanted` when the window moves; the application sets ``window``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1, 0)", "up", show=False),
        Binding("down,j", "move(1, 0)", "down", show=False),
        Binding("left,h", "move(0, -1)", "left", show=False),
        Binding("right,l", "move(0, 1)", "right", show=False),
        Binding("pageup", "page(-1, 0)", "page up", show=False),
        Binding("pagedown,space", "page(1, 0)", "page down", show=False),
        Binding("shift+left,less_than_sign", "page(0, -1)", "page left", show=False),
        Binding("shift+right,greater_than_sign", "page(0, 1)", "page right", show=False),
        Binding("home,g", "edge(False)", "top", show=False),
        Binding("end,G", "edge(True)", "bottom", show=False),
    ]

    class Wanted(Message):
        """The window has moved and has to be read."""

    def __init__(self) -> None:
        super().__init__(id="grid")
        self.tensor: LazyArray | None = None
        self.window: Window | None = None
        self.row = self.col = 0

    def show(self, t: LazyArray | None) -> None:
        """Show another tensor from its first element on, or nothing if it is None."""
        self.tensor, self.window, self.row, self.col, self.at_end = t, None, 0, 0, False
        self.refresh()
        if t is not None:
            self.post_message(self.Wanted())

    @property
    def room(self) -> tuple[int, int]:
        """The numbers of rows and columns that fit."""
        assert self.tensor is not None  # the callers check it
        width = self.size.width - label_width(self.tensor)
        columns = max(1, width // (cell_width(self.tensor) + 1))
        return max(1, self.size.height - 1), min(8, columns) if self.tensor.ndim < 2 else columns

    def read(self, check: Check) -> Window:
        """Read the current window from the files."""
        assert self.tensor is not None  # the callers check it
        return window(self.tensor, self.row, self.col, *self.room)

    def action_move(self, rows: int, cols: int) -> None:
        self._go(self.row + rows, self.col + cols)

    def action_page(self, rows: int, cols: int) -> None:
        if self.tensor is not None:
            height, width = self.room
            self._go(self.row + rows * height, self.col + cols * width)

    def action_edge(self, end: bool) -> None:
        self._go(1 << 62 if end else 0, self.col if end else 0)

    def _go(self, row: int, col: int) -> None:
        if self.tensor is None:
            return
        height, width = self.room
        rows, cols = extent(self.tensor, width)
        self.at_end = row >= rows - height > 0
        row, col = max(0, min(row, rows - height)), max(0, min(col, cols - width))
        if (row, col) != (self.row, self.col):
            self.row, self.col = row, col
            self.post_message(self.Wanted())

    def on_resize(self) -> None:
        if self.tensor is not None:
            if self.at_end:  # keep the last row visible
                self._go(1 << 62, self.col)
            self.post_message(self.Wanted())

    def render(self) -> Content:
        t, shown = self.tensor, self.window
        if t is None or shown is None:
            return Content("")
        if not shown.cells:
            return Content("it has no elements")
        cell, label = cell_width(t), label_width(t)
        heads = "".join(f" {head:>{cell}}" for head in shown.heads)
        lines = [Content.styled(" " * label + heads, "$text-accent")]
        for name, cells in zip(shown.labels, shown.cells, strict=True):
            values = "".join(f" {value:>{cell}}" for value in cells)
            lines.append(Content.assemble((f"{name:>{label}}", "$text-accent"), values))
        return Content("\n").join(lines)
