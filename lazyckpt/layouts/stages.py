"""The pipeline stages and the expert-parallel rank that have a tensor, and the tensor's name there. No I/O.

Layers are distributed evenly over stages, in order; each stack of layers (an encoder, a decoder) separately. Embeddings
are on the first stage. The final norm, the head and multi-token prediction are on the last one; a head that is tied to
the embedding is on the last stage under its own name, as in Megatron. A tensor whose stage is unknown is on all stages.
Megatron's ranks count their layers and experts from 0 (megatron/core/transformer/transformer_block.py, moe/experts.py),
DeepSpeed's ranks their experts (deepspeed/moe/experts.py); other names keep their numbers, as in
torch.distributed.pipelining and Hugging Face's models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .tables import pattern


class Expert(NamedTuple):
    """One expert of a layer.

    ``layer`` is the tensor's name up to the expert's number, ``tail`` the rest after the number. ``counted`` says
    whether each rank counts its experts from 0.
    """

    layer: str
    number: int
    counted: bool
    tail: str


def expert_of(name: str) -> Expert | None:
    """Return the expert that a tensor belongs to; None if it belongs to none or to all.

    >>> expert_of("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
    Expert(layer='decoder.layers.1.mlp.experts.local_experts.', number=3, counted=True, tail='.linear_fc1.weight')
    >>> expert_of("model.layers.1.mlp.experts.3.up_proj.weight")[1:3]
    (3, False)
    """
    match = pattern("model.expert").search(name)
    if match is None:
        return None
    counted = pattern("model.counted_expert").search(match[1]) is not None
    return Expert(name[: match.end(1)], int(match[2]), counted, name[match.end() :])


def is_stack(name: str) -> bool:
    """Return whether a tensor stacks all experts of a layer, [experts, ...]."""
    return ".experts." in name and expert_of(name) is None


class Stages:
    """The distribution of a model's layers over pipeline stages.

    ``names`` are those of the whole model. ``local`` says whether they are Megatron's, whose stages count layers from
    0. ``every`` collects the names passed to `of` that are on all stages because their stage is unknown.
    """

    def __init__(self, names: Iterable[str], pp: int, local: bool) -> None:
        self.pp = pp
        self.local = local
        self.every: dict[str, None] = {}
        self._stacks: dict[str, dict[int, set[str]]] = {}
        for name in names if pp > 1 else ():
            match = _layer(name)
            if match is not None:
                layers = self._stacks.setdefault(match[1], {})
                layers.setdefault(int(match[2]), set()).add(name[match.end() :])
        self._dealt: dict[str, dict[int, tuple[int, int]]] = {}  # head -> layer -> (stage, its number there)

    def of(self, name: str) -> list[tuple[int, str]]:
        """Return (stage, name there) for each stage that has a tensor.

        Raises ValueError if the layers cannot be distributed evenly.
        """
        last = self.pp - 1
        match = _layer(name)
        if not last:
            return [(0, name)]
        if match is not None and int(match[2]) in self._stacks.get(match[1], ()):
            stage, number = self._deal(match[1])[int(match[2])]
            own = pattern("megatron.layer").search(name) if self.local else None
            counted = own is not None and own.end(1) == match.end(1)
            return [(stage, f"{match[1]}{number}{name[match.end() :]}" if counted else name)]
        if pattern("stage.both").search(name):
            return [(0, name), (last, name)]
        if pattern("stage.first").search(name) and not pattern("stage.mtp").search(name):
            return [(0, name)]
        if pattern("stage.last").search(name) or pattern("stage.mtp").search(name):
            return [(last, name)]
        if not pattern("stage.every").search(name):
            self.every[name] = None
        return [(stage, name) for stage in range(self.pp)]

    def _deal(self, head: str) -> dict[int, tuple[int, int]]:
        if head not in self._dealt:
            layers = self._stacks[head]
            # in DeepSpeed's pipelines the modules before and after the transformer's layers have numbers too
            numbers, ends = (sorted(layers), {}) if head else _inner(layers, self.pp)
            each, rest = divmod(len(numbers), self.pp)
            if rest:
                raise ValueError(
                    f"the {len(numbers)} layers {head}{numbers[0]} to {head}{numbers[-1]} cannot be dealt evenly over "
                    f"{self.pp} pipeline stages"
                )
            self._dealt[head] = {n: divmod(i, each) for i, n in enumerate(numbers)} | ends
        return self._dealt[head]


def _layer(name: str) -> re.Match[str] | None:
    return None if pattern("stage.mtp").search(name) else pattern("model.layer").match(name)


def _inner(layers: Mapping[int, set[str]], pp: int) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Return the transformer's layers of a pipeline, and the stages of the unique modules before and after them."""
    kinds = Counter(frozenset(names) for names in layers.values())
    numbers = sorted(layers)
    lo, hi = 0, len(numbers)
    while lo < hi and kinds[frozenset(layers[numbers[lo]])] == 1:
        lo += 1
    while lo < hi and kinds[frozenset(layers[numbers[hi - 1]])] == 1:
        hi -= 1
    if lo == hi:
        return numbers, {}
    return numbers[lo:hi], dict.fromkeys(numbers[:lo], (0, 0)) | dict.fromkeys(numbers[hi:], (pp - 1, 0))
