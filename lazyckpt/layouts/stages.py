"""The pipeline stages and the expert-parallel rank that have a tensor, and the tensor's name there. No I/O.

Layers are distributed over stages, in order, evenly or as a `Pipeline` says; each stack of layers (an encoder, a
decoder) separately. Embeddings are on the first stage. The final norm, the head and multi-token prediction are on the
last one; a head that is tied to the embedding is on the last stage under its own name, as in Megatron. A tensor whose
stage is unknown is on all stages. In megatron-core's models with multi-token prediction, the final norm is behind the
last layer of the decoder (transformer/transformer_block.py `has_final_layernorm_in_this_stage`), and the stage of the
prediction has a copy of the embedding (models/gpt/gpt_model.py `mtp_process`). If Megatron's stages have several model
chunks, names begin with ``model0.``, ``model1.``, as the keys of its files do.

Megatron's ranks count their layers and experts from 0 (megatron/core/transformer/transformer_block.py, moe/experts.py),
DeepSpeed's ranks their experts (deepspeed/moe/experts.py); other names keep their numbers, as in
torch.distributed.pipelining and Hugging Face's models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.placement import Pipeline
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

    def __init__(self, names: Iterable[str], pipeline: Pipeline, local: bool) -> None:
        self.pipeline = pipeline
        self.local = local
        self.every: dict[str, None] = {}
        self._last = pipeline.stages * pipeline.chunks - 1
        self._predicts = False
        self._stacks: dict[str, dict[int, set[str]]] = {}
        for name in names if self._last else ():
            match = _layer(name)
            if match is not None:
                layers = self._stacks.setdefault(match[1], {})
                layers.setdefault(int(match[2]), set()).add(name[match.end() :])
            self._predicts = self._predicts or (local and name.startswith("mtp."))
        self._dealt: dict[str, dict[int, tuple[int, int]]] = {}  # head -> layer -> (position, its number there)

    def of(self, name: str) -> list[tuple[int, str]]:
        """Return (stage, name there) for each stage that has a tensor; several of one stage if several chunks have it.

        Raises ValueError if the layers cannot be distributed.
        """
        stages, chunks = self.pipeline.stages, self.pipeline.chunks
        if not self._last:
            return [(0, name)]
        if chunks == 1 or not self.local:
            return list(dict.fromkeys((at % stages, local) for at, local in self._positions(name)))
        return [(at % stages, in_chunk(at // stages, local)) for at, local in self._positions(name)]

    def _positions(self, name: str) -> list[tuple[int, str]]:
        """Return (position in the pipeline, name there) for each chunk that has a tensor."""
        last = self._last
        match = _layer(name)
        if match is not None and int(match[2]) in self._stacks.get(match[1], ()):
            at, number = self._deal(match[1])[int(match[2])]
            own = pattern("megatron.layer").search(name) if self.local else None
            counted = own is not None and own.end(1) == match.end(1)
            return [(at, f"{match[1]}{number}{name[match.end() :]}" if counted else name)]
        if pattern("stage.both").search(name):
            return [(0, name), (last, name)]
        predicting = pattern("stage.mtp").search(name)
        if pattern("stage.first").search(name) and not predicting:
            copied = self._predicts and name.startswith("embedding.") and self._further() != 0
            return [(0, name), *([(self._further(), name)] if copied else [])]
        if predicting:
            return [(self._further() if self._predicts else last, name)]
        if pattern("stage.last").search(name):
            behind = self._predicts and name.startswith("decoder.") and "decoder.layers." in self._stacks
            return [(max(self._deal("decoder.layers.").values())[0] if behind else last, name)]
        if not pattern("stage.every").search(name):
            self.every[name] = None
        return [(at, name) for at in range(last + 1)]

    def _further(self) -> int:
        """Return the position of the chunk that predicts further tokens."""
        at = self.pipeline.further
        if at == -1:
            raise ValueError("the layout has no stage m for the layers that predict further tokens (mtp.)")
        return self._last if at is None else at

    def _deal(self, head: str) -> dict[int, tuple[int, int]]:
        if head not in self._dealt:
            layers = self._stacks[head]
            # in DeepSpeed's pipelines the modules before and after the transformer's layers have numbers too
            numbers, ends = (sorted(layers), {}) if head else _inner(layers, self._last)
            counts = self._counts(len(numbers), f"the {len(numbers)} layers {head}{numbers[0]} to {head}{numbers[-1]}")
            places = [(at, n) for at, count in enumerate(counts) for n in range(count)]
            self._dealt[head] = dict(zip(numbers, places, strict=True)) | ends
        return self._dealt[head]

    def _counts(self, layers: int, shown: str) -> Sequence[int]:
        """Return the number of layers at each position."""
        counts, parts = self.pipeline.layers, self._last + 1
        if counts is not None:
            if sum(counts) != layers:
                raise ValueError(
                    f"{shown} do not fit the layout, which has {sum(counts)} ({', '.join(map(str, counts))})"
                )
            return counts
        if layers % parts:
            chunks = f" of {self.pipeline.chunks} chunks" if self.pipeline.chunks > 1 else ""
            raise ValueError(
                f"{shown} cannot be dealt evenly over {self.pipeline.stages} pipeline stages{chunks}: say with layout= "
                "how many each has"
            )
        return [layers // parts] * parts


def in_chunk(chunk: int, name: str) -> str:
    """Return the name of a tensor of a model chunk, if stages have several chunks.

    >>> in_chunk(1, "decoder.layers.0.mlp.linear_fc2.weight")
    'model1.decoder.layers.0.mlp.linear_fc2.weight'
    """
    return f"model{chunk}.{name}"


def chunk_of(name: str) -> tuple[int, str]:
    """Return the model chunk of a name that `in_chunk` gave, and the name there.

    >>> chunk_of("model1.decoder.layers.0.mlp.linear_fc2.weight")
    (1, 'decoder.layers.0.mlp.linear_fc2.weight')
    """
    head, _, bare = name.partition(".")
    return int(head.removeprefix("model")), bare


def _layer(name: str) -> re.Match[str] | None:
    return None if pattern("stage.mtp").search(name) else pattern("model.layer").match(name)


def _inner(layers: Mapping[int, set[str]], last: int) -> tuple[list[int], dict[int, tuple[int, int]]]:
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
    return numbers[lo:hi], dict.fromkeys(numbers[:lo], (0, 0)) | dict.fromkeys(numbers[hi:], (last, 0))
