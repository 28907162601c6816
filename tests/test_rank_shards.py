"""Shards of ranks, put together: what is collected, what is decided, and what a hole stands for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lazyckpt.core.box import Shape, c_strides
from lazyckpt.core.compose import held, is_mean
from lazyckpt.core.dtypes import BF16, F32, DType
from lazyckpt.core.extents import Extent, Hole
from lazyckpt.core.placement import Rank
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.formats.shared.rank_shards import NOT_WHOLE, Merging, Shard, Shards, add, missing, undecided, update
from lazyckpt.layouts.merge import Merge, averaged, concatenated, decide, in_parts, replicated, stacked, user_rules


def shard(rank: int, shape: Shape, dtype: DType = F32, file: str = "") -> Shard:
    extent = Extent(file or f"rank{rank}.pt", 0, dtype, shape, c_strides(shape))
    return Shard(shape, dtype, (Fragment(extent, shape, rank=Rank(tp=rank)),))


def merging(rule: str = "column") -> Merging:
    def absent(name: str, rank: int, like: Shard) -> Shard:
        return missing(Hole(f"rank{rank}.pt", "it is lost"), like.shape, like.dtype, Rank(tp=rank))

    def found(name: str, shapes: Sequence[Shape]) -> Merge:
        return decide(name, shapes, (user_rules({"*": rule} if rule else {}),))

    return Merging(found, absent)


def files(spec: TensorSpec) -> list[tuple[str, bool]]:
    """The files of a tensor, and whether they are lost."""
    return [(f.extent.path, isinstance(f.extent, Hole)) for f in spec.fragments]


def test_copies_are_added_and_other_arrays_are_not() -> None:
    shards: Shards = {}
    first = shard(0, (2, 3), file="a.pt")
    assert add(shards, "weights", "w", 0, first) is None
    assert add(shards, "weights", "w", 0, shard(0, (2, 3), file="b.pt")) is None
    held = shards["weights"]["w"][0]
    assert [f.extent.path for f in held.fragments] == ["a.pt", "b.pt"]
    for other in (shard(0, (3, 2)), shard(0, (2, 3), BF16)):
        assert add(shards, "weights", "w", 0, other) is held
    assert len(shards["weights"]["w"][0].fragments) == 2


def test_update_adds_ranks() -> None:
    shards: Shards = {"weights": {"w": {0: shard(0, (2,))}}}
    update(
        shards, {"weights": {"w": {1: shard(1, (2,))}, "b": {1: shard(1, (1,))}}, "fp32": {"w": {0: shard(0, (2,))}}}
    )
    assert {s: {n: sorted(r) for n, r in names.items()} for s, names in shards.items()} == {
        "weights": {"w": [0, 1], "b": [1]},
        "fp32": {"w": [0]},
    }


def test_a_lost_rank_is_a_hole() -> None:
    one = merging()
    spec = one.whole("w", {0: shard(0, (2, 3)), 2: shard(2, (2, 3))}, 3)
    assert spec.shape == (6, 3)
    assert files(spec) == [("rank0.pt", False), ("rank1.pt", True), ("rank2.pt", False)]
    assert (one.hows["w"].kind, one.hows["w"].by, one.unmerged) == ("concatenated", "user", {})


def test_what_nothing_decides_is_not_merged() -> None:
    one = merging("")
    spec = one.whole("w", {0: shard(0, (2, 3)), 1: shard(1, (2, 3))}, 2)
    assert (spec.shape, len(spec.fragments), list(one.unmerged)) == ((2, 3), 0, ["w"])
    assert one.unmerged["w"] in spec.rule
    assert undecided("w", (2, 3), F32, spec.rule) == spec


def test_what_a_lost_rank_leaves_undecided_is_not_whole() -> None:
    one = merging("")
    spec = one.whole("w", {1: shard(1, (2, 3))}, 2)
    assert (spec.rule, files(spec), one.unmerged) == (NOT_WHOLE, [("rank0.pt", True)], {})


def test_a_number_has_all_copies() -> None:
    one = merging("")
    spec = one.whole("step", {1: shard(1, ()), 0: shard(0, ())}, 2)
    assert (spec.shape, files(spec)) == ((), [("rank0.pt", False), ("rank1.pt", False)])


@pytest.mark.parametrize("rule", ["replicated", "average"])
def test_a_whole_on_every_rank(rule: str) -> None:
    spec = merging(rule).whole("w", {0: shard(0, (2, 3)), 1: shard(1, (2, 3))}, 2)
    assert (spec.shape, len(held(spec))) == ((2, 3), 2)
    assert is_mean(spec) == (rule == "average")


def test_a_single_shard_is_the_tensor() -> None:
    alone = shard(0, (2, 3))._replace(rule="as it is")
    spec = merging().whole("w", {0: alone}, 1)
    assert (spec.shape, tuple(spec.fragments), spec.rule) == ((2, 3), alone.fragments, "as it is")


def places(merge: Merge) -> list[list[tuple[Shape, Shape]]]:
    return [[(part.start, part.local.shape) for part in one.parts or ()] for one in merge.placements]


def test_stacks_of_several_groups_of_ranks() -> None:
    merged = stacked(concatenated(2), 2)([(3, 4, 5)] * 4)
    assert merged.shape == (6, 4, 10)
    assert places(merged) == [[((n, 0, at), (3, 4, 5))] for n in (0, 3) for at in (0, 5)]
    assert (merged.how is not None) and (merged.how.kind, merged.how.ranks, merged.how.copies) == ("stacked", 2, 2)
    gated = stacked(in_parts(2, 2), 1)([(3, 4, 6)] * 2)
    assert places(gated)[1] == [((0, 0, 3), (3, 4, 3)), ((0, 0, 9), (3, 4, 3))]
    for whole in (replicated, averaged):
        assert places(stacked(whole, 3)([(2, 4, 5)] * 3)) == [[((n, 0, 0), (2, 4, 5))] for n in (0, 2, 4)]


def test_stacks_that_do_not_fit() -> None:
    assert stacked(concatenated(1), 2)([(3, 4, 5), (2, 4, 5)]).shape == (5, 4, 5)
    with pytest.raises(ValueError, match="differ"):
        stacked(concatenated(1), 2)([(3, 4, 5), (3, 4, 6)])
