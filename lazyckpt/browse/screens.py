"""Modal screens of the browser: the choice of a state, the list of problems, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ..errors import printable

KEYS = (
    ("↑ ↓", "move; Enter or Space opens and closes a level"),
    ("/", "filter: a part of a name, or a glob (*.norm.weight)"),
    ("Esc", "clear the filter, stop a histogram; back to the names"),
    ("s", "state: weights, fp32, exp_avg, ..., as stored"),
    ("d", "tensor: description, and which bytes of which files hold it"),
    ("m", "map: which file holds which block"),
    ("v, Enter", "values: reads only what is shown"),
    ("i", "index of the values, as in Python: 0:8, ::64"),
    ("arrows, PgUp/Dn", "move in the values; < > by a page, Home, End"),
    ("h", "histogram of a sample (4 MiB are read)"),
    ("a", "histogram and statistics of all elements"),
    ("c", "copy the line of Python that reads what is shown"),
    ("p", "problems: all of them"),
    ("t", "light or dark"),
    ("Tab", "next part of the screen"),
    ("q", "quit"),
)


class Text(ModalScreen[None]):
    """A modal screen of text; Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss", "Close")]

    def __init__(self, title: str, lines: Sequence[Content]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="sheet") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = Content("Esc closes")
            yield Static(Content("\n").join(self._lines))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def keys() -> Text:
    width = max(len(key) for key, _ in KEYS)
    return Text("Keys", [Content.assemble((f"{key:<{width}}  ", "$text-accent"), text) for key, text in KEYS])


def problems(lines: Sequence[str]) -> Text:
    shown = [Content(printable(line)) for line in lines] or [Content("there are none")]
    return Text("Problems", shown)


class States(ModalScreen[str | None]):
    """A modal screen to choose a state; its result is the name, or None to keep the current state."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss(None)", "Close")]

    def __init__(self, states: Sequence[str], now: str) -> None:
        super().__init__()
        self._states, self._now = states, now

    def compose(self) -> ComposeResult:
        labels = {"stored": "stored: every tensor as it is in the files"}
        options = [Option(Content(labels.get(name, printable(name)))) for name in self._states]
        box = OptionList(*options, classes="sheet")
        box.border_title = Content("State")
        box.border_subtitle = Content("Enter chooses")
        yield box

    def on_mount(self) -> None:
        box = self.query_one(OptionList)
        box.highlighted = self._states.index(self._now)
        box.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._states[event.option_index])
