"""The tree of names. A level's rows are made when it is opened, some hundred at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.text import Text
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from ..core.names import shortened
from ..core.units import human_bytes, plural
from ..errors import and_more, printable
from ..show.outline import Node as OutlineNode
from ..show.outline import chain, outline
from ..show.text import kind
from ..view import CheckpointView

# -- The names of a view, level by level: a level is found when it is asked for, however many names there are
# below.


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a level. ``label``: what it adds to the names above. ``start``: what the names below it begin with, up
    to a dot; of a tensor its name. ``tensors``, ``numel``, ``nbytes``: of what is below, each tied tensor once.
    ``node``: what it is made from."""

    label: str = field(compare=False)
    start: str
    leaf: bool
    tensors: int
    numel: int
    nbytes: int
    node: OutlineNode = field(compare=False)


class Levels:
    """The levels of a view. Making it looks at every name once. Reads no tensor data."""

    def __init__(self, view: CheckpointView) -> None:
        self.view = view
        self._root = outline(view).root

    @property
    def whole(self) -> Entry:
        """All of it."""
        root = self._root
        return Entry("", "", False, root.tensors, root.numel, root.nbytes, root)

    def below(self, entry: Entry) -> list[Entry]:
        """What there is one level below an entry, in natural order. Chains of levels that leave nothing to choose are
        one entry; a name that begins others is two, its tensor and what is below it."""
        return [found for child in entry.node.children for found in _entries(child)]


def _entries(node: OutlineNode, above: str = "") -> Iterator[Entry]:
    label, node = chain(node)
    label = f"{above}.{label}" if above else label
    if node.spec is not None:
        numel, nbytes = (node.spec.numel, node.spec.nbytes) if node.counted else (0, 0)
        yield Entry(label, node.name, True, 1, numel, nbytes, node)
    below = node.children
    if len(below) == 1:
        yield from _entries(below[0], label)
    elif below:
        tensors, numel, nbytes = (sum(getattr(n, what) for n in below) for what in ("tensors", "numel", "nbytes"))
        yield Entry(label, node.start, False, tensors, numel, nbytes, node)


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
            rows += sum(len(levels.below(n.data)) for n in level[:_OPENED] if isinstance(n.data, Entry))
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
            self._add(node, self.levels.below(node.data))

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
