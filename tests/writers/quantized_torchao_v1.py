"""Checkpoints of torchao's AffineQuantizedTensor, which torchao 0.12 still wrote. The truth is its ``dequantize()``."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch

from .quantized_models import hold, linears, llama
from .quantized_torchao import back, save

__all__ = ["CASES", "write_all"]

CASES = ("v1_int8_pt", "v1_mixed_pt")


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    _without_inductor()
    for name in CASES:
        (folder / name).mkdir()
        _write(folder / name, name)


def _write(folder: Path, name: str) -> None:
    import torchao.quantization as q
    from torchao.dtypes.nf4tensor import to_nf4

    model = llama(64, 96, torch.bfloat16)
    truth = {n: t.detach().clone() for n, t in model.state_dict().items()}
    configs: list[Any] = [q.Int8WeightOnlyConfig(), q.Int8WeightOnlyConfig(group_size=32)]
    if "mixed" in name:
        configs = [
            q.Float8WeightOnlyConfig(), q.Int8DynamicActivationInt8WeightConfig(), q.IntxWeightOnlyConfig(torch.int4),
            q.Int8DynamicActivationInt4WeightConfig(group_size=32), lambda w: to_nf4(w, 64, 8),
        ]  # fmt: skip
    for at, (layer, module) in enumerate(linears(model).items()):
        chosen = configs[at % len(configs)]
        if callable(chosen):
            module.weight = torch.nn.Parameter(chosen(module.weight.data), requires_grad=False)
        else:
            q.quantize_(module, chosen)
        weight = module.weight
        truth[f"{layer}.weight"] = back(getattr(weight, "original_weight_tensor", weight))
    save(folder / "ckpt", model, name)
    hold(folder, truth)


def _without_inductor() -> None:
    """Make torchao 0.12 importable with a torch that moved a module of inductor, which is not used here."""

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: lambda function: function

    sys.modules.setdefault("torch._inductor.kernel.flex_attention", Anything("torch._inductor.kernel.flex_attention"))
