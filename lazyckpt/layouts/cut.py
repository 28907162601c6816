"""The shard of one tensor-parallel rank under another degree, as blocks of the shards that are stored. Pure.

From n ranks to m where m divides n, a new rank has what n/m neighbours had: of a tensor that is fused from several
(gate and up), first all their pieces of the one, then of the other. Where n divides m, every piece of an old rank is
cut evenly. Other degrees are refused. Padding (of a vocabulary) stays: a shard has it as the stored ones do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.box import Box, Shape
from ..core.index import Part, TensorSpec
from .merge import Merge, MergedFragments, Parts, Rule, Source, concatenated, decide, in_parts, replicated
from .rename.rewrite import Heads
from .tables import pattern


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


# -- Merge rules run backwards: the shard of one tensor-parallel rank, from the shape of the whole. Pure.


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's shard: its shape, and which of its blocks stand where in the whole. Elements in no block are padding."""

    shape: Shape
    parts: tuple[Part, ...]
    rule: str = ""

    @property
    def held(self) -> int:
        """Elements that are not padding."""
        return sum(part.local.numel for part in self.parts)


def everything(shape: Shape, rule: str = "") -> Cut:
    """All of a tensor."""
    return Cut(shape, (Part(Box.of(shape), (0,) * len(shape)),), rule)


def cut(
    name: str,
    whole: Shape,
    found: tuple[Rule, str],
    degree: int,
    index: int,
    multiple: int = 1,
    heads: Heads | None = None,
    widths: Sequence[Sequence[int]] | None = None,
) -> Cut:
    """The shard of rank ``index`` of ``degree``. ``found``: the rule, and how it is known; ``multiple``: of what, times
    the degree, the rows of a vocabulary are padded to a multiple; ``widths``: of each fused part on every rank, where
    the rule has them. Raises ValueError if the tensor cannot be cut so."""
    rule, evidence = found
    step = degree * multiple
    padded = (-(-whole[0] // step) * step, *whole[1:]) if pattern("model.vocabulary").search(name) else whole
    said = ""
    for shapes in _candidates(whole, padded, degree, widths):
        try:
            merge = rule(shapes)
        except ValueError as e:
            said = f": {e}"
            continue
        if merge.shape in (whole, padded):
            parts = _parts(merge, index, shapes[index], whole)
            if None not in merge.parts:
                check_heads(name, whole, degree, heads)
            more = padded[0] - whole[0] if shapes[index][0] * degree == padded[0] else 0
            note = f", {more:,} rows of padding behind the last" if more else ""
            return Cut(shapes[index], parts, f"shard {index} of {degree}: {merge.rule}{note}; known from {evidence}")
    raise ValueError(f"{name!r} of shape {whole} cannot be cut evenly over {degree} ranks ({evidence}){said}")


def _candidates(
    whole: Shape, padded: Shape, degree: int, widths: Sequence[Sequence[int]] | None
) -> Iterator[list[Shape]]:
    if widths is not None and all(len(w) == degree for w in widths):
        sizes = [sum(w[rank] for w in widths) for rank in range(degree)]
        for d, n in enumerate(whole):
            if n == sum(sizes):
                yield [(*whole[:d], size, *whole[d + 1 :]) for size in sizes]
    yield [whole] * degree
    for d, n in enumerate(padded):
        if n % degree == 0:
            shape = padded if d == 0 else whole
            yield [(*shape[:d], n // degree, *shape[d + 1 :])] * degree


def _parts(merge: Merge, index: int, shard: Shape, whole: Shape) -> tuple[Part, ...]:
    """Where the shard's blocks stand, without those of padding."""
    parts = merge.parts[index]
    return cropped(everything(shard).parts if parts is None else parts, whole)


def cropped(parts: Iterable[Part], whole: Shape) -> tuple[Part, ...]:
    """The blocks, without what is behind the end of the whole (the padding of a vocabulary)."""
    found = []
    for part in parts:
        room = [n - s for n, s in zip(whole, part.start, strict=True)]
        stop = tuple(min(b, a + r) for a, b, r in zip(part.local.start, part.local.stop, room, strict=True))
        if all(a < b for a, b in zip(part.local.start, stop, strict=True)):
            found.append(Part(Box(part.local.start, stop), part.start))
    return tuple(found)


def check_heads(name: str, whole: Shape, degree: int, heads: Heads | None) -> None:
    """Whole heads, and whole groups of them, stay together. (What is not as large as all heads is not theirs.)"""
    if heads is None:
        return
    for which, dim, rows, count, what in (
        ("qkv", 0, (heads.queries + 2 * heads.groups) * heads.dim, heads.groups, "groups of heads"),
        ("q", 0, heads.queries * heads.dim, heads.queries, "heads"),
        ("kv", 0, heads.groups * heads.dim, heads.groups, "key-value heads"),
        ("out", 1, heads.queries * heads.dim, heads.queries, "heads"),
    ):
        if pattern(f"attention.{which}").search(name) and dim < len(whole) and whole[dim] == rows and count % degree:
            raise ValueError(f"{name!r} of shape {whole} cannot be cut over {degree} ranks: it is of {count} {what}")


# -- What the stored shards of a tensor tell: how it was cut, and so how its ranks' shards are regrouped.

_HOW = "how its stored shards were put together"


def regrouped(spec: TensorSpec, degree: int, index: int, heads: Heads | None) -> Cut | None:
    """The shard of rank ``index`` of ``degree``, by the stored ones. None if there are none, or neither number of ranks
    divides the other, or a piece of a stored one cannot be cut evenly, or a vocabulary may need more padding. Raises
    ValueError if heads would be cut."""
    merge = _merge(spec)
    shapes = _shapes(spec)
    if merge is None or shapes is None or (pattern("model.vocabulary").search(spec.name) and degree > len(shapes)):
        return None
    known = Source(lambda name: (lambda _: merge, _HOW))
    try:
        shard = reshard(spec.name, shapes, (known,), degree, index)
    except ValueError:
        return None
    if degree > len(shapes):
        check_heads(spec.name, spec.shape, degree, heads)
    return Cut(shard.shape, _in_whole(shard, merge, spec.shape), f"shard {index} of {degree}; known from {_HOW}")


def as_merged(spec: TensorSpec | None) -> tuple[Rule, str] | None:
    """The rule by which the stored shards were put together, for any number of ranks; None if that is not known."""
    merge = _merge(spec) if spec is not None else None
    if merge is None:
        return None
    if not any(merge.parts):
        return replicated, _HOW
    dims = cut_dimensions(merge)
    if not dims:
        return replicated, _HOW
    first = sorted(part.start for part in merge.parts[0] or ())
    if len(dims) > 1 or not first:
        return None
    dim = dims.pop()
    starts = [start[dim] for start in first]
    if starts[0] != 0:
        return None
    if len(starts) == 1:
        return concatenated(dim), _HOW
    end = max(p.start[dim] + p.local.shape[dim] for parts in merge.parts for p in parts or ())
    return in_parts(dim, [b - a for a, b in zip(starts, [*starts[1:], end], strict=True)]), _HOW


def _merge(spec: TensorSpec) -> Merge | None:
    fragments = spec.fragments
    if not isinstance(fragments, MergedFragments) or len(fragments.parts) < 2:
        return None
    return Merge(spec.shape, fragments.parts, spec.combine)


def _shapes(spec: TensorSpec) -> list[Shape] | None:
    """Those of the stored shards."""
    if not isinstance(spec.fragments, MergedFragments) or not all(spec.fragments.shards):
        return None
    return [shard[0].local_shape for shard in spec.fragments.shards]


def _in_whole(shard: Shard, merge: Merge, whole: Shape) -> tuple[Part, ...]:
    """The blocks of the new shard in the whole, from where the stored ones stand in both."""
    found: list[Part] = []
    for rank, parts in zip(shard.ranks, shard.parts, strict=True):
        stand = merge.parts[rank]
        if stand is None:
            return everything(shard.shape).parts
        for part in stand if parts is None else parts:
            if parts is None:
                found.append(part)
                continue
            home = next(p for p in stand if p.local & part.local == part.local)
            ahead = [a - b for a, b in zip(part.local.start, home.local.start, strict=True)]
            local = part.local.shift([s - a for s, a in zip(part.start, part.local.start, strict=True)])
            found.append(Part(local, tuple(s + a for s, a in zip(home.start, ahead, strict=True))))
    return cropped(found, whole)
