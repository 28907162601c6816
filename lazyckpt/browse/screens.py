"""Modal screens of the browser: the choice of a state, problems, metadata, and the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ..errors import and_more, printable

_META = 2000  # maximum number of lines of metadata

KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Names",
        (
            ("j k, ↓ ↑", "move; g G the first and the last, PgUp PgDn, ^u ^d"),
            ("l h, → ←", "open and close a level; ⏎ or two clicks, too"),
            ("/", "search as you type: a part of a name, or a glob (*.norm.weight)"),
            ("n N", "the next tensor that is found, the one before"),
            ("s S", "sort by name, size, dtype, norm or difference; S reverses"),
            ("u", "unfold layers that are alike, or fold them"),
            ("L", "a flat list of all tensors, or the tree"),
            ("z", "names over the whole width, or beside the panes"),
            ("R", "read the norms of all tensors that are listed"),
            ("y c", "copy the name; copy the line of Python that reads what is shown"),
        ),
    ),
    (
        "Panes",
        (
            ("1 d", "what it is: sizes, dtypes, where its bytes lie"),
            ("2 m", "heat map; + - 0 or the wheel zoom, arrows or dragging pan"),
            ("", "a means or largest values; X < > other dimensions"),
            ("3 v", "values; i an index as in Python: 0:8, ::64; < > by a page"),
            ("4 b", "histogram of a sample (4 MiB are read); a reads all elements"),
            ("5 f", "files: which one holds which block"),
            ("6 e", "changes: over the steps of a run, or between two checkpoints"),
            ("Tab", "the next part of the screen"),
        ),
    ),
    (
        "What is shown",
        (
            ("x", "state: weights, fp32, exp_avg, ..., as stored"),
            ("[ ]", "the step before, and the next one, of a run"),
            ("w", "of two checkpoints: the difference, A or B"),
            ("M", "metadata and a summary"),
            ("p", "problems: all of them"),
            ("t", "light or dark"),
            ("Esc", "stop reading; leave the search; back to the names"),
            ("q ^c", "quit; ^z suspends"),
        ),
    ),
)


class Text(ModalScreen[None]):
    """A modal screen of text; Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,M,p", "dismiss", "Close", show=False),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
        Binding("g", "edge(False)", "top", show=False),
        Binding("G", "edge(True)", "bottom", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Content]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="sheet") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = Content("Esc closes")
            yield Static(Content("\n").join(self._lines), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def action_edge(self, end: bool) -> None:
        box = self.query_one(VerticalScroll)
        (box.scroll_end if end else box.scroll_home)(animate=False)


def keys() -> Text:
    """Return the screen of the keys."""
    width = max(len(key) for _, part in KEYS for key, _ in part)
    lines: list[Content] = []
    for title, part in KEYS:
        lines += [Content("")] if lines else []
        lines.append(Content.styled(title, "bold"))
        lines += [Content.assemble((f"  {key:<{width}}  ", "$text-accent"), text) for key, text in part]
    return Text("Keys", lines)


def problems(lines: Sequence[str]) -> Text:
    """Return the screen of the problems."""
    shown = [Content.assemble(("• ", "$text-warning"), printable(line)) for line in lines]
    return Text("Problems", shown or [Content("there are none")])


def metadata(facts: Sequence[tuple[str, str]], metas: Sequence[tuple[str, Mapping[str, Any]]]) -> Text:
    """Return the screen of a summary and of metadata as a tree. Titles tell the checkpoints of a pair apart."""
    from ..show.about import meta_lines

    width = max((len(what) for what, _ in facts), default=0)
    lines = [Content.assemble((f"{what:<{width}}  ", "$text-accent"), value) for what, value in facts]
    for title, meta in metas:
        lines += [Content(""), Content.styled(f"metadata {title}".strip(), "bold")]
        found, left_out = meta_lines(meta, limit=_META)
        lines += [
            Content.assemble("  " * line.depth, (line.key, "$text-primary"), f"  {line.value}" if line.value else "")
            for line in found
        ]
        if not found:
            lines.append(Content.styled("there is none", "$text-muted"))
        if left_out:
            lines.append(Content.styled(f"{and_more(left_out, 'lines')}: lazyckpt info prints them", "$text-muted"))
    return Text("Metadata", lines)


class States(ModalScreen[str | None]):
    """A modal screen to choose a state; its result is the name, or None to keep the current state."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,x", "dismiss(None)", "Close", show=False),
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
    ]

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
        box.highlighted = self._states.index(self._now) if self._now in self._states else 0
        box.focus()

    def action_move(self, lines: int) -> None:
        box = self.query_one(OptionList)
        (box.action_cursor_down if lines > 0 else box.action_cursor_up)()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._states[event.option_index])
