"""What the stored shards of a tensor tell: how it was cut, and so how its ranks' shards are regrouped.

Of as many ranks as are stored, a shard is the stored one, also where they are of different sizes. Fewer or more of them
are made of these as `..reshard` says. For other degrees, what was cut along which dimension, in which parts, is a rule.
"""

from __future__ import annotations

from ...core.box import Shape
from ...core.index import Part, TensorSpec
from ..merge import Merge, MergedFragments, Rule, Source, concatenated, in_parts, replicated
from ..renaming.rename import Heads
from ..reshard import Shard, cut_dimensions, reshard
from .cuts import VOCABULARY, Cut, check_heads, cropped, everything

_HOW = "how its stored shards were put together"


def regrouped(spec: TensorSpec, degree: int, index: int, heads: Heads | None) -> Cut | None:
    """The shard of rank ``index`` of ``degree``, by the stored ones. None if there are none, or neither number of ranks
    divides the other, or a piece of a stored one cannot be cut evenly, or a vocabulary may need more padding. Raises
    ValueError if heads would be cut."""
    merge = _merge(spec)
    shapes = _shapes(spec)
    if merge is None or shapes is None or (VOCABULARY.search(spec.name) and degree > len(shapes)):
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
