"""How the tensor-parallel shards of Megatron's parameters form the whole, and how that is known.

Sources: megatron/core/tensor_parallel/layers.py (column- and row-parallel, the attributes of parameters),
transformer/mlp.py (gate and up halves of every rank), transformer/attention.py (whole query groups on every rank),
transformer/multi_latent_attention.py, ssm/mamba_mixer.py. The order: the user's rules, the arguments, names, and for
names that are not known the attributes that a file keeps of its fp32 copies. Those are evidence, no more: the attribute
``partition_stride`` is right only since 0.16, and where extensions/transformer_engine.py makes Transformer Engine
agnostic of tensor parallelism (experts, duplicated layers) all its parameters say ``partition_dim = 0``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.box import Shape
from ..families import family_rules
from ..merge import Merge, Rule, Source, concatenated, in_parts, replicated, user_rules
from .degrees import flag, number
from .mixers import mixer_rule

_FC1 = re.compile(r"\.(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*$")
_QKV = re.compile(r"\.(linear_qkv|query_key_value)\.(weight|bias)$")
_DOWN = re.compile(r"\.linear_(q|kv)_down_proj\.weight$")
_OFFSET = re.compile(r"\.softmax_offset$")
VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer|word_embeddings_for_head|lm_head)\.(weight|bias)$")
_GATED = ("swiglu", "quick_geglu", "geglu", "gated_linear_unit")
# name -> the attributes of the parameter on the ranks
Attributes = Mapping[str, Mapping[str, Any]]


def megatron_rules(args: Any, user: Mapping[str, Any], attributes: Attributes) -> tuple[Source, ...]:
    """Where the rules come from, the first that knows wins."""
    gated = flag(args, *_GATED)
    family = family_rules(gated)
    return (
        user_rules(user),
        Source(lambda name: _by_arguments(name, args, gated, attributes.get(name))),
        Source(lambda name: _by_name(family.find(name), attributes.get(name))),
        Source(lambda name: _by_attributes(name, args, attributes.get(name))),
    )


def is_gated(args: Any) -> bool | None:
    """Whether the first matrix of an MLP is gate and up in one; None if the arguments do not say."""
    return flag(args, *_GATED)


def gated_by(args: Any) -> str:
    """The argument that says it."""
    name = next((n for n in _GATED if flag(args, n)), "swiglu")
    return f"args.{name} = {flag(args, name)}"


def _by_arguments(
    name: str, args: Any, gated: bool | None, attributes: Mapping[str, Any] | None
) -> tuple[Rule, str] | None:
    if _FC1.search(name) and gated is not None:
        rule = in_parts(0, 2) if gated else concatenated(0)
        return rule, gated_by(args) + _second_opinion(attributes, 0)
    if _QKV.search(name):
        groups = number(args, "num_query_groups") if flag(args, "group_query_attention") else None
        heads = number(args, "num_attention_heads")
        how = f"{groups or heads or 'all'} query groups, whole ones on every rank"
        return concatenated(0), f"its name: {how}" + _second_opinion(attributes, 0)
    if _OFFSET.search(name):
        return concatenated(0), "its name: one of each head"
    mixer = mixer_rule(name, args)
    if mixer is not None:
        return mixer
    down = _DOWN.search(name)
    if down is not None:
        width = number(args, "q_lora_rank" if down[1] == "q" else "kv_lora_rank")
        extra = (number(args, "qk_pos_emb_head_dim") or 0) if down[1] == "kv" else 0
        return _down(None if width is None else width + extra), "args.q_lora_rank, args.kv_lora_rank and its shape"
    return None


def _down(width: int | None) -> Rule:
    """The matrices that MLA projects down with are cut by Megatron's own layers, and not by Transformer Engine's."""

    def rule(shapes: Sequence[Shape]) -> Merge:
        if width is None:
            raise ValueError("the arguments do not tell how wide it is: it may be cut, or replicated")
        return replicated(shapes) if shapes[0][0] == width else concatenated(0)(shapes)

    return rule


def _by_name(found: tuple[Rule, str] | None, attributes: Mapping[str, Any] | None) -> tuple[Rule, str] | None:
    if found is None or attributes is None:
        return found
    return found[0], f"{found[1]} ({_said(attributes)})"


def _by_attributes(name: str, args: Any, attributes: Mapping[str, Any] | None) -> tuple[Rule, str] | None:
    if attributes is None or _FC1.search(name):  # (they do not tell what is fused)
        return None
    if attributes.get("tensor_model_parallel") is not True:
        return replicated, _said(attributes)
    dim = _cut(attributes)
    if dim is None or (dim == 0 and getattr(args, "transformer_impl", None) == "transformer_engine"):
        return None
    return concatenated(dim), _said(attributes)


def _said(attributes: Mapping[str, Any]) -> str:
    parallel = attributes.get("tensor_model_parallel") is True
    what = f"partition_dim = {_cut(attributes)}" if parallel else "tensor_model_parallel = False"
    return f"the attributes of its fp32 copy in the file: {what}"


def _second_opinion(attributes: Mapping[str, Any] | None, dim: int) -> str:
    if attributes is None:
        return ""
    agrees = _cut(attributes) == dim
    return f" (the attributes of its fp32 copy in the file {'agree' if agrees else 'differ'})"


def _cut(attributes: Mapping[str, Any]) -> int | None:
    """The dimension that a parameter is cut along, by its attributes; None: it is not cut."""
    dim = attributes.get("partition_dim")
    return dim if attributes.get("tensor_model_parallel") is True and type(dim) is int and dim >= 0 else None


def vocabulary_note(name: str, args: Any, rows: int) -> str:
    """What the arguments say of the rows of a vocabulary; "" for other tensors."""
    if not VOCABULARY.search(name):
        return ""
    said = [f"args.{key} = {n}" for key in ("padded_vocab_size", "vocab_size") if (n := number(args, key)) is not None]
    return f"{rows:,} rows as stored, padding included" + (f" ({', '.join(said)})" if said else "")
