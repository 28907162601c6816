"""What the ranks of Megatron hold, put together by what Megatron itself says of its parameters and its groups.

A parameter's ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` say how it is cut, a layer's
``layer_number`` and a MoE layer's ``local_expert_indices`` what its name is in the whole model, the optimizers' own
tables which master weight and which state belong to it. Nothing is read from a file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .megatron_core import MegatronSpec
from .megatron_hybrid import parts
from .megatron_save import unwrap

States = dict[str, dict[str, Tensor]]


def gather(spec: MegatronSpec, chunks: list[Any], optimizer: Any) -> States:
    """All states under the names of the model on one rank (on rank 0; {} on the others)."""
    mine = {}
    states = _states(optimizer)
    for chunk in chunks:
        mine |= _rank_tensors(spec, unwrap(chunk), states)
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return _merge(everyone) if everyone is not None else {}


def gather_logits(outputs: list[Any]) -> Tensor | None:
    """The logits of the last pipeline stage, the vocabulary put together (on rank 0)."""
    from megatron.core import mpu

    mine = None
    if outputs and mpu.get_data_parallel_rank() == 0:
        mine = (mpu.get_tensor_model_parallel_rank(), outputs[0].detach().clone())
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    return torch.cat([t for _, t in sorted((e for e in everyone if e), key=lambda e: e[0])], dim=-1)


def _rank_tensors(spec: MegatronSpec, model: Any, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name in the whole model -> what this rank has of it, and where it belongs."""
    from megatron.core import mpu
    from megatron.core.transformer.moe.experts import GroupedMLP

    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    tied_copy = "output_layer.weight" if spec.tied and not model.pre_process else ""
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name == tied_copy:
            continue
        p = parameters.get(name, tensor)
        expert = ".experts." in name
        rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        if expert:
            rank, size = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
        cut = bool(getattr(p, "tensor_model_parallel", False)) and size > 1
        parent = modules[name.rpartition(".")[0]]
        values = {"weights": tensor.detach().clone()}
        spans = {}
        for state, (value, span) in states.get(id(p), {}).items():
            values[state], spans[state] = value.detach().clone(), span
        how = {
            "values": values,
            "spans": spans,
            "shape": tuple(tensor.shape),
            "rank": rank,
            "cut": (getattr(p, "partition_dim", 0), getattr(p, "partition_stride", 1)) if cut else None,
            "dp": mpu.get_expert_data_parallel_rank() if expert else mpu.get_data_parallel_rank(),
            "stack": None,
        }
        if isinstance(parent, GroupedMLP):
            how["stack"] = (mpu.get_expert_model_parallel_rank(), parent.num_local_experts, spec.gated)
            how["cut"] = ("grouped", name.rpartition(".")[2]) if size > 1 else None
        before, found_mixer, tail = name.partition(".mixer.")
        widths = parts(modules[f"{before}.mixer"], tail) if found_mixer else None
        if widths is not None:
            how["cut"] = ("parts", widths) if size > 1 else None
        found[_whole_name(name, modules)] = how
    return found


def _whole_name(name: str, modules: dict[str, Any]) -> str:
    parts = name.split(".")
    out = list(parts)
    for n, part in enumerate(parts):
        if part.isdigit():
            module = modules[".".join(parts[: n + 1])]
            if hasattr(module, "layer_number"):
                out[n] = str(module.layer_number - 1)
            else:  # an expert of experts.local_experts
                owner = modules[".".join(parts[: n - 2])]
                out[n] = str(owner.local_expert_indices[int(part)])
    return ".".join(out)


def _states(optimizer: Any) -> dict[int, dict[str, Any]]:
    """id of a model's parameter -> state -> (tensor, the flat interval it is of the parameter's, or None)."""
    from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params

    found: dict[int, dict[str, Any]] = {}
    for one in optimizer.chained_optimizers:
        pairs: list[tuple[Any, Any, Any]] = []
        if isinstance(one, DistributedOptimizer):
            for p, (group, order) in one.model_param_group_index_map.items():
                r = one._get_model_param_range_map(p)["param"]
                pairs.append((p, one.optimizer.param_groups[group]["params"][order], (r.start, r.end)))
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            for half, full in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                pairs += [(p, main, None) for p, main in zip(half, full, strict=True)]
            pairs += [(p, p, None) for group in one.fp32_from_fp32_groups for p in group]
        else:
            pairs += [(p, p, None) for group in one.param_groups for p in group["params"]]
        for p, main, span in pairs:
            states = {k: (v, span if v.ndim else None) for k, v in one.optimizer.state[main].items()}
            if main is not p:
                states["fp32"] = (main, span)
            found[id(p)] = states
    return found


def _merge(everyone: list[dict[str, dict[str, Any]]]) -> States:
    whole: States = {}
    for name in dict.fromkeys(n for rank in everyone for n in rank):
        shards = [rank[name] for rank in everyone if name in rank]
        for state in dict.fromkeys(s for shard in shards for s in shard["values"]):
            held = [shard for shard in shards if state in shard["values"]]  # (a layer-wise optimizer is on one rank)
            whole.setdefault(state, {})[name] = _whole(name, state, held)
    return whole


def _whole(name: str, state: str, shards: list[dict[str, Any]]) -> Tensor:
    blocks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for shard in shards:
        ep = shard["stack"][0] if shard["stack"] else 0
        blocks.setdefault((ep, shard["rank"]), []).append(shard)
    by_ep: dict[int, list[Tensor]] = {}
    for (ep, _), copies in sorted(blocks.items()):
        by_ep.setdefault(ep, []).append(_local(name, state, copies))
    cut = shards[0]["cut"]
    stacks = []
    for locals_ in by_ep.values():
        if cut is None or locals_[0].ndim == 0:
            for other in locals_[1:]:
                assert torch.equal(locals_[0], other), (name, state)
            stacks.append(locals_[0])
        elif cut[0] == "parts":
            stacks.append(
                torch.cat([part for pieces in zip(*(t.split(cut[1]) for t in locals_), strict=True) for part in pieces])
            )
        elif cut[0] == "grouped":
            gated = shards[0]["stack"][2] and cut[1] == "weight1"
            dim = -1 if cut[1] == "weight1" else 1
            stacks.append(_cat(locals_, dim, 2 if gated else 1))
        else:
            stacks.append(_cat(locals_, cut[0], cut[1]))
    return torch.cat(stacks) if shards[0]["stack"] and stacks[0].ndim else stacks[0]


def _cat(shards: list[Tensor], dim: int, stride: int) -> Tensor:
    pieces = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([piece[k] for k in range(stride) for piece in pieces], dim)


def _local(name: str, state: str, copies: list[dict[str, Any]]) -> Tensor:
    """One rank's array: any of the copies that data-parallel ranks hold, or put together from their intervals."""
    spans = [c["spans"].get(state) for c in copies if state in c["values"]]
    values = [c["values"][state] for c in copies if state in c["values"]]
    if spans[0] is None:
        value = values[0]
        for other in values[1:]:
            assert torch.equal(value, other), (name, state)
    else:
        value = torch.full((torch.Size(copies[0]["shape"]).numel(),), float("nan"))
        for span, part in zip(spans, values, strict=True):
            known = value[slice(*span)]  # of another rank, if several hold the same elements
            assert known.isnan().all() or torch.equal(known, part.float()), (name, state)
            value[slice(*span)] = part
        assert not value.isnan().any(), (name, state)
        value = value.view(copies[0]["shape"])
    if copies[0]["stack"] and value.ndim:
        count, last = copies[0]["stack"][1], name.rpartition(".")[2]
        h = copies[0]["shape"][0 if last == "weight1" else 1]
        return value.reshape(-1).view((count, h, -1) if last == "weight1" else (count, -1, h))
    return value
