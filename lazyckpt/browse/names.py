"""The widget of the tree of names: a table whose lines are made when they are shown, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..core.names import shortened
from ..core.units import human_bytes, plural
from ..errors import printable
from ..show.text import kind
from .rows import Row, Rows

_NAME = 20  # least width of the column of names; other columns are left out for it
_READABLE = 40  # dtypes and shapes are left out for names up to this width
_GAP = 2  # spaces between columns

Mark = tuple[str, str]  # text, and the class of its style: "", "good", "warn", "bad"


class Names(ScrollView, can_focus=True):
    """The visible rows of `Rows`, in columns that are aligned.

    ``extra`` returns the cells of the columns of numbers, whose titles are ``heads``; they are empty until something
    is measured."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "names--cursor", "names--away", "names--level", "names--dim", "names--kind", "names--guide", "names--good",
        "names--warn", "names--bad", "names--fold", "names--match",
    }  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "page down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("ctrl+d", "page(0.5)", "half a page down", show=False),
        Binding("ctrl+u", "page(-0.5)", "half a page up", show=False),
        Binding("home,g", "edge(False)", "top", show=False),
        Binding("end,G", "edge(True)", "bottom", show=False),
        Binding("right,l", "open", "open", show=False),
        Binding("left,h", "close", "close", show=False),
        Binding("enter,space", "choose", "Open", key_display="⏎"),
    ]
    cursor: reactive[int] = reactive(0, repaint=False)

    class Moved(Message):
        """The cursor is on another row."""

    class Chosen(Message):
        """A tensor was chosen by Enter or by two clicks."""

    def __init__(self) -> None:
        super().__init__(id="names")
        self.rows: Rows | None = None
        self.heads: tuple[str, ...] = ()
        self.extra: Callable[[Row], tuple[Mark, ...]] = lambda row: ()
        self.found = ""  # the text that is searched for
        self._widths: list[int] = []
        self._need = 0  # columns that the names on the screen need
        self.on_heads: Callable[[], None] = lambda: None

    @property
    def row(self) -> Row | None:
        """The row at the cursor."""
        if self.rows is None or not len(self.rows.visible):
            return None
        return self.rows.visible[min(self.cursor, len(self.rows.visible) - 1)]

    @property
    def columns_wide(self) -> int:
        """Columns of a line, without the scroll bar."""
        return max(0, self.size.width - self.styles.scrollbar_size_vertical)

    def show(self, rows: Rows, cursor: int = 0) -> None:
        """Show other names, or the same ones in another order."""
        self.rows, self._widths, self._need = rows, [], 0
        self._resize()
        self.set_reactive(Names.cursor, cursor)
        self.call_after_refresh(self._keep_visible)
        self.refresh()
        self.post_message(self.Moved())

    def _resize(self) -> None:
        self.virtual_size = Size(self.columns_wide, 0 if self.rows is None else len(self.rows.visible))

    def renumber(self) -> None:
        """Draw the rows again: their numbers have changed."""
        self.refresh()

    def on_resize(self) -> None:
        self._widths, self._need = [], 0
        self._resize()
        self._keep_visible()

    # -- the cursor

    def watch_cursor(self, before: int, now: int) -> None:
        self.refresh()
        self._keep_visible()
        self.post_message(self.Moved())

    def _keep_visible(self) -> None:
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)

    def go(self, n: int) -> None:
        """Put the cursor on a row."""
        self._resize()
        self.refresh()
        if self.rows is not None and len(self.rows.visible):
            self.cursor = max(0, min(n, len(self.rows.visible) - 1))

    def action_move(self, lines: int) -> None:
        self.go(self.cursor + lines)

    def action_page(self, pages: float) -> None:
        self.go(self.cursor + round(pages * max(1, self.size.height - 1)))

    def action_edge(self, end: bool) -> None:
        self.go(1 << 62 if end else 0)

    def action_open(self) -> None:
        """Open the level, or go to its first row."""
        row = self.row
        if row is None or row.leaf:
            return
        if row.opened:
            self.go(self.cursor + 1)
        else:
            self._toggle(row)

    def action_close(self) -> None:
        """Close the level, or go to the row above it."""
        row = self.row
        if row is None or self.rows is None:
            return
        if row.opened:
            self._toggle(row)
        elif row.parent is not None and row.parent.depth >= 0:
            n = self.cursor
            while n > 0 and self.rows.visible[n] is not row.parent:
                n -= 1
            self.go(n)

    def action_choose(self) -> None:
        row = self.row
        if row is not None and row.leaf:
            self.post_message(self.Chosen())
        elif row is not None:
            self._toggle(row)

    def _toggle(self, row: Row) -> None:
        assert self.rows is not None  # a row exists only if they do
        (self.rows.close if row.opened else self.rows.open)(self.cursor)
        self._resize()
        self.refresh()

    def on_click(self, event: Click) -> None:
        row_at = event.y + self.scroll_offset.y
        if self.rows is None or row_at >= len(self.rows.visible):
            return
        self.cursor = row_at
        row = self.rows.visible[row_at]
        if event.chain == 2 or (not row.leaf and 2 * row.depth <= event.x <= 2 * row.depth + 1):
            self.action_choose()

    # -- drawing

    def columns(self) -> list[tuple[str, int]]:
        """Return the titles of the columns right of the names, and their widths."""
        titles = [*self.heads, "dtype", "shape", "size"]
        widths = self._widths or [len(title) for title in titles]
        found = list(zip(titles, widths, strict=True))
        for title in ("shape", "dtype", *reversed(self.heads[1:]), "size"):  # what is left out first
            need = max(_NAME, min(self._need, _READABLE)) if title in ("shape", "dtype") else _NAME
            if sum(width + _GAP for _, width in found) + need <= self.columns_wide:
                break
            found = [one for one in found if one[0] != title]
        return found

    def header(self) -> str:
        """Return the line of titles."""
        found = self.columns()
        rest = "".join(" " * _GAP + (f"{t:>{w}}" if t not in ("dtype", "shape") else f"{t:<{w}}") for t, w in found)
        return f"{'  name':<{max(0, self.columns_wide - len(rest))}}{rest}"

    def title_at(self, x: int) -> str:
        """Return the title of the column at a place of the line of titles."""
        right = self.columns_wide
        for title, width in reversed(self.columns()):
            right -= width + _GAP
            if x >= right:
                return title
        return "name"

    def _measure(self) -> None:
        """Widen the columns for the rows that are on the screen. They never become narrower while one scrolls."""
        titles = [*self.heads, "dtype", "shape", "size"]
        widths = [len(title) for title in titles]
        for n, width in enumerate(self._widths[: len(widths)] if len(self._widths) == len(widths) else ()):
            widths[n] = max(widths[n], width)
        assert self.rows is not None  # it is called when lines are drawn
        top, need = self.scroll_offset.y, self._need
        for row in self.rows.visible[top : top + self.size.height]:
            need = max(need, 2 * row.depth + 2 + sum(map(cell_len, _labelled(row))))
            for n, (text, _) in enumerate(self._cells(row)):
                widths[n] = max(widths[n], len(text))
        if widths != self._widths or need != self._need:
            self._widths, self._need = widths, need
            self.on_heads()

    def _cells(self, row: Row) -> list[Mark]:
        extra = list(self.extra(row))[: len(self.heads)]
        extra += [("", "")] * (len(self.heads) - len(extra))
        spec = row.node.spec if row.leaf else None
        if spec is not None:
            dtype, _, shape = kind(spec).partition(" ")
            size = human_bytes(spec.nbytes) if row.node.counted else "tied"
            return [*extra, (dtype, "kind"), (shape, "kind"), (size, "" if row.node.counted else "dim")]
        return [*extra, (row.dtype, "dim"), (plural(row.tensors, "tensor"), "dim"), (human_bytes(row.nbytes), "")]

    def render_lines(self, crop: Region) -> list[Strip]:
        if self.rows is not None:
            self._measure()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        n = y + self.scroll_offset.y
        width = self.columns_wide
        base = self.rich_style
        if self.rows is None or n >= len(self.rows.visible):
            return Strip.blank(width, base)
        row = self.rows.visible[n]
        here = n == self.cursor
        style = (
            base + self.get_component_rich_style("names--cursor" if self.has_focus else "names--away") if here else base
        )
        shown = self.columns()
        cells = dict(zip([*self.heads, "dtype", "shape", "size"], self._cells(row), strict=True))
        rest = sum(w + _GAP for _, w in shown)
        segments = self._named(row, max(1, width - rest), style, here)
        for title, w in shown:
            text, of = cells[title]
            text = f"{text:<{w}}" if title in ("dtype", "shape") else f"{text:>{w}}"
            segments.append(Segment(" " * _GAP, style))
            segments.append(
                Segment(text, style + self.get_component_rich_style(f"names--{of}", partial=True))
                if of and not here
                else Segment(text, style)
            )
        return Strip(segments).adjust_cell_length(width, style)

    def _named(self, row: Row, width: int, style: Style, here: bool) -> list[Segment]:
        """Return the name of a row, with its guides, in exactly this width."""

        def of(name: str) -> Style:
            if here:  # colours on that of the cursor are not all readable
                return style + Style(underline=True) if name == "match" else style
            return style + self.get_component_rich_style(f"names--{name}", partial=True)

        indent = "│ " * min(row.depth, max(0, (width - 12) // 2))
        mark = "  " if row.leaf else "▾ " if row.opened else "▸ "
        label, note = _labelled(row)
        room = max(1, width - len(indent) - 2)
        if cell_len(label) + len(note) > room:
            note = note if cell_len(label) > room - len(note) and room - len(note) >= 4 else ""
            label = _cut(label, max(1, room - len(note)))
        kind_of = "fold" if row.folded else "level" if not row.leaf else ""
        segments = [Segment(indent, of("guide")), Segment(mark, of("guide"))]
        at = label.lower().find(self.found) if self.found else -1
        whole = of(kind_of) if kind_of else style
        if at < 0:
            segments.append(Segment(label, whole))
        else:
            end = at + len(self.found)
            segments += [Segment(label[:at], whole), Segment(label[at:end], of("match")), Segment(label[end:], whole)]
        segments.append(Segment(note, of("dim")))
        used = sum(segment.cell_length for segment in segments)
        segments.append(Segment(set_cell_size("", max(0, width - used)), style))
        return segments


def _labelled(row: Row) -> tuple[str, str]:
    """Return the text of a row's name, and the note beside it."""
    label = printable(shortened(row.label))
    label = label if label and label == label.strip() else f"'{label}'"  # outer spaces are no indentation
    return label, f"  {len(row.nodes):,} alike" if row.folded else ""


def _cut(text: str, width: int) -> str:
    """Return a text without its middle, so that it fits.

    >>> _cut("post_attention_layernorm", 12)
    'post_a…rnorm'
    """
    if cell_len(text) <= width:
        return text
    end = text[len(text) - (width - 1) // 2 :] if width > 2 else ""
    return set_cell_size(text, max(0, width - 1 - cell_len(end))).rstrip("\0") + "…" + end
