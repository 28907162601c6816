"""Logits of tiny models of transformers, and of the same weights in megatron-core's models, renamed by lazyckpt.

A child process builds both and prints ``{model: largest difference, relative to the largest logit}``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

_LATENT = {"mla": True, "experts": True, "qk_norm": True}
# `model_type` -> what is not as in Llama: options of `_config`
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"qk_norm": True},
    "phi3": {},
    "mixtral": {"experts": True},
    "qwen3_moe": {"experts": True, "qk_norm": True},
    "qwen2_moe": {"experts": True, "moe_shared_expert_gate": True},
    "glm4_moe": {"experts": True, "qk_norm": True, "sigmoid": True, "rotary_percent": 0.5},
    "deepseek_v2": {**_LATENT, "pre_softmax": True},
    "deepseek_v3": {**_LATENT, "sigmoid": True},
    "gpt_oss": {"experts": True, "oss": True},
    "gpt2": {"gelu": True, "positions": "learned_absolute"},
}


def main(names: list[str]) -> None:
    from . import megatron_core, megatron_cpu

    megatron_cpu.patch()
    with tempfile.TemporaryDirectory() as folder, megatron_cpu.OnCPU():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        megatron_core.start(megatron_core.MegatronSpec())
        print(json.dumps({name: difference(name, Path(folder) / name) for name in names}))


def difference(name: str, folder: Path) -> float:
    import lazyckpt

    from ..tiny_models import CONFIGS, build

    theirs = build(name)
    theirs.save_pretrained(folder)
    view = lazyckpt.open(folder).rename("megatron")
    lost = [line for line in view.problems if line.code == "not-renamed"]
    assert not lost, lost
    ours = _megatron(name, CONFIGS[name], theirs.config, tied="output_layer.weight" not in view.specs)
    state = {key: view[key][...] for key in view.specs}
    missing, unexpected = ours.load_state_dict(state, strict=False)
    missing = [key for key in missing if "_extra_state" not in key and "local_tokens_per_expert" not in key]
    assert not missing and not unexpected, (name, missing, unexpected)
    tokens = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        got = ours(tokens, torch.arange(8).expand(2, 8), mask)
    return float((got - wanted).abs().max() / wanted.abs().max())


def _megatron(name: str, sizes: dict[str, Any], config: Any, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    about = MODELS[name]
    made = _config(sizes, config, about)
    turning = getattr(config, "rope_parameters", None) or {}
    return GPTModel(
        made,
        get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=made.normalization),
        vocab_size=32,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=about.get("positions", "rope"),
        rotary_base=turning.get("rope_theta", 10000),
        rotary_percent=about.get("rotary_percent", 1.0),
    ).eval()


def _config(sizes: dict[str, Any], config: Any, about: dict[str, Any]) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn import functional as F  # noqa: N812

    gelu = about.get("gelu", False)
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": sizes.get("intermediate_size", 64),
        "num_attention_heads": 4,
        "num_query_groups": sizes.get("num_key_value_heads", 4),
        "kv_channels": sizes.get("head_dim", 4),
        "gated_linear_unit": not gelu,
        "activation_func": (lambda x: F.gelu(x, approximate="tanh")) if gelu else F.silu,
        "add_bias_linear": gelu,
        "add_qkv_bias": bool(getattr(config, "attention_bias", False)) or config.model_type in ("qwen2", "qwen2_moe"),
        "qk_layernorm": about.get("qk_norm", False),
        "normalization": "LayerNorm" if gelu else "RMSNorm",
        "layernorm_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": torch.float32,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    if about.get("experts"):
        dense = sizes.get("first_k_dense_replace", 0)
        values |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
            "moe_router_topk": sizes["num_experts_per_tok"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid" if about.get("sigmoid") else "softmax",
            "moe_router_enable_expert_bias": about.get("sigmoid", False),
            "moe_router_pre_softmax": about.get("pre_softmax", False),
            "moe_router_topk_scaling_factor": getattr(config, "routed_scaling_factor", None),
            "moe_layer_freq": [int(n >= dense) for n in range(2)],
            "moe_grouped_gemm": False,
        }
        if "n_shared_experts" in sizes or "shared_expert_intermediate_size" in sizes:
            values["moe_shared_expert_intermediate_size"] = sizes.get("shared_expert_intermediate_size", 8)
            values["moe_shared_expert_gate"] = about.get("moe_shared_expert_gate", False)
    if about.get("mla"):
        values |= {
            "multi_latent_attention": True,
            "kv_channels": 6,
            "q_lora_rank": sizes["q_lora_rank"],
            "kv_lora_rank": 8,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
            "rope_type": "rope",
            "rotary_base": config.rope_parameters["rope_theta"],
        }
    if about.get("oss"):
        values |= {
            "add_bias_linear": True,
            "activation_func": lambda x: x * torch.sigmoid(1.702 * x),
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "softmax_type": "learnable",
        }
    return (MLATransformerConfig if about.get("mla") else TransformerConfig)(**values)


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
