"""The run's arguments that every file of a Megatron checkpoint has: the source's, adapted, or derived from the model.

Source: megatron/training/checkpointing.py `load_checkpoint` -> `check_checkpoint_args` (compares num_layers,
hidden_size, num_attention_heads and the degrees with those of the run, and stops where one is missing),
`load_args_from_checkpoint` (what --use-checkpoint-args takes). The names are those of megatron/training/arguments.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..core.placement import Division, Pipeline
from ..core.specs import TensorSpec
from ..formats.megatron.layers import decoder_layer
from ..layouts.megatron import is_gated, number
from ..layouts.mixers import widths_in
from ..layouts.pipeline import ends_of, layout_of
from ..layouts.ranks import world_size
from ..layouts.rename.apply import heads_of
from ..layouts.rename.pieces import Heads
from ..layouts.rename.table import builtin
from ..layouts.stages import expert_of
from .training import Lost, restored

EMBEDDING = "embedding.word_embeddings.weight"
_COMPARED = ("num_layers", "hidden_size", "num_attention_heads")
# The source's distribution of layers over stages.
_DEALT = (
    "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
_SWITCHED_OFF = (
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_distributed_optimizer",
    "use_legacy_models", "use_dist_ckpt",
)  # fmt: skip
# Hugging Face's config -> Megatron's argument
_CONFIG = {
    "max_position_embeddings": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "norm_epsilon",
    "layer_norm_eps": "norm_epsilon",
    "layer_norm_epsilon": "norm_epsilon",
    "intermediate_size": "ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
}
# part of a name -> the kind of its layer in a hybrid model; G: a gated delta net, which has an MLP beside it
_KINDS = {
    ".self_attention.in_proj.": "G",
    ".mixer.in_proj.": "M",
    ".self_attention.linear_qkv.": "*",
    ".mlp.router.": "E",
    ".mlp.linear_fc1.": "-",
}
_STRONGER = " -E*MG"  # of several in a layer the last of these counts
# the same of latent attention
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}


def source_args(meta: Mapping[str, Any], lost: Lost) -> argparse.Namespace:
    """Copy the source's arguments without those that cannot be written; return an empty namespace if it has none."""
    args = meta.get("args")
    if not isinstance(args, argparse.Namespace) or not hasattr(args, "num_layers"):
        return argparse.Namespace()
    found = restored(args, "args", lambda name: None, lost)
    return found if isinstance(found, argparse.Namespace) else argparse.Namespace()


def complete(
    args: argparse.Namespace,
    weights: Mapping[str, TensorSpec],
    meta: Mapping[str, Any],
    tied: bool,
    dtype: torch.dtype,
) -> None:
    """Add missing arguments that follow from names, shapes and Hugging Face's config."""
    gated = is_gated(args)
    for name, value in (*_in_shapes(weights), *_in_config(weights, meta), *_in_dtype(dtype)):
        if getattr(args, name, None) is None and (name != "gated_linear_unit" or gated is None):
            setattr(args, name, value)
    args.untie_embeddings_and_output_weights = not tied


def of_rank_files(
    args: argparse.Namespace, weights: Mapping[str, TensorSpec], division: Division, iteration: int, lost: Lost
) -> None:
    """Set the arguments that depend on the written files, such as the parallel degrees."""
    mesh = division.mesh
    for name in (*_DEALT, *_SWITCHED_OFF):
        if hasattr(args, name):
            setattr(args, name, None if name in _DEALT else False)
    args.tensor_model_parallel_size = mesh.tp
    args.pipeline_model_parallel_size = mesh.pp
    args.expert_model_parallel_size = mesh.ep
    args.expert_tensor_parallel_size = division.etp
    args.context_parallel_size = 1
    args.world_size = world_size(mesh, division.etp)
    args.data_parallel_size = args.world_size // (mesh.tp * mesh.pp)  # experts are distributed over these ranks
    _set_pipeline(args, weights, division.pipeline)
    args.ckpt_format = "torch"
    args.iteration = iteration
    if EMBEDDING in weights:
        step = mesh.tp * (number(args, "make_vocab_size_divisible_by") or 1)
        args.padded_vocab_size = -(-weights[EMBEDDING].shape[0] // step) * step
    text = "\n".join(weights)
    if ".experts." in text:
        args.moe_use_legacy_grouped_gemm = ".experts.weight1" in text
        args.moe_grouped_gemm = ".local_experts." not in text
    for name in _COMPARED:
        if getattr(args, name, None) is None:
            lost[f"args.{name}"] = "it is not known, and Megatron's loader fails without it: load with --finetune"


def _set_pipeline(args: argparse.Namespace, weights: Mapping[str, TensorSpec], pipeline: Pipeline) -> None:
    """Set the arguments that say how layers are distributed over stages, if not evenly over stages of one chunk."""
    if pipeline.chunks > 1:
        args.virtual_pipeline_model_parallel_size = pipeline.chunks
        if pipeline.layers is None:
            args.num_virtual_stages_per_pipeline_rank = pipeline.chunks
    ends = ends_of(pipeline)
    if ends is not None:
        args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers = ends
    elif pipeline.layers is not None:
        predicting = {name.split(".")[2] for name in weights if name.startswith("mtp.layers.")}
        args.pipeline_model_parallel_layout = layout_of(pipeline, len(predicting))


def true_vocabulary(args: argparse.Namespace, rows: int) -> int | None:
    """Return how many rows of the embedding are tokens and not padding; None if the arguments do not determine it.
    (tokenizer.py `_vocab_size_with_padding`; --vocab-size excludes the end-of-document token and applies only to
    NullTokenizer.)"""
    stated, multiple = number(args, "vocab_size"), number(args, "make_vocab_size_divisible_by")
    tp, kind = number(args, "tensor_model_parallel_size"), getattr(args, "tokenizer_type", None)
    if stated is None or multiple is None or tp is None or kind not in (None, "NullTokenizer"):
        return None
    step = multiple * tp
    return stated + 1 if -(-(stated + 1) // step) * step == rows else None


def _in_shapes(weights: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Any]]:
    layers = {layer for name in weights if (layer := decoder_layer(name)) is not None}
    if layers:
        yield "num_layers", max(layers) + 1
    if EMBEDDING in weights:
        yield "hidden_size", weights[EMBEDDING].shape[1]
    first, second = (_ending(weights, f".mlp.linear_fc{n}.weight") for n in (1, 2))
    if second is not None:
        yield "ffn_hidden_size", second.shape[1]
    yield from _in_mixers(weights, max(layers, default=-1) + 1)
    experts = {name: spec for name, spec in weights.items() if ".experts." in name}
    if experts:
        yield from _in_experts(weights, experts, max(layers, default=0) + 1)
        first = first or _like(experts, "linear_fc1.weight")
        second = second or _like(experts, "linear_fc2.weight")
    if first is not None and second is not None:
        yield "gated_linear_unit", first.shape[0] == 2 * second.shape[1]
    yield "add_bias_linear", any(name.endswith(("linear_proj.bias", "linear_fc2.bias")) for name in weights)
    yield "add_qkv_bias", any(name.endswith("linear_qkv.bias") for name in weights)
    yield "qk_layernorm", any(".q_layernorm." in name for name in weights)
    if any("layernorm.bias" in name or "layer_norm_bias" in name for name in weights):
        yield "normalization", "LayerNorm"
    if "embedding.position_embeddings.weight" in weights:
        yield "position_embedding_type", "learned_absolute"
    fused = any(".linear_qkv.layer_norm_" in name for name in weights)
    yield "transformer_impl", "transformer_engine" if fused else "local"


def _in_mixers(weights: Mapping[str, TensorSpec], layers: int) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of models with layers that mix tokens without softmax (ssm/mamba_hybrid_layer_allocation.py
    `Symbols`; transformer_config.py `linear_attention_freq`)."""
    kinds = [" "] * layers
    for name in weights:
        layer = decoder_layer(name)
        if layer is not None:
            found = next((kind for part, kind in _KINDS.items() if part in name), " ")
            kinds[layer] = max(kinds[layer], found, key=_STRONGER.index)
    if "M" in kinds and " " not in kinds:
        yield "is_hybrid_model", True
        yield "hybrid_override_pattern", "".join(kinds)
    if "G" in kinds:
        yield "experimental_attention_variant", "gated_delta_net"
        yield "linear_attention_freq", [int(kind == "G") for kind in kinds]


def _in_experts(
    weights: Mapping[str, TensorSpec], experts: Mapping[str, TensorSpec], layers: int
) -> Iterator[tuple[str, Any]]:
    stack = _like(experts, ".weight2")
    if stack is not None and len(stack.shape) == 3:
        yield "num_experts", stack.shape[0]
        yield "moe_ffn_hidden_size", stack.shape[1]
    else:
        found = [one.number for one in map(expert_of, experts) if one is not None]
        yield "num_experts", max(found, default=0) + 1
        second = _like(experts, "linear_fc2.weight")
        if second is not None:
            yield "moe_ffn_hidden_size", second.shape[1]
    shared = _ending(weights, ".mlp.shared_experts.linear_fc2.weight")
    if shared is not None:
        yield "moe_shared_expert_intermediate_size", shared.shape[1]
    there = {layer for name in experts if (layer := decoder_layer(name)) is not None}
    yield "moe_layer_freq", 1 if len(there) == layers else [int(n in there) for n in range(layers)]


def _is_gated_attention(weights: Mapping[str, TensorSpec], heads: Heads) -> bool:
    """Return whether each head of q has a gate: fused q, k and v then have as many rows more."""
    fused = _ending(weights, ".self_attention.linear_qkv.weight")
    return fused is not None and fused.shape[0] == 2 * (heads.queries + heads.groups) * heads.dim


def _in_config(weights: Mapping[str, TensorSpec], meta: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    heads = heads_of(meta)
    if heads is not None:
        yield "num_attention_heads", heads.queries
        yield "kv_channels", heads.dim
        yield "group_query_attention", heads.groups != heads.queries
        yield "num_query_groups", heads.groups
        yield "attention_output_gate", _is_gated_attention(weights, heads)
    yield from widths_in(meta).items()
    config = meta.get("config")
    model = builtin(str(config.get("model_type"))) if isinstance(config, dict) else None
    if model is not None:  # what the model does with values that are stored alike
        yield "apply_layernorm_1p", model.less_one
        yield "rotary_interleaved", model.interleaved
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    turning = config.get("rope_parameters")  # since transformers 5
    config = {**(turning if isinstance(turning, dict) else {}), **config}
    latent = type(config.get("kv_lora_rank")) is int
    if latent:
        yield "multi_latent_attention", True
    for name, argument in (_CONFIG | _LATENT if latent else _CONFIG).items():
        if type(config.get(name)) in (int, float):
            yield argument, config[name]
    if "rms_norm_eps" in config:
        yield "normalization", "RMSNorm"
    if "rope_theta" in config:
        yield "position_embedding_type", "rope"
    activation = config.get("hidden_act", config.get("activation_function"))
    if isinstance(activation, str):
        yield "swiglu", activation in ("silu", "swish")
        yield "squared_relu", activation == "relu2"


def _in_dtype(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    yield "params_dtype", dtype
    yield "bf16", dtype == torch.bfloat16
    yield "fp16", dtype == torch.float16


def _ending(weights: Mapping[str, TensorSpec], tail: str) -> TensorSpec | None:
    return next((spec for name, spec in weights.items() if name.endswith(tail)), None)


def _like(experts: Mapping[str, TensorSpec], part: str) -> TensorSpec | None:
    return next((spec for name, spec in experts.items() if part in name), None)
