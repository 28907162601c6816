"""Training that is saved and goes on, and training that goes on from a universal checkpoint: the losses of both.

Every rank takes its share of the same batches, so that the losses do not depend on how many there are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from .deepspeed_specs import ResumeSpec
from .deepspeed_train import STEPS, with_names
from .nasty_model import NastyModel
from .optimizers import make_optimizer

BATCH, LENGTH = 6, 7
SIZES = {"hidden": 26, "layers": 2, "vocab": 103, "with_empty": False}


class PerSample(NastyModel):
    """What it makes of a sample does not depend on the others beside it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(PerSample, self).forward(row[None]) for row in ids])


def write(spec: ResumeSpec, rank: int, out: Path) -> None:
    torch.manual_seed(0)
    model = PerSample(**SIZES)  # type: ignore[arg-type]
    if spec.optimizer == "torch" and spec.load is None:
        losses = plain(spec, model, out)
    else:
        losses = with_deepspeed(spec, model, rank, out)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.json").write_text(json.dumps(losses))


def with_deepspeed(spec: ResumeSpec, model: NastyModel, rank: int, out: Path) -> list[float]:
    optimizer = make_optimizer("adamw" if spec.optimizer == "torch" else spec.optimizer, groups(model, spec))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(spec))
    first = 0
    if spec.load is None:
        for step in range(STEPS):
            one_step(engine, spec, rank, step)
        engine.save_checkpoint(str(out / "ckpt"), client_state={"epoch": 7})
        first = STEPS
    else:
        path, client = engine.load_checkpoint(spec.load)
        if path is None or engine.global_steps != STEPS:
            raise RuntimeError(f"{spec.load} was not loaded: {path}, step {engine.global_steps}")
        if spec.optimizer != "torch" and client["epoch"] != 7:
            raise RuntimeError(f"{spec.load}: the client state is lost: {sorted(client)}")
        first = STEPS
    return [one_step(engine, spec, rank, step) for step in range(first, first + STEPS)]


def plain(spec: ResumeSpec, model: NastyModel, out: Path) -> list[float]:
    """Without DeepSpeed, on one rank; a step's count stands beside the model."""
    optimizer = make_optimizer("adamw", groups(model, spec))
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            (out / "ckpt").mkdir(parents=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
            torch.save(state, out / "ckpt" / "training.pt")
        ids = batch(step)
        loss = loss_of(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses[STEPS:]


def groups(model: NastyModel, spec: ResumeSpec) -> list[dict[str, object]]:
    """Two, of which every rank has some elements: DeepSpeed cannot load a universal checkpoint where one has none. With
    names where numbers are all that is saved of them."""
    decay, *others = model.param_groups()
    rest = [p for group in others for p in group["params"]]  # type: ignore[attr-defined]
    if spec.one_group:
        return [{"params": [*decay["params"], *rest], "weight_decay": 0.1}]  # type: ignore[misc]
    both = [decay, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    return with_names(model, both) if spec.stage == 0 else both


def config(spec: ResumeSpec) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // spec.dp,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": spec.stage, "reduce_bucket_size": 100_000},
        "checkpoint": {"load_universal": spec.load is not None},
    }
    if spec.dtype == "bf16":
        made["bf16"] = {"enabled": True}
    if spec.scheduler:
        made["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2}}
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def one_step(engine: Any, spec: ResumeSpec, rank: int, step: int) -> float:
    share = BATCH // spec.dp
    ids = batch(step)[rank * share : (rank + 1) * share]
    loss = loss_of(engine(ids), ids)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / spec.dp
