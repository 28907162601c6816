"""Names in the rank files of Megatron, and what they are in the model on one rank. Pure.

Sources: megatron/core/models/gpt/gpt_model.py, transformer/moe/experts.py; legacy/model/language_model.py
`TransformerLanguageModel.state_dict_for_save_checkpoint` (nested dicts; `word_embeddings_for_head`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LAYER = re.compile(r"((?:^|\.)(?:encoder|decoder|transformer)\.layers\.)(\d+)(?=\.)")
_LOCAL = re.compile(r"(\.experts\.local_experts\.)(\d+)(?=\.)")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_STACKED = re.compile(r"\.experts\.weight([12])$")
_HEAD = re.compile(r"(^|\.)output_layer\.weight$|^word_embeddings_for_head\.weight$")
# not trained, so no optimizer has them: transformer/moe/router.py, models/common/embeddings/rotary_pos_embedding.py
_BUFFER = re.compile(r"(^|\.)(expert_bias|local_tokens_per_expert|inv_freq|_extra_state)$")


class Place(NamedTuple):
    """Where a rank's tensor belongs. ``layer``: the number in its name, None if it is of no layer. ``expert``: whether
    it is an expert's, ``number``: its number on the rank; None for what stacks all experts of the rank."""

    head: str
    layer: int | None
    tail: str
    expert: bool
    number: int | None

    def named(self, first_layer: int, first_expert: int) -> str:
        """The name in the model on one rank, from the first layer and the first expert of the rank."""
        name = self.tail
        if self.number is not None:
            match = _LOCAL.search(name) or _GROUPED.search(name)
            if match is not None:
                name = f"{name[: match.start(2)]}{self.number + first_expert}{name[match.end(2) :]}"
        return name if self.layer is None else f"{self.head}{self.layer + first_layer}{name}"


def place(name: str) -> Place:
    """Take a name of a rank file apart.

    >>> place("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight").named(4, 8)
    'decoder.layers.5.mlp.experts.local_experts.8.linear_fc1.weight'
    >>> place("mtp.layers.0.eh_proj.weight").named(4, 8)
    'mtp.layers.0.eh_proj.weight'
    """
    match = _LAYER.search(name)
    head, layer, tail = (
        ("", None, name) if match is None else (name[: match.end(1)], int(match[2][:9]), name[match.end() :])
    )
    number = _LOCAL.search(tail) or _GROUPED.search(tail)
    return Place(head, layer, tail, is_expert(name), int(number[2][:9]) if number else None)


def is_expert(name: str) -> bool:
    """Whether it is a parameter of experts, which expert parallelism spreads (shared experts and routers are not)."""
    return ".experts." in name


def stack_of(name: str) -> int | None:
    """1 or 2 for the first or second matrix of all experts of a rank in one (GroupedMLP); else None."""
    match = _STACKED.search(name)
    return int(match[1]) if match else None


def is_head(name: str) -> bool:
    """Whether it is the output layer's matrix, a copy of the embedding's where these are tied."""
    return _HEAD.search(name) is not None


def tied_to(name: str) -> str:
    """Of the output layer's matrix, or what old models call its copy: the embedding's that it is tied to.

    >>> tied_to("output_layer.weight"), tied_to("word_embeddings_for_head.weight")
    ('embedding.word_embeddings.weight', 'language_model.embedding.word_embeddings.weight')
    """
    if name.startswith("word_embeddings_for_head."):
        return "language_model.embedding.word_embeddings.weight"
    return f"{name.removesuffix('output_layer.weight')}embedding.word_embeddings.weight"


def is_buffer(name: str) -> bool:
    """Whether no optimizer has it, though the model's state does."""
    return _BUFFER.search(name) is not None
