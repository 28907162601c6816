"""What one rank of a DeepSpeed run holds, made whole over its data-parallel peers, with no knowledge of any file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from . import bit_equal

States = dict[str, dict[str, Tensor]]


def held(engine: Any) -> States:
    """State -> parameter -> tensor, of this rank's module (its stage, its slice, its experts); every rank must call it.

    "fp32" is there only where the optimizer keeps masters beside the weights.  A parameter that never had a gradient
    has no optimizer state without ZeRO.
    """
    module: nn.Module = engine.module
    optimizer = engine.optimizer
    names = {id(p): name for name, p in module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        trainable = ((n, p) for n, p in module.named_parameters() if p.requires_grad and numel(p))
        states = stage3_states(optimizer, trainable)
    elif isinstance(optimizer, torch.optim.Optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        states = _whole_states(optimizer, names, [(p, p) for p in params])
    elif hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = [pair for weights, masters in groups for pair in zip(weights, masters, strict=True)]
        states = _whole_states(optimizer.optimizer, names, pairs)
        states["fp32"] = {names[id(p)]: master.detach().clone() for p, master in pairs}
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        states = _fused_states(optimizer, names)
    else:
        states = flat_states(optimizer, names)
    states["weights"] = weights = module_weights(module)
    for name, master in states.get("fp32", {}).items():
        if not bit_equal(master.to(weights[name].dtype), weights[name]):
            raise RuntimeError(f"{name}: the fp32 master does not round to the weight")
    return states


def numel(p: Tensor) -> int:
    return int(getattr(p, "ds_numel", p.numel()))


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """Training dtype, every name of the state dict, aliases too; buffers are this rank's."""
    partitioned = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return {name: t.detach().clone() for name, t in module.state_dict().items()}


def groups_in_flat_order(optimizer: Any) -> list[list[Tensor]]:
    """The optimizer's own lists: per parameter group (ZeRO-3: per sub-group), in the order of its flat buffer."""
    for attribute in ("round_robin_bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, attribute):
            groups: list[list[Tensor]] = getattr(optimizer, attribute)
            return groups
    raise RuntimeError(f"no parameter groups in {type(optimizer).__name__}")


def groups_by_id(optimizer: Any, names: dict[int, str]) -> list[list[str]]:
    """Without ZeRO: the names behind the numbers of the optimizer's state dict, group by group, in order."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return [[names[id(p)] for p in group] for group in groups_in_flat_order(optimizer)]


def stage3_states(optimizer: Any, trainable: Iterable[tuple[str, Tensor]]) -> States:
    params = dict(trainable)
    states: States = {}
    owners = zip(groups_in_flat_order(optimizer), optimizer.fp32_partitioned_groups_flat, strict=True)
    owner = {id(p): flat for group, flat in owners for p in group}
    for n, p in params.items():
        state = optimizer.optimizer.state[owner[id(p)]]
        for key in _state_keys(state, owner[id(p)]):  # (8-bit states are gathered as float32, which holds them exactly)
            gathered = safe_get_full_optimizer_state(p, key).clone()
            states.setdefault(key, {})[n] = gathered.to(state[key].dtype)
    return states | {"fp32": {n: safe_get_full_fp32_param(p).clone() for n, p in params.items()}}


def flat_states(optimizer: Any, names: dict[int, str]) -> States:
    """ZeRO 1/2 and BF16_Optimizer: all-gather the flat partitions and cut each parameter out where it really lives.

    DeepSpeed's own ``safe_get_full_optimizer_state`` cannot serve here: with torch optimizers, which make their state
    at the first step, only group 0 gets linked to it; and ``safe_get_full_fp32_param`` is wrong under
    round_robin_gradients.  But every parameter of the module is a view of its group's flat buffer, and the fp32
    partitions are that buffer cut in equal pieces, one per rank of the group's own data-parallel group: the address of
    the view says where the parameter is, whatever order or padding was chosen.
    """
    if type(optimizer).__name__ == "BF16_Optimizer":
        buffers, pieces = optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
    else:
        buffers, pieces = optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
    groups, peers = groups_in_flat_order(optimizer), optimizer.real_dp_process_group
    states: States = {"fp32": {}}
    for group, buffer, piece, process_group in zip(groups, buffers, pieces, peers, strict=True):
        state = optimizer.optimizer.state[piece]
        tensors = {"fp32": piece} | {key: state[key] for key in _state_keys(state, piece)}
        for key, local in tensors.items():
            flat = _all_gather(local, process_group)
            if flat.numel() != buffer.numel():
                raise RuntimeError(f"{key}: partitions of {flat.numel()} elements, buffer of {buffer.numel()}")
            for p in group:
                start, rest = divmod(p.data_ptr() - buffer.data_ptr(), p.element_size())
                if rest or start < 0 or start + p.numel() > buffer.numel() or not p.is_contiguous():
                    raise RuntimeError(f"{names[id(p)]} is no view of its group's flat buffer")
                states.setdefault(key, {})[names[id(p)]] = flat[start : start + p.numel()].view(p.shape).clone()
    return states


def _fused_states(optimizer: Any, names: dict[int, str]) -> States:
    """FP16_Optimizer without ZeRO: every parameter is a view of its group's flat buffer, which the states follow."""
    states: States = {}
    for group, buffer, master in zip(
        optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True
    ):
        state = optimizer.optimizer.state[master]
        for key, flat in ({"fp32": master} | {key: state[key] for key in _state_keys(state, master)}).items():
            for p in group:
                start = (p.data_ptr() - buffer.data_ptr()) // p.element_size()
                states.setdefault(key, {})[names[id(p)]] = (
                    flat[start : start + p.numel()].view(p.shape).detach().clone()
                )
    return states


def muon_momenta(optimizer: Any, names: dict[int, str]) -> dict[str, Tensor]:
    """ZeRO 1/2 with Muon: every rank keeps the whole momentum of each matrix of which it holds an element, one after
    the other (stage_1_and_2.py ``get_flat_partition``), and uses the part of the elements that it holds.  All ranks
    that keep a matrix's must have the same."""
    found: dict[str, Tensor] = {}
    for g, params in enumerate(optimizer.params_in_partition):
        momentum = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[g]].get("momentum_buffer")
        at = 0
        for p in params if momentum is not None else ():
            found[names[id(p)]] = momentum[at : at + p.numel()].view(p.shape).clone()
            at += p.numel()
        if momentum is not None and at != momentum.numel():
            raise RuntimeError(f"a momentum of {momentum.numel()} elements for matrices of {at}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    whole: dict[str, Tensor] = {}
    for of_rank in everyone:
        for name, t in of_rank.items():
            if not bit_equal(whole.setdefault(name, t), t):
                raise RuntimeError(f"{name}: the ranks' momenta differ")
    return whole


def _whole_states(
    optimizer: torch.optim.Optimizer, names: dict[int, str], pairs: Iterable[tuple[Tensor, Tensor]]
) -> States:
    states: States = {}
    for p, key, tensor in _unsharded(optimizer, pairs):
        states.setdefault(key, {})[names[id(p)]] = tensor.detach().clone()
    return states


def _unsharded(
    optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    for p, owner in pairs:
        for key, tensor in optimizer.state.get(owner, {}).items():
            if torch.is_tensor(tensor) and tensor.shape == owner.shape:
                yield p, key, tensor


def _state_keys(state: dict[str, Any], flat: Tensor) -> list[str]:
    keys = sorted(key for key, t in state.items() if torch.is_tensor(t) and t.shape == flat.shape)
    if not keys and "momentum_buffer" not in state:  # Muon's is gathered by :func:`muon_momenta`
        raise RuntimeError(f"no optimizer state of shape {tuple(flat.shape)} among {sorted(state)}")
    return keys


def _all_gather(local: Tensor, peers: Any) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(peers))]
    dist.all_gather(parts, local.detach().contiguous(), group=peers)
    return torch.cat(parts)
