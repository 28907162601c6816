"""Checkpoints of AWQ, packed by AutoAWQ, with the weights that it unpacks.

Only the layout "gemm" can be unpacked without a GPU (``dequantize_gemm``). The truth of the others is AutoAWQ's packing
run backwards: each code, which is packed here with known values, times its scale, in the order of its kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .quantized_models import bare, hold, linears, llama, save, state_without

__all__ = ["CASES", "write_all"]

CASES: dict[str, dict[str, Any]] = {
    "gemm_sharded_tied": {"version": "gemm", "group_size": 32, "hidden": 32, "inner": 64, "tied": True},
    "gemm_one_group": {"version": "gemm", "group_size": -1, "hidden": 32, "inner": 64},
    "gemv": {"version": "gemv", "group_size": 32, "hidden": 32, "inner": 96},
    "gemv_fast": {"version": "gemv_fast", "group_size": 64, "hidden": 64, "inner": 64},
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name, case in CASES.items():
        (folder / name).mkdir()
        _write(folder / name, **case)


def _write(folder: Path, version: str, group_size: int, hidden: int, inner: int, tied: bool = False) -> None:
    model = llama(hidden, inner, torch.float16, tied)
    layers = linears(model)
    state, truth = state_without(model, layers), model.state_dict()
    for name, layer in layers.items():
        packed, weight = _packed(layer, version, group_size)
        state.update({f"{name}.{key}": value for key, value in packed.items()})
        truth[f"{name}.weight"] = weight
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    config["quantization_config"] = {
        "quant_method": "awq", "zero_point": True, "group_size": group_size, "bits": 4, "version": version,
        "modules_to_not_convert": None,
    }  # fmt: skip
    save(folder / "ckpt", state, config, "8KB" if tied else "5GB")
    hold(folder, truth)


def _packed(layer: nn.Linear, version: str, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    bare("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.modules.linear.gemv_fast import WQLinear_GEMVFast
    from awq.utils.packing_utils import dequantize_gemm

    out, size = layer.weight.shape
    group = size if group_size == -1 else group_size
    scales = ((torch.rand(out, size // group) + 0.5) / 16).half()
    zeros = torch.randint(0, 16, scales.shape)
    codes = torch.randint(0, 16, (out, size))
    spread = [values.repeat_interleave(group, 1) for values in (scales.float(), zeros)]
    with torch.no_grad():
        layer.weight.data = ((codes - spread[1]) * spread[0]).float()
    kind = {"gemm": WQLinear_GEMM, "gemv": WQLinear_GEMV, "gemv_fast": WQLinear_GEMVFast}[version]
    given = (scales.T, zeros.T) if version == "gemm" else (scales, zeros)
    module = kind.from_linear(layer, 4, group, scales=given[0].float().contiguous(), zeros=given[1].contiguous())
    if version == "gemm":
        module.scales = module.scales.contiguous()
        half = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, group).T
        weight = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, group).T.contiguous()
        assert half.dtype == torch.float16 and torch.equal(weight.half(), half)
    elif version == "gemv":
        weight = (codes - spread[1]) * spread[0]
    else:
        minus = module.qzeros[: size // group].T.float().repeat_interleave(group, 1)
        weight = codes * spread[0] + minus
    state = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales")}
    if layer.bias is not None:
        state["bias"] = module.bias
        layer.bias.data = layer.bias.data.half()
    return state, weight
