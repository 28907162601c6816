"""The shards of every tensor, from all rank files, and how they are put together.

A dense parameter is cut over tensor-parallel ranks, and every expert-parallel rank's file repeats it. An expert is on
one expert-parallel rank, cut over the expert-tensor-parallel ones. All experts of a rank in one array (GroupedMLP:
megatron/core/transformer/moe/experts.py) are a stack, [experts, ...]; the stacks of the ranks follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.box import Shape, c_strides
from ...core.compose import Composed
from ...core.dtypes import DType
from ...core.index import Extent, Fragment, Hole, Placement, Rank, TensorSpec
from ...errors import Problem
from ...layouts.megatron import gated_by, is_expert, is_gated, number, stack_of, vocabulary_note
from ...layouts.merge import Merge, Source, concatenated, decide, in_parts
from .ranks import Grid

_NUMBERS = re.compile(r"\d+")
Key = tuple[int, int]  # (expert-parallel rank; 0 unless a stack, rank that cuts the tensor)


@dataclass(slots=True)
class Shard:
    """One rank's tensor, and where it is stored: once, or several times."""

    shape: Shape
    dtype: DType
    copies: list[Fragment]


@dataclass(slots=True)
class Gathered:
    """All shards: state -> name -> key -> shard. ``sources``: where merge rules come from; ``single``: whether a tensor
    may have one of its own; ``unmerged``: name -> why it cannot be put together."""

    grid: Grid
    sources: tuple[Source, ...]
    single: Callable[[str], bool]
    states: dict[str, dict[str, dict[Key, Shard]]] = field(default_factory=dict)
    unmerged: dict[str, str] = field(default_factory=dict)
    _rules: dict[tuple[str, tuple[Shape, ...]], Merge] = field(default_factory=dict)

    def add(self, state: str, name: str, extent: Extent, rank: Rank) -> None:
        """What a rank's file holds of a tensor. A stack's extent is [local experts, ...]."""
        key = self.key(name, rank) if is_expert(name) else (0, rank.tp)
        if key is None:
            return
        names = self.states.get(state)
        if names is None:
            names = self.states[state] = {}
        table = names.get(name)
        if table is None:
            table = names[name] = {}
        fragment = Fragment(extent, extent.shape, rank=rank)
        shard = table.get(key)
        if shard is None:
            table[key] = Shard(extent.shape, extent.dtype, [fragment])
        elif shard.shape == extent.shape and shard.dtype == extent.dtype:
            shard.copies.append(fragment)
        else:
            line = (
                f"{extent.path}: {name!r} is {extent.shape} here, {shard.shape} in {shard.copies[0].extent.path}: the "
                "first is read (the others: view.stored)"
            )
            self.grid.tell(Problem("mismatched-shards", line, name))

    def key(self, name: str, rank: Rank) -> Key | None:
        """Which shard of an expert's tensor a rank has; None if that is not known."""
        cut = self.grid.degrees.expert_rank(rank.tp)
        if cut is None:
            d = self.grid.degrees
            line = (
                f"experts cut over {d.etp} ranks with tp={d.tp}: several ranks write the same file, which shards it "
                "has is not known; they are in view.stored only"
            )
            self.grid.tell(Problem("undecided-layout", line))
            return None
        return (rank.ep if stack_of(name) else 0), cut

    def spec(self, state: str, name: str) -> TensorSpec:
        """The whole tensor. What cannot be put together has no fragments, and is in ``unmerged``."""
        shards = self.states[state][name]
        first = shards[min(shards)]
        expert = is_expert(name)
        ranks = self.grid.degrees.etp if expert else self.grid.degrees.tp
        note = vocabulary_note(name, self.grid.args, first.shape[0] * ranks) if first.shape else ""
        if first.shape == ():  # a step: the same on all
            copies = [f for _, shard in sorted(shards.items()) for f in shard.copies]
            return TensorSpec(name, (), first.dtype, tuple(copies))
        try:
            if stack_of(name) and len(first.shape) == 3:
                return self._stack(name, shards)
            row = [shards.get((0, r)) or self._absent(name, r, first) for r in range(ranks)]
            merged = self._decide(name, tuple(s.shape for s in row))
        except ValueError as e:
            if self._torn(shards, ranks):
                reason = "not whole: the files of a rank are lost"
                hole = Hole("", reason)
                return TensorSpec(name, first.shape, first.dtype, (Fragment(hole, first.shape),), rule=reason)
            self.unmerged.setdefault(name, str(e))
            return TensorSpec(name, first.shape, first.dtype, (), rule=f"it cannot be put together: {e}")
        rule = "; ".join(filter(None, (merged.rule, note if merged.shape[0] == first.shape[0] * ranks else "")))
        if merged.is_one:
            return TensorSpec(name, first.shape, first.dtype, tuple(first.copies), rule=rule)
        fragments = merged.join(tuple(s.copies) for s in row)
        return TensorSpec(name, merged.shape, first.dtype, fragments, merged.combine, rule)

    def _decide(self, name: str, shapes: tuple[Shape, ...]) -> Merge:
        """How shards are put together: what differs from another tensor in the numbers of its name only has the same
        rule. (What a user says, or a file of one tensor, may tell them apart.)"""
        if self.single(name):
            return decide(name, shapes, self.sources)
        key = (_NUMBERS.sub("", name), shapes)
        found = self._rules.get(key)
        if found is None:
            found = self._rules[key] = decide(name, shapes, self.sources)
        return found

    def _torn(self, shards: Mapping[Key, Shard], ranks: int) -> bool:
        return len(shards) < ranks

    def _absent(self, name: str, rank: int, like: Shard) -> Shard:
        """A rank's shard that no file has; it is taken to be like the others."""
        d = self.grid.degrees
        if is_expert(name):
            hole = Hole("", f"the shard of expert-tensor-parallel rank {rank} of {d.etp} is in no file that is here")
        else:
            lost = next((lost for (tp, _), lost in self.grid.lost.items() if tp == rank), None)
            hole = lost or Hole("", f"the shard of tensor-parallel rank {rank} of {d.tp} is in no file that is here")
        return Shard(like.shape, like.dtype, [Fragment(hole, like.shape)])

    def _stack(self, name: str, shards: Mapping[Key, Shard]) -> TensorSpec:
        """All experts' matrices, [experts, in, out]: those of the ranks follow each other, each cut along its last (the
        first matrices: gate and up halves of every rank) or middle dimension."""
        d, args = self.grid.degrees, self.grid.args
        first = shards[min(shards)]
        gated = is_gated(args)
        if stack_of(name) == 1:
            if gated is None and d.etp > 1:
                raise ValueError("the arguments do not say whether gate and up are in one")
            rule = in_parts(2, 2) if gated and d.etp > 1 else concatenated(2)
        else:
            rule = concatenated(1)
        total = number(args, "num_experts") or first.shape[0] * d.ep
        fragments: list[Sequence[Fragment]] = []
        placements: list[Placement] = []
        shape = first.shape
        for ep in range(d.ep):
            row = [shards.get((ep, r)) or self._absent(name, r, first) for r in range(d.etp)]
            merged = rule([s.shape for s in row])
            shape = merged.shape
            for shard, placement in zip(row, merged.placements, strict=True):
                fragments.append(tuple(shard.copies))
                ahead = ep * first.shape[0]
                parts = tuple(replace(b, start=(b.start[0] + ahead, *b.start[1:])) for b in placement.blocks)
                placements.append(replace(placement, parts=parts))
        if first.shape[0] * d.ep != total:
            raise ValueError(f"{d.ep} ranks have {first.shape[0]} experts each, args.num_experts says {total}")
        how = f"experts of {d.ep} expert-parallel ranks stacked, each cut over {d.etp} ranks"
        by = f"; known from args.num_experts, {gated_by(args)}"
        whole = Composed(tuple(fragments), tuple(placements), merged=True)
        return TensorSpec(name, (total, *shape[1:]), first.dtype, whole, rule=how + by)


def stacked(extent: Extent, which: int, hidden: int, experts: int) -> Extent | None:
    """The array of all experts of a rank, [hidden, experts * width] or [experts * width, hidden] in its shape, as what
    its bytes are: [experts, hidden, width] or [experts, width, hidden] (experts.py `GroupedMLP.forward`: ``view`` of
    the flat buffer). None if it is no such array."""
    if len(extent.shape) != 2 or extent.strides != c_strides(extent.shape) or experts < 1:
        return None
    rows, columns = extent.shape
    width, rest = divmod(columns if which == 1 else rows, experts)
    if rest or (rows if which == 1 else columns) != hidden:
        return None
    shape = (experts, hidden, width) if which == 1 else (experts, width, hidden)
    return replace(extent, shape=shape, strides=c_strides(shape))
