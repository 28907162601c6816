"""Checkpoints of MLX: quantized and saved by mlx, in the layout of mlx-lm, with what `mlx.core.dequantize` returns.

mlx-lm's ``convert`` calls `mlx.nn.quantize`, saves with `mlx.core.save_safetensors` and puts the parameters of
`mlx.core.quantize` into config.json. The truth is in the dtype that MLX dequantizes to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .quantized_models import hold, llama

__all__ = ["CASES", "write_all"]

_MIXED = {"q_proj": 2, "k_proj": 3, "v_proj": 5, "o_proj": 6, "gate_proj": 8}
CASES: dict[str, dict[str, Any]] = {
    "w4_sharded_tied": {"dtype": torch.bfloat16, "group_size": 32, "bits": 4},
    "mixed": {"dtype": torch.float16, "group_size": 32, "bits": 4, "mixed": _MIXED, "plain": "up_proj"},
    "w3_experts": {"dtype": torch.bfloat16, "group_size": 64, "bits": 3, "experts": 3},
    "w6_float32": {"dtype": torch.float32, "group_size": 32, "bits": 6},
    "mxfp4": {"dtype": torch.bfloat16, "group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"dtype": torch.bfloat16, "group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"dtype": torch.bfloat16, "group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name, case in CASES.items():
        (folder / name).mkdir()
        _write(folder / name, name, **case)


def _write(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    group_size: int,
    bits: int,
    mode: str = "affine",
    mixed: dict[str, int] | None = None,
    plain: str = "",
    experts: int = 0,
) -> None:
    import mlx.core as mx

    model = llama(64, 192 if experts else 96, dtype, "tied" in name)
    settings: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    state = {n: t for n, t in model.state_dict().items() if not ("tied" in name and n == "lm_head.weight")}
    if experts:
        for which in ("gate", "up", "down"):
            one = state.pop(f"model.layers.0.mlp.{which}_proj.weight")
            stack = torch.stack([one * (n + 1) for n in range(experts)])
            state[f"model.layers.0.mlp.switch_mlp.{which}_proj.weight"] = stack
    arrays: dict[str, Any] = {}
    truth: dict[str, Tensor] = {}
    for key, tensor in state.items():
        module = key.rpartition(".")[0]
        array = mx.array(tensor.to(torch.float32).numpy()).astype(_dtype(dtype))
        if tensor.ndim < 2 or (plain and plain in key):
            arrays[key], truth[key] = array, tensor
            if tensor.ndim > 1:
                settings[module] = False
            continue
        own = {"group_size": group_size, "bits": bits, "mode": mode}
        for part, count in (mixed or {}).items():
            if part in key:
                own = {"group_size": 32, "bits": count}
                settings[module] = own
        parts = mx.quantize(array, **own)
        for end, part in zip(("weight", "scales", "biases"), parts, strict=False):
            arrays[f"{module}.{end}"] = part
        back = mx.dequantize(*parts, **own)
        truth[key] = torch.from_numpy(np.array(back.astype(mx.float32))).to(dtype)
    if "tied" in name:
        truth["lm_head.weight"] = truth["model.embed_tokens.weight"]
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": ["LlamaForCausalLM"], "quantization": settings, "quantization_config": settings}
    _save(folder / "ckpt", arrays, config, 2 if "sharded" in name else 1)
    hold(folder, truth)


def _dtype(dtype: torch.dtype) -> Any:
    import mlx.core as mx

    return getattr(mx, str(dtype).removeprefix("torch."))


def _save(folder: Path, arrays: dict[str, Any], config: dict[str, Any], count: int) -> None:
    """As mlx-lm's ``save_model`` and ``save_config``."""
    import mlx.core as mx

    folder.mkdir()
    names = sorted(arrays)
    shards = [names[n::count] for n in range(count)]
    files = [
        "model.safetensors" if count == 1 else f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)
    ]
    weight_map = {}
    for file, shard in zip(files, shards, strict=True):
        mx.save_safetensors(str(folder / file), {n: arrays[n] for n in shard}, {"format": "mlx"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    (folder / "config.json").write_text(json.dumps(config, indent=4))
