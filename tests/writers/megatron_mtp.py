"""Whether megatron-core's models with layers that predict a further token load what lazyckpt renames, name by name.

transformers leaves such layers out, so there are no logits to compare. They are made of a copy of layer 1 here. A child
process prints ``{model: names that one side lacks}``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYER = "model.layers.1."
# `model_type` -> the model that it is like, where its further layer is, and what this has of its own
MODELS: dict[str, tuple[str, str, dict[str, list[int]]]] = {
    "qwen3": (
        "qwen3",
        "mtp.layers.0.",
        {"mtp.fc": [16, 32], "mtp.pre_fc_norm_embedding": [16], "mtp.pre_fc_norm_hidden": [16], "mtp.norm": [16]},
    ),
    "mimo": (
        "qwen2",
        "model.mtp_layers.0.",
        {
            "model.mtp_layers.0.input_proj": [16, 32],
            **{f"model.mtp_layers.0.{n}": [16] for n in ("token_layernorm", "hidden_layernorm", "final_layernorm")},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        "model.layers.2.",
        {
            "model.layers.2.eh_proj": [16, 32],
            **{f"model.layers.2.{n}": [16] for n in ("enorm", "hnorm", "shared_head.norm")},
        },
    ),
}


def main() -> None:
    from . import megatron_core, megatron_cpu

    megatron_cpu.patch()
    with tempfile.TemporaryDirectory() as folder, megatron_cpu.OnCPU():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        megatron_core.start(megatron_core.MegatronSpec())
        print(json.dumps({name: lacking(name, Path(folder) / name) for name in MODELS}))


def lacking(name: str, folder: Path) -> list[str]:
    import lazyckpt

    from .. import tiny_models
    from . import megatron_logits

    like, stem, own = MODELS[name]
    tensors = tiny_models.write(folder, like)
    tensors |= {key.replace(LAYER, stem): one.clone() for key, one in tensors.items() if key.startswith(LAYER)}
    save_file(
        tensors | {f"{key}.weight": torch.randn(shape) for key, shape in own.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(tiny_models.config_of(like) | {"model_type": name}))
    view = lazyckpt.open(folder).rename("megatron")
    tied = "output_layer.weight" not in view.specs
    made = megatron_logits.config_of(
        tiny_models.CONFIGS[like], tiny_models.build(like).config, megatron_logits.MODELS[like]
    )
    made.mtp_num_layers = 1
    missing, unexpected = _model(made, tied).load_state_dict({key: view[key][...] for key in view.specs}, strict=False)
    return [key for key in (*missing, *unexpected) if not key.endswith(("_extra_state", "local_tokens_per_expert"))]


def _model(made: Any, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm")
    further = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False)
    return GPTModel(
        made,
        spec,
        vocab_size=32,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=further,
    )


if __name__ == "__main__":
    main()
