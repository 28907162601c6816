"""What the DeepSpeed writers share inside the child: optimizers, configs, and putting the ranks' shares together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from . import bit_equal
from .deepspeed_held import States, groups_by_id, held

STEPS = 3
BATCH, LENGTH = 2, 7
TAG = f"global_step{STEPS}"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_names(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, object]]:
    """The groups with (name, parameter) pairs, as torch takes them since 2.6: their names are then saved."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [group | {"params": [(names[id(p)], p) for p in group["params"]]} for group in groups]


def decay_groups(module: nn.Module) -> list[dict[str, object]]:
    """With weight decay, without, and single elements; what is frozen is in no group."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in params if p.ndim < 2 and p.numel() > 1], "weight_decay": 0.0, "name": "no_decay"},
        {"params": [p for p in params if p.numel() == 1], "weight_decay": 0.0, "lr": 3e-3, "name": "single"},
    ]
    return [group for group in groups if group["params"]]


def base_config(stage: int, dtype: str, bf16_optimizer: bool = False) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":  # a low first scale: no step may overflow and be skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 6}
    if bf16_optimizer:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def check_run(engine: Any) -> None:
    if engine.skipped_steps:
        raise RuntimeError(f"{engine.skipped_steps} of {STEPS} steps were skipped for overflow")


@dataclass
class Share:
    """What one rank holds, whole over its data-parallel peers."""

    pp: int = 0
    tp: int = 0
    dp: int = 0
    ep: int = 0
    states: States = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    nonpersistent_buffers: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    """Parameter names of the optimizer's groups, as this rank numbers them."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever else the family's merge needs to hear from the rank."""


def share_of(engine: Any, pp: int = 0, tp: int = 0, dp: int = 0, ep: int = 0) -> Share:
    """This rank's share; every rank must call it."""
    module: nn.Module = engine.module
    states = held(engine)
    names = {id(p): name for name, p in module.named_parameters()}
    return Share(
        pp=pp,
        tp=tp,
        dp=dp,
        ep=ep,
        states=states,
        frozen=[n for n, p in module.named_parameters() if not p.requires_grad],
        buffers=[n for n, _ in module.named_buffers() if n in states["weights"]],
        nonpersistent_buffers=[n for n, _ in module.named_buffers() if n not in states["weights"]],
        groups=groups_by_id(engine.optimizer, names),
    )


def collect(share: Share) -> list[Share]:
    """The shares of all ranks at rank 0, and nothing elsewhere; data-parallel replicas must not differ."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(share, everyone)
    shares: list[Share] = everyone or []
    first: dict[tuple[int, int, int], Share] = {}
    for s in shares:
        peer = first.setdefault((s.pp, s.tp, s.ep), s)
        for key, tensors in s.states.items():
            same_bits(f"the data-parallel replicas of {key}", without(tensors, s.buffers), peer.states[key])
    return shares


def without(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n not in set(names)}


def same_bits(what: str, tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if name not in others or not bit_equal(t, others[name]):
            raise RuntimeError(f"{what}: {name} differs")


def union(parts: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def write_truth(out: Path, spec: Any, engine: Any, shares: list[Share], states: States, info: dict[str, Any]) -> None:
    """``out/truth``: the merged states, what each model-parallel rank held, per-rank buffers, and what is known."""
    folders = {name: out / "truth" / name for name in ("states", "shards", "buffers", "reference")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for key, tensors in states.items():
        save_file(tensors, folders["states"] / f"{key}.safetensors")
    for number, s in enumerate(shares):
        held_buffers = {n: s.states["weights"][n] for n in s.buffers}
        save_file(held_buffers, folders["buffers"] / f"rank{number}.safetensors")
        if s.dp == 0 and max(x.pp + x.tp for x in shares):
            width = 1 + max(x.tp for x in shares)
            for key, tensors in s.states.items():
                save_file(tensors, folders["shards"] / f"mp_rank_{s.pp * width + s.tp:02d}.{key}.safetensors")
    known = {
        "spec": asdict(spec),
        "stage": spec.stage,
        "dtype": spec.dtype,
        **{axis: 1 + max(getattr(s, axis) for s in shares) for axis in ("pp", "tp", "dp", "ep")},
        "wrapper": type(engine.optimizer).__name__,
        "states": sorted(states),
        "tied": {},
        "frozen": union(s.frozen for s in shares),
        "buffers": union(s.buffers for s in shares),
        "nonpersistent_buffers": union(s.nonpersistent_buffers for s in shares),
        "shapes": {n: list(t.shape) for n, t in states["weights"].items()},
        "step": STEPS,
        "tag": TAG,
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
    }
    (out / "truth" / "info.json").write_text(json.dumps(known | info, indent=1))
