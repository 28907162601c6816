"""Checkpoints of HQQ, quantized and saved by hqq, with the weights that ``HQQLinear.dequantize`` returns.

The truth is in the compute dtype, in which HQQ rounds each step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .quantized_models import hold, linears, llama, save, state_without

__all__ = ["CASES", "write_all"]

CASES: dict[str, dict[str, Any]] = {
    "w4_axis1_sharded": {"nbits": 4, "group_size": 8, "axis": 1},
    "w4_axis0_pt": {"nbits": 4, "group_size": 8, "axis": 0, "file": "qmodel.pt", "tied": True},
    "w8_axis1_pt": {"nbits": 8, "group_size": None, "axis": 1, "file": "qmodel.pt"},
    "w3_axis1": {"nbits": 3, "group_size": 8, "axis": 1},
    "w3_axis0": {"nbits": 3, "group_size": 16, "axis": 0, "dtype": torch.bfloat16},
    "w2_axis0": {"nbits": 2, "group_size": 8, "axis": 0, "dtype": torch.bfloat16},
    "w1_axis1": {"nbits": 1, "group_size": 8, "axis": 1},
    "w4_as_float": {"nbits": 4, "group_size": 8, "axis": 1, "view_as_float": True},
    "w4_nested_pt": {"nbits": 4, "group_size": 8, "axis": 0, "file": "qmodel.pt", "nested": True},
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name, case in CASES.items():
        (folder / name).mkdir()
        _write(folder / name, name, **case)


def _write(
    folder: Path,
    name: str,
    file: str = "",
    tied: bool = False,
    dtype: torch.dtype = torch.float16,
    nested: bool = False,
    **options: Any,
) -> None:
    from hqq.core.quantize import BaseQuantizeConfig

    model = llama(16, 40, dtype, tied)
    layers = linears(model)
    state, truth = state_without(model, layers), model.state_dict()
    modules: dict[str, dict[str, Any]] = {}
    for layer, module in layers.items():
        packed, weight = _quantized(module, BaseQuantizeConfig(**options), dtype, not file, nested)
        truth[f"{layer}.weight"] = weight
        modules[layer] = packed
    config = json.loads(model.config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    if file:  # as BaseHQQModel.save_weights
        for module_name, module in model.named_modules():
            if not list(module.children()) and module_name not in modules and (own := dict(module.state_dict())):
                modules[module_name] = own
        (folder / "ckpt").mkdir()
        torch.save(modules, folder / "ckpt" / file)
        (folder / "ckpt/config.json").write_text(json.dumps(config))
    else:
        for layer, packed in modules.items():
            state.update({f"{layer}.{key}": value for key, value in packed.items()})
        config["quantization_config"] = {
            "quant_method": "hqq", "quant_config": BaseQuantizeConfig(**options), "skip_modules": ["lm_head"],
        }  # fmt: skip
        save(folder / "ckpt", state, config, "8KB" if "sharded" in name else "5GB")
    hold(folder, truth)


def _quantized(
    layer: nn.Linear, config: dict[str, Any], dtype: torch.dtype, encoded: bool, nested: bool
) -> tuple[dict[str, Any], Tensor]:
    from hqq.core.quantize import HQQLinear

    config["weight_quant_params"]["optimize"] = False
    module = HQQLinear(layer, config, del_orig=False, compute_dtype=dtype, device="cpu")
    if nested:  # `HQQLinear.initialize` of version 0.2.8 no longer does this, but it still reads what others did
        eight = {"nbits": 8, "channel_wise": True, "group_size": 8, "optimize": False, "axis": 0}
        whole = {"nbits": 8, "channel_wise": False, "group_size": None, "optimize": False, "axis": 0}
        weights = module.quant_config["weight_quant_params"]
        del module.W_q
        module.quantize(layer.weight.data, weights, scale_quant_params=eight, zero_quant_params=whole)
    module.encoded_state_dict = encoded
    state = {key: value for key, value in module.state_dict().items() if value is not None or not encoded}
    return state, module.dequantize().detach()
