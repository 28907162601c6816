"""The browser application: its screen and the actions of its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from ..core.select import parse_index
from ..errors import and_more, printable
from ..show.layout import Drawing, drawing
from ..show.text import facts, kind, oddities
from ..tensor import LazyTensor
from ..view import CheckpointView
from . import detail, fragments, screens
from . import detail as code
from .background import Background, error_content, error_text
from .grid import Grid
from .histogram import Histogram
from .tree import Entry, Levels, NameTree, Row, chosen

_PROBLEMS = 2  # maximum number of problems at the top of the screen
_PAUSE = 0.15  # seconds between the last key typed into the filter and filtering
_STORED = "stored"


class Browser(App[Exception]):
    """The application. Its result is the error of opening, or None.

    ``open_views`` opens and returns two views: the default state, and the state to show first. ``path`` and ``options``
    are the arguments of `lazyckpt.open` for the line of Python that is shown.
    """

    CSS_PATH = "app.tcss"
    TITLE = "lazyckpt"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#names"  # not the filter, which comes first: keys typed during startup are commands, not text
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (72, "-normal"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "state", "State"),
        Binding("d", "tab('tensor')", "Tensor", show=False),
        Binding("m", "tab('map')", "Map"),
        Binding("v", "values", "Values"),
        Binding("i", "index", "Index", show=False),
        Binding("h", "histogram", "Histogram"),
        Binding("a", "all", "All elements", show=False),
        Binding("c", "copy", "Copy line"),
        Binding("p", "problems", "Problems", show=False),
        Binding("t", "theme", "Light/dark", show=False),
        Binding("question_mark", "keys", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(
        self,
        open_views: Callable[[], tuple[CheckpointView, CheckpointView]],
        path: str,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._open = open_views
        self._opened = code.opening(path, options)
        self._path = path
        self._facts = Content("opening")  # the second line of the screen
        self.base: CheckpointView | None = None  # the default state
        self.view: CheckpointView | None = None  # the selected state
        self.entry: Entry | None = None
        self._levels: Levels | None = None
        self._at = ""  # name or prefix of the entry; kept while a filter hides the entry
        self._filtered = ""  # the filter of the names that are shown or being computed
        self._index: str | None = None
        self._map: Drawing | None = None
        self.head, self.problems = Static(id="head", markup=False), Static(id="problems", markup=False)
        self.filter = Input(placeholder="/ filters: part of a name, or a glob", id="filter")
        self.names = NameTree()
        self.tabs = TabbedContent(id="right")
        self.about, self.fragments = Static(markup=False), Static(markup=False)
        self.index = Input(placeholder="i: an index, as 0:8, ::64", id="index")
        self.told, self.grid = Static(id="told", markup=False), Grid()
        self.bars, self.code = Histogram(self, self._indicate), Static(id="code", markup=False)
        self._names = Background(self, self._indicate)  # opens views, changes states, filters names
        self._about = Background(self, self._indicate)
        self._values = Background(self, self._indicate)

    @property
    def busy(self) -> bool:
        """Whether any background work is running or pending."""
        threads = (self._names, self._about, self._values, self.bars)
        return self.filter.value != self._filtered or any(b.busy for b in threads)

    @property
    def tensor(self) -> LazyTensor | None:
        """The tensor at the cursor; None if the cursor is on a level."""
        if self.view is None or self.entry is None or not self.entry.leaf:
            return None
        found: LazyTensor = self.view[self.entry.start]
        return found

    # -- the screen

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.problems
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield self.filter
                yield self.names
            with self.tabs:
                with TabPane("Tensor", id="tensor"), VerticalScroll():
                    yield self.about
                with TabPane("Map", id="map"), VerticalScroll():
                    yield self.fragments
                with TabPane("Values", id="values"):
                    yield self.index
                    yield self.told
                    yield self.grid
                with TabPane("Histogram", id="histogram"), VerticalScroll():
                    yield self.bars
        yield self.code
        yield Footer()

    def on_mount(self) -> None:
        self.names.focus()
        self._names.ask(self._work_open, self._have_view, self.exit)

    def on_unmount(self) -> None:
        self.bars.drop()

    def _indicate(self) -> None:
        """Update the two lines at the top, with a mark while work is running."""
        mark = Content.styled(" reading… ", "reverse") if self.busy else Content("")
        self.head.update(Content.assemble(mark, (printable(self._path), "bold"), "\n", self._facts))

    # -- opening, states, filters

    def _work_open(self) -> tuple[CheckpointView, CheckpointView, Levels, str]:
        base, view = self._open()
        return base, view, Levels(view), _summary(view)

    def _have_view(self, found: tuple[CheckpointView, CheckpointView, Levels, str]) -> None:
        self.base, self.view, levels, text = found
        self.entry = None  # the next entry at the cursor is a new one, even if its name is the same
        self._facts = Content.assemble((printable(self.view.state), "bold"), " | ", text)
        problems = oddities(self.view)
        lines = [printable(p) for p in problems[:_PROBLEMS]]
        if len(problems) > _PROBLEMS:
            lines.append(f"{and_more(len(problems) - _PROBLEMS, 'problems')} (p shows them all)")
        self.problems.set_class(bool(lines), "some")
        self.problems.update(Content("\n".join(lines)))
        self._indicate()
        self._have_levels(levels)

    def _have_levels(self, levels: Levels) -> None:
        self._levels = levels
        self.names.show(levels, self._at)
        if not levels.whole.tensors:
            self._look(levels.whole)

    def action_state(self) -> None:
        if self.base is not None and self.view is not None:
            states = [*self.base.states, _STORED]
            self.push_screen(screens.States(states, self.view.state), self._choose)

    def _choose(self, state: str | None) -> None:
        base, text = self.base, self.filter.value
        if state is None or base is None:
            return

        def work() -> tuple[CheckpointView, CheckpointView, Levels, str]:
            view = _state(base, state)
            return base, view, Levels(chosen(view, text)), _summary(view)

        self._filtered = text
        self._names.ask(work, self._have_view, self._name_error)

    def action_filter(self) -> None:
        self.filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.set_timer(_PAUSE, partial(self._filter, event.value))

    def _filter(self, text: str) -> None:
        view = self.view
        if view is not None and text == self.filter.value:  # the user has stopped typing
            self._filtered = text
            self._names.ask(lambda: Levels(chosen(view, text)), self._have_levels, self._name_error)

    def _name_error(self, error: Exception) -> None:
        self.notify(printable(error_text(error)), severity="error", markup=False)

    def action_leave(self) -> None:
        """Go back one step: stop a histogram, leave the index, or clear the filter."""
        box = self.filter
        if self.bars.stop():
            return
        if self.focused is self.index:
            self.grid.focus()
        else:
            if self.focused is box or self.focused is self.names:
                box.value = ""
            self.names.focus()

    # -- the entry at the cursor

    def on_tree_node_highlighted(self, event: NameTree.NodeHighlighted[Row]) -> None:
        entry = event.node.data
        late = self.names.moving or event.node is not self.names.cursor_node
        if not isinstance(entry, Entry) or late:
            return
        if entry != self.entry:  # a filter may change the label of the same entry: keep what is shown
            self._look(entry)

    def on_tree_node_selected(self, event: NameTree.NodeSelected[Row]) -> None:
        if isinstance(event.node.data, Entry) and event.node.data.leaf:
            self.action_values()

    def _look(self, entry: Entry) -> None:
        """Show what is known about a tensor or a level without reading tensor data."""
        self.entry, self._at, self._index, self._map = entry, entry.start, None, None
        self._values.drop()
        view, levels, t = self.view, self._levels, self.tensor
        assert view is not None and levels is not None  # an entry exists only if both do
        self.index.value = ""
        self.grid.show(None)
        hint = "" if t is None else f"v reads values of {kind(t)}"
        self._tell(hint or "choose a tensor")
        self.bars.show(t)
        self.fragments.update("choose a tensor" if t is None else "")
        self._show_code()

        def work() -> tuple[Content, Drawing | None]:
            if t is None:
                shown = levels.view
                names = list(shown.names.below(entry.start[:-1]) if entry.start else shown)
                return detail.drawn(detail.of_prefix(shown, entry, names)), None
            return detail.drawn(detail.of_tensor(view, entry.start)), drawing(t) if t.numel() else None

        self._about.ask(work, self._have_about, lambda e: self.about.update(error_content(e)))

    def _have_about(self, found: tuple[Content, Drawing | None]) -> None:
        about, self._map = found
        self.about.update(about)
        self._draw_map()

    @property
    def _width(self) -> int:
        """Columns of a drawing: the width of the right side without padding and scroll bar."""
        return self.tabs.size.width - 4

    def _draw_map(self) -> None:
        if self._map is not None:
            self.fragments.update(fragments.drawn(self._map, self._width))
        elif self.tensor is not None:
            self.fragments.update("it has no elements")

    def on_resize(self) -> None:
        if self._map is not None:
            self.call_after_refresh(self._draw_map)

    def action_tab(self, tab: str) -> None:
        self.tabs.active = tab

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self._show_code()

    # -- values

    def action_values(self) -> None:
        self.action_tab("values")
        if self.tensor is not None:
            self._read()

    def action_index(self) -> None:
        self.action_tab("values")
        self.index.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self.names.focus()
        elif self.tensor is not None:
            self._read()

    def _read(self) -> None:
        """Show the values that the index selects, starting at the first."""
        t, grid = self.tensor, self.grid
        assert t is not None  # the callers check it
        text = self.index.value.strip()
        try:
            part = t.lazy[parse_index(text)] if text else t
        except Exception as e:
            self._tell(error_text(e), wrong=True)
            return
        self._index = text or None
        self._tell(f"{kind(part)}" + (f" of {kind(t)}" if text else ""))
        grid.focus()
        grid.show(part)

    def on_grid_wanted(self) -> None:
        grid = self.grid
        if grid.tensor is not None and grid.size.height:
            self._values.ask(grid.read, self._have_values, self._values_error)

    def _have_values(self, found: Any) -> None:
        grid = self.grid
        grid.window = found
        grid.refresh()
        self._show_code()

    def _values_error(self, error: Exception) -> None:
        self.grid.show(None)
        self._tell(error_text(error), wrong=True)

    def _tell(self, text: str, wrong: bool = False) -> None:
        self.told.set_class(wrong, "wrong")
        self.told.update(Content(printable(text)))

    # -- histogram

    def action_histogram(self) -> None:
        self._histogram(whole=False)

    def action_all(self) -> None:
        self._histogram(whole=True)

    def _histogram(self, whole: bool) -> None:
        t = self.tensor
        self.action_tab("histogram")
        if t is not None:
            self.names.focus()
            self.bars.read(t, whole, self._width)

    # -- the line of Python and the remaining actions

    @property
    def line(self) -> str:
        """The Python expression that reads what is shown."""
        base, view, entry = self.base, self.view, self.entry
        if base is None or view is None or entry is None:
            return self._opened
        found = code.of_state(self._opened, None if view.state == base.state else view.state)
        if not entry.start and not entry.leaf:
            return found
        grid = self.grid
        if self.tensor is None:
            return f'{found}[{code.quoted(entry.start[:-1])}].to("cpu")'
        found += f"[{code.quoted(entry.start)}]"
        if self.tabs.active != "values" or grid.tensor is None or grid.window is None:
            return f"{found}[...]"
        shown = grid.window
        shape = grid.tensor.shape if shown.cells else ()
        return found + code.of_window(self._index, shape, shown.first, shown.last)

    def _show_code(self) -> None:
        self.code.update(Content(self.line))

    def action_copy(self) -> None:
        self.copy_to_clipboard(self.line)
        self.notify("copied (if the terminal supports OSC 52); the line is above the keys", markup=False)

    def action_problems(self) -> None:
        if self.view is not None:
            self.push_screen(screens.problems(oddities(self.view)))

    def action_keys(self) -> None:
        self.push_screen(screens.keys())

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"


def _state(base: CheckpointView, state: str) -> CheckpointView:
    if state == base.state:
        return base
    return base.stored if state == _STORED else base.states[state]


def _summary(view: CheckpointView) -> str:
    """Return format, mesh and counts; the other parts of a summary are elsewhere on the screen."""
    return " | ".join(facts(view)[:3])
