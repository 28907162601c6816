"""Which of the tables fits a model, by its names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.index import TensorSpec
from .rename import Heads

_FC1 = re.compile(r"(.*\.)linear_fc1(\.weight\d*)")


def hugging_face(specs: Mapping[str, TensorSpec], args: Mapping[str, Any], heads: Heads | None) -> str:
    """The table from megatron-core's names to those of the family at Hugging Face that is built so."""
    text = "\n".join(specs)
    gated = _gated(specs, args)
    if gated and ".mlp.experts." in text:
        return "qwen_moe" if ".shared_experts." in text or ".q_layernorm." in text else "mixtral"
    if gated:
        return "llama"
    if "embedding.position_embeddings." in text:
        return "gpt2"
    many = heads is None or heads.queries == heads.groups  # (GPT-NeoX has no groups)
    return "gpt_neox" if many and ".mlp.experts." not in text and "decoder.final_layernorm.bias" in text else "nemotron"


def megatron(names: Mapping[str, TensorSpec]) -> str:
    """The table whose right side these names are on."""
    text = "\n".join(names)
    if ".block_sparse_moe." in text:
        return "mixtral"
    if ".mlp.experts." in text:
        return "qwen_moe"
    if "gpt_neox." in text:
        return "gpt_neox"
    if "transformer.h." in text:
        return "gpt2"
    return "nemotron" if ".mlp.up_proj." in text and ".mlp.gate_proj." not in text else "llama"


def _gated(specs: Mapping[str, TensorSpec], args: Mapping[str, Any]) -> bool:
    """Whether an MLP's first matrix is gate and up in one: it has twice the rows that the second has columns."""
    for name, spec in specs.items():
        match = _FC1.fullmatch(name)
        second = specs.get(f"{match[1]}linear_fc2{match[2]}") if match is not None else None
        if second is not None and len(spec.shape) == len(second.shape) == 2:
            return spec.shape[0] == 2 * second.shape[1]
        if name.endswith(".experts.weight1") and len(spec.shape) == 3:
            second = specs.get(f"{name[:-1]}2")
            if second is not None and len(second.shape) == 3:
                return spec.shape[2] == 2 * second.shape[1]
    return args.get("swiglu") is not False
