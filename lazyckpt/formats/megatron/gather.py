"""The shards of every tensor, from all rank files, and how they form the whole tensor.

A dense parameter is cut over tensor-parallel ranks, and every expert-parallel rank's file repeats it. An expert is on
one expert-parallel rank, cut over the expert-tensor-parallel ones. All experts of a rank in one array (GroupedMLP:
megatron/core/transformer/moe/experts.py) are a stack, [experts, ...]; the whole concatenates the ranks' stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...core.box import Shape, c_strides
from ...core.extents import Extent, Hole
from ...core.placement import Rank
from ...core.specs import Fragment, TensorSpec
from ...errors import Problem
from ...layouts.megatron import gated_by, is_expert, is_gated, number, stack_of, vocabulary_note
from ...layouts.merge import Merge, Source, concatenated, decide, in_parts
from ...layouts.merge import stacked as stacks
from ..shared.rank_shards import Merging, Shard, Shards, add, missing
from .ranks import Grid

_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class Gathered:
    """All shards, by the rank among those that cut the tensor (for stacks, ordered by expert-parallel rank first).
    ``sources``: sources of merge rules; ``single``: whether a tensor may have a rule of its own."""

    grid: Grid
    sources: tuple[Source, ...]
    single: Callable[[str], bool]
    states: Shards = field(default_factory=dict)
    merging: Merging = field(init=False)
    _cuts: dict[tuple[str, int, int], int | None] = field(default_factory=dict)
    _rules: dict[tuple[str, tuple[Shape, ...]], Merge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.merging = Merging(self._decide, self._absent)

    def add(self, state: str, name: str, extent: Extent, rank: Rank) -> None:
        """Add the extent of a tensor in a rank's file. The extent of a stack is [local experts, ...]."""
        shard = Shard(extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))
        self.add_shard(state, name, shard, rank, extent.path)

    def add_shard(self, state: str, name: str, shard: Shard, rank: Rank, path: str) -> None:
        """Add a rank's shard. ``path``: its file, for messages."""
        key = name, rank.tp, rank.ep
        cut = self._cuts.get(key, -1)
        if cut == -1:  # the same for all states of a tensor
            cut = self._cuts[key] = self._expert_rank(name, rank) if is_expert(name) else rank.tp
        if cut is None:
            return
        other = add(self.states, state, name, cut, shard)
        if other is not None:
            line = (
                f"{path}: {name!r} has shape {shard.shape} here, {other.shape} in "
                f"{other.fragments[0].extent.path}: the latter is read (the others: view.stored)"
            )
            self.grid.report(Problem("mismatched-shards", line, name))

    def _expert_rank(self, name: str, rank: Rank) -> int | None:
        """Return the index of a rank's shard of an expert's tensor; None if it is not known."""
        d = self.grid.degrees
        cut = d.expert_rank(rank.tp)
        if cut is None:
            line = (
                f"experts are cut over {d.etp} ranks with tp={d.tp}: several ranks write the same file, and which "
                "shards it has is not known; they are in view.stored only"
            )
            self.grid.report(Problem("undecided-layout", line))
            return None
        return rank.ep * d.etp + cut if stack_of(name) else cut

    def spec(self, state: str, name: str) -> TensorSpec:
        """Return the whole tensor."""
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
        """Return how shards form the whole. Tensors whose names differ only in numbers share a rule, unless `single`
        allows a tensor its own."""
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
        """Return the stand-in for a rank's shard that no file has: a hole."""
        d = self.grid.degrees
        if is_expert(name):
            why = f"the shard of expert-tensor-parallel rank {rank % d.etp} of {d.etp} is in none of the files"
            return missing(Hole("", why), like.shape, like.dtype)
        why = f"the shard of tensor-parallel rank {rank} of {d.tp} is in none of the files"
        known = next((hole for (tp, _), hole in self.grid.lost.items() if tp == rank), None)
        return missing(known or Hole("", why), like.shape, like.dtype)

    def _stack(self, name: str, shapes: Sequence[Shape]) -> Merge:
        """Return how stacks of all experts' matrices, [experts, in, out], form the whole: the ranks' stacks follow each
        other, cut along the last dimension (first matrices: gate and up halves of every rank) or the middle one."""
        d, args = self.grid.degrees, self.grid.args
        gated = is_gated(args)
        if stack_of(name) == 1:
            if gated is None and d.etp > 1:
                raise ValueError("the arguments do not say whether gate and up are fused")
            rule = in_parts(2, 2) if gated and d.etp > 1 else concatenated(2)
        else:
            rule = concatenated(1)
        merged = stacks(rule, d.ep)(shapes)
        total = number(args, "num_experts")
        if total is not None and merged.shape[0] != total:
            raise ValueError(f"{d.ep} ranks have {shapes[0][0]} experts each, args.num_experts says {total}")
        return merged.known("checkpoint", f"args.num_experts, {gated_by(args)}")


def stacked(extent: Extent, which: int, hidden: int, experts: int) -> Extent | None:
    """Return the array of all experts of a rank as the stack that its bytes are. Its shape is [hidden, experts * width]
    or [experts * width, hidden], its bytes are [experts, hidden, width] or [experts, width, hidden] (experts.py
    `GroupedMLP.forward`: ``view`` of the flat buffer). None if it is not such an array."""
    if len(extent.shape) != 2 or extent.strides != c_strides(extent.shape) or experts < 1:
        return None
    rows, columns = extent.shape
    width, rest = divmod(columns if which == 1 else rows, experts)
    if rest or (rows if which == 1 else columns) != hidden:
        return None
    shape = (experts, hidden, width) if which == 1 else (experts, width, hidden)
    return replace(extent, shape=shape, strides=c_strides(shape))
