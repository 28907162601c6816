"""Tiny models saved by ``save_pretrained`` of transformers, and the ``.bin`` shards it wrote until version 5.

The truth is every name a user may ask for: those on disk, and the tied ones that ``save_pretrained`` leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import (
    BertConfig,
    BertForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

__all__ = ["write_bert", "write_bin_sharded", "write_llama_sharded", "write_llama_single", "write_mixtral"]

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 41,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for write in (write_llama_sharded, write_llama_single, write_bert, write_mixtral, write_bin_sharded):
        case = folder / write.__name__.removeprefix("write_")
        case.mkdir()
        write(case)


def write_llama_sharded(folder: Path) -> None:
    """Tied, bf16, several safetensors shards and an index."""
    model = _randomised(_llama(tied=True)).to(torch.bfloat16)
    model.save_pretrained(folder / "ckpt", max_shard_size="5KB")
    _hold(folder, model)


def write_llama_single(folder: Path) -> None:
    """Untied, fp32, one safetensors file."""
    model = _randomised(_llama(tied=False))
    model.save_pretrained(folder / "ckpt")
    _hold(folder, model)


def write_bert(folder: Path) -> None:
    """Two tied names, and buffers that are not saved."""
    model = _randomised(BertForPreTraining(BertConfig(**SIZES, max_position_embeddings=17)))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "ckpt")
    _hold(folder, model)


def write_mixtral(folder: Path) -> None:
    """Experts: one tensor for all of them in memory, one per expert on disk, in several shards."""
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3)
    model = _randomised(MixtralForCausalLM(config))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "ckpt", max_shard_size="20KB")
    _hold(folder, model, _per_expert(model.state_dict()))


def write_bin_sharded(folder: Path) -> None:
    """``pytorch_model-0000i-of-0000n.bin`` with both names of a tied tensor, as transformers 4 left them."""
    model = _randomised(_llama(tied=True)).to(torch.float16)
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size="5KB"
    )
    (folder / "ckpt").mkdir()
    for name, keys in split.filename_to_tensors.items():
        torch.save({key: state[key] for key in keys}, folder / "ckpt" / name)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "ckpt" / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    model.config.save_pretrained(folder / "ckpt")
    _hold(folder, model)


def _llama(*, tied: bool) -> Any:
    config = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def _randomised(model: Any) -> Any:
    """Fresh norms are all ones and fresh biases all zeros: a reader could swap them unnoticed."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=g)
    return model


def _per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names and shapes of Mixtral on disk, made from the fused ones in memory."""
    truth: dict[str, Tensor] = {}
    for name, tensor in state.items():
        disk = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                w1, w3 = both.chunk(2)
                stem = disk.removesuffix("gate_up_proj")
                truth |= {f"{stem}{e}.w1.weight": w1, f"{stem}{e}.w3.weight": w3}
        elif name.endswith(".experts.down_proj"):
            stem = disk.removesuffix("down_proj")
            truth |= {f"{stem}{e}.w2.weight": w2 for e, w2 in enumerate(tensor)}
        else:
            truth[disk] = tensor
    return truth


def _hold(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor] | None = None) -> None:
    weights = model.state_dict() if weights is None else weights
    info = {"dtype": str(model.dtype).removeprefix("torch."), "tied": dict(model.all_tied_weights_keys)}
    torch.save({"weights": {name: t.detach().clone() for name, t in weights.items()}}, folder / "truth.pt")
    (folder / "info.json").write_text(json.dumps(info))
