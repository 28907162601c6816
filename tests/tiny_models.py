"""Tiny models of transformers: names and shapes of what `save_pretrained` writes, for tests that have no time for it.

``python -m tests.tiny_models`` records them anew, in tests/tiny_models.json, with the version of transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RECORDED = Path(__file__).with_suffix(".json")

_DENSE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
_ROUTED = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
}
# `model_type` -> what its configuration has
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": {**_DENSE, "head_dim": 4},
    "qwen3": {**_DENSE, "tie_word_embeddings": True},
    "seed_oss": _DENSE,
    "arcee": _DENSE,
    "gemma": {**_DENSE, "tie_word_embeddings": True},
    "gemma2": {
        **_DENSE,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3_text": {
        **_DENSE,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {**_DENSE, "head_dim": 4},
    "glm4": _DENSE,
    "mixtral": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_DENSE, **_EXPERTS, "head_dim": 4, "num_experts": 4, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {**_DENSE, **_EXPERTS, "num_experts": 4},
    "olmoe": {**_DENSE, **_EXPERTS, "head_dim": 4, "num_experts": 4},
    "glm4_moe": {**_DENSE, **_ROUTED, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**_DENSE, **_ROUTED},
    "deepseek_v2": {**_DENSE, **_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_DENSE, **_LATENT, "q_lora_rank": 8},
    "glm4_moe_lite": {**_DENSE, **_LATENT, "q_lora_rank": 8},
    "gpt_oss": {
        **_DENSE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gpt_neox": {**_DENSE, "num_key_value_heads": 4, "head_dim": 4},
    "nemotron": _DENSE,
    "nemotron_h": {
        **_DENSE,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "ssm_state_size": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 4,
        "n_groups": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "num_experts_per_tok": 2,
    },
    "mamba2": {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 4,
        "n_groups": 1,
        "tie_word_embeddings": False,
    },
}
_DELTA = {
    **_DENSE,
    **_EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 1.0,
}
_BERT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_FALCON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
}
_LLAMA4 = {
    **_DENSE,
    "intermediate_size": 12,
    "intermediate_size_mlp": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "no_rope_layers": [1, 1],
}
CONFIGS |= {
    "exaone4": {**_DENSE, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "starcoder2": {**_DENSE, "head_dim": 4},
    "qwen3_next": _DELTA,
    "qwen3_5_text": {**_DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe_text": _DELTA,
    "llama4_text": _LLAMA4,
    "ernie4_5_moe": {
        **_DENSE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "gpt_bigcode": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "falcon": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "t5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "mt5": {**_T5, "feed_forward_proj": "relu"},
    "bert": _BERT,
    "megatron-bert": _BERT,
}
# other forms of a model: its name -> `model_type`
FORMS = {"falcon 7b": "falcon", "falcon rw": "falcon", "bert untied": "bert", "falcon_h1 late": "falcon_h1"}
CONFIGS |= {
    "falcon 7b": {**_FALCON, "multi_query": True, "parallel_attn": True},
    "falcon rw": {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
}
_SEEING = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 16,
}
CONFIGS |= {
    "gemma3": {
        "text_config": {**_DENSE, "model_type": "gemma3_text", "tie_word_embeddings": True},
        "vision_config": {**_SEEING, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": {**_DENSE, "head_dim": 4, "model_type": "qwen2_5_vl_text"},
        "vision_config": {**_SEEING, "model_type": "qwen2_5_vl"},
        "tie_word_embeddings": False,
    },
}
_QWEN3_SEEING = {
    **_SEEING,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
CONFIGS |= {
    "qwen2_vl": {
        "text_config": {**_DENSE, "head_dim": 4, "model_type": "qwen2_vl_text"},
        "vision_config": {**_SEEING, "model_type": "qwen2_vl", "embed_dim": 16, "mlp_ratio": 2},
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**_DENSE, "model_type": "qwen3_vl_text"},
        "vision_config": {**_QWEN3_SEEING, "model_type": "qwen3_vl"},
        "tie_word_embeddings": False,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_DENSE,
            **_EXPERTS,
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "model_type": "qwen3_vl_moe_text",
        },
        "vision_config": {**_QWEN3_SEEING, "model_type": "qwen3_vl_moe"},
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": {**_DELTA, "model_type": "qwen3_5_text"},
        "vision_config": {**_QWEN3_SEEING, "model_type": "qwen3_5"},
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "text_config": {**_DELTA, "model_type": "qwen3_5_moe_text"},
        "vision_config": {**_QWEN3_SEEING, "model_type": "qwen3_5_moe"},
        "tie_word_embeddings": False,
    },
    "glm4v": {
        "text_config": {**_DENSE, "head_dim": 4, "attention_bias": True, "model_type": "glm4v_text"},
        "vision_config": {**_SEEING, "model_type": "glm4v", "temporal_patch_size": 2, "spatial_merge_size": 2},
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": {**_DENSE, **_ROUTED, "attention_bias": True, "model_type": "glm4v_moe_text"},
        "vision_config": {**_SEEING, "model_type": "glm4v_moe", "temporal_patch_size": 2, "spatial_merge_size": 2},
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {**_DENSE, "model_type": "mistral"},
        "vision_config": {**_SEEING, "model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {**_LLAMA4, "model_type": "llama4_text"},
        "vision_config": {
            **_SEEING,
            "model_type": "llama4_vision_model",
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "tie_word_embeddings": False,
    },
}
_HEARING = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
CONFIGS |= {
    "exaone_moe": {
        **_DENSE,
        **_EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {
        **_DENSE,
        **_LATENT,
        "q_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "falcon_h1": {
        **_DENSE,
        "mamba_d_ssm": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_rms_norm": True,
    },
    "qwen2_audio": {
        "text_config": {**_DENSE, "head_dim": 4, "model_type": "qwen2"},
        "audio_config": {**_HEARING, "model_type": "qwen2_audio_encoder"},
    },
}
# those that are not recorded, too
FURTHER = CONFIGS | {
    "bert untied": {**_BERT, "tie_word_embeddings": False},
    # (as published ones; megatron-core's mixer multiplies before the norm)
    "falcon_h1 late": {**CONFIGS["falcon_h1"], "mamba_norm_before_gate": False, "mamba_n_groups": 2},
}
# of these transformers writes all experts in one tensor if it is told not to write the older naming
FUSED = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "ernie4_5_moe")


def config_of(model: str) -> dict[str, Any]:
    """What config.json says."""
    return {"model_type": FORMS.get(model, model), **FURTHER[model]}


def recorded() -> dict[str, dict[str, list[int]]]:
    """The names and shapes of each model, by `model_type`; those with fused experts as ``TYPE fused``."""
    found: dict[str, dict[str, list[int]]] = json.loads(RECORDED.read_text())["models"]
    return found


def write(folder: Path, model: str) -> dict[str, torch.Tensor]:
    """Write a folder of a recorded model with config.json, and return its tensors, which are multiples of 1/64."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).mul(64).round() / 64 for name, shape in recorded()[model].items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(model.removesuffix(" fused"))))
    return tensors


def build(model: str) -> Any:
    """The model itself, with random weights, of which none is 0 or 1 throughout."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForPreTraining,
        AutoModelForSeq2SeqLM,
        Qwen2AudioForConditionalGeneration,
    )

    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if "vision_config" in FURTHER[model] else AutoModelForCausalLM
    kind = AutoModelForSeq2SeqLM if "d_kv" in FURTHER[model] else kind
    kind = AutoModelForPreTraining if "bert" in model else kind
    kind = Qwen2AudioForConditionalGeneration if model == "qwen2_audio" else kind
    config = AutoConfig.for_model(**config_of(model))
    built = (kind(config) if model == "qwen2_audio" else kind.from_config(config)).float().eval()
    with torch.no_grad():
        for name, one in (*built.named_parameters(), *built.named_buffers()):
            if one.is_floating_point() and not any(kept in name for kept in ("inv_freq", "embed_scale", "mup_vector")):
                one.add_(0.1 * torch.randn(one.shape))
    return built


def shapes(model: str, fused: bool = False) -> dict[str, list[int]]:
    """The names and shapes in what transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        build(model).save_pretrained(folder, save_original_format=not fused)
        return {name: list(one.shape) for name, one in load_file(Path(folder) / "model.safetensors").items()}


def main() -> None:
    import transformers

    models = {model: shapes(model) for model in CONFIGS} | {f"{model} fused": shapes(model, True) for model in FUSED}
    lines = ",\n".join(f"{json.dumps(model)}: {json.dumps(found)}" for model, found in models.items())
    RECORDED.write_text(f'{{"transformers": "{transformers.__version__}", "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
