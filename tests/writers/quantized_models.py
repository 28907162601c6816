"""Small models for the writers of quantized checkpoints, and the files around their tensors."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["bare", "hold", "linears", "llama", "save", "state_without"]


def llama(hidden: int, inner: int, dtype: torch.dtype, tied: bool = False) -> LlamaForCausalLM:
    """A model with random weights, of two layers if its head is tied, which is one case of each writer, else of one."""
    torch.manual_seed(hidden + inner)
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2 if tied else 1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.to(dtype).eval()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that writers quantize: all linear ones but the head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def state_without(model: LlamaForCausalLM, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of a model without the matrices of some layers, and without the tied head."""
    left = {f"{name}.weight" for name in layers} | ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    return {name: t.detach().clone() for name, t in model.state_dict().items() if name not in left}


def save(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], size: str = "5GB") -> None:
    """Write a state and config.json as ``save_pretrained`` does, in shards of at most a size."""
    folder.mkdir(parents=True)
    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern="model{suffix}.safetensors", max_shard_size=size
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: state[name].contiguous() for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def hold(folder: Path, truth: Mapping[str, Tensor], **info: Any) -> None:
    """Write what the writer's own library dequantizes the checkpoint to."""
    torch.save({"weights": {name: t.detach().clone() for name, t in truth.items()}}, folder / "truth.pt")
    (folder / "info.json").write_text(json.dumps(info))


def bare(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which imports what is not needed here."""
    for name in names:
        if name in sys.modules:
            continue
        above, _, last = name.rpartition(".")
        if above:
            places = [str(Path(place) / last) for place in sys.modules[above].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(name)
            places = list(spec.submodule_search_locations)
        module = ModuleType(name)
        module.__path__ = places
        sys.modules[name] = module
