"""The shard of one tensor-parallel rank under another degree, as blocks of the shards that are stored. Pure.

From n ranks to m where m divides n, a new rank has what n/m neighbours had: of a tensor that is fused from several
(gate and up), first all their pieces of the one, then of the other. Where n divides m, every piece of an old rank is
cut evenly. Other degrees are refused. Padding (of a vocabulary) stays: a shard has it as the stored ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.box import Box, Shape
from ..core.index import Part
from .merge import Merge, Parts, Source, decide


@dataclass(frozen=True, slots=True)
class Shard:
    """``ranks``: the stored shards that it is made of; ``parts``: how each of them maps into it (None: it is it)."""

    shape: Shape
    ranks: tuple[int, ...]
    parts: tuple[Parts, ...]
    combine: Literal["first", "mean"] = "first"
    rule: str = ""


def stored_ranks(stored: int, degree: int, index: int) -> range:
    """The stored ranks that rank ``index`` of ``degree`` is made of. Raises ValueError if the degrees do not go into
    each other.

    >>> stored_ranks(4, 2, 1), stored_ranks(2, 4, 1)
    (range(2, 4), range(0, 1))
    """
    if degree > 0 and stored % degree == 0:
        each = stored // degree
        return range(index * each, (index + 1) * each)
    if degree > 0 and degree % stored == 0:
        return range(index * stored // degree, index * stored // degree + 1)
    raise ValueError(f"{stored} tensor-parallel ranks cannot become {degree}: neither number divides the other")


def reshard(name: str, shapes: Sequence[Shape], sources: Sequence[Source], degree: int, index: int) -> Shard:
    """The shard of rank ``index`` of ``degree``, from stored shards of these shapes. Raises ValueError if no source
    knows the tensor's rule, or if it cannot be cut so."""
    ranks = stored_ranks(len(shapes), degree, index)
    if len(ranks) == 1 and degree <= len(shapes):
        return Shard(shapes[ranks[0]], (ranks[0],), (None,))
    if not shapes[0] or all(0 in s for s in shapes):  # a single number is the same on all; nothing needs no rule
        return Shard(shapes[ranks[0]], (ranks[0],), (None,))
    # of one stored shard no rule tells how it would be cut: two of its kind do
    merge = decide(name, shapes if len(shapes) > 1 else [shapes[0]] * 2, sources)
    if all(merge.parts[r] is None for r in ranks):
        return Shard(shapes[ranks[0]], tuple(ranks), (None,) * len(ranks), merge.combine, merge.rule)
    cut = cut_dimensions(merge)
    if not cut:  # every rank has all of it, whatever the rule calls it
        return Shard(shapes[ranks[0]], tuple(ranks), (None,) * len(ranks), merge.combine, merge.rule)
    if len(cut) > 1:
        raise ValueError(f"{merge.rule}: it is cut along {len(cut)} dimensions, its ranks cannot be regrouped")
    dim = cut.pop()
    if degree <= len(shapes):
        return _gathered(merge, shapes, ranks, dim)
    return _split(merge, shapes[ranks[0]], ranks[0], dim, degree // len(shapes), index % (degree // len(shapes)))


def cut_dimensions(merge: Merge) -> set[int]:
    """The dimensions along which the ranks' blocks are not the whole."""
    parts = [p for ps in merge.parts for p in ps or ()]
    full = [max(p.start[d] + p.local.shape[d] for p in parts) for d in range(len(merge.shape))]
    return {d for p in parts for d, n in enumerate(full) if p.start[d] or p.local.shape[d] != n}


def _gathered(merge: Merge, shapes: Sequence[Shape], ranks: range, dim: int) -> Shard:
    """The pieces of some ranks in the order in which they stand in the whole."""
    pieces = sorted(((p.start[dim], p.local.shape[dim], r, p) for r in ranks for p in merge.parts[r] or ()), key=_first)
    placed: dict[int, list[Part]] = {r: [] for r in ranks}
    at, last = 0, (-1, 0)  # where the next piece goes; where the last one stands in the whole, and its width
    for start, width, r, part in pieces:
        if (start, width) == last:  # a replica of the one before
            placed[r].append(_moved(part, dim, at - width))
            continue
        if start < sum(last):
            raise ValueError(f"{merge.rule}: the pieces of its ranks overlap")
        placed[r].append(_moved(part, dim, at))
        at, last = at + width, (start, width)
    first = shapes[ranks[0]]
    shape = (*first[:dim], at, *first[dim + 1 :])
    return Shard(shape, tuple(ranks), tuple(tuple(placed[r]) for r in ranks), rule=merge.rule)


def _first(piece: tuple[int, int, int, Part]) -> tuple[int, int, int]:
    return piece[:3]


def _moved(part: Part, dim: int, at: int) -> Part:
    return Part(part.local, tuple(at if d == dim else 0 for d in range(len(part.start))))


def _split(merge: Merge, shape: Shape, rank: int, dim: int, count: int, index: int) -> Shard:
    """The ``index``-th of ``count`` equal cuts of every piece of one rank."""
    parts = []
    at = 0
    for part in sorted(merge.parts[rank] or (), key=lambda p: p.local.start[dim]):
        start, stop = part.local.start[dim], part.local.stop[dim]
        if (stop - start) % count:
            raise ValueError(f"{merge.rule}: a piece {stop - start} wide cannot be cut into {count} equal ones")
        width = (stop - start) // count
        lo, hi = list(part.local.start), list(part.local.stop)
        lo[dim], hi[dim] = start + index * width, start + (index + 1) * width
        parts.append(_moved(Part(Box(tuple(lo), tuple(hi)), part.start), dim, at))
        at += width
    rule = f"{merge.rule}; of rank {rank} every piece cut into {count}, the {index + 1}. of them"
    return Shard((*shape[:dim], at, *shape[dim + 1 :]), (rank,), (tuple(parts),), rule=rule)
