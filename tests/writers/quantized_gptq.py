"""Checkpoints of GPTQ, packed by GPTQModel and AutoGPTQ, with the weights that these unpack.

The codes are rounded to nearest: what a quantizer finds does not matter to a reader. Packing, the conversion of zero
points to version 1, and unpacking are the packages' own. Truth of GPTQModel is float32, of which its float16 is the
rounding (checked here); that of AutoGPTQ is its float16. Of Marlin's layout, which only kernels on GPUs read, it is the
weights that were packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .quantized_models import bare, hold, linears, llama, save, state_without

__all__ = ["CASES", "write_all"]

# Case -> settings, as in config.json; `hidden` and `inner` are the model's sizes.
CASES: dict[str, dict[str, Any]] = {
    "w4_v1_sharded_tied": {"bits": 4, "group_size": 32, "sym": True, "tied": True},
    "w4_v2_act_order": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "w3_v1": {"bits": 3, "group_size": -1, "sym": False},
    "w3_planar": {"bits": 3, "group_size": 32, "sym": False, "checkpoint_format": "gptq_p"},
    "w8_v2_odd_groups": {"bits": 8, "group_size": 64, "sym": True, "checkpoint_format": "gptq_v2", "inner": 96},
    "w2_v1_borrows": {"bits": 2, "group_size": 32, "sym": False, "low": 0},
    "w5_planar": {"bits": 5, "group_size": 32, "sym": False, "checkpoint_format": "gptq_p"},
    "w4_dynamic": {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": -1}},
    },
    "w4_autogptq": {"bits": 4, "group_size": 32, "sym": False, "by": "auto_gptq"},
    "w2_autogptq": {"bits": 2, "group_size": 32, "sym": False, "low": 0, "by": "auto_gptq"},
    "w4_marlin": {"bits": 4, "group_size": 128, "by": "marlin"},
    "w4_marlin_one_group": {"bits": 4, "group_size": -1, "by": "marlin"},
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name, case in CASES.items():
        (folder / name).mkdir()
        write = _write_marlin if case.get("by") == "marlin" else _write
        write(folder / name, **case)


def _write(
    folder: Path,
    hidden: int = 32,
    inner: int = 64,
    tied: bool = False,
    by: str = "gptqmodel",
    low: int = 1,
    **said: Any,
) -> None:
    model = llama(hidden, inner, torch.float16, tied)
    layers = linears(model)
    settings = {"desc_act": False, "checkpoint_format": "gptq", **said, "lm_head": False, "quant_method": "gptq"}
    pack = _gptqmodel if by == "gptqmodel" else _auto_gptq
    state = state_without(model, layers)
    truth = model.state_dict()
    for name, layer in layers.items():
        own = settings | next((s for key, s in said.get("dynamic", {}).items() if name.endswith(key[4:])), {})
        state_of, weight = pack(layer, own, low)
        state.update({f"{name}.{key}": value for key, value in state_of.items()})
        truth[f"{name}.weight"] = weight
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    if by == "gptqmodel":
        settings |= {"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05}}
        config["quantization_config"] = settings
    save(folder / "ckpt", state, config, "8KB" if tied else "5GB")
    if by != "gptqmodel":
        settings.pop("quant_method")
        (folder / "ckpt/quantize_config.json").write_text(json.dumps(settings))
    hold(folder, truth)


def _write_marlin(folder: Path, bits: int, group_size: int, by: str) -> None:
    """AutoGPTQ's layers for Marlin, of several sizes. The codes of a row are a sequence with a random step."""
    bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_marlin import QuantLinear

    torch.manual_seed(group_size)
    state, truth = {}, {}
    for name, (out, size) in {"q": (256, 128), "k": (256, 128), "up": (512, 128), "down": (256, 256)}.items():
        group = size if group_size == -1 else group_size
        scales = ((torch.rand(out, size // group) + 0.5) / 16).half()
        column = torch.arange(size)
        codes = (torch.randint(16, (out, 1)) + column * torch.randint(1, 16, (out, 1)) + column // 16) % 16
        weight = (codes - 8) * scales.float().repeat_interleave(group, 1)
        layer = nn.Linear(size, out).half()
        layer.weight.data = weight.half()
        with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
            module = QuantLinear(bits, group, size, out, True)
        module.pack(layer, scales)
        place = f"model.layers.0.{name}_proj"
        state |= {f"{place}.{key}": value for key, value in module.state_dict().items()}
        truth |= {f"{place}.weight": weight, f"{place}.bias": layer.bias}
    settings = {"bits": bits, "group_size": group_size, "desc_act": False, "sym": True, "is_marlin_format": True}
    save(folder / "ckpt", state, {"quantization_config": settings | {"quant_method": "gptq"}})
    hold(folder, truth)


def _codes(layer: nn.Linear, own: dict[str, Any], low: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and zero points of each row, ``[out, groups]``, and the group of each input."""
    out, size = layer.weight.shape
    group = size if own["group_size"] == -1 else own["group_size"]
    g_idx = torch.arange(size, dtype=torch.int32) // group
    if own["desc_act"]:
        g_idx = g_idx[torch.randperm(size)]
    count = -(-size // group)
    scales = (torch.rand(out, count) + 0.5) / 2 ** own["bits"]
    zeros = torch.full((out, count), float(2 ** (own["bits"] - 1)))
    if not own["sym"]:
        zeros = torch.randint(low, 2 ** own["bits"], (out, count)).float()
    return scales.half().float(), zeros, g_idx


def _gptqmodel(layer: nn.Linear, own: dict[str, Any], low: int) -> tuple[dict[str, Tensor], Tensor]:
    bare("gptqmodel", "gptqmodel.models", "gptqmodel.nn_modules")
    import gptqmodel

    gptqmodel.DEBUG_ON = False
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scales, zeros, g_idx = _codes(layer, own, low)
    size, out = layer.in_features, layer.out_features
    module = TorchLinear(
        own["bits"], own["group_size"], own["sym"], own["desc_act"], size, out, layer.bias is not None,
        format=FORMAT(own["checkpoint_format"]),
    )  # fmt: skip
    module.pack_block(layer.float(), scales, zeros, g_idx)
    module._init_wf_unsqueeze_buffers()
    module.eval()
    weight = _unpacked(module.dequantize_weight, module)
    if own["checkpoint_format"] == "gptq":

        class Bits:
            bits = own["bits"]
            pack_dtype = torch.int32

        convert_gptq_v2_to_v1_format_module(module, Bits())
    state = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if layer.bias is not None:
        state["bias"] = module.bias
    layer.half()
    return state, weight


def _unpacked(dequantize: Callable[[], Tensor], module: Any) -> Tensor:
    """The weights of a module in float32, whose rounding to float16 is what it computes."""
    half = dequantize().T
    module.scales = module.scales.float()
    exact = dequantize().T.contiguous()
    module.scales = module.scales.half()
    assert half.dtype == torch.float16 and torch.equal(exact.half(), half)
    return exact


def _auto_gptq(layer: nn.Linear, own: dict[str, Any], low: int) -> tuple[dict[str, Tensor], Tensor]:
    bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    scales, zeros, g_idx = _codes(layer, own, low)
    module = QuantLinear(own["bits"], own["group_size"], layer.in_features, layer.out_features, layer.bias is not None)
    # AutoGPTQ packs the zero point 0 wrongly, as -1 over all higher bits: the fields are packed here
    module.pack(layer, scales, torch.ones_like(zeros), g_idx)
    module.scales = module.scales.half()
    fields = (zeros.T.to(torch.int64) - 1) % 2 ** own["bits"]
    each = 32 // own["bits"]
    words = (fields.view(len(fields), -1, each) << (torch.arange(each) * own["bits"])).sum(-1)
    module.qzeros = words.to(torch.int32)
    bias, module.bias = module.bias, None
    weight = module(torch.eye(layer.in_features, dtype=torch.float16)).T.contiguous()
    state = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if bias is not None:
        state["bias"] = bias
    return state, weight
