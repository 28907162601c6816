"""Trains the nasty model with ZeRO 0 to 3, or BF16_Optimizer: the child's side of :mod:`.deepspeed_zero`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from .deepspeed_held import module_weights
from .deepspeed_train import BATCH, LENGTH, STEPS, TAG, base_config, check_run, with_names, without
from .deepspeed_truth import gather, tied_names
from .deepspeed_zero import TagsSpec, ZeroSpec
from .nasty_model import NastyModel
from .optimizers import make_optimizer


def make_config(spec: ZeroSpec) -> dict[str, Any]:
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2}}
    zero = config["zero_optimization"]
    if spec.round_robin:
        zero["round_robin_gradients"] = True
    if spec.sub_group_size is not None:
        zero["sub_group_size"] = spec.sub_group_size
    if spec.hpz is not None:
        zero["zero_hpz_partition_size"] = spec.hpz
    if spec.elastic:
        zero["elastic_checkpoint"] = True
    if spec.parameter_alignment:
        zero["parameter_alignment"] = True
    return config


def train(spec: ZeroSpec, rank: int) -> Iterator[tuple[Any, dict[str, str]]]:
    """The engine and the tied names, after every step."""
    torch.manual_seed(spec.seed)
    model = NastyModel(spec.hidden, spec.layers, spec.vocab, with_empty=spec.stage < 3)
    tied = tied_names(model)  # by identity, while no ZeRO-3 hook has touched the module
    groups = model.param_groups()
    if spec.named_groups:
        groups = with_names(model, [g | {"params": g["params"][::-1]} for g in reversed(groups)])  # type: ignore[index]
    optimizer = make_optimizer(spec.optimizer, groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(spec))
    if spec.bf16_optimizer != (type(engine.optimizer).__name__ == "BF16_Optimizer"):
        raise RuntimeError(f"DeepSpeed chose {type(engine.optimizer).__name__} for {spec}")
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        logits = engine(ids).float()
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        engine.step()
        yield engine, tied
    check_run(engine)


def write(spec: ZeroSpec | TagsSpec, rank: int, out: Path) -> None:
    if isinstance(spec, TagsSpec):
        for step, (engine, tied) in enumerate(train(spec.zero, rank), start=1):
            folder = out / "ckpt" / spec.folder_at(step)
            for tag in spec.tags_at(step):
                engine.save_checkpoint(str(folder), tag=tag, save_latest=tag != "best")
                save_truth(engine, spec.zero, rank, out / "saves" / spec.folder_at(step) / tag, tied, step, tag)
            if spec.trainer:
                save_trainer_files(engine, rank, folder, step, list(tied))
        return
    for engine, tied in train(spec, rank):  # noqa: B007 - the last one counts
        pass
    save_truth(engine, spec, rank, out, tied, STEPS, TAG)
    engine.save_checkpoint(
        str(out / "ckpt"), client_state=spec.client_state or {}, exclude_frozen_parameters=spec.exclude_frozen
    )


def save_trainer_files(engine: Any, rank: int, folder: Path, step: int, aliases: list[str]) -> None:
    """What Hugging Face's Trainer puts beside DeepSpeed's folder."""
    weights = module_weights(engine.module)
    torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    if rank == 0:
        save_file(without(weights, aliases), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    dist.barrier()


def save_truth(engine: Any, spec: ZeroSpec, rank: int, out: Path, tied: dict[str, str], step: int, tag: str) -> None:
    truth = gather(engine, spec)
    states, buffers = out / "truth" / "states", out / "truth" / "buffers"
    if rank == 0:
        states.mkdir(parents=True)
        buffers.mkdir()
        (out / "truth" / "reference").mkdir()
        for name, tensors in truth.states.items():
            save_file(tensors, states / f"{name}.safetensors")
        info = truth.info | {"tied": tied, "step": step, "tag": tag}
        (out / "truth" / "info.json").write_text(json.dumps(info, indent=1))
    dist.barrier()
    save_file(truth.buffers, buffers / f"rank{rank}.safetensors")
