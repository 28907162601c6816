"""The tree of names. A level's rows are made when it is opened, some hundred at a time."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from rich.text import Text
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from ..core.names import natural, shortened
from ..core.units import human_bytes, plural
from ..errors import and_more, printable
from ..show.text import kind
from ..view import CheckpointView

# -- The names of a view, level by level: a level is found when it is asked for, however many names there are
# below.

_JOINED = 100  # levels that are one row


class Entry(NamedTuple):
    """A row of a level. ``label``: what it adds to the names above. ``start``: what the names below it begin with, up
    to a dot; of a tensor its name. ``tensors``, ``numel``, ``nbytes``: of what is below, each tied tensor once."""

    label: str
    start: str
    leaf: bool
    tensors: int
    numel: int
    nbytes: int


class Levels:
    """Of a view; making one looks at every name once. Reads no tensor data."""

    def __init__(self, view: CheckpointView) -> None:
        self.view = view
        self._names = view.names.sorted
        sizes: dict[str, tuple[int, int]] = {}
        seen: set[str] = set()
        for name in view:
            owner = view.owner(name)
            if owner not in seen:
                seen.add(owner)
                spec = view[name].spec
                sizes[name] = spec.numel, spec.nbytes
        found = [sizes.get(name, (0, 0)) for name in self._names]
        self._numel = list(accumulate((n for n, _ in found), initial=0))
        self._nbytes = list(accumulate((n for _, n in found), initial=0))

    @property
    def whole(self) -> Entry:
        """All of it."""
        return self._entry("", "", False, 0, len(self._names))

    def below(self, start: str = "") -> list[Entry]:
        """What there is at the level behind ``start`` (an entry's; "": the first), in natural order. Chains of levels
        that leave nothing to choose are one entry."""
        names = self._names
        at = bisect_left(names, start)
        end = bisect_left(names, _behind(start), at) if start else len(names)
        found = []
        while at < end:
            name = names[at]
            dot = name.find(".", len(start))
            stop = at + 1 if dot < 0 else bisect_left(names, _behind(name[: dot + 1]), at)
            if stop - at == 1:
                found.append(self._entry(name[len(start) :], name, True, at, stop))
            else:
                inner = self._joined(dot + 1, at, stop)
                found.append(self._entry(inner[len(start) : -1], inner, False, at, stop))
            at = stop
        return sorted(found, key=lambda e: (natural(e.label), not e.leaf))

    def _joined(self, length: int, at: int, stop: int) -> str:
        """What all of these names begin with, up to a dot."""
        first, last = self._names[at], self._names[stop - 1]
        for _ in range(_JOINED):
            dot = first.find(".", length)
            if dot < 0 or not last.startswith(first[: dot + 1]):
                break
            length = dot + 1
        return first[:length]

    def _entry(self, label: str, start: str, leaf: bool, at: int, stop: int) -> Entry:
        numel, nbytes = self._numel, self._nbytes
        return Entry(label, start, leaf, stop - at, numel[stop] - numel[at], nbytes[stop] - nbytes[at])


def _behind(start: str) -> str:
    """The least text that sorts behind all that begin with ``start``, which ends with a dot."""
    return start[:-1] + "/"


def chosen(view: CheckpointView, text: str) -> CheckpointView:
    """The names that a filter leaves: those that hold the text, or match it as a glob (``*`` also crosses dots)."""
    if not text:
        return view
    names = set(view.select(lambda name: text in name))
    if any(c in text for c in "*?["):
        names.update(view.select(text))
    return view.select(names.__contains__)


# -- The tree of names. A level's rows are made when it is opened, some hundred at a time.

_ROWS = 500  # of a level that are made at a time
_OPENED = 40  # rows up to which levels are opened at first

Row = Entry | list[Entry]  # a list: the rest of a level, which has not been made yet
Node = TreeNode[Row]


class NameTree(Tree[Row]):
    """Shows `Levels`; a node's ``data`` is its entry."""

    ICON_NODE = "▸ "
    ICON_NODE_EXPANDED = "▾ "

    def __init__(self) -> None:
        super().__init__("", id="names")
        self.show_root = False
        self.guide_depth = 2
        self.levels: Levels | None = None
        self.moving = False  # other names are being shown: where the cursor is meanwhile means nothing

    def show(self, levels: Levels, name: str = "") -> None:
        """Show other names; the cursor goes to this one, as far as it is there."""
        self.levels, self.moving = levels, True
        self.clear()
        self.root.data = levels.whole
        self._fill(self.root)
        self.root.expand()
        level, rows = [self.root], len(self.root.children)
        while True:
            level = [child for node in level for child in node.children if child.allow_expand]
            rows += sum(len(levels.below(n.data.start)) for n in level[:_OPENED] if isinstance(n.data, Entry))
            if not level or (len(level) > 1 and rows > _OPENED):  # one row alone has nothing to choose from
                break
            for node in level:
                self._fill(node)
                node.expand()
        # the cursor is set when the lines are known
        self.call_after_refresh(self._go_to, self._reveal(name))

    def _go_to(self, node: Node | None) -> None:
        self.moving = False
        self.move_cursor(node)
        if node is not None:  # a cursor that stays in its line tells nobody that another node is there now
            self.post_message(self.NodeHighlighted(node))

    def _reveal(self, name: str) -> Node | None:
        """The node of a name, opened down to it, or the nearest above it; the first row if it is nowhere."""
        node = self.root
        while True:
            self._fill(node)
            inner = next((c for c in node.children if _leads_to(c, name)), None)
            if inner is None:
                break
            if node is not self.root:
                node.expand()
            node = inner
            if not node.allow_expand:
                break
        if node is not self.root:
            return node
        return node.children[0] if node.children else None

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Row]) -> None:
        self._fill(event.node)

    def on_tree_node_selected(self, event: Tree.NodeSelected[Row]) -> None:
        node = event.node
        if isinstance(node.data, list) and node.parent is not None:
            event.stop()
            parent, rest = node.parent, node.data
            node.remove()
            first = len(parent.children)
            self._add(parent, rest)
            self.call_after_refresh(self._go_to, parent.children[first])

    def _fill(self, node: Node) -> None:
        if self.levels is not None and not node.children and isinstance(node.data, Entry) and not node.data.leaf:
            self._add(node, self.levels.below(node.data.start))

    def _add(self, node: Node, entries: list[Entry]) -> None:
        for entry in entries[:_ROWS]:
            node.add(self._label(entry), entry, allow_expand=not entry.leaf)
        rest = entries[_ROWS:]
        if rest:
            node.add_leaf(Text(f"{and_more(len(rest))} (Enter)", "dim"), rest)

    def _label(self, entry: Entry) -> Text:
        assert self.levels is not None  # entries are of levels
        label = printable(shortened(entry.label)) or "''"
        if entry.leaf:
            tied = "" if entry.numel or not self.levels.view[entry.start].numel() else "  tied"
            return Text.assemble(label, (f"  {kind(self.levels.view[entry.start])}{tied}", "dim"))
        counts = f"  {plural(entry.tensors, 'tensor')}, {human_bytes(entry.nbytes)}"
        return Text.assemble((label, "bold"), (counts, "dim"))


def _leads_to(node: Node, name: str) -> bool:
    if not isinstance(node.data, Entry):
        return False
    return node.data.start == name or (not node.data.leaf and name.startswith(node.data.start))
