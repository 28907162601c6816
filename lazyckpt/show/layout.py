"""Which block of a tensor lies in which file, as data: HTML, plots and the terminal draw the same. No I/O.

A fragment's span or parts are boxes (core/plan.py `fragment_boxes`). A `Drawing` is what is left of them on two of the
tensor's dimensions, in so few cells that they can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple

from ..core.box import Box
from ..core.index import Fragment, Hole, Rank
from ..core.plan import fragment_boxes, fragments_near
from ..errors import some
from ..lazy import LazyArray

_MOST = 20_000  # blocks that a drawing looks at
_CELLS = 200  # cells of a drawing


class Holder(NamedTuple):
    """A file that holds some of a tensor, and whose it is. ``label``: short, of one line: "tp 1 dp 3" or, where the
    checkpoint tells no rank, the file's name. ``missing``: why the file cannot be read; "" if it can."""

    label: str
    path: str
    rank: Rank | None = None
    missing: str = ""


class Block(NamedTuple):
    """A block of a tensor, in elements of the whole tensor, and what holds it. ``stored``: whether its fragment is a
    flat interval (ZeRO, FSDP1), which several blocks may be of: "span"; else "block"."""

    box: Box
    holder: Holder
    stored: str


def boxes(t: LazyArray) -> Iterator[Block]:
    """The blocks that files hold of what ``t`` selects of its tensor, cut to the hull of that: replicas, too, in the
    order in which reading takes the first. Padding is left out. Reads nothing.

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
    """What holds elements of what ``t`` selects of its tensor, or may: each once, in the order of the fragments."""
    return tuple(dict.fromkeys(_holders(_fragments(t))))


def _fragments(t: LazyArray) -> list[Fragment]:
    hull = t._sel.hull
    if hull == Box.of(t.spec.shape):
        return list(t.spec.fragments)
    want = tuple(range(a, b) for a, b in zip(hull.start, hull.stop, strict=True))
    return list(fragments_near(t.spec.fragments, want))


def _holders(fragments: Sequence[Fragment]) -> list[Holder]:
    """Of each fragment, with labels that tell them apart as shortly as the ranks allow."""
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
    """A rectangle of a drawing: half-open intervals of elements along its two dimensions. ``holders``: of all blocks
    that fall into it, the first that is read first; several where there are replicas, or blocks that differ in
    dimensions that are not drawn, or where blocks are drawn together."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    holders: tuple[Holder, ...]
    blocks: int = 1

    @property
    def missing(self) -> bool:
        """Whether none of its holders can be read."""
        return all(h.missing for h in self.holders)


class Drawing(NamedTuple):
    """``row_dim``, ``col_dim``: the dimensions that are drawn; None: there is none, and the interval is (0, 1).
    ``rows``, ``cols``: what is drawn of them. ``cells``: the larger first, so that none hides another.
    ``holders``: all of them, in order. ``blocks``: how many there are, ``complete``: whether these are all (a drawing
    looks at 20,000). ``merged``: cells are hulls of several neighbouring blocks. ``undrawn``: dimensions that the
    tensor is cut along as well."""

    row_dim: int | None
    col_dim: int | None
    rows: tuple[int, int]
    cols: tuple[int, int]
    cells: tuple[Cell, ...]
    holders: tuple[Holder, ...]
    blocks: int
    complete: bool
    merged: bool
    undrawn: tuple[int, ...]


def drawing(t: LazyArray, cells: int = _CELLS) -> Drawing:
    """The blocks of `boxes` on two dimensions, in at most so many cells: those along which the tensor is cut into most
    pieces or, where there are not two, that are longest. Reads nothing."""
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
    """Neighbours together: as many as it takes, from the top left on."""
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
    """The holders in one short line: those that differ in one number only, one after the other, as a range.

    >>> ranges([Holder(f"tp 0 dp {n}", "") for n in range(64)])
    'tp 0 dp 0-63'
    >>> ranges([Holder(f"tp {n}", "") for n in (0, 1, 3)])
    'tp 0-1, tp 3'
    """
    runs: list[tuple[str, int | None, int | None]] = []  # (what is in front, first number, last number)
    for label in dict.fromkeys(h.label for h in holders):
        front, _, last = label.rpartition(" ")
        number = int(last) if last.isascii() and last.isdigit() and front and len(last) < 10 else None
        if number is not None and runs and runs[-1][0] == front and runs[-1][2] == number - 1:
            runs[-1] = (front, runs[-1][1], number)
        else:
            runs.append((label if number is None else front, number, number))
    texts = [front if a is None else f"{front} {a}" if a == b else f"{front} {a}-{b}" for front, a, b in runs]
    return some(texts, most)
