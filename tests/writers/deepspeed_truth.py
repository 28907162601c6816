"""What the ranks of a DeepSpeed run hold in memory, put together without any knowledge of the files' layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from . import bit_equal
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
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad and _numel(p)}
    states = _stage3(engine, trainable) if spec.stage == 3 else _flat_groups(engine, names)
    states["weights"] = weights = _weights(module)
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
        "wrapper": type(engine.optimizer).__name__,
        "states": sorted(states),
        "frozen": frozen,
        "empty": [n for n, p in module.named_parameters() if not _numel(p)],
        "unused": ["unused.weight", "unused.bias"],
        "buffers": list(buffers),
        "nonpersistent_buffers": [n for n, _ in module.named_buffers() if n not in weights],
        "shapes": {n: list(getattr(p, "ds_shape", p.shape)) for n, p in module.named_parameters()},
        "group_names": [[names[id(p)] for p in group] for group in _groups_in_flat_order(engine.optimizer)],
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
    }
    return Truth(states, buffers, info)


def _numel(p: Tensor) -> int:
    return int(getattr(p, "ds_numel", p.numel()))


def _groups_in_flat_order(optimizer: Any) -> list[list[Tensor]]:
    """The optimizer's own lists: per parameter group (ZeRO-3: per sub-group), in the order of its flat buffer."""
    for attribute in ("round_robin_bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, attribute):
            groups: list[list[Tensor]] = getattr(optimizer, attribute)
            return groups
    raise RuntimeError(f"no parameter groups in {type(optimizer).__name__}")


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Training dtype, every name of the state dict, aliases too; buffers are this rank's."""
    partitioned = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return {name: t.detach().clone() for name, t in module.state_dict().items()}


def _stage3(engine: Any, trainable: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    optimizer = engine.optimizer
    flat = optimizer.fp32_partitioned_groups_flat[0]
    keys = _state_keys(optimizer.optimizer.state[flat], flat)
    states = {key: {n: safe_get_full_optimizer_state(p, key).clone() for n, p in trainable.items()} for key in keys}
    return states | {"fp32": {n: safe_get_full_fp32_param(p).clone() for n, p in trainable.items()}}


def _flat_groups(engine: Any, names: dict[int, str]) -> dict[str, dict[str, Tensor]]:
    """ZeRO 1/2 and BF16_Optimizer: all-gather the flat partitions and cut each parameter out where it really lives.

    DeepSpeed's own ``safe_get_full_optimizer_state`` cannot serve here: with torch optimizers, which make their state
    at the first step, only group 0 gets linked to it; and ``safe_get_full_fp32_param`` is wrong under
    round_robin_gradients.  But every parameter of the module is a view of its group's flat buffer, and the fp32
    partitions are that buffer cut in dp equal pieces: the address of the view says where the parameter is, whatever
    order or padding was chosen.
    """
    optimizer = engine.optimizer
    if type(optimizer).__name__ == "BF16_Optimizer":
        buffers, pieces = optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
    else:
        buffers, pieces = optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
    states: dict[str, dict[str, Tensor]] = {"fp32": {}}
    for group, buffer, piece in zip(_groups_in_flat_order(optimizer), buffers, pieces, strict=True):
        state = optimizer.optimizer.state[piece]
        held = {"fp32": piece} | {key: state[key] for key in _state_keys(state, piece)}
        for key, local in held.items():
            flat = _all_gather(local)
            if flat.numel() != buffer.numel():
                raise RuntimeError(f"{key}: partitions of {flat.numel()} elements, buffer of {buffer.numel()}")
            for p in group:
                start, rest = divmod(p.data_ptr() - buffer.data_ptr(), p.element_size())
                if rest or start < 0 or start + p.numel() > buffer.numel() or not p.is_contiguous():
                    raise RuntimeError(f"{names[id(p)]} is no view of its group's flat buffer")
                states.setdefault(key, {})[names[id(p)]] = flat[start : start + p.numel()].view(p.shape).clone()
    return states


def _state_keys(state: dict[str, Any], flat: Tensor) -> list[str]:
    keys = sorted(key for key, t in state.items() if torch.is_tensor(t) and t.shape == flat.shape)
    if not keys:
        raise RuntimeError(f"no optimizer state of shape {tuple(flat.shape)} among {sorted(state)}")
    return keys


def _all_gather(local: Tensor) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach().contiguous())
    return torch.cat(parts)


def _cross_check(states: dict[str, dict[str, Tensor]], trainable: Mapping[str, Tensor], spec: ZeroSpec) -> None:
    """The masters must round to the weights, and DeepSpeed must agree wherever it can be believed."""
    for key, tensors in states.items():
        if key != "weights" and tensors.keys() != trainable.keys():
            raise RuntimeError(f"{key} misses or adds {sorted(tensors.keys() ^ trainable.keys())}")
    for name, p in trainable.items():
        fp32, weight = states["fp32"][name], states["weights"][name]
        if not bit_equal(fp32.to(weight.dtype), weight):
            raise RuntimeError(f"{name}: the fp32 master does not round to the weight")
        if not spec.round_robin and not bit_equal(safe_get_full_fp32_param(p), fp32):
            raise RuntimeError(f"{name}: safe_get_full_fp32_param disagrees with the gathered partitions")
