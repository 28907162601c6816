"""The shards of every tensor, from all rank files, and how they are put together.

A dense parameter is cut over tensor-parallel ranks, and every expert-parallel rank's file repeats it. An expert is on
one expert-parallel rank, cut over the expert-tensor-parallel ones. All experts of a rank in one array (GroupedMLP:
megatron/core/transformer/moe/experts.py) are a stack, [experts, ...]; the stacks of the ranks follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...core.box import Shape, c_strides
from ...core.index import Extent, Fragment, Hole, Rank, TensorSpec
from ...errors import Problem
from ...layouts.megatron import gated_by, is_expert, is_gated, number, stack_of, vocabulary_note
from ...layouts.merge import Merge, Source, concatenated, decide, in_parts
from ...layouts.merge import stacked as stacks
from ..shared.rank_shards import Merging, Shard, Shards, add, missing
from .ranks import Grid

_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class Gathered:
    """All shards, by the rank among those that cut the tensor (of stacks, those of one expert-parallel rank after those
    of another). ``sources``: where merge rules come from; ``single``: whether a tensor may have one of its own."""

    grid: Grid
    sources: tuple[Source, ...]
    single: Callable[[str], bool]
    states: Shards = field(default_factory=dict)
    merging: Merging = field(init=False)
    _rules: dict[tuple[str, tuple[Shape, ...]], Merge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.merging = Merging(self._decide, self._absent)

    def add(self, state: str, name: str, extent: Extent, rank: Rank) -> None:
        """What a rank's file holds of a tensor. A stack's extent is [local experts, ...]."""
        cut = self._expert_rank(name, rank) if is_expert(name) else rank.tp
        if cut is None:
            return
        shard = Shard(extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))
        other = add(self.states, state, name, cut, shard)
        if other is not None:
            line = (
                f"{extent.path}: {name!r} is {extent.shape} here, {other.shape} in {other.fragments[0].extent.path}: "
                "the first is read (the others: view.stored)"
            )
            self.grid.tell(Problem("mismatched-shards", line, name))

    def _expert_rank(self, name: str, rank: Rank) -> int | None:
        """Which shard of an expert's tensor a rank has; None if that is not known."""
        d = self.grid.degrees
        cut = d.expert_rank(rank.tp)
        if cut is None:
            line = (
                f"experts cut over {d.etp} ranks with tp={d.tp}: several ranks write the same file, which shards it "
                "has is not known; they are in view.stored only"
            )
            self.grid.tell(Problem("undecided-layout", line))
            return None
        return rank.ep * d.etp + cut if stack_of(name) else cut

    def spec(self, state: str, name: str) -> TensorSpec:
        """The whole tensor."""
        shards = self.states[state][name]
        first = shards[min(shards)]
        d = self.grid.degrees
        ranks = d.etp if is_expert(name) else d.tp
        if stack_of(name) and len(first.shape) == 3:
            ranks *= d.ep
        spec = self.merging.whole(name, shards, ranks)
        if not first.shape or spec.shape[0] != first.shape[0] * ranks:
            return spec
        note = vocabulary_note(name, self.grid.args, spec.shape[0])
        return replace(spec, rule="; ".join(filter(None, (spec.rule, note)))) if note else spec

    def _decide(self, name: str, shapes: Sequence[Shape]) -> Merge:
        """How shards are put together: what differs from another tensor in the numbers of its name only has the same
        rule. (What a user says, or a file of one tensor, may tell them apart.)"""
        if stack_of(name) and len(shapes[0]) == 3:
            return self._stack(name, shapes)
        if self.single(name):
            return decide(name, shapes, self.sources)
        key = (_NUMBERS.sub("", name), tuple(shapes))
        found = self._rules.get(key)
        if found is None:
            found = self._rules[key] = decide(name, shapes, self.sources)
        return found

    def _absent(self, name: str, rank: int, like: Shard) -> Shard:
        """A rank's shard that no file has."""
        d = self.grid.degrees
        if is_expert(name):
            why = f"the shard of expert-tensor-parallel rank {rank % d.etp} of {d.etp} is in no file that is here"
            return missing(Hole("", why), like.shape, like.dtype)
        why = f"the shard of tensor-parallel rank {rank} of {d.tp} is in no file that is here"
        known = next((hole for (tp, _), hole in self.grid.lost.items() if tp == rank), None)
        return missing(known or Hole("", why), like.shape, like.dtype)

    def _stack(self, name: str, shapes: Sequence[Shape]) -> Merge:
        """All experts' matrices, [experts, in, out]: those of the ranks follow each other, each cut along its last (the
        first matrices: gate and up halves of every rank) or middle dimension."""
        d, args = self.grid.degrees, self.grid.args
        gated = is_gated(args)
        if stack_of(name) == 1:
            if gated is None and d.etp > 1:
                raise ValueError("the arguments do not say whether gate and up are in one")
            rule = in_parts(2, 2) if gated and d.etp > 1 else concatenated(2)
        else:
            rule = concatenated(1)
        merged = stacks(rule, d.ep)(shapes)
        total = number(args, "num_experts")
        if total is not None and merged.shape[0] != total:
            raise ValueError(f"{d.ep} ranks have {shapes[0][0]} experts each, args.num_experts says {total}")
        return merged.known("checkpoint", f"args.num_experts, {gated_by(args)}")


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
