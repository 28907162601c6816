"""Tensors from the shards of all ranks: collect the files' shards, decide how they form the whole, mark lost ones.

The differences between formats are parameters: the rank of a shard among those that cut the tensor (`add`), the
decision (`Merging.decide`), and the replacement for a lost shard (`Merging.absent`). Nothing is merged on a guess: an
undecided tensor has no fragments, and its rule says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.box import Shape
from ...core.dtypes import DType
from ...core.extents import Hole
from ...core.placement import Rank
from ...core.specs import Fragment, TensorSpec
from ...layouts.merge import How, Merge

NOT_WHOLE = "not whole: the files of a rank are lost"


class Shard(NamedTuple):
    """One rank's shard of a tensor. ``fragments`` are copies of it, or its parts in several files."""

    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    rule: str = ""


# state -> name -> rank among those that cut the tensor -> its shard
Shards = dict[str, dict[str, dict[int, Shard]]]


# -- collect


def add(shards: Shards, state: str, name: str, rank: int, shard: Shard) -> Shard | None:
    """Add a file's part or copy of a rank's shard.

    Return None, or the shard that other files hold if it differs in shape or dtype; the new one is then left out.
    """
    names = shards.get(state)
    if names is None:
        names = shards[state] = {}
    by_rank = names.get(name)
    if by_rank is None:
        by_rank = names[name] = {}
    held = by_rank.get(rank)
    if held is None:
        by_rank[rank] = shard
    elif (held.shape, held.dtype) == (shard.shape, shard.dtype):
        by_rank[rank] = held._replace(fragments=(*held.fragments, *shard.fragments))
    else:
        return held
    return None


def update(shards: Shards, more: Shards) -> None:
    """Add shards of other ranks."""
    for state, names in more.items():
        known = shards.setdefault(state, {})
        for name, by_rank in names.items():
            known.setdefault(name, {}).update(by_rank)


# -- replace lost shards by holes


def missing(hole: Hole, shape: Shape, dtype: DType, rank: Rank | None = None) -> Shard:
    """Return the shard of a rank whose file is lost, with its likely shape."""
    return Shard(shape, dtype, (Fragment(hole, shape, rank=rank),))


# -- decide


def undecided(name: str, shape: Shape, dtype: DType, reason: str) -> TensorSpec:
    """Return a tensor without fragments, described as on the lowest rank; each shard is in ``view.stored``."""
    return TensorSpec(name, shape, dtype, (), rule=reason)


@dataclass(slots=True)
class Merging:
    """The merge of shards to whole tensors.

    ``decide`` returns how shards form the whole, from the name and the ranks' shapes; it raises ValueError if nothing
    says so. ``absent`` returns the replacement for a lost shard, from the name, the rank and another rank's shard.
    ``hows`` collects how the shards of each name form the tensor, ``unmerged`` why they do not.
    """

    decide: Callable[[str, Sequence[Shape]], Merge]
    absent: Callable[[str, int, Shard], Shard]
    hows: dict[str, How] = field(default_factory=dict)
    unmerged: dict[str, str] = field(default_factory=dict)
    _decided: dict[tuple[str, tuple[Shape, ...]], Merge] = field(default_factory=dict)  # most states have equal shapes

    def whole(self, name: str, shards: Mapping[int, Shard], ranks: int) -> TensorSpec:
        """Return the tensor that is cut over ``ranks`` ranks. A scalar keeps the fragments of all ranks."""
        first = shards[min(shards)]
        if first.shape == ():
            copies = tuple(fragment for _, shard in sorted(shards.items()) for fragment in shard.fragments)
            return TensorSpec(name, (), first.dtype, copies, rule=first.rule)
        row = [shards.get(rank) or self.absent(name, rank, first) for rank in range(ranks)]
        key = name, tuple(shard.shape for shard in row)
        try:
            merged = self._decided.get(key) or self._decided.setdefault(key, self.decide(*key))
        except ValueError as e:
            gone = next((shard for rank, shard in enumerate(row) if rank not in shards and shard.fragments), None)
            if gone is not None:  # the shape of the lost shard was a guess; the other shards are in view.stored
                return TensorSpec(name, first.shape, first.dtype, gone.fragments, rule=NOT_WHOLE)
            self.unmerged.setdefault(name, str(e))
            return undecided(name, first.shape, first.dtype, f"it cannot be put together: {e}")
        if merged.how is not None:
            self.hows[name] = merged.how
        rule = "; ".join(filter(None, (first.rule, merged.rule)))
        if merged.is_one:
            return TensorSpec(name, first.shape, first.dtype, first.fragments, rule=rule)
        return merged.tensor(name, first.dtype, (shard.fragments for shard in row), rule)
