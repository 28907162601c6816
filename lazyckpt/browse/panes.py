"""The right side of the screen: what is known about the row at the cursor, in six panes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from textual.app import App, ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Static, TabbedContent, TabPane

from ..core.select import parse_index
from ..errors import printable
from ..show import differences
from ..show.layout import Drawing, drawing
from ..show.text import kind
from . import detail, fragments, steps
from .background import Background, Check, error_content, error_text
from .grid import Grid
from .heat import Heat
from .histogram import Histogram
from .measures import Measures
from .picture import legend
from .rows import Row
from .subject import Pair, Run, Subject

if TYPE_CHECKING:
    from ..tensor import LazyTensor

TABS = (
    ("about", "About"),
    ("map", "Heat map"),
    ("values", "Values"),
    ("histogram", "Histogram"),
    ("files", "Files"),
    ("changes", "Changes"),
)
_NONE = "choose a tensor: l opens a level, n goes to the next tensor"
_LISTED = 200  # lines of the table of differences below a level


class Known(NamedTuple):
    """What is shown of a row without reading elements; ``tensor`` is None for a level."""

    about: Content
    tensor: LazyTensor | None
    drawing: Drawing | None
    error: Exception | None = None


class Panes(Vertical):
    """The panes. ``changed`` is called when background work starts or ends, ``told`` when the line of Python may be
    another one."""

    def __init__(
        self, app: App[Any], changed: Callable[[], None], told: Callable[[], None], measures: Measures
    ) -> None:
        super().__init__(id="right")
        self._told, self._measures = told, measures
        self.subject: Subject | None = None
        self.row: Row | None = None
        self.side = ""
        self.tensor: LazyTensor | None = None
        self.error: Exception | None = None
        self.text: str | None = None  # the index of the values
        self._drawing: Drawing | None = None
        self._points: list[steps.Point] | None = None
        self._pending, self._changed = False, changed
        self._same = False  # whether the row is that of before, of another step or side
        self.tabs = TabbedContent(id="tabs")
        self.about, self.files, self.changes = (Static(markup=False) for _ in range(3))
        self.index = Input(placeholder="i: an index, as 0:8, ::64", id="index")
        self.told, self.grid = Static(id="told", markup=False), Grid()
        self.heat, self.legend, self.pointed = (
            Heat(),
            Static(id="legend", markup=False),
            Static(id="pointed", markup=False),
        )
        self.bars = Histogram(app, changed)
        self.work = {name: Background(app, changed) for name in ("about", "values", "map", "changes")}

    def compose(self) -> ComposeResult:
        with self.tabs:
            for name, title in TABS:
                with TabPane(title, id=name):
                    if name == "values":
                        yield self.index
                        yield self.told
                        yield self.grid
                    elif name == "map":
                        yield self.legend
                        yield self.heat
                        yield self.pointed
                    else:
                        bodies = {"about": self.about, "files": self.files, "changes": self.changes}
                        with VerticalScroll():
                            yield bodies.get(name, self.bars)

    @property
    def busy(self) -> bool:
        """Whether any background work is running or pending."""
        return self._pending or self.bars.busy or any(one.busy for one in self.work.values())

    @property
    def active(self) -> str:
        return str(self.tabs.active)

    @property
    def columns(self) -> int:
        """Columns of a drawing: the width without padding and scroll bar."""
        return self.tabs.size.width - 4

    # -- the row at the cursor

    def show(self, subject: Subject, row: Row | None, side: str) -> None:
        """Show what is known about a row without reading elements, and read what the open pane shows."""
        self._same = row is not None and self.row is not None and row.key == self.row.key
        self.subject, self.row, self.side = subject, row, side
        self.tensor = self._drawing = self.text = self.error = None
        self._points = None
        for work in self.work.values():
            work.drop()
        self.index.value = ""
        self.grid.show(None)
        self.bars.show(None)
        if not self._same:
            self.heat.show(None)
        self._tell(_NONE)
        for static in (self.files, self.changes, self.legend):
            if not (static is self.legend and self._same):
                static.update(Content.styled("reading…" if row is not None and row.leaf else _NONE, "$text-muted"))
        self.pointed.update("")
        self._told()
        if row is None:
            self.about.update(Content.styled("there are no tensors", "$text-muted"))
            return
        self._pending = True
        self.work["about"].ask(lambda check: self._known(subject, row, side), self._have, self._failed)

    def _failed(self, error: Exception) -> None:
        self._pending = False
        self._changed()
        self.about.update(error_content(error))

    def _known(self, subject: Subject, row: Row, side: str) -> Known:
        if not row.leaf:
            states = [s for s in subject.states[:-1] if _has(subject, s, row)]
            return Known(detail.drawn(detail.of_level(row, subject.view, subject.problems, states)), None, None)
        t: LazyTensor | None = None
        error: Exception | None = None
        try:
            t = subject.tensor(row.start, side)
        except Exception as e:  # a difference of tensors that cannot be subtracted
            error = e
        if isinstance(subject, Pair):
            found = self._number(row)
            about = detail.of_pair(row.start, subject.both(row.start), found)
        else:
            about = detail.of_tensor(subject.view, row.start)
        shown = None
        if t is not None and t.numel() and side != Pair.sides[0]:
            shown = drawing(t)
        return Known(detail.drawn(about), t, shown, error)

    def _have(self, found: Known) -> None:
        self._pending = False
        self._changed()
        self.about.update(found.about)
        self.tensor, self._drawing, self.error = found.tensor, found.drawing, found.error
        t = self.tensor
        if t is not None:
            self._tell(f"⏎ reads values of {kind(t)}")
        self.bars.show(t)
        self.heat.show(t, self._same)
        self._draw_files()
        self._told()
        self.read()

    def _number(self, row: Row) -> Any:
        """Return what has been measured of the tensor of a row; None if nothing has."""
        numbers = self._measures.numbers
        return None if numbers is None else numbers.found.get(row.start)

    def renew(self) -> None:
        """Show again what depends on measured numbers."""
        subject, row = self.subject, self.row
        if isinstance(subject, Pair) and row is not None:
            found = self._number(row) if row.leaf else None
            if found is not None:
                self.about.update(detail.drawn(detail.of_pair(row.start, subject.both(row.start), found)))
            if self.active == "changes":
                self._draw_differences()

    def _draw_files(self) -> None:
        t = self.tensor
        if self._drawing is not None:
            self.files.update(fragments.drawn(self._drawing, self.columns))
        elif t is not None and not t.numel():
            self.files.update("it has no elements")
        elif t is not None:
            self.files.update(Content.styled("w: A or B shows their files", "$text-muted"))
        elif self.error is not None:
            self.files.update(error_content(self.error))

    def on_resize(self) -> None:
        if self._drawing is not None:
            self.call_after_refresh(self._draw_files)

    # -- the panes

    def action_tab(self, tab: str, focus: bool = True) -> None:
        """Show a pane; with ``focus``, that of a tensor's heat map or values gets the focus, for its keys."""
        if self.tabs.active != tab and self.has_focus_within:  # else Textual shows the pane of the focus again
            self.screen.set_focus(self.screen.query_one("#names"))
        self.tabs.active = tab
        if focus and tab in ("map", "values") and self.row is not None and self.row.leaf:
            (self.heat if tab == "map" else self.grid).focus()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self._told()
        self.read()

    def read(self) -> None:
        """Read what the open pane shows, if it has not been read."""
        if self.error is not None and self.row is not None and self.active not in ("about", "files", "changes"):
            content = error_content(self.error)
            self.legend.update(content)
            self.bars.update(content)
            self._tell(error_text(self.error), wrong=True)
            return
        t = self.tensor
        if self.active == "values" and t is not None and self.grid.tensor is None:
            self.read_values(focus=False)
        elif self.active == "map" and t is not None and not self.heat.fresh:
            self.on_heat_wanted()
        elif self.active == "histogram" and t is not None and not self.bars.read_from(t):
            self.bars.read(t, False, self.columns)
        elif self.active == "changes":
            self._read_changes(asked=False)

    def read_all(self) -> None:
        """Read all that the open pane can show, however large."""
        if self.active == "changes":
            self._read_changes(asked=True)
        elif self.active == "map":
            self.heat.action_pool()
        elif self.tensor is not None:
            self.action_tab("histogram")
            self.bars.read(self.tensor, True, self.columns)

    # -- values

    def read_values(self, focus: bool = True) -> None:
        """Show the values that the index selects, starting at the first."""
        t, grid = self.tensor, self.grid
        if t is None:
            return
        text = self.index.value.strip()
        try:
            part = t.lazy[parse_index(text)] if text else t
        except Exception as e:
            grid.show(None)
            self._tell(error_text(e), wrong=True)
            return
        self.text = text or None
        self._tell(f"{kind(part)}" + (f" of {kind(t)}" if text else ""))
        if focus:
            grid.focus()
        grid.show(part)

    def on_grid_wanted(self) -> None:
        grid = self.grid
        if grid.tensor is not None and grid.size.height:
            self.work["values"].ask(grid.read, self._have_values, self._values_error)

    def _have_values(self, found: Any) -> None:
        self.grid.window = found
        self.grid.refresh()
        self._told()

    def _values_error(self, error: Exception) -> None:
        self.grid.show(None)
        self._tell(error_text(error), wrong=True)

    def _tell(self, text: str, wrong: bool = False) -> None:
        self.told.set_class(wrong, "wrong")
        self.told.update(Content(printable(text)))

    # -- the heat map

    def on_heat_wanted(self) -> None:
        heat = self.heat
        if heat.tensor is None or not heat.size.height:
            return
        if not heat.tensor.numel():
            self.legend.update("it has no elements")
            return
        self.work["map"].ask(heat.read, self._have_map, self._map_error)

    def _have_map(self, found: Any) -> None:
        heat = self.heat
        heat.have(found)
        if found is not None and heat.tensor is not None:
            self.legend.update(Content(legend(found, heat.tensor)))

    def _map_error(self, error: Exception) -> None:
        self.heat.have(None)
        self.legend.update(error_content(error))

    def on_heat_pointed(self, event: Heat.Pointed) -> None:
        self.pointed.update(Content(event.text))

    # -- changes

    def _read_changes(self, asked: bool) -> None:
        subject, row = self.subject, self.row
        if isinstance(subject, Pair):
            if asked:
                self._measures.start(subject, list(subject.view))
            self._draw_differences()
        elif not isinstance(subject, Run):
            self.changes.update(
                Content.styled(
                    "Steps and differences are shown here:\nlazyckpt browse RUN\nlazyckpt browse A B", "$text-muted"
                )
            )
        elif row is None or not row.leaf or self.tensor is None:
            self.changes.update(Content.styled(_NONE, "$text-muted"))
        elif self._points is None or (asked and not self.work["changes"].busy):
            t = self.tensor
            if not asked and 2 * len(subject.steps) * t.nbytes > steps.AT_ONCE:
                self.changes.update(Content(steps.hint(subject.steps, t)))
                return
            name, run = row.start, subject
            stream = steps.points(run.steps, lambda step: run.tensor_at(step, name))
            self._points = []
            self._next_point(stream)

    def _next_point(self, stream: Any) -> None:
        self.work["changes"].ask(
            lambda check: next(stream, None), lambda point: self._have_point(point, stream), self._lost
        )

    def _lost(self, error: Exception) -> None:
        self.changes.update(error_content(error))

    def _have_point(self, point: steps.Point | None, stream: Any) -> None:
        assert isinstance(self.subject, Run) and self._points is not None  # only a run is asked for points
        if point is not None:
            self._points.append(point)
            self._next_point(stream)
        more = len(self.subject.steps) - len(self._points) if point is not None else 0
        self.changes.update(steps.drawn(self._points, self.subject.step, more, self.columns))

    def _draw_differences(self) -> None:
        """Draw the differences of the tensors of the row, as far as they have been compared."""
        row = self.row
        if row is None:
            return
        measures, numbers = self._measures, self._measures.numbers

        def drawn(check: Check) -> Content:
            shown: list[Any] = [] if numbers is None else list(numbers.of(row))
            check()
            return _table(differences.lines_of(shown)[:_LISTED], shown, row, measures.busy)

        self.work["changes"].ask(drawn, self.changes.update, self._lost)

    # -- what is shown, as Python

    @property
    def window(self) -> str:
        """The index of the values that are shown; "" if no values are."""
        grid = self.grid
        if self.active != "values" or grid.tensor is None or grid.window is None:
            return ""
        shown = grid.window
        shape = grid.tensor.shape if shown.cells else ()
        return detail.of_window(self.text, shape, shown.first, shown.last)


def _has(subject: Subject, state: str, row: Row) -> bool:
    """Return whether a state has names below a row."""
    view = subject.one.base.states.get(state)
    start = row.node.start
    return view is not None and (not start or bool(view.names.below(start[:-1])))


def _table(lines: list[differences.Line], found: list[Any], row: Row, busy: bool) -> Content:
    """Return the differences of the tensors of a row as a table. Names are those below the row."""
    tensors, start = row.tensors, "" if row.leaf or row.folded else printable(row.start)
    equal = sum(one.status == "equal" for one in found)
    note = f"{equal:,} of {len(found):,} tensors are equal"
    if len(found) < tensors:
        note += f"; {tensors - len(found):,} are not compared" + (" yet" if busy else ": a compares them")
    parts = [Content.styled(note, "$text-muted"), Content("")]
    cells = [differences.cells(line) for line in lines]
    if not cells:
        return Content("\n").join(parts)
    heads = differences.HEAD[:4]
    widths = [max(len(line[c]) for line in [heads, *cells]) for c in range(3)]
    parts.append(
        Content.styled(
            "  ".join([*(f"{h:>{w}}" for h, w in zip(heads, widths, strict=False)), heads[3]]), "$text-accent"
        )
    )
    for line, cell in zip(lines, cells, strict=True):
        name = cell[3].removeprefix(start)
        dtypes, count, most = cell[4:]
        if line.kind == "values":
            numbers = "  ".join(f"{number:>{w}}" for number, w in zip(cell, widths, strict=False))
            note = f"  {count} tensors, most at {most}" if len(line.rows) > 1 else ""
            note = f"  {dtypes}" if " and " in dtypes and not note else note
            style = STYLES[differences.degree(line.worst)]
            parts.append(Content.assemble((numbers, style), f"  {name}", (note, "$text-muted")))
        else:
            kind_of = f"{line.kind:>{sum(widths) + 4}}"
            parts.append(Content.assemble((kind_of, "$text-warning"), f"  {name}", (f"  {dtypes}", "$text-muted")))
    return Content("\n").join(parts)


STYLES = {"none": "$text-muted", "small": "$text-success", "medium": "$text-warning", "large": "$text-error"}
