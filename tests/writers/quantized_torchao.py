"""Checkpoints of torchao: its tensor classes, pickled by torch.save and flattened into safetensors.

The truth is what ``dequantize()`` of each class returns, in the dtype of the model (for NF4Tensor,
``get_original_weight()``, for Int4Tensor, which has no ``dequantize()``, what the package's GPTQ takes it for,
`_int4_row_dequantize_zp`; its kernels need a GPU). Needs torchao 0.18; quantized_torchao_v1.py has what older versions
wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .quantized_models import hold, linears, llama

__all__ = ["CASES", "back", "save", "write_all"]

CASES = ("int8_sharded_tied", "float8", "intx", "mixed_pt", "microscaling", "microscaling_pt", "int4", "int4_pt")


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name in CASES:
        (folder / name).mkdir()
        _write(folder / name, name)


def _write(folder: Path, name: str) -> None:
    from torchao.quantization import quantize_

    dtype = torch.float32 if name == "intx" else torch.bfloat16
    model = llama(64, 160 if "micro" in name else 96, dtype, "tied" in name)
    truth = {n: t.detach().clone() for n, t in model.state_dict().items()}
    configs = _configs(name)
    for at, (layer, module) in enumerate(linears(model).items()):
        chosen = configs[at % len(configs)]
        if not callable(chosen):
            quantize_(module, chosen)
        else:
            module.weight = torch.nn.Parameter(chosen(module.weight.data), requires_grad=False)
        truth[f"{layer}.weight"] = back(module.weight)
    save(folder / "ckpt", model, name)
    hold(folder, truth)


def _configs(name: str) -> list[Any]:
    import torchao.quantization as q
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    int8 = [q.Int8WeightOnlyConfig(version=2), q.Int8WeightOnlyConfig(version=2, granularity=q.PerTensor())]
    float8 = [q.Float8WeightOnlyConfig(), lambda w: q.Float8Tensor.from_hp(w, granularity=q.PerTensor())]
    float8.append(lambda w: q.Float8Tensor.from_hp(w, granularity=q.PerBlock([32, 32])))
    intx = [q.IntxWeightOnlyConfig(getattr(torch, f"int{n}"), granularity=q.PerGroup(32)) for n in (4, 3, 8)]
    intx.append(q.IntxWeightOnlyConfig(torch.int6, granularity=q.PerAxis(0), mapping_type=q.MappingType.ASYMMETRIC))
    fp4 = torch.float4_e2m1fn_x2
    micro: list[Callable[[Tensor], Tensor]] = [
        lambda w: MXTensor.to_mx(w, torch.float8_e4m3fn, 32),
        lambda w: MXTensor.to_mx(w, torch.float8_e5m2, 32, is_swizzled_scales=True),
        lambda w: MXTensor.to_mx(w, fp4, 32, is_swizzled_scales=True),
        lambda w: MXTensor.to_mx(w, fp4, 32),
        lambda w: NVFP4Tensor.to_nvfp4(w),
        lambda w: NVFP4Tensor.to_nvfp4(w, per_tensor_scale=torch.tensor(0.003), is_swizzled_scales=True),
    ]
    if name.startswith("micro"):
        return micro
    if name.startswith("int4"):
        return [lambda w: int4(w, 32), lambda w: int4(w, 16)]
    if name == "mixed_pt":
        return [int8[0], float8[0], intx[0], lambda w: to_nf4(w, 64, 8), lambda w: to_nf4(w, 32, 2)]
    return {"int8_sharded_tied": int8, "float8": float8, "intx": intx}[name]


def int4(w: Tensor, size: int) -> Any:
    """An Int4Tensor of groups of ``size``, as `_gptq_quantize` of torchao.prototype.gptq makes it. Two codes are packed
    as `pack_int4` of the kernels' package does: the first in the lower bits."""
    from torchao.prototype.gptq.api import _int4_row_quantize_zp_precomputed_qparams as quantize
    from torchao.quantization import Int4Tensor

    groups = w.float().view(w.shape[0], -1, size)
    scale = ((groups.amax(-1) - groups.amin(-1)).clamp(min=1e-6) / 15).t().contiguous()
    zero = groups.amin(-1).t() + scale * 8
    codes = quantize(w, scale, zero, size)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return Int4Tensor(packed, scale.to(w.dtype), zero.to(w.dtype).contiguous(), [1, size], w.shape)


def _of_int4(one: Any) -> Tensor:
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp

    codes = torch.stack([one.qdata << 4 >> 4, one.qdata >> 4], -1).flatten(-2)
    found: Tensor = _int4_row_dequantize_zp(codes, one.scale.float(), one.zero_point.float(), one.block_size[-1])
    return found.to(one.dtype)


def back(weight: Any) -> Tensor:
    kind = type(weight.data if type(weight) is torch.nn.Parameter else weight).__name__
    if kind == "Int4Tensor":
        return _of_int4(weight.data if type(weight) is torch.nn.Parameter else weight)
    found: Tensor = weight.get_original_weight() if kind == "NF4Tensor" else weight.dequantize()
    return found.detach()


def save(folder: Path, model: Any, name: str) -> None:
    folder.mkdir()
    config = json.loads(model.config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {}}}
    (folder / "config.json").write_text(json.dumps(config))
    state = {n: t.data if type(t) is torch.nn.Parameter else t for n, t in model.state_dict().items()}
    if "tied" in name:
        del state["lm_head.weight"]
    if name.endswith("_pt"):
        torch.save(state, folder / "pytorch_model.bin")
        return
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    shards = [dict(list(state.items())[:9]), dict(list(state.items())[9:])] if "sharded" in name else [state]
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards):
        file = f"model-{n + 1:05d}-of-00002.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors, metadata = flatten_tensor_state_dict(shard)
        save_file(tensors, folder / file, metadata)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
