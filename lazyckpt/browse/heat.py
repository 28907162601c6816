"""The heat map of a tensor in half blocks, with zoom, pan and the choice of dimensions."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from math import prod
from typing import ClassVar

import numpy as np
from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, MouseDown, MouseMove, MouseScrollDown, MouseScrollUp, MouseUp
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ..errors import DataError
from ..lazy import LazyArray
from .background import Check
from .picture import HOW, Box, Drawn, Picture, colours, drawn, half_blocks, numbers_of, picture

_LEAST = 4  # rows or columns of the closest view
_GUTTER = 1  # columns between the labels and the picture


class Heat(Widget, can_focus=True):
    """A heat map. It posts `Wanted` when another part has to be read; the application sets ``shown``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom", key_display="+ -"),
        Binding("minus", "zoom(2)", "Zoom out", show=False),
        Binding("0", "whole", "Whole", show=False),
        Binding("up,k", "pan(-1, 0)", "Pan", key_display="↑↓←→"),
        Binding("down,j", "pan(1, 0)", "down", show=False),
        Binding("left,h", "pan(0, -1)", "left", show=False),
        Binding("right,l", "pan(0, 1)", "right", show=False),
        Binding("a", "pool", "Mean/largest"),
        Binding("less_than_sign,comma", "index(-1)", "index", show=False),
        Binding("greater_than_sign,full_stop", "index(1)", "index", show=False),
        Binding("X", "dims", "Dimensions", key_display="X < >"),
    ]

    class Wanted(Message):
        """Another part has to be read."""

    class Pointed(Message):
        """The mouse is over a cell, or over none."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(id="heat")
        self.tensor: LazyArray | None = None
        self.how = "mean"
        self.of: Drawn | None = None
        self.dims: tuple[int, int] | None = None  # of rows and columns
        self.index = -1  # of the other dimensions
        self.box: Box | None = None
        self.shown: Picture | None = None
        self.fresh = False  # whether what is shown is of the tensor
        self._held: tuple[int, int, Box] | None = None
        self._lines: tuple[object, list[Strip]] | None = None

    def show(self, t: LazyArray | None, same: bool = False) -> None:
        """Show another tensor as a whole, or nothing. With ``same``, it is the same tensor of another step or side: the
        same part is shown, and until it is read the picture stays."""
        before, whole = self.tensor, self.whole
        self.tensor, self.fresh = t, False
        if not (same and t is not None and before is not None and t.shape == before.shape):
            self.dims, self.index, self.box, self.shown = None, -1, None, None
        self._draw()
        if self.whole != whole:
            self.box = None
        self.refresh()

    def _draw(self) -> None:
        self.of = None
        if self.tensor is not None:
            with suppress(DataError):  # no numbers: `read` raises it
                self.of = drawn(self.tensor, self.dims, self.index)

    def have(self, found: Picture | None) -> None:
        self.shown, self.fresh = found, found is not None
        self.refresh()

    @property
    def whole(self) -> tuple[int, int]:
        return (0, 0) if self.of is None else (self.of.plane.height, self.of.plane.width)

    @property
    def _part(self) -> Box:
        height, width = self.whole
        return self.box or (0, height, 0, width)

    @property
    def _labels(self) -> int:
        return len(f"{self.whole[0]:,}") + _GUTTER

    @property
    def room(self) -> tuple[int, int]:
        """The numbers of rows and columns of cells that fit: two rows to a line."""
        return max(2, 2 * (self.size.height - 1)), max(1, self.size.width - self._labels)

    def read(self, check: Check) -> Picture | None:
        """Read the part that is shown. Raises the errors of reading, and DataError if the elements are no numbers."""
        t = self.tensor
        if t is None:
            return None
        return picture(t, *self.room, self.how, self.box, self.of or drawn(t), check)

    # -- zoom and pan

    def action_pool(self) -> None:
        self.how = "absmax" if self.how == "mean" else "mean"
        self.post_message(self.Wanted())

    def action_index(self, by: int) -> None:
        """Show the next index of the dimensions that are not drawn, or all of them pooled, which comes before 0."""
        t = self.tensor
        if t is None or self.of is None or t.ndim < 3:
            return
        plane, shape = self.of.plane, numbers_of(t)
        count = prod(n for d, n in enumerate(shape) if d not in (plane.row_dim, plane.col_dim))
        index = max(-1, min(self.index + by, count - 1))
        if index != self.index:
            self.index = index
            self._draw()
            self.post_message(self.Wanted())

    def action_dims(self) -> None:
        """Draw another two of the dimensions."""
        t = self.tensor
        if t is None or self.of is None or t.ndim < 3:
            return
        pairs = list(combinations(range(t.ndim), 2))[::-1]
        self.dims = pairs[(pairs.index(self.dims or pairs[0]) + 1) % len(pairs)]
        self.index, self.box = -1, None
        self._draw()
        self.post_message(self.Wanted())

    def action_whole(self) -> None:
        self._go(None)

    def action_zoom(self, factor: float, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Show a part that is larger by a factor; ``at`` is the place that stays where it is."""
        top, bottom, left, right = self._part
        spans = []
        for (low, high), share, most in zip(((top, bottom), (left, right)), at, self.whole, strict=True):
            size = max(min(most, _LEAST), min(most, round((high - low) * factor)))
            start = round(low + (high - low - size) * share)
            start = max(0, min(start, most - size))
            spans += [start, start + size]
        self._go((spans[0], spans[1], spans[2], spans[3]))

    def action_pan(self, rows: int, cols: int) -> None:
        top, bottom, left, right = self._part
        self._move(rows * max(1, (bottom - top) // 4), cols * max(1, (right - left) // 4), self._part)

    def _move(self, rows: int, cols: int, start: Box) -> None:
        top, bottom, left, right = start
        height, width = self.whole
        rows = max(-top, min(rows, height - bottom))
        cols = max(-left, min(cols, width - right))
        self._go((top + rows, bottom + rows, left + cols, right + cols))

    def _go(self, box: Box | None) -> None:
        height, width = self.whole
        if box == (0, height, 0, width):
            box = None
        if box != self.box and self.tensor is not None:
            self.box = box
            self.post_message(self.Wanted())

    def on_resize(self) -> None:
        if self.tensor is not None and self.size.height:
            self.post_message(self.Wanted())

    # -- the mouse

    def _share(self, x: int, y: int) -> tuple[float, float]:
        rows, cols = self.room
        return min(1.0, max(0.0, 2 * y / rows)), min(1.0, max(0.0, (x - self._labels) / cols))

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.action_zoom(0.5, self._share(event.x, event.y))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.action_zoom(2, self._share(event.x, event.y))

    def on_mouse_down(self, event: MouseDown) -> None:
        self._held = event.x, event.y, self._part
        self.capture_mouse()

    def on_mouse_up(self, event: MouseUp) -> None:
        self._held = None
        self.release_mouse()

    def on_click(self, event: Click) -> None:
        if event.chain == 2:
            self.action_zoom(0.5, self._share(event.x, event.y))

    def on_mouse_move(self, event: MouseMove) -> None:
        shown = self.shown
        if self._held is not None:
            x, y, start = self._held
            rows, cols = self.room
            height, width = start[1] - start[0], start[3] - start[2]
            self._move(-round(2 * (event.y - y) * height / rows), -round((event.x - x) * width / cols), start)
        elif shown is not None:
            self.post_message(self.Pointed(self._told(shown, event.x - self._labels, 2 * event.y)))

    def _told(self, shown: Picture, col: int, row: int) -> str:
        """Return what the cell at a place shows, as text."""
        across, down = self._stretch(shown)
        n, m = row // down, col // across
        if not (0 <= n < shown.rows and 0 <= m < shown.cols):
            return ""
        rows, cols = shown.pixels.row_edges.tolist(), shown.pixels.col_edges.tolist()
        place = ", ".join(
            f"{a:,}" if b == a + 1 else f"{a:,}:{b:,}" for a, b in ((rows[n], rows[n + 1]), (cols[m], cols[m + 1]))
        )
        odd = ", with NaN or infinities" if shown.odd[n, m] else ""
        return f"[{place}] {HOW[shown.how]} {float(shown.values[n, m]):.4g}{odd}"

    # -- drawing

    def _stretch(self, shown: Picture) -> tuple[int, int]:
        """Return how many columns and half lines a cell takes: more than one if the part is smaller than the room."""
        rows, cols = self.room
        return max(1, cols // shown.cols), max(1, rows // shown.rows)

    @property
    def _palette(self) -> str:
        few = self.app.console.color_system in ("standard", "windows")
        return "grey" if self.app.no_color else "few" if few else ""

    def on_mouse_leave(self) -> None:
        self.post_message(self.Pointed(""))

    def render_line(self, y: int) -> Strip:
        shown = self.shown
        if shown is None:
            return Strip.blank(self.size.width, self.rich_style)
        key = (id(shown), self.size, self.app.current_theme.name, self.rich_style)
        if self._lines is None or self._lines[0] != key:
            self._lines = key, self._drawn(shown)
        lines = self._lines[1]
        return lines[y] if y < len(lines) else Strip.blank(self.size.width, self.rich_style)

    def _drawn(self, shown: Picture) -> list[Strip]:
        base = self.rich_style
        back = base.bgcolor.get_truecolor() if base.bgcolor is not None else ColorTriplet(0, 0, 0)
        cells = colours(shown, self.app.current_theme.dark, (back.red, back.green, back.blue), self._palette)
        across, down = self._stretch(shown)
        cells = cells.repeat(across, axis=1).repeat(down, axis=0)
        if len(cells) % 2:
            cells = np.concatenate([cells, np.broadcast_to(np.array(tuple(back), np.uint8), (1, *cells.shape[1:]))])
        top, bottom, left, right = shown.box
        muted = base + Style(dim=True)
        width = self._labels
        marks = {0: f"{top:,}", len(cells) // 2 - 1: f"{bottom - 1:,}"} if len(cells) > 2 else {0: f"{top:,}"}
        strips = []
        for n in range(len(cells) // 2):
            label = Segment(f"{marks.get(n, ''):>{width - _GUTTER}}" + " " * _GUTTER, muted)
            strips.append(
                Strip([label, *half_blocks(cells[2 * n], cells[2 * n + 1])]).extend_cell_length(self.size.width, base)
            )
        low, high = f"{left:,}", f"{right - 1:,}"
        gap = max(1, cells.shape[1] - len(low) - len(high))
        strips.append(
            Strip([Segment(" " * width + low + " " * gap + high, muted)]).extend_cell_length(self.size.width, base)
        )
        return strips
