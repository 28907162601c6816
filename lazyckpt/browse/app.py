"""The browser application: its screen and the actions of its keys."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Click
from textual.screen import ModalScreen
from textual.theme import BUILTIN_THEMES
from textual.widgets import Footer, Input, Static

from ..errors import and_more, printable
from ..show.about import facts_of
from ..show.differences import cosine_text, degree, relative_text
from ..show.outline import outline
from . import screens
from .background import Background, Check, error_text
from .measures import AT_ONCE, Measures, Numbers
from .names import Mark, Names
from .panes import Panes
from .rows import OPENED, ORDERS, Look, Row, Rows
from .search import Search
from .steps import Slider
from .subject import Pair, Run, Subject

_PROBLEMS = 2  # maximum number of problems at the top of the screen
_PAUSE = 0.12  # seconds between the last key typed into the search and searching
_FOUND = 400  # levels of a search's result are opened up to this many rows
_CLASSES = {"none": "dim", "small": "good", "medium": "warn", "large": "bad"}


_DARK_256 = replace(
    BUILTIN_THEMES["textual-dark"], name="lazyckpt-256", primary="#0087d7", background="#121212", surface="#1c1c1c",
    panel="#303030", boost="#262626",
)  # fmt: skip


class _Names(NamedTuple):
    """Rows, their numbers, the search and the arrangement that they are of, and the row of the name ``at``."""

    finder: Search
    numbers: Numbers
    text: str
    look: Look
    rows: Rows
    at: str
    cursor: int


class Titles(Static):
    """The line of titles above the names. A click orders by the column."""

    def on_click(self, event: Click) -> None:
        app = self.app
        assert isinstance(app, Browser)
        title = app.names.title_at(event.x)
        order = title if title in ("name", "size", "dtype") else "value" if title in app.names.heads else None
        if order is not None and app.rows is not None:
            app.arrange(order, not app.look.reverse if app.look.order == order else False)


class Filter(Input):
    """The line of the search. Enter and the arrow down go to the names."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,down", "submit", "To the names", key_display="⏎"),
        Binding("escape", "app.leave", "Clear", key_display="Esc"),
    ]

    def __init__(self) -> None:
        super().__init__(placeholder="/ search: part of a name or glob", id="filter")


class Browser(App[Exception]):
    """The application. Its result is the error of opening, or None.

    ``open_subject`` opens what is looked at, on a thread; ``title`` names it until then."""

    CSS_PATH = "app.tcss"
    TITLE = "lazyckpt"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#names"  # not the search, which comes first: keys typed during startup are commands, not text
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (72, "-normal"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (16, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Help", key_display="?"),
        # a priority: letters that are typed at once after it are of the search, also if all arrive together
        Binding("slash", "search", "Search", key_display="/", priority=True),
        Binding("q", "quit", "Quit"),
        Binding("n", "next(1)", "Next", key_display="n N", show=False),
        Binding("N", "next(-1)", "Previous", show=False),
        Binding("s", "order", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("u", "fold", "Fold"),
        Binding("L", "flat", "List", show=False),
        Binding("x", "state", "State"),
        Binding("w", "side", "A/B"),
        Binding("left_square_bracket", "step(-1)", "Step", key_display="[ ]"),
        Binding("right_square_bracket", "step(1)", "Step", show=False),
        Binding("1,d", "tab('about')", "About", show=False),
        Binding("2,m", "tab('map')", "Map", key_display="m"),
        Binding("3,v", "tab('values')", "Values", key_display="v"),
        Binding("4,b", "tab('histogram')", "Bars", key_display="b"),
        Binding("5,f", "tab('files')", "Files", show=False),
        Binding("6,e", "tab('changes')", "Changes", key_display="e"),
        Binding("i", "index", "Index", show=False, priority=True),
        Binding("z", "wide", "Wide names", show=False),
        Binding("a", "all", "All elements", show=False),
        Binding("R", "norms", "Norms", show=False),
        Binding("y", "copy_name", "Copy"),
        Binding("c", "copy_line", "Copy line", show=False),
        Binding("M", "meta", "Meta"),
        Binding("p", "problems", "Problems", show=False),
        Binding("t", "theme", "Light/dark", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom in", show=False),
        Binding("minus", "zoom(2)", "Zoom out", show=False),
        Binding("0", "zoom(0)", "Whole", show=False),
        Binding("ctrl+c", "interrupt", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, open_subject: Callable[[], Subject], title: str) -> None:
        super().__init__()
        if self.console.color_system == "256":  # of the usual colours some become navy
            self.register_theme(_DARK_256)
            self.theme = _DARK_256.name
        self._open, self._path = open_subject, title
        self._facts = Content("opening")  # the second line of the screen
        self.subject: Subject | None = None
        self.rows: Rows | None = None
        self.side = ""
        self._at = ""  # name or prefix of the row; kept while a search hides the row
        self.row: Row | None = None
        self._searched = ""  # the search whose names are shown or being computed
        self._finder: Search | None = None  # of the subject's names
        self._arranged: tuple[str, Look] = "", Look()  # the search and the arrangement of the rows
        self.look = Look()
        self.head, self.problems = Static(id="head", markup=False), Static(id="problems", markup=False)
        self.filter = Filter()
        self.names, self.titles, self.slider = Names(), Titles(id="titles", markup=False), Slider()
        self.measures = Measures(self._measured)
        self.panes = Panes(self, self._indicate, self._show_code, self.measures)
        self.code = Static(id="code", markup=False)
        self._opens = Background(self, self._indicate)  # opens, changes states and steps
        self._names = Background(self, self._indicate)  # searches and arranges the names

    @property
    def busy(self) -> bool:
        """Whether any background work is running or pending."""
        return (
            self.filter.value != self._searched or self._opens.busy or self._names.busy or self.panes.busy
            or self.measures.busy or _key(self.names.row) != _key(self.row)
        )  # fmt: skip

    # -- the screen

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.slider
        yield self.problems
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield self.filter
                yield self.titles
                yield self.names
            yield self.panes
        yield self.code
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        # a signal leaves the application as q does, so that the terminal is as it was before
        for name in ("SIGTERM", "SIGHUP", "SIGINT"):
            with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):  # Windows, other threads
                number = getattr(signal, name)
                asyncio.get_running_loop().add_signal_handler(number, self._end_by, number)
        self.slider.show((), 0)
        self.names.on_heads = lambda: self.titles.update(Content(self.names.header()))
        self.names.focus()
        self._indicate()
        self.call_after_refresh(
            self._opens.ask, lambda check: self._prepared(self._open, check), self._have_subject, self.exit
        )

    def on_unmount(self) -> None:
        self.panes.bars.drop()
        self.measures.stop()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave the keys out of the footer that do nothing here."""
        if action in ("search", "index"):  # their keys have priority over letters that are typed
            return not isinstance(self.focused, Input) and not isinstance(self.screen, ModalScreen)
        if action == "side":
            return bool(self.subject is None or self.subject.sides)
        if action == "step":
            return bool(self.subject is None or self.subject.steps)
        return True

    def _indicate(self) -> None:
        """Update the two lines at the top, with a mark while work is running."""
        if self.measures.busy:
            mark = Content.styled(f" {self.measures.progress}, Esc stops ", "reverse")
        else:
            waiting = self._opens.busy or self._names.busy or self.panes.busy
            mark = Content.styled(" reading… ", "reverse") if waiting else Content("")
        self.head.update(Content.assemble((printable(self._path), "bold"), " ", mark, "\n", self._facts))

    # -- opening, states, steps

    def _prepared(self, change: Callable[[], Subject], check: Check) -> tuple[Subject, str, _Names]:
        subject = change()
        names = self._names_of(Search(outline(subject.view)), isinstance(subject, Pair), check)
        if self.subject is None:  # what was opened stays: to look through it for garbage would halt the screen
            gc.freeze()
        return subject, subject.facts, names

    def _names_of(self, finder: Search, pair: bool, check: Check) -> _Names:
        """Return the rows of the names that are searched for, as they are to be arranged. Rows that are open stay so,
        unless the search is another one."""
        text, look = self._searched, self.look
        of = finder.found(text, check)
        check()
        opened = self.rows.opened if self.rows is not None and text == self._arranged[0] else ()
        numbers = self.measures.of(finder.outline)
        value = numbers.farness if pair else numbers.norm
        rows = Rows(of, value, _FOUND if text else OPENED, look, opened, numbers.each)
        at = self._at
        return _Names(finder, numbers, text, look, rows, at, rows.reveal(at))

    def _have_subject(self, found: tuple[Subject, str, _Names]) -> None:
        self.subject, text, names = found
        self._finder = names.finder
        self.side = self.side or (self.subject.sides[0] if self.subject.sides else "")
        self.row = None
        self.measures.show(names.numbers)
        side = f" | shown: {self.side}" if self.side else ""
        self._facts = Content.assemble((printable(self.subject.view.state), "bold"), " | ", text, (side, "bold"))
        self.slider.show(self.subject.steps, self.subject.step if isinstance(self.subject, Run) else 0)
        problems = self.subject.problems
        lines = [printable(p) for p in problems[:_PROBLEMS]]
        if len(problems) > _PROBLEMS:
            lines.append(f"{and_more(len(problems) - _PROBLEMS, 'problems')} (p shows them all)")
        self.problems.set_class(bool(lines), "some")
        self.problems.update(Content("\n".join(lines)))
        self.names.heads, self.names.extra = (), lambda row: ()
        self._have_names(names)
        if (names.text, names.look) != (self._searched, self.look):  # they have changed meanwhile
            self._arrange()
        self.refresh_bindings()
        if isinstance(self.subject, Pair):
            self._compare(self.subject)

    def _arrange(self) -> None:
        """Show the names that are searched for, as they are to be arranged."""
        finder, pair = self._finder, isinstance(self.subject, Pair)
        if finder is not None:
            self._names.ask(lambda check: self._names_of(finder, pair, check), self._have_names, self._error)

    def _have_names(self, names: _Names) -> None:
        if names.finder is not self._finder:
            return  # there is another subject
        self.rows, self._arranged = names.rows, (names.text, names.look)
        self.names.found = names.text.lower()
        self.names.show(names.rows, names.cursor if names.at == self._at else names.rows.reveal(self._at))
        self.titles.update(Content(self.names.header()))
        self._indicate()

    def _error(self, error: Exception) -> None:
        self.notify(printable(error_text(error)), severity="error", markup=False)

    def _change(self, change: Callable[[], Subject]) -> None:
        """Show another subject, which ``change`` makes on a thread."""
        self._searched = self.filter.value
        self._opens.ask(lambda check: self._prepared(change, check), self._have_subject, self._error)

    def action_state(self) -> None:
        if self.subject is not None:
            self.push_screen(screens.States(self.subject.states, self.subject.view.state), self._choose)

    def _choose(self, state: str | None) -> None:
        subject = self.subject
        if state is not None and subject is not None:
            self._change(lambda: subject.of(state))

    def action_step(self, by: int) -> None:
        subject = self.subject
        if isinstance(subject, Run):
            n = subject.steps.index(subject.step) + by
            if 0 <= n < len(subject.steps):
                self._go_to_step(subject, subject.steps[n])

    def on_slider_moved(self, event: Slider.Moved) -> None:
        if isinstance(self.subject, Run):
            self._go_to_step(self.subject, event.step)

    def _go_to_step(self, run: Run, step: int) -> None:
        self._change(lambda: run.at(step))

    def action_side(self) -> None:
        subject = self.subject
        if subject is None or not subject.sides:
            return
        self.side = subject.sides[(subject.sides.index(self.side) + 1) % len(subject.sides)]
        self._facts = Content.assemble(
            (printable(subject.view.state), "bold"), " | ", subject.facts, (f" | shown: {self.side}", "bold")
        )
        self._indicate()
        self.panes.show(subject, self.row, self.side)

    # -- searching and ordering

    def action_search(self) -> None:
        self.screen.set_focus(self.filter)  # at once: the next key may have arrived already

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.set_timer(_PAUSE, partial(self._search, event.value))

    def _search(self, text: str) -> None:
        if text == self.filter.value:  # the user has stopped typing
            self._searched = text
            self._arrange()

    def arrange(self, order: Any, reverse: bool) -> None:
        """Order the names."""
        if self.rows is not None:
            self.look = replace(self.look, order=order, reverse=reverse)
            self._arrange()
            what = {"value": "difference" if isinstance(self.subject, Pair) else "norm"}.get(order, order)
            self.notify(f"ordered by {what}{', reversed' if reverse else ''}", timeout=1.5, markup=False)

    def action_next(self, by: int) -> None:
        """Go to the next tensor, or the one before, of those that are found or listed, opening levels."""
        rows, row = self.rows, self.row
        if rows is None or row is None:
            return
        name = rows.beside(row, by)
        if name is not None:
            self.names.go(rows.reveal(name))

    def action_order(self) -> None:
        if self.rows is not None:
            orders = ORDERS if self.names.heads else ORDERS[:-1]
            self.arrange(orders[(orders.index(self.look.order) + 1) % len(orders)], False)

    def action_reverse(self) -> None:
        if self.rows is not None:
            self.arrange(self.look.order, not self.look.reverse)

    def action_fold(self) -> None:
        self.look = replace(self.look, fold=not self.look.fold)
        self._arrange()

    def action_flat(self) -> None:
        self.look = replace(self.look, flat=not self.look.flat)
        self._arrange()

    def action_leave(self) -> None:
        """Go back one step: stop reading, leave the index, or clear the search."""
        if self.measures.stop() or self.panes.bars.stop():
            return
        if self.focused is self.panes.index:
            self.panes.grid.focus()
        else:
            if self.focused is self.filter or self.focused is self.names:
                self.filter.value = ""
            self.names.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self.names.focus()
        else:
            self.panes.read_values()

    # -- the row at the cursor, and its numbers

    def on_names_moved(self) -> None:
        row = self.names.row
        before = self.row
        self.row = row
        if row is not None:
            self._at = row.start
        if row is not None and before is not None and row.key == before.key:
            return  # a search may change the label of the same row: keep what is shown
        if self.subject is not None:
            self.panes.show(self.subject, row, self.side)

    def on_names_chosen(self) -> None:
        self.panes.action_tab("values")
        self.panes.read_values()

    def _compare(self, pair: Pair) -> None:
        """Show columns of differences, and compare unless that reads too much to do it without being asked."""
        self.names.heads, self.names.extra = ("relative", "cosine", "max"), self._of_pair
        hint = f"more than {AT_ONCE >> 30} GiB would be read: e and a compare all tensors"
        self.measures.start(pair, list(pair.view), AT_ONCE, lambda: self.notify(hint, markup=False))

    def _of_pair(self, row: Row) -> tuple[Mark, ...]:
        numbers = self.measures.numbers
        worst = None if numbers is None else numbers.worst(row)
        if worst is None:
            return ()
        if worst.status in ("only in a", "only in b"):
            return (worst.status.replace(" a", " A").replace(" b", " B"), "warn"), ("", ""), ("", "")
        if worst.status == "shape":
            return ("shape", "warn"), ("", ""), ("", "")
        style = _CLASSES[degree(worst)]
        most = "" if worst.max_abs is None else f"{worst.max_abs:.3g}"
        relative = "equal" if worst.status == "equal" else relative_text(worst)
        return (relative, style), (cosine_text(worst.cosine) if worst.status != "equal" else "", style), (most, style)

    def _of_norm(self, row: Row) -> tuple[Mark, ...]:
        numbers = self.measures.numbers
        norm = None if numbers is None else numbers.norm(row)
        return () if norm is None else ((f"{norm:.4g}", ""),)

    def action_norms(self) -> None:
        """Read the norms of all tensors that are listed."""
        subject = self.subject
        if subject is None or self.rows is None or isinstance(subject, Pair):
            return
        self.names.heads, self.names.extra = ("norm",), self._of_norm
        self.measures.start(subject, self.rows.outline.names)
        self._measured()

    def _measured(self) -> None:
        self._indicate()
        self.names.renumber()
        self.panes.renew()
        if not self.measures.busy and self.look.order == "value":
            self._arrange()

    # -- panes

    def action_tab(self, tab: str) -> None:
        self.screen.remove_class("-names")
        self.panes.action_tab(tab)

    def action_zoom(self, factor: float) -> None:
        """Zoom the heat map if it is shown, also while the names have the focus; 0 shows all of it."""
        heat = self.panes.heat
        if self.panes.active == "map":
            heat.action_zoom(factor) if factor else heat.action_whole()

    def action_index(self) -> None:
        self.screen.remove_class("-names")
        self.panes.action_tab("values", focus=False)
        self.screen.set_focus(self.panes.index)

    def action_all(self) -> None:
        self.panes.read_all()

    # -- the line of Python and the remaining actions

    @property
    def line(self) -> str:
        """The Python expression that reads what is shown."""
        subject, row = self.subject, self.row
        if subject is None or row is None:
            return ""
        if row.folded or not row.leaf:
            start = row.parent.start if row.folded and row.parent is not None else row.start
            return subject.line(start[:-1], False, self.side)
        return subject.line(row.start, True, self.side) + (self.panes.window or "[...]")

    def _show_code(self) -> None:
        self.code.update(Content(self.line))

    def _copy(self, text: str) -> None:
        self.copy_to_clipboard(text)
        self.notify(f"copied (if the terminal supports OSC 52): {printable(text)[:60]}", timeout=2, markup=False)

    def action_copy_name(self) -> None:
        if self.row is not None:
            self._copy(printable(self.row.start if self.row.leaf else self.row.start[:-1]))

    def action_copy_line(self) -> None:
        self._copy(self.line)

    def action_meta(self) -> None:
        if self.subject is not None:
            facts: Sequence[tuple[str, str]] = facts_of(self.subject.one.view)
            self.push_screen(screens.metadata(facts, self.subject.metas))

    def action_problems(self) -> None:
        if self.subject is not None:
            self.push_screen(screens.problems(self.subject.problems))

    def action_keys(self) -> None:
        self.push_screen(screens.keys())

    def action_wide(self) -> None:
        """Give the names the whole width of the screen, or show the panes again."""
        self.screen.toggle_class("-names")
        self.names.focus()

    def action_interrupt(self) -> None:
        self._end_by(signal.SIGINT)

    def _end_by(self, number: int) -> None:
        """Leave the application, with the exit code that shells report of the signal."""
        self.exit(return_code=128 + number)

    def action_theme(self) -> None:
        dark = _DARK_256.name if self.console.color_system == "256" else "textual-dark"
        self.theme = "textual-light" if self.current_theme.dark else dark


def _key(row: Row | None) -> object:
    return None if row is None else row.key
