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

# what models have beside parameters, and the bias of the tied head of megatron-core's T5, which T5 does not have
_BUFFERS = ("_extra_state", "local_tokens_per_expert", "lm_head.output_layer.bias")
_UNUSED = "cls.predictions.bias"  # of BERT, if its head is not tied
_FALCON = {"gelu": True, "add_bias_linear": False}
_GEMMA = {"norm": "LessOneRMS", "tanh": True, "scaled": True}
_DELTA = {"norm": "LessOneRMS", "qk_norm": True, "delta": True, "moe_shared_expert_gate": True}
_LATENT = {"mla": True, "experts": True, "qk_norm": True}
# `model_type` -> what is not as in Llama: options of `config_of`
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
    "gpt_bigcode": {"gelu": True, "positions": "learned_absolute"},
    "gpt_neox": {"gelu": True, "layer": "SideBySide", "rotary_percent": 0.25},
    "falcon": {**_FALCON, "layer": "SideBySide"},
    "falcon 7b": {**_FALCON, "layer": "SideBySide", "one_norm": True},
    "falcon rw": {**_FALCON, "layer": "OldFalcon", "one_norm": True, "add_bias_linear": True},
    "starcoder2": {"gelu": True},
    "arcee": {"squared": True},
    "nemotron": {"squared": True, "norm": "LessOneLayerNorm", "rotary_percent": 0.5, "normalization": "LayerNorm"},
    "gemma": {**_GEMMA},
    "gemma2": {**_GEMMA, "linear": "LessOneBehind"},
    "gemma3_text": {**_GEMMA, "linear": "LessOneBehind", "qk_norm": True},
    "exaone4": {"linear": "NormBehind", "qk_norm": True, "no_norms": True},
    "glm4": {"layer": "Sandwich", "rotary_percent": 0.5, "rotary_interleaved": True},
    "qwen3_next": {**_DELTA, "experts": True},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, "experts": True},
    "llama4_text": {"experts": True, "llama4": True, "rotary_interleaved": True},
    "ernie4_5_moe": {"experts": True, "rotary_interleaved": True, "ernie": True},
    "exaone_moe": {"experts": True, "qk_norm": True, "sigmoid": True},
    "mamba2": {"mamba": True},
    "nemotron_h": {"mamba": True, "experts": True, "sigmoid": True, "squared": True},
    "falcon_h1 late": {"layer": "BesideMamba", "no_first_norm": True},
    "t5": {"t5": True},
    "mt5": {"t5": True},
    "bert": {"bert": True, "layer": "PostNorm"},
    "bert untied": {"bert": True, "layer": "PostNorm"},
    "megatron-bert": {"bert": True},
}


def main(names: list[str]) -> None:
    from . import megatron_core, megatron_cpu, megatron_mamba

    megatron_cpu.patch()
    megatron_mamba.patch()
    with tempfile.TemporaryDirectory() as folder, megatron_cpu.OnCPU():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        megatron_core.start(megatron_core.MegatronSpec())
        print(json.dumps({name: difference(name, Path(folder) / name) for name in names}))


def difference(name: str, folder: Path, tp: int = 1) -> float:
    """``tp``: of ranks that each load the shards that `CheckpointView.shard` gives them."""
    import lazyckpt

    from ..tiny_models import FURTHER, build

    sizes = FURTHER[name]
    theirs = build(name)
    if MODELS[name].get("ernie"):  # (megatron-core adds a bias to sigmoids only, transformers to the softmax)
        for key, buffer in theirs.state_dict().items():
            if "moe_statics" in key:
                buffer.zero_()
    rank = torch.distributed.get_rank()
    if rank == 0:
        theirs.save_pretrained(folder)
    torch.distributed.barrier()
    view = lazyckpt.open(folder).rename("megatron")
    lost = [line for line in view.problems if line.code == "not-renamed" and line.path != _UNUSED]
    assert not lost, lost
    if tp > 1:
        view = view.shard(tp=tp, rank=rank)
    tied = not {"output_layer.weight", "lm_head.output_layer.weight"} & set(view.specs)
    ours = _megatron(name, sizes, theirs.config, tied)
    state = {_local(key): view[key][...] for key in view.specs if not key.endswith(_UNUSED)}
    if (
        "decoder.final_layernorm.weight" in ours.state_dict()
    ):  # (that of a GPTModel; Falcon-H1's stack has another name)
        state = {key.replace("decoder.final_norm.", "decoder.final_layernorm."): one for key, one in state.items()}
    missing, unexpected = ours.load_state_dict(state, strict=False)
    missing = [key for key in missing if not key.endswith(_BUFFERS)]
    if MODELS[name].get("t5"):  # (the head has two names)
        missing = [key for key in missing if not key.startswith("output_layer.")]
    assert not missing and not unexpected, (name, missing, unexpected)
    tokens = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, got = _logits(MODELS[name], theirs, ours, tokens)
        if tp > 1:  # (each rank has some of the vocabulary)
            parts = [torch.empty_like(got) for _ in range(tp)]
            torch.distributed.all_gather(parts, got.contiguous())
            got = torch.cat(parts, -1)
    return float((got - wanted).abs().max() / wanted.abs().max())


def _local(name: str) -> str:
    """The name of a norm beside a linear layer; that of Transformer Engine is within the layer."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _logits(about: dict[str, Any], theirs: Any, ours: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    if about.get("t5"):
        wanted = theirs(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits
        nothing = torch.zeros_like(mask)
        got = ours(tokens, tokens.flip(1), nothing, mask, nothing)
        scaled = getattr(theirs.config, "scale_decoder_outputs", False)  # (before a head that is tied)
        return wanted, got * 16**-0.5 if scaled else got
    if about.get("bert"):
        kinds = (tokens > 15).long()
        found = theirs(tokens, token_type_ids=kinds)
        words, sentences = ours(tokens, torch.ones_like(tokens), kinds)
        return torch.cat([found.prediction_logits.flatten(), found.seq_relationship_logits.flatten()]), torch.cat(
            [words.flatten(), sentences.flatten()]
        )
    return theirs(tokens).logits, ours(tokens, torch.arange(8).expand(2, 8), mask)


def _megatron(name: str, sizes: dict[str, Any], config: Any, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    about = MODELS[name]
    made = config_of(sizes, config, about)
    if about.get("t5"):
        return _t5(made, sizes, tied)
    if about.get("bert"):
        return _bert(made, about, tied)
    if about.get("mamba"):
        from . import megatron_mamba

        return megatron_mamba.build(made, sizes.get("layers_block_type", ["mamba"] * 2), tied)
    turning = getattr(config, "rope_parameters", None) or {}
    turning = turning.get("full_attention", turning)  # (Gemma 3 has two)
    spec = get_gpt_decoder_block_spec(
        made,
        use_transformer_engine=False,
        normalization=made.normalization,
        qk_l2_norm=about.get("llama4", False),
    )
    model = GPTModel(
        made,
        _special(spec, about),
        vocab_size=32,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=about.get("positions", "rope"),
        rotary_base=turning.get("rope_theta", 10000),
        rotary_percent=about.get("rotary_percent", 1.0),
    ).eval()
    if about.get("scaled"):
        model.embedding.register_forward_hook(lambda module, args, out: out * 4)  # (the root of the hidden size)
    return model


def _special(spec: Any, about: dict[str, Any]) -> Any:
    """A specification of layers with what megatron-core's models do not have."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from . import megatron_parts as parts

    new = {"norm": WrappedTorchNorm, "layer": TransformerLayer, "linear": RowParallelLinear}
    spec = parts.replaced(spec, {old: getattr(parts, about[key]) for key, old in new.items() if key in about})
    for n, layer in enumerate(spec.layer_specs):
        inner = layer.submodules
        if about.get("one_norm"):
            inner.pre_mlp_layernorm = IdentityOp
        if about.get("no_first_norm"):
            inner.input_layernorm = IdentityOp
        if about.get("no_norms"):
            inner.input_layernorm = inner.pre_mlp_layernorm = IdentityOp
        if about.get("delta") and n == 0:
            inner.self_attention = parts.delta_net()
    return spec


def _t5(made: Any, sizes: dict[str, Any], tied: bool) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from . import megatron_parts as parts

    specs = [t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()]
    encoder, decoder = (
        TransformerBlockSubmodules(parts.replaced([one] * 2, {DotProductAttention: parts.Biased}), WrappedTorchNorm)
        for one in specs
    )
    return T5Model(
        config=made,
        encoder_config=made,
        transformer_encoder_layer_spec=encoder,
        transformer_decoder_layer_spec=decoder,
        vocab_size=32,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="relative",
        relative_attention_num_buckets=sizes["relative_attention_num_buckets"],
        relative_attention_max_distance=128,
    ).eval()


def _bert(made: Any, about: dict[str, Any], tied: bool) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.identity_op import IdentityOp

    from . import megatron_parts as parts

    spec = bert_layer_local_spec
    if "layer" in about:
        spec = parts.replaced(spec, {})
        spec.module = parts.PostNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    model = BertModel(made, 2, spec, 32, 32, share_embeddings_and_output_weights=tied).eval()
    if "layer" in about:
        first = torch.nn.LayerNorm(16, eps=made.layernorm_epsilon)
        model.encoder.final_layernorm = None
        model.encoder.initial_layernorm = first
        model.embedding.register_forward_hook(lambda module, args, out: first(out))
    return model


def config_of(sizes: dict[str, Any], config: Any, about: dict[str, Any]) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn import functional as F  # noqa: N812

    gelu = bool(about.get("gelu") or about.get("bert"))
    relu = about.get("squared") or sizes.get("feed_forward_proj") == "relu"
    act: Any = F.relu if relu else F.silu
    if about.get("squared"):
        act = lambda x: F.relu(x).square()  # noqa: E731
    if about.get("tanh") or about.get("gelu") or sizes.get("feed_forward_proj") == "gated-gelu":
        act = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    if about.get("bert") or config.model_type in ("falcon", "gpt_neox"):
        act = F.gelu
    biased = about.get("add_bias_linear", gelu)
    epsilon = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": sizes.get("intermediate_size_mlp", sizes.get("intermediate_size", sizes.get("d_ff", 64))),
        "num_attention_heads": 4,
        "num_query_groups": _groups(sizes, config),
        "kv_channels": sizes.get("head_dim", sizes.get("d_kv", 4)),
        "gated_linear_unit": not gelu and not relu,
        "activation_func": act,
        "add_bias_linear": biased,
        "add_qkv_bias": (not about.get("llama4") and bool(getattr(config, "attention_bias", False)))
        or config.model_type in ("qwen2", "qwen2_moe"),
        "qk_layernorm": about.get("qk_norm", False),
        "normalization": about.get("normalization", "LayerNorm" if gelu else "RMSNorm"),
        "layernorm_epsilon": next((getattr(config, one) for one in epsilon if hasattr(config, one)), 1e-5),
        "rotary_interleaved": about.get("rotary_interleaved", False),
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
    if "mamba_d_state" in sizes:
        names = {"state_dim": "d_state", "head_dim": "d_head", "num_heads": "n_heads", "num_groups": "n_groups"}
        values |= {f"mamba_{one}": sizes[f"mamba_{name}"] for one, name in names.items()}
    if about.get("mamba"):
        names = {"state_dim": "state_size", "head_dim": "head_dim", "num_heads": "num_heads", "num_groups": "n_groups"}
        hybrid = {"state_dim": "ssm_state_size", "head_dim": "mamba_head_dim", "num_heads": "mamba_num_heads"}
        names |= hybrid if "ssm_state_size" in sizes else {}
        values |= {f"mamba_{one}": sizes[name] for one, name in names.items()}
        values["num_layers"] = sizes["num_hidden_layers"]
    scale = getattr(config, "query_pre_attn_scalar", None)
    if about.get("t5") or scale:
        values["softmax_scale"] = scale**-0.5 if scale else 1.0
    if about.get("delta"):
        names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        values |= {f"linear_{one}": sizes[f"linear_{one}"] for one in names}
        values |= {"attention_output_gate": True, "deterministic_mode": True}
    if about.get("experts"):
        dense = sizes.get("first_k_dense_replace", sizes.get("moe_layer_start_index", 0))
        dense = 1 if about.get("llama4") else dense
        values |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
            "moe_router_topk": sizes.get("num_experts_per_tok", sizes.get("moe_k")),
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid" if about.get("sigmoid") or about.get("llama4") else "softmax",
            "moe_router_enable_expert_bias": about.get("sigmoid", False),
            "moe_apply_probs_on_input": about.get("llama4", False),
            "moe_router_pre_softmax": about.get("pre_softmax", False),
            "moe_router_topk_scaling_factor": getattr(config, "routed_scaling_factor", None),
            "moe_layer_freq": 1 if about.get("mamba") else [int(n >= dense) for n in range(2)],
            "moe_grouped_gemm": False,
        }
        if {
            "n_shared_experts",
            "shared_expert_intermediate_size",
            "moe_num_shared_experts",
            "num_shared_experts",
            "intermediate_size_mlp",
        } & set(sizes):
            values["moe_shared_expert_intermediate_size"] = sizes.get(
                "shared_expert_intermediate_size", 12 if about.get("llama4") else 8
            )
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
    made = (MLATransformerConfig if about.get("mla") else TransformerConfig)(**values)
    if about.get("ernie"):
        made.moe_router_enable_expert_bias = True
    return made


def _groups(sizes: dict[str, Any], config: Any) -> int:
    if config.model_type == "gpt_bigcode" or sizes.get("multi_query"):
        return 1
    return int(sizes.get("num_key_value_heads", sizes.get("num_kv_heads", 4)))


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
