"""Layers of towers in transformers, and megatron-core's with the same weights, renamed by lazyckpt.

A child process runs both on the same patches and prints ``{model: largest difference, relative to the largest value}``.
What a tower does before and behind its layers is replicated under the names of transformers, so its names are trivial.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

_QWEN3: dict[str, Any] = {"activation_func": lambda x: F.gelu(x, approximate="tanh"), "ffn_hidden_size": 24}
# `model_type` -> (the table with megatron-core's names of its tower, options of the configuration)
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": (
        "mbridge_qwen2_5_vl",
        {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "ffn_hidden_size": 24},
    ),
    "qwen2_vl": ("qwen2_vl", {"activation_func": lambda x: x * torch.sigmoid(1.702 * x), "ffn_hidden_size": 32}),
    "qwen3_vl": ("qwen3_vl", _QWEN3),
    "qwen3_vl_moe": ("qwen3_vl_moe", _QWEN3),
    "qwen3_5": ("qwen3_5", _QWEN3),
}


def main(names: list[str]) -> None:
    from . import megatron_core, megatron_cpu

    megatron_cpu.patch()
    with tempfile.TemporaryDirectory() as folder, megatron_cpu.OnCPU():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        megatron_core.start(megatron_core.MegatronSpec())
        print(json.dumps({name: difference(name, Path(folder) / name) for name in names}))


def difference(name: str, folder: Path) -> float:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    import lazyckpt

    from ..tiny_models import build
    from .megatron_logits import _local

    table, options = TOWERS[name]
    theirs = build(name)
    theirs.save_pretrained(folder)
    view = lazyckpt.open(folder).rename(table, reverse=True)
    head = "vision_model.decoder.layers.0."
    state = {_local(key.removeprefix(head)): view[key][...] for key in view.specs if key.startswith(head)}
    usual: dict[str, Any] = {"add_bias_linear": True, "add_qkv_bias": True, "layernorm_epsilon": 1e-6}
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.float32, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, **usual | options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    ours = build_module(spec, config=config, layer_number=1).eval()
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected and all("_extra_state" in key for key in missing), (name, missing, unexpected)
    tower = theirs.model.visual
    patches = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    turning = tower.rot_pos_emb(torch.tensor([[1, 2, 2]]))
    turning = (turning[0] if isinstance(turning, tuple) else turning).repeat(1, 2)
    with torch.no_grad():
        wanted = tower.blocks[0](
            patches, cu_seqlens=torch.tensor([0, 4]), position_embeddings=(turning.cos(), turning.sin())
        )
        mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
        got, _ = ours(patches[:, None], attention_mask=mask, rotary_pos_emb=turning[:, None, None])
    return float((got[:, 0] - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    main(sys.argv[1:] or list(TOWERS))
