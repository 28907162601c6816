"""Merge rules: how the shards of tensor-parallel ranks form one tensor, and the sources of rules.

The first source that knows a tensor decides, in this order: the user (``rules``), the checkpoint itself (DeepSpeed's
universal_checkpoint_info, Megatron's args), the names of known model families, and finally the shapes: shards that
differ along one dimension are cut along it. Equal shapes decide nothing: each shard can still be read on its own, and
reading the whole tensor raises an error that says so. Nothing is merged on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from ..core.box import Box, Shape, c_strides
from ..core.compose import Composed
from ..core.compose import averaged as mean_of
from ..core.dtypes import DType
from ..core.names import matcher
from ..core.placement import Part, Placement
from ..core.specs import Fragment, TensorSpec
from ..errors import FormatError
from .flat_rules import flat_rule, is_flat_rule

By = Literal["user", "checkpoint", "names", "shapes"]


@dataclass(frozen=True, slots=True)
class How:
    """How the shards of ``ranks`` ranks form a tensor, and the evidence for it. `str` returns a sentence.

    ``kind`` is "concatenated" along ``dim``, with ``fused`` tensors in one, or "pieces" placed one by one;
    "overlapping" if ``copies`` neighbours hold the same shard, "stacked" if each of ``copies`` groups of ranks has a
    stack. ``padding`` holds the number of logical rows and of the padding rows after them. ``by`` is the kind of source
    (the user's rules, the checkpoint, the family's names or the shapes), ``evidence`` what it relies on.
    """

    kind: Literal["replicated", "averaged", "concatenated", "pieces", "overlapping", "stacked"]
    ranks: int
    dim: int = 0
    fused: int = 1
    copies: int = 1
    padding: tuple[int, int] | None = None
    by: By | None = None
    evidence: str = ""

    def __str__(self) -> str:
        fused = f" in {self.fused} parts" if self.fused > 1 else ""
        text = {
            "replicated": f"replicated on {self.ranks} ranks, the first is read",
            "averaged": f"averaged over {self.ranks} ranks",
            "concatenated": f"concatenated{fused} along dimension {self.dim} over {self.ranks} ranks",
            "pieces": f"placed piece by piece over {self.ranks} ranks",
            "overlapping": f"along dimension {self.dim}, each shard on {self.copies} ranks",
            "stacked": f"experts of {self.copies} expert-parallel ranks stacked, each cut over {self.ranks} ranks",
        }[self.kind]
        if self.padding is not None:
            text += f"; the first {self.padding[0]:,} rows, {self.padding[1]:,} are padding"
        if self.by == "shapes":
            return f"{text}; inferred: the shards differ along that dimension only"
        return f"{text}; known from {self.evidence}" if self.evidence else text


@dataclass(frozen=True, slots=True)
class Merge:
    """A tensor of ``shape`` made of the ranks' shards.

    ``placements`` holds the placement of each rank's shard. ``is_mean``: the shards are replicas, and their mean is
    read. ``how`` is None if there was nothing to decide.
    """

    shape: Shape
    placements: tuple[Placement, ...]
    is_mean: bool = False
    how: How | None = None

    @property
    def rule(self) -> str:
        """`how`, as a sentence."""
        return "" if self.how is None else str(self.how)

    @property
    def is_one(self) -> bool:
        """Whether the only shard is the whole tensor."""
        return len(self.placements) == 1 and self.placements[0].parts is None

    def known(self, by: By, evidence: str = "") -> Merge:
        """Return the merge with its source and evidence."""
        return self if self.how is None else replace(self, how=replace(self.how, by=by, evidence=evidence))

    def join(self, shards: Iterable[Sequence[Fragment]]) -> Composed:
        """Return the fragments of all shards, given in rank order, as those of the tensor."""
        return Composed(tuple(shards), self.placements, merged=True)

    def tensor(self, name: str, dtype: DType, shards: Iterable[Sequence[Fragment]], rule: str = "") -> TensorSpec:
        """Return the tensor, from the fragments of all shards in rank order."""
        if self.is_mean:
            return mean_of(name, self.shape, dtype, tuple(shards), rule)
        return TensorSpec(name, self.shape, dtype, self.join(shards), rule=rule)


# A rule: from the shards' shapes, in rank order, to a Merge. It raises ValueError for shapes that it does not fit.
Rule = Callable[[Sequence[Shape]], Merge]


# -- the rules


def replicated(shapes: Sequence[Shape]) -> Merge:
    """Merge replicas: every rank holds the whole tensor, and the lowest rank's copy is read."""
    _all_equal(shapes)
    return Merge(shapes[0], (Placement(shapes[0]),) * len(shapes), how=How("replicated", len(shapes)))


def averaged(shapes: Sequence[Shape]) -> Merge:
    """Merge replicas that may have drifted apart: their mean is read (in float32)."""
    _all_equal(shapes)
    return Merge(shapes[0], (Placement(shapes[0]),) * len(shapes), True, How("averaged", len(shapes)))


def concatenated(dim: int) -> Rule:
    """Return the rule of shards that are concatenated along a dimension; their widths may differ."""

    def rule(shapes: Sequence[Shape]) -> Merge:
        return _interleaved(shapes, dim, [[s[dim] for s in shapes]] if dim < len(shapes[0]) else [])

    return rule


def in_parts(dim: int, sizes: Sequence[int] | int, widths: Sequence[Sequence[int]] | None = None) -> Rule:
    """Return the rule of tensors fused along a dimension (gate and up, or q, k and v), each cut over the ranks.

    ``sizes`` holds their logical sizes, or is their number if they are equal. ``widths`` holds, for each of them, its
    width on every rank; None if each is cut evenly. A rank's shard is its piece of the first tensor, then of the
    second, and so on.
    """

    def rule(shapes: Sequence[Shape]) -> Merge:
        ranks = len(shapes)
        if widths is not None:
            return _interleaved(shapes, dim, widths)
        if isinstance(sizes, int):
            count = sizes
            if any(s[dim] % count for s in shapes):
                raise ValueError(
                    f"shards of {[s[dim] for s in shapes]} along dimension {dim} are not {count} equal parts"
                )
            return _interleaved(shapes, dim, [[s[dim] // count for s in shapes]] * count)
        if any(n % ranks for n in sizes):
            raise ValueError(
                f"parts of {list(sizes)} cannot be cut evenly over {ranks} ranks: say how wide each is on every rank"
            )
        return _interleaved(shapes, dim, [[n // ranks] * ranks for n in sizes])

    return rule


def rows(rule: Rule, count: int) -> Rule:
    """Return ``rule`` without the padding after the first ``count`` rows of its result (a padded vocabulary)."""

    def cut(shapes: Sequence[Shape]) -> Merge:
        merged = rule(shapes)
        if count > merged.shape[0]:
            raise ValueError(f"{count:,} rows are wanted, the shards have {merged.shape[0]:,} together")
        if count == merged.shape[0]:
            return merged
        how = None if merged.how is None else replace(merged.how, padding=(count, merged.shape[0] - count))
        return replace(merged, shape=(count, *merged.shape[1:]), how=how)

    return cut


def stacked(rule: Rule, groups: int) -> Rule:
    """Return the rule of stacks of experts that are concatenated along dimension 0.

    Each of ``groups`` groups of ranks has one stack, which ``rule`` cuts over the ranks of the group.
    """

    def stack(shapes: Sequence[Shape]) -> Merge:
        each = len(shapes) // groups
        placements: list[Placement] = []
        ahead = 0
        inner: set[Shape] = set()
        for n in range(groups):
            merged = rule(shapes[n * each : (n + 1) * each])
            for placement in merged.placements:
                parts = tuple(replace(b, start=(b.start[0] + ahead, *b.start[1:])) for b in placement.blocks)
                placements.append(replace(placement, parts=parts))
            ahead += merged.shape[0]
            inner.add(merged.shape[1:])
        if len(inner) > 1:
            raise ValueError(f"the stacks of the ranks differ: {sorted(inner)}")
        return Merge((ahead, *inner.pop()), tuple(placements), how=How("stacked", each, copies=groups))

    return stack


def pieces(logical: Shape, ranks: Mapping[int, Sequence[tuple[Shape, int, Shape, int, Shape]]]) -> Rule:
    """Return the rule of given blocks, by rank.

    A block is (shape, offset and strides in the tensor, offset and strides in the shard), all in elements.
    """

    def rule(shapes: Sequence[Shape]) -> Merge:
        placements = []
        for r, shape in enumerate(shapes):
            found: list[Part] = []
            for block in ranks.get(r, ()):
                found += _blocks(logical, shape, *block)
            placements.append(Placement(shape, tuple(found)))
        covered = sum(placement.numel for placement in placements)
        if covered < prod(logical):
            raise ValueError(f"the pieces cover {covered:,} of {prod(logical):,} elements")
        return Merge(logical, tuple(placements), how=How("pieces", len(shapes)))

    return rule


def _all_equal(shapes: Sequence[Shape]) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(f"the ranks' shapes differ: {list(dict.fromkeys(shapes))}")


def _interleaved(shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Merge:
    """Merge shards of fused tensors. ``widths[k][r]`` is the width along ``dim`` of rank r's piece of tensor k."""
    first = shapes[0]
    if dim >= len(first):
        raise ValueError(f"a tensor of shape {first} has no dimension {dim}")
    if any(s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        raise ValueError(f"the shards {list(dict.fromkeys(shapes))} do not fit along dimension {dim}")
    for r, shape in enumerate(shapes):
        if any(len(w) != len(shapes) for w in widths) or sum(w[r] for w in widths) != shape[dim]:
            raise ValueError(
                f"rank {r} is {shape[dim]} wide along dimension {dim}, its parts {[w[r : r + 1] for w in widths]}"
            )
    parts: list[list[Part]] = [[] for _ in shapes]
    local = [0] * len(shapes)
    at = 0
    for piece in widths:
        for r, width in enumerate(piece):
            start = [0] * len(first)
            stop = list(shapes[r])
            start[dim], stop[dim] = local[r], local[r] + width
            target = [0] * len(first)
            target[dim] = at
            if width:
                parts[r].append(Part(Box(tuple(start), tuple(stop)), tuple(target)))
            local[r] += width
            at += width
    shape = (*first[:dim], at, *first[dim + 1 :])
    placements = tuple(Placement(tuple(s), tuple(own)) for s, own in zip(shapes, parts, strict=True))
    return Merge(shape, placements, how=How("concatenated", len(shapes), dim, fused=len(widths)))


def _blocks(
    logical: Shape, shard: Shape, shape: Shape, source: int, s_strides: Shape, dest: int, d_strides: Shape
) -> Iterator[Part]:
    """Yield a strided block of both arrays as boxes, cutting it along its first dimension until each part is a box."""
    dims = _dims(shape, s_strides, logical)
    if dims is not None and dims == _dims(shape, d_strides, shard):
        start, local = _unravel(source, logical), _unravel(dest, shard)
        sizes = [1] * len(logical)
        for n, d in zip(shape, dims, strict=True):
            if d is not None:
                sizes[d] = n
        if all(a + n <= m for a, n, m in zip(start, sizes, logical, strict=True)) and all(
            a + n <= m for a, n, m in zip(local, sizes, shard, strict=True)
        ):
            yield Part(Box(local, tuple(a + n for a, n in zip(local, sizes, strict=True))), start)
            return
    if not shape or shape[0] > 4096:
        raise ValueError(
            f"a piece of shape {shape} with strides {s_strides} is no block of a tensor of shape {logical}"
        )
    for i in range(shape[0]):
        yield from _blocks(
            logical, shard, shape[1:], source + i * s_strides[0], s_strides[1:], dest + i * d_strides[0], d_strides[1:]
        )


def _dims(shape: Shape, strides: Shape, array: Shape) -> list[int | None] | None:
    """Return, for every dimension of a block, the array's dimension that it runs along (None if it has length 1)."""
    steps = c_strides(array)
    found: list[int | None] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            found.append(None)
            continue
        at = next(
            (d for d, (m, t) in enumerate(zip(array, steps, strict=True)) if t == s and m > 1 and d not in found), None
        )
        if at is None:
            return None
        found.append(at)
    return found


def _unravel(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in c_strides(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)


# -- where rules come from


@dataclass(frozen=True, slots=True)
class Source:
    """A source of rules. ``find`` returns (rule, evidence) for a name, or None; ``by`` is the kind of source."""

    find: Callable[[str], tuple[Rule, str] | None]
    by: By = "checkpoint"


def decide(name: str, shapes: Sequence[Shape], sources: Sequence[Source]) -> Merge:
    """Return the merge of one tensor's shards, by the first source that knows the tensor.

    Raises ValueError if no source knows it, or if the rule does not fit the shapes.
    """
    if len(shapes) == 1:
        return _alone(name, shapes, sources)
    for source in sources:
        found = source.find(name)
        if found is not None:
            rule, evidence = found
            return rule(shapes).known(source.by, evidence)
    by_shape = _by_shape(shapes)
    if by_shape is not None:
        return by_shape
    raise ValueError(
        f"nothing tells how its {len(shapes)} shards of shape {shapes[0]} form one tensor (replicated? cut, along "
        "which dimension?). Say it with rules={'pattern': 'row' | 'column' | 'replicated' | ...}; each shard "
        "reads on its own in view.stored"
    )


def _alone(name: str, shapes: Sequence[Shape], sources: Sequence[Source]) -> Merge:
    """Return the merge of a single shard, which is the whole tensor except for the padding of a vocabulary."""
    found = next(((f, source.by) for source in sources if (f := source.find(name)) is not None), None)
    if found is None:
        return Merge(shapes[0], (Placement(shapes[0]),))
    (rule, evidence), by = found
    try:
        merged = rule(shapes)
    except ValueError:  # the rule of a cut tensor need not fit one that is not cut
        return Merge(shapes[0], (Placement(shapes[0]),))
    return Merge(shapes[0], (Placement(shapes[0]),)) if merged.shape == shapes[0] else merged.known(by, evidence)


def _by_shape(shapes: Sequence[Shape]) -> Merge | None:
    if len({len(s) for s in shapes}) != 1:
        return None
    differ = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(differ) != 1:
        return None
    return concatenated(differ[0])(shapes).known("shapes")


def user_rules(rules: Mapping[str, Any]) -> Source:
    """Return the source of the user's rules: glob of the logical name -> rule.

    A rule is a word ("replicated", "average", "column" = cut along dimension 0, "row" = along dimension 1, "swiglu" =
    column in two equal parts) or a table: {"cat": dim}, with "parts" (several tensors fused along it: a count of equal
    ones, or their logical sizes, each cut evenly over the ranks), "widths" (for each part its width on every rank,
    where they are not cut evenly) and "rows" (logical rows of a padded vocabulary). {"flat": ...} is for flat
    parameters of FSDP (see `lazyckpt.layouts.flat_rules`). Raises FormatError for anything else.

    >>> qkv = {"cat": 0, "widths": [[4, 2], [2, 1], [2, 1]]}  # 6 + 3 + 3 heads over two ranks
    >>> decide("qkv", [(8, 5), (4, 5)], [user_rules({"*qkv": qkv})]).shape
    (12, 5)
    """
    table = [(glob, matcher(glob), _parsed(glob, rule)) for glob, rule in rules.items()]

    def find(name: str) -> tuple[Rule, str] | None:
        return next(((rule, f"rules[{glob!r}]") for glob, match, rule in table if match(name)), None)

    return Source(find, "user")


_WORDS: dict[str, Rule] = {
    "replicated": replicated,
    "average": averaged,
    "column": concatenated(0),
    "row": concatenated(1),
    "swiglu": in_parts(0, 2),
}


def _parsed(glob: str, rule: Any) -> Rule:
    if isinstance(rule, str) and rule in _WORDS:
        return _WORDS[rule]
    if is_flat_rule(rule):
        flat_rule(glob, rule)
        return _no_flat
    if isinstance(rule, Mapping) and _is_table(rule):
        made = concatenated(rule["cat"])
        if "parts" in rule or "widths" in rule:
            widths = rule.get("widths")
            made = in_parts(rule["cat"], rule.get("parts", len(widths or ())), widths)
        return rows(made, rule["rows"]) if "rows" in rule else made
    raise FormatError(
        f"rules[{glob!r}] = {rule!r} is not understood: one of {', '.join(_WORDS)}, or a table such as "
        "{'cat': 0, 'parts': 2, 'rows': 50257}, {'cat': 0, 'parts': [4096, 1024, 1024]} or "
        "{'cat': 0, 'widths': [[4, 2], [2, 1]]}"
    )


def _no_flat(shapes: Sequence[Shape]) -> Merge:
    raise ValueError("a rule with 'flat' is for the flat parameters of FSDP (names that end with _flat_param)")


def _is_table(rule: Mapping[str, Any]) -> bool:
    if not {"cat"} <= rule.keys() <= {"cat", "parts", "widths", "rows"} or not _is_count(rule["cat"], 0):
        return False
    parts, widths = rule.get("parts", 1), rule.get("widths", [[0]])
    counted = _is_count(parts, 1) or _are_counts(parts)
    wide = isinstance(widths, list | tuple) and len(widths) > 0 and all(map(_are_counts, widths))
    sized = not _are_counts(parts) or "widths" not in rule or list(map(sum, widths)) == list(parts)
    return counted and wide and sized and _is_count(rule.get("rows", 1), 1)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _are_counts(values: Any) -> bool:
    return isinstance(values, list | tuple) and len(values) > 0 and all(_is_count(n, 0) for n in values)
