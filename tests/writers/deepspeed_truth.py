"""What the ranks of a DeepSpeed run hold in memory, put together without any knowledge of the files' layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from . import bit_equal
from .deepspeed_held import groups_by_id, groups_in_flat_order, held, numel
from .deepspeed_zero import ZeroSpec


@dataclass
class Truth:
    states: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    info: dict[str, Any]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias -> the name under which ``named_parameters`` lists the parameter."""
    owner = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: owner[id(p)] for name, p in every if owner[id(p)] != name}


def gather(engine: Any, spec: ZeroSpec) -> Truth:
    """Every rank must call this; every rank gets the same states, and its own buffers."""
    module: nn.Module = engine.module
    names = {id(p): name for name, p in module.named_parameters()}
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad and numel(p)}
    states = held(engine)
    weights = states["weights"]
    _cross_check(states, trainable, spec)
    buffers = {n: weights[n] for n, _ in module.named_buffers() if n in weights}
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    if spec.exclude_frozen:  # the truth about this checkpoint is that they are not in it
        states["weights"] = {n: t for n, t in weights.items() if n not in frozen}
    info = {
        "spec": asdict(spec) | {"client_state": None},
        "stage": spec.stage,
        "dtype": spec.dtype,
        "dp": spec.dp,
        "pp": 1,
        "tp": 1,
        "ep": 1,
        "wrapper": type(engine.optimizer).__name__,
        "states": sorted(states),
        "frozen": frozen,
        "empty": [n for n, p in module.named_parameters() if not numel(p)],
        "unused": ["unused.weight", "unused.bias"],
        "buffers": list(buffers),
        "nonpersistent_buffers": [n for n, _ in module.named_buffers() if n not in weights],
        "shapes": {n: list(getattr(p, "ds_shape", p.shape)) for n, p in module.named_parameters()},
        **_groups(engine.optimizer, spec, names),
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
    }
    return Truth(states, buffers, info)


def _groups(optimizer: Any, spec: ZeroSpec, names: dict[int, str]) -> dict[str, Any]:
    if spec.stage == 0:
        return {"group_param_names": {"mp_rank_00": groups_by_id(optimizer, names)}}
    return {"group_names": [[names[id(p)] for p in group] for group in groups_in_flat_order(optimizer)]}


def _cross_check(states: dict[str, dict[str, Tensor]], trainable: Mapping[str, Tensor], spec: ZeroSpec) -> None:
    """Every state must hold every parameter, and DeepSpeed must agree wherever it can be believed."""
    if spec.stage == 0:  # no gradient, no state; and safe_get_full_fp32_param knows only ZeRO
        return
    for key, tensors in states.items():
        if key != "weights" and tensors.keys() != trainable.keys():
            raise RuntimeError(f"{key} misses or adds {sorted(tensors.keys() ^ trainable.keys())}")
    for name, p in trainable.items():
        if not spec.round_robin and not bit_equal(safe_get_full_fp32_param(p), states["fp32"][name]):
            raise RuntimeError(f"{name}: safe_get_full_fp32_param disagrees with the gathered partitions")
