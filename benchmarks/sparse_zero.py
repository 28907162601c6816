"""Checkpoints of Llama 3.1 405B on any number of ranks, as DeepSpeed writes them, with holes as flat buffers.

torch.save writes every file; for what is large, a fake tensor, `torch.serialization.skip_data` leaves a hole. Keys,
classes and order are those of files that DeepSpeed 0.19 wrote (runtime/engine.py `_common_checkpoint_state`;
runtime/zero/stage3.py `_rigid_state_dict`; runtime/zero/stage_1_and_2.py `state_dict`).
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch._subclasses.fake_tensor import FakeTensorMode

TAG = "global_step1000"
Shapes = dict[str, torch.Size]


def llama(layers: int) -> tuple[Shapes, Any]:
    """The parameters of the model (126 layers are that of 405B), and the ``_metadata`` of its state dict."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {n: p.shape for n, p in model.named_parameters()}, model.state_dict()._metadata


def groups_of(shapes: Shapes) -> list[Shapes]:
    """With weight decay, and without: the usual two groups, each of one sub-group (10^9 elements of a rank's share)."""
    decay = {n: s for n, s in shapes.items() if len(s) > 1}
    return [OrderedDict(decay), OrderedDict((n, s) for n, s in shapes.items() if n not in decay)]


def write_zero3(folder: Path, frozen: bool = False, world: int = 1024, layers: int = 126) -> None:
    """``frozen``: the norms are frozen, and every layer has a buffer: then the model states of all ranks matter."""
    shapes, metadata = llama(layers)
    held_back = {n: s for n, s in shapes.items() if "norm" in n} if frozen else {}
    groups = [g for g in groups_of({n: s for n, s in shapes.items() if n not in held_back}) if g]
    module = OrderedDict((n, torch.empty(0, dtype=torch.bfloat16)) for n in shapes)
    buffers = [f"model.layers.{n}.mlp.seen" for n in range(layers)] if frozen else []
    module.update((n, torch.ones(8, dtype=torch.int64)) for n in buffers)
    module._metadata = metadata  # type: ignore[attr-defined]
    pieces = OrderedDict((n, torch.full((-(-prod(s) // world),), 0.5).bfloat16()) for n, s in held_back.items())
    state = _model_states(
        3, world, module, groups, buffers, frozen_param_shapes=OrderedDict(held_back), frozen_param_fragments=pieces
    )
    _write_alike(folder, "zero_pp_rank_{}_mp_rank_00_model_states.pt", state, world)
    widths = [sum(-(-prod(s) // world) for s in g.values()) for g in groups]
    with FakeTensorMode():
        state = {
            "optimizer_state_dict": {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": LossScaler(1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": world,
                "optimizer_state_dict": _adam(widths),
                "fp32_flat_groups": [_named(torch.empty(n), f"{i}_{i}") for i, n in enumerate(widths)],
            },
            "ds_config": _config(3),
            "ds_version": "0.19.8",
        }
        for rank in range(world):
            _save(state, folder / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text(TAG)


def write_zero2(folder: Path, world: int = 1024, layers: int = 126) -> None:
    shapes, metadata = llama(layers)
    groups = groups_of(shapes)
    (folder / TAG).mkdir(parents=True)
    with FakeTensorMode():
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        widths = []
        for group in groups:
            width = -(-sum(map(prod, group.values())) // (2 * world)) * 2
            widths.append(width)
            flat, at = torch.empty(width * world, dtype=torch.bfloat16), 0
            for name, shape in group.items():
                module[name] = flat[at : at + prod(shape)].view(shape)
                at += prod(shape)
        module = OrderedDict((n, module[n]) for n in shapes)
        module._metadata = metadata  # type: ignore[attr-defined]
        _save(_model_states(2, world, module, groups, []), folder / TAG / "mp_rank_00_model_states.pt")
        for rank in range(world):
            _save(
                _stage2(groups, widths, rank, world),
                folder / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    (folder / "latest").write_text(TAG)


def _stage2(groups: list[Shapes], widths: list[int], rank: int, world: int) -> dict[str, Any]:
    masters, paddings = [], []
    for group, width in zip(groups, widths, strict=True):
        left = max(0, min(width, sum(map(prod, group.values())) - rank * width))
        masters.append(torch.empty(width)[:left])
        paddings.append(width - left)
    return {
        "optimizer_state_dict": {
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": _adam(widths),
            "single_partition_of_fp32_groups": masters,
            "zero_stage": ZeroStageEnum.gradients,
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(g) for g in groups],
            "partition_count": [world] * len(groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": [_slices(g, w, rank) for g, w in zip(groups, widths, strict=True)],
        },
        "ds_config": _config(2),
        "ds_version": "0.19.8",
    }


def _slices(group: Shapes, width: int, rank: int) -> OrderedDict[str, fragment_address]:
    found, at = OrderedDict(), -rank * width
    for name, shape in group.items():
        lo, hi = max(0, at), min(width, at + prod(shape))
        if lo < hi:
            found[name] = fragment_address(numel=hi - lo, start=lo)
        at += prod(shape)
    return found


def _adam(widths: list[int]) -> dict[str, Any]:
    group = {
        "lr": 8e-5, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None,
        "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip
    state = {
        i: {"step": torch.empty(()), "exp_avg": torch.empty(n), "exp_avg_sq": torch.empty(n)}
        for i, n in enumerate(widths)
    }
    decays = (0.1, 0.0)[: len(widths)]
    return {
        "state": state,
        "param_groups": [{"weight_decay": w, **group, "params": [i]} for i, w in enumerate(decays)],
    }


def _named(tensor: torch.Tensor, ds_id: str) -> torch.Tensor:
    tensor.ds_id = ds_id  # type: ignore[attr-defined]
    return tensor.requires_grad_()


def _model_states(
    stage: int, world: int, module: Any, groups: list[Shapes], buffers: list[str], **frozen: OrderedDict[str, Any]
) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": frozen.get("frozen_param_shapes", OrderedDict()),
        "shared_params": {},
        "frozen_param_fragments": frozen.get("frozen_param_fragments", OrderedDict()),
        "lr_scheduler": {"last_batch_iteration": 999},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 1000,
        "global_samples": 2048000,
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(stage),
        "ds_version": "0.19.8",
    }


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 8e-5}},
    }


def _save(state: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def _write_alike(folder: Path, pattern: str, state: Any, world: int) -> None:
    """One file a rank. They differ in the name of the zip's folder only: torch.save writes the first of every length of
    names (tens of thousands of records take it a while), and the others are that with their name put in."""
    (folder / TAG).mkdir(parents=True)
    for digits in range(1, len(str(world - 1)) + 1):
        first = 10 ** (digits - 1) if digits > 1 else 0
        path = folder / TAG / pattern.format(first)
        torch.save(state, path)
        content, name = path.read_bytes(), path.stem.encode()
        for rank in range(first + 1, min(10**digits, world)):
            other = folder / TAG / pattern.format(rank)
            other.write_bytes(content.replace(name, other.stem.encode()))
