"""Merge rules by the names that known model families give their parameters.

Sources: Megatron-LM megatron/core/tensor_parallel/layers.py (what is column- and row-parallel), the names of GPT,
Llama-like and Megatron models. Only names whose meaning does not depend on the model's configuration are listed: a
fused gate-and-up or query-key-value weight is not, unless what tells its order is known.
"""

from __future__ import annotations

import re

from .merge import Rule, Source, concatenated, in_parts, replicated

_REPLICATED = (
    r"(^|\.)[\w]*(norm|layernorm)\w*\.(weight|bias)$",
    r"(^|\.)ln_\w+\.(weight|bias)$",
    r"\.layer_norm_(weight|bias)$",  # Transformer Engine's norm within a linear layer
    r"(^|\.)relative_attention_bias\.weight$",
    r"(^|\.)(self_|cross_|inter_)?(attention|attn)\.(dense|o_proj|out_proj|linear_proj)\.bias$",
    r"(^|\.)mlp\.(dense_4h_to_h|down_proj|fc2|linear_fc2)\.bias$",
    r"(^|\.)(position_embeddings|embed_positions|wpe)\.weight$",
    r"(^|\.)mlp\.(router|gate)\.weight$",
    r"(^|\.)router\.(bias|expert_bias)$",
    r"(^|\.)(local_experts\.\d+|shared_experts)\.linear_fc2\.bias$",
    r"(^|\.)experts\.linear_fc2\.bias\d+$",
    r"(^|\.)shared_experts\.gate_weight$",
    r"(^|\.)(tokentype_embeddings|pooler\.dense|binary_head|lm_head\.dense)\.(weight|bias)$",
)
_ROW = (
    r"(^|\.)(self_|cross_|inter_)?(attention|attn)\.(dense|o_proj|out_proj|linear_proj)\.weight$",
    r"(^|\.)mlp\.(dense_4h_to_h|down_proj|fc2|linear_fc2)\.weight$",
    r"(^|\.)(local_experts\.\d+|shared_experts)\.linear_fc2\.weight$",
    r"(^|\.)experts\.linear_fc2\.weight\d+$",
)
_COLUMN = (
    r"(^|\.)(self_)?(attention|attn)\.[qkv]_proj\.(weight|bias)$",
    r"(^|\.)mlp\.(gate_proj|up_proj)\.(weight|bias)$",
    r"(^|\.)(word_embeddings|embed_tokens|wte|lm_head|output_layer)\.weight$",
    r"(^|\.)(output_layer|lm_head)\.bias$",
    r"(^|\.)(self|cross)_attention\.linear_(q|q_proj|q_up_proj|kv_up_proj|kv)\.(weight|bias)$",
    r"(^|\.)inter_attention\.(query|key_value)\.(weight|bias)$",
    r"(^|\.)eh_proj\.weight$",
)
_FC1 = r"(^|\.)(mlp|local_experts\.\d+|shared_experts)\.(dense_h_to_4h|linear_fc1)\.(weight|bias)$"


def family_rules(gated: bool | None = None) -> Source:
    """Rules by name. ``gated``: whether the first matrix of an MLP is gate and up in one (Megatron's args.swiglu);
    None where that is not known, and then no rule is given for it."""
    table: list[tuple[re.Pattern[str], Rule]] = [(re.compile(p), replicated) for p in _REPLICATED]
    table += [(re.compile(p), concatenated(1)) for p in _ROW]
    table += [(re.compile(p), concatenated(0)) for p in _COLUMN]
    if gated is not None:
        table.append((re.compile(_FC1), in_parts(0, 2) if gated else concatenated(0)))

    def find(name: str) -> tuple[Rule, str] | None:
        for pattern, rule in table:
            if pattern.search(name):
                return rule, f"the family's name pattern {pattern.pattern!r}"
        return None

    return Source(find, "names")
