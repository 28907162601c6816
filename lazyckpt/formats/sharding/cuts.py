"""Merge rules run backwards: the shard of one tensor-parallel rank, from the shape of the whole. Pure.

A rule says what shards of given shapes make. Of a whole, the shards are those of equal shapes that make it again: all
of it on every rank, or one dimension divided by the degree; of a vocabulary, the first dimension padded to a multiple.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...core.box import Box, Shape
from ...core.index import Part
from ..merge import Merge, Rule
from ..renaming.rename import Heads

VOCABULARY = re.compile(
    r"(^|\.)(word_embeddings|word_embeddings_for_head|output_layer|lm_head|embed_tokens|wte|embed_in|embed_out|"
    r"tok_embeddings)\.(weight|bias)$|^output\.weight$"
)
_ATTENTION = r"(?:^|\.)(?:self_|cross_|inter_)?(?:attention|attn|self_attn)\."
_QKV = re.compile(_ATTENTION + r"(?:linear_qkv|query_key_value)\.(?:weight|bias)$")
_Q = re.compile(_ATTENTION + r"(?:q_proj|linear_q|wq)\.(?:weight|bias)$")
_KV = re.compile(_ATTENTION + r"(?:k_proj|v_proj|wk|wv)\.(?:weight|bias)$")
_OUT = re.compile(_ATTENTION + r"(?:o_proj|out_proj|linear_proj|dense|wo)\.weight$")


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
    padded = (-(-whole[0] // step) * step, *whole[1:]) if VOCABULARY.search(name) else whole
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
    for pattern, dim, rows, count, what in (
        (_QKV, 0, (heads.queries + 2 * heads.groups) * heads.dim, heads.groups, "groups of heads"),
        (_Q, 0, heads.queries * heads.dim, heads.queries, "heads"),
        (_KV, 0, heads.groups * heads.dim, heads.groups, "key-value heads"),
        (_OUT, 1, heads.queries * heads.dim, heads.queries, "heads"),
    ):
        if pattern.search(name) and dim < len(whole) and whole[dim] == rows and count % degree:
            raise ValueError(f"{name!r} of shape {whole} cannot be cut over {degree} ranks: it is of {count} {what}")
