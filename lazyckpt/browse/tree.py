"""The tree of names. The rows of a level are created when it is opened, some hundred at a time."""

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

# -- The names of a view, level by level. A level is computed on demand, whatever the number of names below it.


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a level. Counts and sizes include everything below it, each tied tensor once."""

    label: str = field(compare=False)
    """The part of the name that this row adds to the rows above it."""
    start: str
    """Common prefix of the names below, with the final dot; the name of a tensor."""
    leaf: bool
    """Whether the row is a tensor."""
    tensors: int
    numel: int
    nbytes: int
    node: OutlineNode = field(compare=False)


class Levels:
    """The levels of a view. The constructor visits every name once and reads no tensor data."""

    def __init__(self, view: CheckpointView) -> None:
        self.view = view
        self._root = outline(view).root

    @property
    def whole(self) -> Entry:
        """The entry of the whole view."""
        root = self._root
        return Entry("", "", False, root.tensors, root.numel, root.nbytes, root)

    def below(self, entry: Entry) -> list[Entry]:
        """Return the entries one level below an entry, in natural order.

        A chain of single children is one entry. A tensor whose name is also a prefix is two entries: the tensor, and
        the level below it."""
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
    """Filter the names that contain the text or match it as a glob, in which ``*`` matches dots, too."""
    if not text:
        return view
    names = set(view.select(lambda name: text in name))
    if any(c in text for c in "*?["):
        names.update(view.select(text))
    return view.select(names.__contains__)


# -- The widget.

_ROWS = 500  # rows of a level that are created at a time
_OPENED = 40  # levels are opened at first as long as the tree has at most this many rows

Row = Entry | list[Entry]  # a list is the rest of a level whose rows have not been created yet
Node = TreeNode[Row]


class NameTree(Tree[Row]):
    """The tree of `Levels`; the ``data`` of a node is its entry."""

    ICON_NODE = "▸ "
    ICON_NODE_EXPANDED = "▾ "

    def __init__(self) -> None:
        super().__init__("", id="names")
        self.show_root = False
        self.guide_depth = 2
        self.levels: Levels | None = None
        self.moving = False  # while the names are replaced, the cursor's position is meaningless

    def show(self, levels: Levels, name: str = "") -> None:
        """Show other names, and move the cursor to ``name`` or to the nearest level above it."""
        self.levels, self.moving = levels, True
        self.clear()
        self.root.data = levels.whole
        self._fill(self.root)
        self.root.expand()
        level, rows = [self.root], len(self.root.children)
        while True:
            level = [child for node in level for child in node.children if child.allow_expand]
            rows += sum(len(levels.below(n.data)) for n in level[:_OPENED] if isinstance(n.data, Entry))
            if not level or (len(level) > 1 and rows > _OPENED):  # a single row is always opened
                break
            for node in level:
                self._fill(node)
                node.expand()
        # Textual computes the lines at the next refresh; the cursor can be set after that
        self.call_after_refresh(self._go_to, self._reveal(name))

    def _go_to(self, node: Node | None) -> None:
        self.moving = False
        self.move_cursor(node)
        if node is not None:  # Textual posts no message if the line of the cursor stays the same
            self.post_message(self.NodeHighlighted(node))

    def _reveal(self, name: str) -> Node | None:
        """Open the levels down to a name and return its node, or the nearest node above it, or the first row."""
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
        assert self.levels is not None  # an entry exists only if they do
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
