"""The shard of one tensor-parallel rank under another degree, as blocks of the stored shards. No I/O.

From n to m ranks, where m divides n, a new rank has the shards of n/m neighbours: of a fused tensor (gate and up),
first all pieces of the one, then all pieces of the other. Where n divides m, every piece of an old rank is cut evenly.
Other degrees are refused. Padding (of a vocabulary) stays as it is in the stored shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.box import Box, Shape
from ..core.compose import held, is_mean
from ..core.fragments import fragments_of
from ..core.placement import Part, Placement
from ..core.specs import TensorSpec
from .merge import Merge, Rule, Source, concatenated, decide, in_parts, replicated
from .rename.pieces import Heads
from .tables import pattern

Known = tuple[Placement, str]  # the placement of a shard in its tensor, and the evidence for it


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A new rank's shard, made of stored shards: those of ``ranks``, each with its placement in the new shard.
    ``is_mean``: the shards are replicas, and their mean is read."""

    shape: Shape
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]
    is_mean: bool = False
    rule: str = ""


def stored_ranks(stored: int, degree: int, index: int) -> range:
    """Return the stored ranks that rank ``index`` of ``degree`` is made of.

    Raises ValueError if neither degree divides the other.

    >>> stored_ranks(4, 2, 1), stored_ranks(2, 4, 1)
    (range(2, 4), range(0, 1))
    """
    if degree > 0 and stored % degree == 0:
        each = stored // degree
        return range(index * each, (index + 1) * each)
    if degree > 0 and degree % stored == 0:
        return range(index * stored // degree, index * stored // degree + 1)
    raise ValueError(f"{stored} tensor-parallel ranks cannot become {degree}: neither number divides the other")


def reshard(name: str, shapes: Sequence[Shape], sources: Sequence[Source], degree: int, index: int) -> Regrouped:
    """Return the shard of rank ``index`` of ``degree``, from stored shards of these shapes.

    Raises ValueError if no source knows the tensor's rule, or if the rule does not allow these degrees.
    """
    ranks = stored_ranks(len(shapes), degree, index)
    own = shapes[ranks[0]]
    if len(ranks) == 1 and degree <= len(shapes):
        return Regrouped(own, (ranks[0],), (Placement(own),))
    if not shapes[0] or all(0 in s for s in shapes):  # scalars are the same on all ranks; empty tensors need no rule
        return Regrouped(own, (ranks[0],), (Placement(own),))
    # a rule shows the cut dimension only for several shards: ask it for two like the stored one
    merge = decide(name, shapes if len(shapes) > 1 else [shapes[0]] * 2, sources)
    cut = set() if all(merge.placements[r].parts is None for r in ranks) else cut_dimensions(merge)
    if not cut:  # every rank has the whole tensor, whatever the rule is called
        return Regrouped(own, tuple(ranks), (Placement(own),) * len(ranks), merge.is_mean, merge.rule)
    if len(cut) > 1:
        raise ValueError(f"{merge.rule}: it is cut along {len(cut)} dimensions, its ranks cannot be regrouped")
    dim = cut.pop()
    if degree <= len(shapes):
        return _gathered(merge, shapes, ranks, dim)
    return _split(merge, own, ranks[0], dim, degree // len(shapes), index % (degree // len(shapes)))


def cut_dimensions(merge: Merge) -> set[int]:
    """Return the dimensions along which the ranks' blocks are smaller than the whole."""
    parts = [part for placement in merge.placements for part in placement.parts or ()]
    full = [max(p.start[d] + p.local.shape[d] for p in parts) for d in range(len(merge.shape))]
    return {d for p in parts for d, n in enumerate(full) if p.start[d] or p.local.shape[d] != n}


def _gathered(merge: Merge, shapes: Sequence[Shape], ranks: range, dim: int) -> Regrouped:
    """Return the shard made of the pieces of some ranks, in the order of the whole tensor."""
    found = ((p.start[dim], p.local.shape[dim], r, p) for r in ranks for p in merge.placements[r].parts or ())
    pieces = sorted(found, key=_first)
    placed: dict[int, list[Part]] = {r: [] for r in ranks}
    at, last = 0, (-1, 0)  # the start of the next piece; (start, width) of the last piece in the whole tensor
    for start, width, r, part in pieces:
        if (start, width) == last:  # a replica of the previous piece
            placed[r].append(_moved(part, dim, at - width))
            continue
        if start < sum(last):
            raise ValueError(f"{merge.rule}: the pieces of its ranks overlap")
        placed[r].append(_moved(part, dim, at))
        at, last = at + width, (start, width)
    first = shapes[ranks[0]]
    shape = (*first[:dim], at, *first[dim + 1 :])
    placements = tuple(Placement(shapes[r], tuple(placed[r])) for r in ranks)
    return Regrouped(shape, tuple(ranks), placements, rule=merge.rule)


def _first(piece: tuple[int, int, int, Part]) -> tuple[int, int, int]:
    return piece[:3]


def _moved(part: Part, dim: int, at: int) -> Part:
    return Part(part.local, tuple(at if d == dim else 0 for d in range(len(part.start))))


def _split(merge: Merge, shape: Shape, rank: int, dim: int, count: int, index: int) -> Regrouped:
    """Return the shard made of the ``index``-th of ``count`` equal cuts of every piece of one rank."""
    parts = []
    at = 0
    for part in sorted(merge.placements[rank].parts or (), key=lambda p: p.local.start[dim]):
        start, stop = part.local.start[dim], part.local.stop[dim]
        if (stop - start) % count:
            raise ValueError(f"{merge.rule}: a piece {stop - start} wide cannot be cut into {count} equal ones")
        width = (stop - start) // count
        lo, hi = list(part.local.start), list(part.local.stop)
        lo[dim], hi[dim] = start + index * width, start + (index + 1) * width
        parts.append(_moved(Part(Box(tuple(lo), tuple(hi)), part.start), dim, at))
        at += width
    rule = f"{merge.rule}; of rank {rank} every piece cut into {count}, the {index + 1}. of them"
    return Regrouped((*shape[:dim], at, *shape[dim + 1 :]), (rank,), (Placement(shape, tuple(parts)),), rule=rule)


# -- Merge rules in reverse: the shard of one tensor-parallel rank, from the shape of the whole tensor.


def cut(
    name: str,
    whole: Shape,
    found: tuple[Rule, str],
    degree: int,
    index: int,
    multiple: int = 1,
    heads: Heads | None = None,
    widths: Sequence[Sequence[int]] | None = None,
) -> Known:
    """Return the placement of the shard of rank ``index`` of ``degree`` in the tensor.

    ``found`` is the rule and the evidence for it. The rows of a vocabulary are padded to a multiple of ``degree *
    multiple``. ``widths`` holds the width of each fused part on every rank, if the rule has them. Raises ValueError if
    the tensor cannot be cut this way.
    """
    rule, evidence = found
    if _repeats_groups(name, whole, degree, heads):
        return _repeated_group(whole, degree, index, heads.groups if heads else 1)
    step = degree * multiple
    padded = (-(-whole[0] // step) * step, *whole[1:]) if pattern("model.vocabulary").search(name) else whole
    reason = ""
    for shapes in _candidates(whole, padded, degree, widths):
        try:
            merge = rule(shapes)
        except ValueError as e:
            reason = f": {e}"
            continue
        if merge.shape in (whole, padded):
            placement = _cropped(merge.placements[index], whole)
            if not any(one.parts is None for one in merge.placements):
                check_heads(name, whole, degree, heads)
            more = padded[0] - whole[0] if shapes[index][0] * degree == padded[0] else 0
            note = f", {more:,} rows of padding behind the last" if more else ""
            return placement, f"shard {index} of {degree}: {merge.rule}{note}; known from {evidence}"
    raise ValueError(f"{name!r} of shape {whole} cannot be cut evenly over {degree} ranks ({evidence}){reason}")


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


def _cropped(placement: Placement, whole: Shape) -> Placement:
    """Return the placement without the elements past the end of the whole (the padding of a vocabulary)."""
    found = []
    for part in placement.blocks:
        room = [n - s for n, s in zip(whole, part.start, strict=True)]
        stop = tuple(min(b, a + r) for a, b, r in zip(part.local.start, part.local.stop, room, strict=True))
        if all(a < b for a, b in zip(part.local.start, stop, strict=True)):
            found.append(Part(Box(part.local.start, stop), part.start))
    return Placement(placement.shape, tuple(found))


def _repeats_groups(name: str, whole: Shape, degree: int, heads: Heads | None) -> bool:
    """Return whether several ranks have the same key-value head, because there are more ranks than such heads."""
    if heads is None or not whole or heads.groups * heads.dim != whole[0]:
        return False
    more = degree > heads.groups and degree % heads.groups == 0 and heads.queries % degree == 0
    return more and pattern("attention.kv").search(name) is not None


def _repeated_group(whole: Shape, degree: int, index: int, groups: int) -> Known:
    """Return the shard of a key or value matrix with one head for several neighbouring ranks."""
    copies, rows = degree // groups, whole[0] // groups
    shape, rest = (rows, *whole[1:]), (0,) * (len(whole) - 1)
    placement = Placement(shape, (Part(Box.of(shape), (index // copies * rows, *rest)),))
    return placement, f"shard {index} of {degree}: key-value head {index // copies} of {groups}, on {copies} ranks each"


def check_heads(name: str, whole: Shape, degree: int, heads: Heads | None) -> None:
    """Raise ValueError if the degree would cut a head or a group of heads. Tensors of other sizes are not checked.

    megatron-core since 0.16 gathers the fused q, k and v of the ranks that share a group, so more ranks than groups cut
    its rows wherever the cut falls (transformer/attention.py `SelfAttention.get_query_key_value_tensors`).
    """
    if heads is None:
        return
    for which, dim, rows, count, what in (
        ("qkv", 0, (heads.queries + 2 * heads.groups) * heads.dim, heads.groups, "groups of heads"),
        ("q", 0, heads.queries * heads.dim, heads.queries, "heads"),
        ("kv", 0, heads.groups * heads.dim, heads.groups, "key-value heads"),
        ("out", 1, heads.queries * heads.dim, heads.queries, "heads"),
    ):
        if not pattern(f"attention.{which}").search(name) or dim >= len(whole) or whole[dim] != rows:
            continue
        shared = which == "qkv" and degree > count and degree % count == 0 and heads.queries % degree == 0
        if count % degree and not (shared and pattern("attention.gathered").search(name)):
            raise ValueError(f"{name!r} of shape {whole} cannot be cut over {degree} ranks: it has {count} {what}")


# -- Evidence from the stored shards of a tensor: how it was cut, and so how to regroup its shards.

_HOW = "how its stored shards were put together"


def regrouped(spec: TensorSpec, degree: int, index: int, heads: Heads | None) -> Known | None:
    """Return the placement of the shard of rank ``index`` of ``degree`` in the tensor, from the stored shards.

    Return None if there are no stored shards, if neither number of ranks divides the other, if a piece of a stored
    shard cannot be cut evenly, or if a vocabulary may need more padding. Raises ValueError if heads would be cut.
    """
    merge = _merge(spec)
    if merge is None:
        return None
    shapes = [placement.shape for placement in merge.placements]
    if _repeats_groups(spec.name, spec.shape, degree, heads):
        return None
    if pattern("model.vocabulary").search(spec.name) and degree > len(shapes):
        return None
    known = Source(lambda name: (lambda _: merge, _HOW))
    try:
        shard = reshard(spec.name, shapes, (known,), degree, index)
    except ValueError:
        return None
    if degree > len(shapes):
        check_heads(spec.name, spec.shape, degree, heads)
    return _in_whole(shard, merge, spec.shape), f"shard {index} of {degree}; known from {_HOW}"


def as_merged(spec: TensorSpec | None) -> tuple[Rule, str] | None:
    """Return the rule by which the stored shards form the tensor, for any number of ranks; None if it is unknown."""
    merge = _merge(spec) if spec is not None else None
    if merge is None:
        return None
    if not any(placement.parts for placement in merge.placements):
        return replicated, _HOW
    dims = cut_dimensions(merge)
    if not dims:
        return replicated, _HOW
    first = sorted(part.start for part in merge.placements[0].parts or ())
    if len(dims) > 1 or not first:
        return None
    dim = dims.pop()
    starts = [start[dim] for start in first]
    if starts[0] != 0:
        return None
    if len(starts) == 1:
        return concatenated(dim), _HOW
    end = max(p.start[dim] + p.local.shape[dim] for placement in merge.placements for p in placement.parts or ())
    return in_parts(dim, [b - a for a, b in zip(starts, [*starts[1:], end], strict=True)]), _HOW


def _merge(spec: TensorSpec) -> Merge | None:
    """Return how the stored shards form the tensor; None if there are fewer than two."""
    shards = fragments_of(held(spec)).shards
    return Merge(spec.shape, shards, is_mean(spec)) if len(shards) > 1 else None


def _in_whole(shard: Regrouped, merge: Merge, whole: Shape) -> Placement:
    """Return the placement of the new shard in the tensor, from the stored shards' placements in both."""
    found: list[Part] = []
    for rank, placement in zip(shard.ranks, shard.placements, strict=True):
        stored = merge.placements[rank].parts
        if stored is None:
            return Placement(shard.shape, Placement(shard.shape).blocks)
        if placement.parts is None:
            found += stored
            continue
        for part in placement.parts:
            home = next(p for p in stored if p.local & part.local == part.local)
            ahead = [a - b for a, b in zip(part.local.start, home.local.start, strict=True)]
            local = part.local.shift([s - a for s, a in zip(part.start, part.local.start, strict=True)])
            found.append(Part(local, tuple(s + a for s, a in zip(home.start, ahead, strict=True))))
    return _cropped(Placement(shard.shape, tuple(found)), whole)
