"""Which file holds which block of a tensor, as pure data that HTML, plots and the terminal draw. No I/O.

`fragment_boxes` of core/fragments.py turns a fragment's span or parts into boxes. A `Drawing` projects these boxes onto
two dimensions of the tensor and merges them into few enough cells to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple

from ..core.box import Box
from ..core.extents import Hole
from ..core.fragments import fragment_boxes, fragments_of
from ..core.placement import Rank
from ..core.specs import Fragment
from ..errors import some
from ..lazy import LazyArray

_MOST = 20_000  # maximum number of blocks that a drawing considers
_CELLS = 200  # default maximum number of cells of a drawing


class Holder(NamedTuple):
    """A file that holds part of a tensor, and the rank that it belongs to.

    ``label`` is a short text such as "tp 1 dp 3", or the file's name where the checkpoint does not name ranks.
    ``missing`` says why the file cannot be read; "" if it can."""

    label: str
    path: str
    rank: Rank | None = None
    missing: str = ""


class Block(NamedTuple):
    """A block of a tensor, in coordinates of the whole tensor, and the file that holds it.

    ``stored`` is "span" if its fragment is a flat interval (ZeRO, FSDP1), which may consist of several blocks, and
    "block" otherwise."""

    box: Box
    holder: Holder
    stored: str


def boxes(t: LazyArray) -> Iterator[Block]:
    """Yield the blocks that files hold of the selection of ``t``, clipped to the hull of the selection.

    Replicas are included; reading takes the first block that covers an element. Padding is left out. No file is read.

    >>> import lazyckpt
    >>> list(boxes(lazyckpt.open("model.safetensors")["up.weight"]))  # doctest: +SKIP
    [Block(box=Box(start=(0, 0), stop=(512, 128)), holder=Holder(label='model.safetensors', ...), stored='block')]
    """
    hull = t._sel.hull
    fragments = _fragments(t)
    for fragment, holder in zip(fragments, _holders(fragments), strict=True):
        stored = "block" if fragment.span is None else "span"
        for _, globe in fragment_boxes(fragment):
            box = globe & hull
            if box:
                yield Block(box, holder, stored)


def holders(t: LazyArray) -> tuple[Holder, ...]:
    """Return the files that may hold elements of the selection of ``t``, without repetition, in fragment order."""
    return tuple(dict.fromkeys(_holders(_fragments(t))))


def _fragments(t: LazyArray) -> list[Fragment]:
    hull = t._sel.hull
    if hull == Box.of(t.spec.shape):
        return list(t.fragments)
    want = tuple(range(a, b) for a, b in zip(hull.start, hull.stop, strict=True))
    return list(fragments_of(t.fragments).meeting(want))


def _holders(fragments: Sequence[Fragment]) -> list[Holder]:
    """Return the holder of each fragment, with the shortest labels that distinguish the ranks."""
    ranks = {f.rank for f in fragments if f.rank is not None}
    named = [n for n in Rank._fields if any(getattr(r, n) for r in ranks)]
    names: dict[str, set[str]] = {}
    for f in fragments:
        names.setdefault(f.extent.path.rsplit("/", 1)[-1], set()).add(f.extent.path)
    found = []
    for f in fragments:
        path, rank = f.extent.path, f.rank
        if rank is None:
            name = path.rsplit("/", 1)[-1]
            label = name if len(names[name]) == 1 else path
        else:
            label = " ".join(f"{n} {getattr(rank, n)}" for n in named) or "rank 0"
        found.append(Holder(label, path, rank, f.extent.reason if isinstance(f.extent, Hole) else ""))
    return found


class Cell(NamedTuple):
    """A rectangle of a drawing: half-open intervals of elements along its two dimensions.

    ``holders`` are those of all blocks in the rectangle, in reading order. There are several if blocks are replicated,
    if they differ only along dimensions that are not drawn, or if neighbouring blocks are merged."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    holders: tuple[Holder, ...]
    blocks: int = 1

    @property
    def missing(self) -> bool:
        """Whether no holder of the cell can be read."""
        return all(h.missing for h in self.holders)


class Drawing(NamedTuple):
    """The blocks of a tensor as cells on two of its dimensions."""

    row_dim: int | None
    """Dimension that is drawn from top to bottom; None if fewer than two are drawn."""
    col_dim: int | None
    """Dimension that is drawn from left to right; None if none is drawn."""
    rows: tuple[int, int]
    """Interval of elements along ``row_dim``; (0, 1) if that is None."""
    cols: tuple[int, int]
    """Interval of elements along ``col_dim``; (0, 1) if that is None."""
    cells: tuple[Cell, ...]
    """The cells, larger ones first so that none hides another."""
    holders: tuple[Holder, ...]
    """All holders, without repetition, in fragment order."""
    blocks: int
    """Number of blocks considered."""
    complete: bool
    """Whether ``blocks`` counts all blocks; at most 20,000 are considered."""
    merged: bool
    """Whether a cell is the hull of several neighbouring blocks."""
    undrawn: tuple[int, ...]
    """Further dimensions along which the tensor is cut."""


def drawing(t: LazyArray, cells: int = _CELLS) -> Drawing:
    """Project the blocks of `boxes` onto two dimensions, in at most ``cells`` cells. No file is read.

    The dimensions are those along which the tensor is cut into the most pieces; ties are decided by length."""
    hull = t._sel.hull
    stream = boxes(t)
    found = list(islice(stream, _MOST))
    complete = next(stream, None) is None
    cuts = [len({(b.box.start[d], b.box.stop[d]) for b in found}) for d in range(len(hull.start))]
    drawn = sorted(range(len(cuts)), key=lambda d: (-cuts[d], -(hull.stop[d] - hull.start[d])))
    drawn = sorted([d for d in drawn if hull.stop[d] - hull.start[d] > 1][:2])
    row, col = (None, None, *drawn)[-2:]
    placed: dict[tuple[tuple[int, int], tuple[int, int]], list[Holder]] = {}
    for block in found:
        placed.setdefault((_along(block.box, row), _along(block.box, col)), []).append(block.holder)
    made = [Cell(a, b, tuple(dict.fromkeys(holders)), len(holders)) for (a, b), holders in placed.items()]
    merged = len(made) > cells
    if merged:
        made = list(_fewer(made, cells))
    made.sort(key=lambda c: (c.rows[0] - c.rows[1]) * (c.cols[1] - c.cols[0]))
    undrawn = tuple(d for d, n in enumerate(cuts) if n > 1 and d not in drawn)
    holders = tuple(dict.fromkeys(b.holder for b in found))
    return Drawing(
        row, col, _along(hull, row), _along(hull, col), tuple(made), holders, len(found), complete, merged, undrawn
    )


def _along(box: Box, dim: int | None) -> tuple[int, int]:
    return (0, 1) if dim is None else (box.start[dim], box.stop[dim])


def _fewer(cells: Iterable[Cell], most: int) -> Iterator[Cell]:
    """Merge neighbouring cells, in row-major order, until at most ``most`` are left."""
    order = sorted(cells, key=lambda c: (c.rows[0], c.cols[0]))
    size = ceil(len(order) / most)
    for n in range(0, len(order), size):
        group = order[n : n + size]
        yield Cell(
            (min(c.rows[0] for c in group), max(c.rows[1] for c in group)),
            (min(c.cols[0] for c in group), max(c.cols[1] for c in group)),
            tuple(dict.fromkeys(h for c in group for h in c.holders)),
            sum(c.blocks for c in group),
        )


def ranges(holders: Iterable[Holder], most: int = 6) -> str:
    """Return the labels of the holders on one line, with labels that end in consecutive numbers as a range.

    >>> ranges([Holder(f"tp 0 dp {n}", "") for n in range(64)])
    'tp 0 dp 0-63'
    >>> ranges([Holder(f"tp {n}", "") for n in (0, 1, 3)])
    'tp 0-1, tp 3'
    """
    runs: list[tuple[str, int | None, int | None]] = []  # (text before the number, first number, last number)
    for label in dict.fromkeys(h.label for h in holders):
        front, _, last = label.rpartition(" ")
        number = int(last) if last.isascii() and last.isdigit() and front and len(last) < 10 else None
        if number is not None and runs and runs[-1][0] == front and runs[-1][2] == number - 1:
            runs[-1] = (front, runs[-1][1], number)
        else:
            runs.append((label if number is None else front, number, number))
    texts = [front if a is None else f"{front} {a}" if a == b else f"{front} {a}-{b}" for front, a, b in runs]
    return some(texts, most)
