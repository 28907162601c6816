"""One tensor from the shards of all ranks: what their files hold is collected, how the shards lie in the whole is
decided, and a hole stands for what is lost.

What differs between families of formats is passed in: which rank of those that cut a tensor a file is of (`add`), what
decides (`Merging.decide`), and what a rank has of which no file is here (`Merging.absent`). Nothing is merged on a
guess: what is not decided has no fragments, and its rule says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.box import Shape
from ...core.dtypes import DType
from ...core.index import Fragment, Hole, Rank, TensorSpec
from ...layouts.merge import How, Merge

NOT_WHOLE = "not whole: the files of a rank are lost"


class Shard(NamedTuple):
    """What one rank has of a tensor: its shape there, and its fragments: copies, or parts in several files."""

    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    rule: str = ""


# state -> name -> rank among those that cut the tensor -> its shard
Shards = dict[str, dict[str, dict[int, Shard]]]


# -- collect


def add(shards: Shards, state: str, name: str, rank: int, shard: Shard) -> Shard | None:
    """Add what a file holds of a rank's shard, which others may hold as well. Returns their shard if this one is
    another array: then it is left out."""
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


# -- let a hole stand for what is lost


def missing(hole: Hole, shape: Shape, dtype: DType, rank: Rank | None = None) -> Shard:
    """The shard of a rank whose file is lost, of the shape that it is likely to have."""
    return Shard(shape, dtype, (Fragment(hole, shape, rank=rank),))


# -- decide


def undecided(name: str, shape: Shape, dtype: DType, reason: str) -> TensorSpec:
    """A tensor that is not put together, as the lowest rank has it; each shard is in ``view.stored``."""
    return TensorSpec(name, shape, dtype, (), rule=reason)


@dataclass(slots=True)
class Merging:
    """How shards become whole tensors.

    ``decide``: name and the ranks' shapes -> how they form the whole; it raises ValueError where nothing says.
    ``absent``: name, rank and a shard of another rank -> what stands for the shard of which no file is here.
    ``hows``: name -> how its shards were put together; ``unmerged``: name -> why they cannot be.
    """

    decide: Callable[[str, Sequence[Shape]], Merge]
    absent: Callable[[str, int, Shard], Shard]
    hows: dict[str, How] = field(default_factory=dict)
    unmerged: dict[str, str] = field(default_factory=dict)

    def whole(self, name: str, shards: Mapping[int, Shard], ranks: int) -> TensorSpec:
        """The tensor that ``ranks`` ranks cut. Of a single number all copies count: it is the same on all."""
        first = shards[min(shards)]
        if first.shape == ():
            copies = tuple(fragment for _, shard in sorted(shards.items()) for fragment in shard.fragments)
            return TensorSpec(name, (), first.dtype, copies, rule=first.rule)
        row = [shards.get(rank) or self.absent(name, rank, first) for rank in range(ranks)]
        try:
            merged = self.decide(name, tuple(shard.shape for shard in row))
        except ValueError as e:
            gone = next((shard for rank, shard in enumerate(row) if rank not in shards and shard.fragments), None)
            if gone is not None:  # its shape was a guess; what there is of the tensor is in view.stored
                return TensorSpec(name, first.shape, first.dtype, gone.fragments, rule=NOT_WHOLE)
            self.unmerged.setdefault(name, str(e))
            return undecided(name, first.shape, first.dtype, f"it cannot be put together: {e}")
        if merged.how is not None:
            self.hows[name] = merged.how
        rule = "; ".join(filter(None, (first.rule, merged.rule)))
        if merged.is_one:
            return TensorSpec(name, first.shape, first.dtype, first.fragments, rule=rule)
        fragments = merged.join(shard.fragments for shard in row)
        return TensorSpec(name, merged.shape, first.dtype, fragments, merged.combine, rule)
