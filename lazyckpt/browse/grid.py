"""The widget that shows a window of a tensor's elements, and moves it."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from ..tensor import LazyTensor
from .sheet import Window, cell_width, extent, label_width, window


class Grid(Widget, can_focus=True):
    """Asks for windows (`Wanted`) as it is moved, and shows what it is given."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1, 0)", "up", show=False),
        Binding("down", "move(1, 0)", "down", show=False),
        Binding("left", "move(0, -1)", "left", show=False),
        Binding("right", "move(0, 1)", "right", show=False),
        Binding("pageup", "page(-1, 0)", "page up", show=False),
        Binding("pagedown,space", "page(1, 0)", "page down", show=False),
        Binding("shift+left,less_than_sign", "page(0, -1)", "page left", show=False),
        Binding("shift+right,greater_than_sign", "page(0, 1)", "page right", show=False),
        Binding("home", "edge(False)", "top", show=False),
        Binding("end", "edge(True)", "bottom", show=False),
    ]

    class Wanted(Message):
        """The window has moved: what it shows has to be read."""

    def __init__(self) -> None:
        super().__init__(id="grid")
        self.tensor: LazyTensor | None = None
        self.window: Window | None = None
        self.row = self.col = 0

    def show(self, t: LazyTensor | None) -> None:
        """Of another tensor, from its first element on; None: of none."""
        self.tensor, self.window, self.row, self.col, self.at_end = t, None, 0, 0, False
        self.refresh()
        if t is not None:
            self.post_message(self.Wanted())

    @property
    def room(self) -> tuple[int, int]:
        """(rows, columns) that fit."""
        assert self.tensor is not None  # asked only when there is one
        width = self.size.width - label_width(self.tensor)
        columns = max(1, width // (cell_width(self.tensor) + 1))
        return max(1, self.size.height - 1), min(8, columns) if self.tensor.ndim < 2 else columns

    def read(self) -> Window:
        """What it has to show, from the files."""
        assert self.tensor is not None  # asked only when there is one
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
            if self.at_end:  # the last row stays in sight
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
