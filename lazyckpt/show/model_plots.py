"""Plots of a whole checkpoint: its parameters as a treemap, what its ranks hold, and both with norms as an overview.

Nothing here reads tensor data but the norms of the overview.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..core.units import human_bytes, human_count, plural
from ..errors import DataError
from ..inspect.architecture import Architecture, architecture
from ..inspect.layers import kind_labels
from ..inspect.ranks import RankHeld, Ranks, ranks_of
from ..namespace import Namespace
from .style import (
    Theme,
    axes_of,
    bare,
    byte_axis,
    colour_bar,
    count_axis,
    headline,
    heat,
    import_matplotlib,
    legend,
    mixed,
    on,
    short,
)
from .style import sizes as sizes_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["bytes", "parameters"]
_HELD = ("bytes", "tensors", "files")

# Role -> colour, of Okabe and Ito's palette.
_ROLES = {
    "embedding": "#cc79a7", "attention": "#0072b2", "mlp": "#e69f00", "experts": "#009e73", "router": "#d55e00",
    "norm": "#56b4e9", "head": "#8f5a7a", "other": "#6e7781",
}  # fmt: skip
_WRITTEN = 0.004  # share of the whole that a rectangle has at least if its name is written
_CELLS = 64  # ranks up to which bytes are written into their cells
_BRANCHES = 12  # entries of the legend of a treemap
_TILES = 300  # kinds that have a rectangle of their own
_FILES = 24  # files that are drawn if no ranks are known
_ACROSS = 32  # ranks of a single degree that are drawn in one row


class Tile(NamedTuple):
    """A rectangle of a treemap: its corner and sides, and the number of its item."""

    x: float
    y: float
    wide: float
    high: float
    item: int


def treemap(sizes: Sequence[float], wide: float = 1.0, high: float = 1.0) -> list[Tile]:
    """Divide a rectangle into parts of given sizes, as square as possible.

    The method is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000). Sizes are descending.
    """
    total = sum(sizes)
    tiles: list[Tile] = []
    if total <= 0:
        return tiles
    areas = [size * wide * high / total for size in sizes]
    x = y = 0.0
    at = 0
    while at < len(areas):
        side = min(wide, high)
        end = at + 1
        while end < len(areas) and _worst(areas[at : end + 1], side) <= _worst(areas[at:end], side):
            end += 1
        row = areas[at:end]
        thick = sum(row) / side if side else 0.0
        along = 0.0
        for n, area in enumerate(row, at):
            length = area / thick if thick else 0.0
            upright = wide >= high  # the row is a column at the left
            tiles.append(Tile(x, y + along, thick, length, n) if upright else Tile(x + along, y, length, thick, n))
            along += length
        if wide >= high:
            x, wide = x + thick, wide - thick
        else:
            y, high = y + thick, high - thick
        at = end
    return tiles


def _worst(row: Sequence[float], side: float) -> float:
    """Return the worst ratio of the sides of the rectangles of a row."""
    total, most, least = sum(row), max(row), min(row)
    if not total or not least or not side:
        return float("inf")
    return max(side * side * most / (total * total), total * total / (side * side * least))


def draw_architecture(view: Namespace[Any], quantity: str, ax: Axes | None, by: str = "role") -> Axes:
    """See `ViewPlots.architecture`."""
    if by not in ("role", "layers"):
        raise DataError(f"there is no order {by!r} of an architecture: it is by 'role' or by 'layers'")
    if quantity not in ("bytes", "parameters"):
        raise DataError(f"there is no quantity {quantity!r} of an architecture: it is 'bytes' or 'parameters'")
    import_matplotlib()
    found = architecture(view)
    if not found.groups:
        raise DataError("there are no tensors in this view: there is nothing to draw")
    ax, theme = axes_of(ax, (8.6, 4.8))
    _draw_tiles(ax, (_roles if by == "role" else _layers)(found, quantity, theme), quantity, theme)
    headline(ax, "Parameters by kind" if by == "role" else "Parameters by layer", _facts(view, found), theme)
    return ax


def _facts(view: Namespace[Any], found: Architecture) -> list[str]:
    layers = [layer for layer in found.layers if layer is not None]
    return [
        f"{human_count(found.numel)} parameters, {human_bytes(found.nbytes)}",
        plural(len(view), "tensor"),
        plural(len(layers), "layer") if layers else "",
        f"state {view.state}",
    ]


class _Leaf(NamedTuple):
    """A rectangle: its label, the number of tensors that it stands for, and its size."""

    label: str
    tensors: int
    size: int


class _Branch(NamedTuple):
    """Rectangles that are drawn together, in one colour."""

    label: str
    tone: Any
    leaves: list[_Leaf]

    @property
    def size(self) -> int:
        return sum(leaf.size for leaf in self.leaves)


def _roles(found: Architecture, quantity: str, theme: Theme) -> list[_Branch]:
    """Return a rectangle for each kind, those of a role together."""
    kinds = found.of_kind()
    labels = dict(zip(kinds, kind_labels(list(kinds)), strict=True))
    sizes = {kind: sum(g.nbytes if quantity == "bytes" else g.numel for g in groups) for kind, groups in kinds.items()}
    small = sorted(sizes, key=lambda kind: -sizes[kind])[_TILES:]
    rest = sum(sizes.pop(kind) for kind in small)
    roles: dict[str, list[str]] = {}
    for kind in sizes:
        roles.setdefault(kinds[kind][0].role, []).append(kind)
    if small:
        label = f"{len(small):,} smaller kinds"
        kinds[label], labels[label], sizes[label] = [g for kind in small for g in kinds[kind]], label, rest
        roles.setdefault("other", []).append(label)
    return [
        _Branch(
            role,
            mixed(_ROLES[role], theme.paper, 0.2),
            [_Leaf(labels[kind], sum(len(g.names) for g in kinds[kind]), sizes[kind]) for kind in some],
        )
        for role, some in roles.items()
    ]


def _layers(found: Architecture, quantity: str, theme: Theme) -> list[_Branch]:
    """Return a rectangle for each layer, those that are alike together, and for each kind outside of layers."""
    tones = [mixed(colour, theme.paper, 0.2) for colour in _ROLES.values()][:-1]
    branches = []
    for n, block in enumerate(found.blocks()):
        size = block.nbytes if quantity == "bytes" else block.numel
        leaves = [_Leaf(f"layer {layer}", block.tensors, size) for layer in block.layers]
        branches.append(_Branch(f"{block.stack}{block.label}", tones[n % len(tones)], leaves))
    kinds = {kind: groups for kind, groups in found.of_kind().items() if all(g.layer is None for g in groups)}
    labels = kind_labels(list(kinds))
    leaves = [
        _Leaf(
            label, sum(len(g.names) for g in groups), sum(g.nbytes if quantity == "bytes" else g.numel for g in groups)
        )
        for label, groups in zip(labels, kinds.values(), strict=True)
    ]
    rest = mixed(_ROLES["other"], theme.paper, 0.2)
    return [*branches, _Branch("outside layers", rest, leaves)] if leaves else branches


def _draw_tiles(ax: Any, branches: list[_Branch], quantity: str, theme: Theme) -> None:
    """Draw a rectangle for each leaf, those of a branch together, with the largest branches first."""
    from matplotlib.patches import Patch, Rectangle

    branches = sorted(branches, key=lambda branch: -branch.size)
    total = sum(branch.size for branch in branches) or 1
    figure = ax.figure.figure
    inches = (
        ax.get_position().width * figure.get_size_inches()[0],
        ax.get_position().height * figure.get_size_inches()[1],
    )
    ratio = max(0.5, inches[0] / max(0.1, inches[1]))
    for outer in treemap([branch.size for branch in branches], ratio, 1.0):
        branch = branches[outer.item]
        tone, leaves = branch.tone, sorted(branch.leaves, key=lambda leaf: -leaf.size)
        for tile in treemap([leaf.size for leaf in leaves], outer.wide, outer.high):
            leaf = leaves[tile.item]
            corner = outer.x + tile.x, outer.y + tile.y
            ax.add_patch(Rectangle(corner, tile.wide, tile.high, facecolor=tone, edgecolor=theme.paper, linewidth=1.2))
            if leaf.size >= _WRITTEN * total:
                _write(ax, tile, corner, leaf.label, leaf.tensors, leaf.size, quantity, on(tone), inches[1])
    ax.set(xlim=(0, ratio), ylim=(1, 0), xticks=[], yticks=[])
    bare(ax)
    handles = [
        Patch(color=branch.tone, label=f"{short(branch.label, 32)}  {_share(branch.size / total)}")
        for branch in branches[:_BRANCHES]
    ]
    legend(ax, theme, handles, outside=True)


def _share(part: float) -> str:
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def _write(
    ax: Any,
    tile: Tile,
    corner: tuple[float, float],
    label: str,
    count: int,
    size: int,
    quantity: str,
    ink: str,
    scale: float,
) -> None:
    """Write the name, the size and the number of tensors into a rectangle, as far as there is room."""
    wide, high = 0.9 * tile.wide * scale * 72, 0.9 * tile.high * scale * 72  # points
    text = human_bytes(size) if quantity == "bytes" else human_count(size)
    lines = [short(label, 32), text + (f" in {count:,}" if count > 1 else "")]
    font = min(9.0, 0.9 * wide / (0.6 * max(len(line) for line in lines)))
    if font < 6.5 and len(lines[0].rpartition(".")[2]) < len(lines[0]):
        lines[0] = lines[0].rpartition(".")[2]
        font = min(9.0, 0.9 * wide / (0.6 * max(len(line) for line in lines)))
    room = int(0.9 * wide / (0.6 * 6.5))
    if font < 6.5 and room >= 8:
        lines = [short(lines[0], room), *(line for line in lines[1:] if len(line) <= room)]
        font = min(9.0, 0.9 * wide / (0.6 * max(len(line) for line in lines)))
    while lines and len(lines) * font * 1.35 > high:
        lines.pop()
    if font < 6 or not lines:
        return
    place = corner[0] + tile.wide / 2, corner[1] + tile.high / 2
    made = ax.text(*place, "\n".join(lines), ha="center", va="center", color=ink, fontsize=font, linespacing=1.3)
    made.set_in_layout(False)


# -- ranks


def draw_ranks(view: Namespace[Any], ax: Axes | None, quantity: str = "bytes", every: bool = True) -> Axes:
    """See `ViewPlots.ranks`."""
    if quantity not in _HELD:
        raise DataError(f"there is no quantity {quantity!r} of ranks: it is one of {', '.join(_HELD)}")
    import_matplotlib()
    states = [view] if not every or view.state not in view.states else list(view.states.values())
    found = ranks_of(states)
    known = [held for held in found.ranks if held.rank is not None]
    if len(known) < 2:
        return _draw_files(found, ax, quantity)
    grid = _grid(known)
    rows, columns = len(grid.rows), len(grid.columns)
    ax, theme = axes_of(
        ax,
        (
            min(9.5, 2.6 + columns * (0.9 if columns <= 8 else 0.26)),
            min(8.0, 1.6 + rows * (0.5 if rows <= 8 else 0.22)),
        ),
    )
    from matplotlib.colors import Normalize

    values = np.array(
        [[float(_held(held, quantity)) if held is not None else np.nan for held in row] for row in grid.cells]
    )
    image = heat(ax, values, sizes_map(theme), Normalize(0, float(np.nanmax(values)) or 1.0), theme)
    ax.set_xticks(range(columns), labels=grid.columns)
    ax.set_yticks(range(rows), labels=grid.rows)
    if columns > _ACROSS / 2:
        shown = range(0, columns, -(-columns // 16))
        ax.set_xticks(list(shown), labels=[grid.columns[n] for n in shown])
    if rows > _ACROSS / 2:
        shown = range(0, rows, -(-rows // 16))
        ax.set_yticks(list(shown), labels=[grid.rows[n] for n in shown])
    _write_ranks(ax, grid, image, theme, quantity)
    bar = colour_bar(ax, image, f"{quantity} that a rank holds", theme)
    if quantity == "bytes":
        byte_axis(bar.ax.yaxis, image.norm.vmax)
    else:
        count_axis(bar.ax.yaxis, 6)
    headline(ax, "What each rank holds", _rank_notes(found, known), theme)
    ax.set(xlabel=grid.across, ylabel=grid.down)
    return ax


def _held(held: RankHeld, quantity: str) -> int:
    """Return what a rank holds: bytes, tensors, or files."""
    return held.nbytes if quantity == "bytes" else held.tensors if quantity == "tensors" else len(held.files)


class _Grid(NamedTuple):
    """Ranks in rows and columns, with the labels of both."""

    cells: list[list[RankHeld | None]]
    rows: list[str]
    columns: list[str]
    down: str
    across: str


def _grid(known: Sequence[RankHeld]) -> _Grid:
    """Arrange ranks: one degree in rows of equal length, two as rows and columns, more as pairs."""
    ranks = {held.rank: held for held in known if held.rank is not None}
    several = [name for name in ("pp", "dp", "ep", "tp") if len({getattr(rank, name) for rank in ranks}) > 1]
    if len(several) <= 1:
        every = sorted(ranks)
        across = next((n for n in (8, 16, _ACROSS) if len(every) <= n * n), _ACROSS)
        across = len(every) if len(every) <= 12 else across
        held: list[RankHeld | None] = [ranks[rank] for rank in every]
        cells = [held[n : n + across] for n in range(0, len(held), across)]
        cells[-1] += [None] * (across - len(cells[-1]))
        name = several[0] if several else "dp"
        rows = [f"{n * across}" for n in range(len(cells))] if len(cells) > 1 else [""]
        columns = [
            f"+{n}" if len(cells) > 1 else f"{getattr(rank, name)}"
            for n, rank in zip(range(across), every, strict=False)
        ]
        return _Grid(cells, rows, columns, name if len(cells) > 1 else "", f"{name} rank")
    cut = len(several) // 2
    downs, acrosses = several[:cut], several[cut:]
    found = {}
    for rank, one in ranks.items():
        found[tuple(getattr(rank, n) for n in downs), tuple(getattr(rank, n) for n in acrosses)] = one
    rows_, columns_ = (sorted({key[k] for key in found}) for k in (0, 1))
    cells = [[found.get((row, column)) for column in columns_] for row in rows_]
    texts = [[", ".join(map(str, one)) for one in each] for each in (rows_, columns_)]
    return _Grid(cells, texts[0], texts[1], ", ".join(downs), ", ".join(acrosses))


def _write_ranks(ax: Any, grid: _Grid, image: Any, theme: Theme, quantity: str) -> None:
    """Write the numbers into the cells of few ranks, and mark those of which files are missing."""
    from matplotlib.patches import Rectangle

    few = sum(map(len, grid.cells)) <= _CELLS
    for r, row in enumerate(grid.cells):
        for c, held in enumerate(row):
            if held is None:
                continue
            if held.missing:
                box = Rectangle(
                    (c - 0.5, r - 0.5), 1, 1, facecolor=theme.empty, edgecolor=theme.lost, hatch="////", linewidth=0
                )
                ax.add_patch(box)
            if few:
                count = _held(held, quantity)
                text = "missing" if held.missing else human_bytes(count) if quantity == "bytes" else f"{count:,}"
                ink = theme.ink if held.missing else on(image.cmap(image.norm(count)))
                pad = (
                    {"facecolor": theme.paper, "edgecolor": "none", "boxstyle": "round,pad=0.15"}
                    if held.missing
                    else None
                )
                ax.text(c, r, text.replace(" ", "\n", 1), ha="center", va="center", color=ink, fontsize=7.5, bbox=pad)


def _rank_notes(found: Ranks, known: Sequence[RankHeld]) -> list[str]:
    mesh = found.mesh
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep}
    notes = [" ".join(f"{name}={n}" for name, n in degrees.items() if n > 1), plural(len(known), "rank")]
    notes.append(
        f"{human_bytes(sum(held.nbytes for held in known))} in {plural(sum(len(h.files) for h in known), 'file')}"
    )
    rest = [held for held in found.ranks if held.rank is None]
    if any(held.nbytes for held in rest):
        notes.append(f"{human_bytes(sum(held.nbytes for held in rest))} in files of no known rank")
    if found.lost:
        notes.append(f"hatched: files are missing, {plural(len(found.lost), 'tensor')} of all states incomplete")
    return notes


def _draw_files(found: Ranks, ax: Axes | None, quantity: str) -> Axes:
    """Draw the bytes or the tensors of each file as bars, where the ranks of files are not known."""
    if quantity == "files":
        raise DataError(
            "the ranks of the files are not known, so files of a rank cannot be counted: take 'bytes' or 'tensors'"
        )
    size = {path: one.nbytes if quantity == "bytes" else one.tensors for path, one in found.files.items()}
    held = sorted((one for one in found.files.values() if one.nbytes), key=lambda one: -size[one.path])
    if not held:
        raise DataError("no file that is known holds a tensor of this view: there is nothing to draw")
    shown = held[:_FILES]
    ax, theme = axes_of(ax, (7.4, 1.1 + 0.26 * max(1, len(shown))), grid="x")
    places = range(len(shown))
    tones = [theme.lost if one.missing else theme.accent for one in shown]
    ax.barh(places, [size[one.path] for one in shown], color=tones, height=0.7)
    ax.set_yticks(places, labels=[short(one.path, 44) for one in shown])
    ax.invert_yaxis()
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if quantity == "bytes":
        byte_axis(ax.xaxis, max(size.values()))
    else:
        count_axis(ax.xaxis)
    ax.set_xlabel("bytes of tensors" if quantity == "bytes" else "tensors")
    notes = [
        "files, not grouped by rank",
        f"{human_bytes(sum(one.nbytes for one in held))} in {plural(len(held), 'file')}",
    ]
    if len(held) > len(shown):
        notes.append(f"the largest {len(shown)}")
    headline(ax, "What each file holds", notes, theme)
    return ax
