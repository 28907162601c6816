"""The heat map of a tensor in half blocks, with zoom and pan. At most some MiB of what is shown are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, MouseDown, MouseMove, MouseScrollDown, MouseScrollUp, MouseUp
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ..core.units import human_bytes
from ..lazy import LazyArray
from .pooling import Box, How, Pooled, matrix_shape, pooled

_LEAST = 4  # rows or columns of the closest view
_GUTTER = 1  # columns between the labels and the picture

# Colours that people with any colour vision tell apart: blue and orange for signs, and viridis for sizes (matplotlib's
# table at even places). The middle of signed values is the background, so that zeros recede.
_NEGATIVE = {True: ((58, 142, 220), (150, 205, 255)), False: ((70, 140, 210), (8, 64, 130))}
_POSITIVE = {True: ((222, 122, 34), (255, 205, 120)), False: ((222, 130, 50), (140, 56, 4))}
_SIZES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_ODD = (255, 0, 170)

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A pooled part of a tensor and the number that has the strongest colour."""

    part: Pooled
    how: How
    most: float

    @property
    def rows(self) -> int:
        return len(self.part.values)


def picture(t: LazyArray, rows: int, cols: int, how: How, box: Box | None) -> Picture:
    """Read a part of a tensor for ``rows`` x ``cols`` cells. Raises what reading raises."""
    part = pooled(t, rows, cols, how, box)
    sizes = np.abs(part.values[np.isfinite(part.values)])
    # a single outlier would leave all the rest without colour
    most = float(np.quantile(sizes, 0.995)) if sizes.size else 0.0
    return Picture(part, how, most or (float(sizes.max()) if sizes.size else 0.0))


def colours(shown: Picture, dark: bool, back: Colour) -> np.ndarray[Any, Any]:
    """Return the colours of the cells, as an array of uint8 of shape (rows, columns, 3)."""
    values = shown.part.values
    with np.errstate(invalid="ignore"):
        scaled = np.clip(np.nan_to_num(values / shown.most if shown.most else values * 0), -1, 1)
    if shown.how == "absmax":
        found = _ramp(np.abs(scaled), _SIZES)
    else:
        found = np.where(
            scaled[..., None] < 0, _ramp(-scaled, (back, *_NEGATIVE[dark])), _ramp(scaled, (back, *_POSITIVE[dark]))
        )
    found[np.isnan(values)] = back
    found[shown.part.odd] = _ODD
    return found.astype(np.uint8)


def _ramp(at: np.ndarray[Any, Any], stops: tuple[Colour, ...]) -> np.ndarray[Any, Any]:
    """Return colours between stops that are evenly spaced from 0 to 1."""
    places = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(at, places, [stop[c] for stop in stops]) for c in range(3)], axis=-1)


def legend(shown: Picture, whole: tuple[int, int], unit: str) -> str:
    """Return what a picture shows, as text."""
    part = shown.part
    top, bottom, left, right = part.box
    cell = (-(-(bottom - top) // max(1, shown.rows)), -(-(right - left) // max(1, part.values.shape[1])))
    of = "each cell is an element" if cell == (1, 1) else f"{_HOW[shown.how]} of {cell[0]:,} x {cell[1]:,}"
    read = f"{human_bytes(part.nbytes)} read" + (f", a sample: 1 of {part.every:,} {unit}" if part.every > 1 else "")
    zoom = (
        ""
        if (top, left, bottom, right) == (0, 0, *whole)
        else f"{unit} {top:,}-{bottom - 1:,}, columns {left:,}-{right - 1:,}  "
    )
    return f"{zoom}{of}  {read}"


_HOW: dict[How, str] = {"mean": "mean", "absmax": "largest"}


class Heat(Widget, can_focus=True):
    """A heat map. It posts `Wanted` when another part has to be read; the application sets ``shown``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom in", key_display="+"),
        Binding("minus", "zoom(2)", "Zoom out", key_display="-"),
        Binding("0", "whole", "Whole"),
        Binding("up,k", "pan(-1, 0)", "Pan", key_display="↑↓←→"),
        Binding("down,j", "pan(1, 0)", "down", show=False),
        Binding("left,h", "pan(0, -1)", "left", show=False),
        Binding("right,l", "pan(0, 1)", "right", show=False),
        Binding("a", "pool", "Mean/largest"),
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
        self.how: How = "mean"
        self.box: Box | None = None
        self.shown: Picture | None = None
        self._held: tuple[int, int, Box] | None = None
        self._lines: tuple[object, list[Strip]] | None = None

    def show(self, t: LazyArray | None) -> None:
        """Show another tensor as a whole, or nothing."""
        self.tensor, self.box, self.shown = t, None, None
        self.refresh()

    def have(self, found: Picture | None) -> None:
        self.shown = found
        self.refresh()

    @property
    def whole(self) -> tuple[int, int]:
        return (0, 0) if self.tensor is None else matrix_shape(self.tensor)

    @property
    def unit(self) -> str:
        return "rows"

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

    def read(self) -> Picture | None:
        """Read the part that is shown. Raises the errors of reading."""
        t = self.tensor
        if t is None or not all(self.whole):
            return None
        return picture(t, *self.room, self.how, self.box)

    # -- zoom and pan

    def action_pool(self) -> None:
        self.how = "absmax" if self.how == "mean" else "mean"
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
        if not (0 <= n < shown.rows and 0 <= m < shown.part.values.shape[1]):
            return ""
        top, bottom, left, right = shown.part.box
        rows = np.linspace(top, bottom, shown.rows + 1).astype(int)
        cols = np.linspace(left, right, shown.part.values.shape[1] + 1).astype(int)
        value = float(shown.part.values[n, m])
        place = ", ".join(
            f"{a:,}" if b == a + 1 else f"{a:,}:{b:,}" for a, b in ((rows[n], rows[n + 1]), (cols[m], cols[m + 1]))
        )
        odd = ", with NaN or infinities" if shown.part.odd[n, m] else ""
        return f"[{place}] {_HOW[shown.how]} {value:.4g}{odd}"

    # -- drawing

    def _stretch(self, shown: Picture) -> tuple[int, int]:
        """Return how many columns and half lines a cell takes: more than one if the part is smaller than the room."""
        rows, cols = self.room
        return max(1, cols // shown.part.values.shape[1]), max(1, rows // shown.rows)

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
        cells = colours(shown, self.app.current_theme.dark, (back.red, back.green, back.blue))
        across, down = self._stretch(shown)
        cells = cells.repeat(across, axis=1).repeat(down, axis=0)
        if len(cells) % 2:
            cells = np.concatenate([cells, np.broadcast_to(np.array(tuple(back), np.uint8), (1, *cells.shape[1:]))])
        top, bottom, left, right = shown.part.box
        muted = base + Style(dim=True)
        width = self._labels
        marks = {0: f"{top:,}", len(cells) // 2 - 1: f"{bottom - 1:,}"} if len(cells) > 2 else {0: f"{top:,}"}
        strips = []
        for n in range(len(cells) // 2):
            label = Segment(f"{marks.get(n, ''):>{width - _GUTTER}}" + " " * _GUTTER, muted)
            strips.append(
                Strip([label, *_half_blocks(cells[2 * n], cells[2 * n + 1])]).extend_cell_length(self.size.width, base)
            )
        low, high = f"{left:,}", f"{right - 1:,}"
        gap = max(1, cells.shape[1] - len(low) - len(high))
        strips.append(
            Strip([Segment(" " * width + low + " " * gap + high, muted)]).extend_cell_length(self.size.width, base)
        )
        return strips


def _half_blocks(upper: np.ndarray[Any, Any], lower: np.ndarray[Any, Any]) -> list[Segment]:
    """Return a line of two rows of cells; neighbours of the same colours are one segment."""
    both = np.concatenate([upper, lower], axis=1)
    starts = np.flatnonzero(np.r_[True, (both[1:] != both[:-1]).any(axis=1)]).tolist()
    found = []
    for a, b in zip(starts, [*starts[1:], len(both)], strict=True):
        r, g, blue, r2, g2, blue2 = both[a].tolist()
        style = Style(color=Color.from_rgb(r, g, blue), bgcolor=Color.from_rgb(r2, g2, blue2))
        found.append(Segment("▀" * (b - a), style))
    return found
