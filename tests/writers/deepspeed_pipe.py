"""Trains a pipeline of two or three stages: the child's side of the pipeline cases of :mod:`.deepspeed_more`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_uniform
from torch import Tensor

from . import bit_equal, pipe_model
from .deepspeed_held import States
from .deepspeed_specs import PipeSpec
from .deepspeed_train import (
    BATCH,
    LENGTH,
    STEPS,
    Share,
    base_config,
    check_run,
    collect,
    decay_groups,
    share_of,
    with_names,
    write_truth,
)
from .optimizers import make_optimizer

MICRO_BATCHES = 2


def write(spec: PipeSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    stages: dict[str, Any] = {"num_stages": spec.pp}
    if spec.model_axis:
        stages = {"topology": PipeModelDataParallelTopology(num_pp=spec.pp, num_mp=1, num_dp=spec.dp)}
    layers = pipe_model.layers(spec.vocab, spec.hidden, spec.head_file, spec.more_ties)
    model = PipelineModule(layers, loss_fn=pipe_model.loss, partition_method="uniform", **stages)
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer and spec.stage == 1)
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    if spec.parallel_write:
        config["checkpoint"] = {"parallel_write": {"pipeline_stage": True}}
    groups = with_names(model, decay_groups(model)) if spec.named_groups else decay_groups(model)
    engine = train_pipeline(model, make_optimizer(spec.optimizer, groups), config, spec.vocab, spec.seed)
    if spec.bf16_optimizer != (type(engine.optimizer).__name__ == "BF16_Optimizer"):
        raise RuntimeError(f"DeepSpeed chose {type(engine.optimizer).__name__} for {spec}")
    engine.save_checkpoint(str(out / "ckpt"), exclude_frozen_parameters=spec.exclude_frozen)
    share = pipe_share(engine)
    share.notes["wrote"] = wrote(engine, spec)
    shares = collect(share)
    if rank == 0:
        states, differing = merge_stages(shares)
        frozen = [n for s in shares for n in s.frozen]
        if spec.exclude_frozen:
            states["weights"] = {n: t for n, t in states["weights"].items() if n not in frozen}
        for s in shares:  # each layer file holds the buffers of the rank that wrote it
            for name in set(s.buffers):
                if name.split(".")[0] in s.notes["wrote"]:
                    states["weights"][name] = s.states["weights"][name]
        write_truth(out, spec, engine, shares, states, pipe_info(shares, differing))


def wrote(engine: Any, spec: PipeSpec) -> list[str]:
    """The numbers of the layers whose files are this rank's work."""
    model, dp = engine.module, engine.grid.get_data_parallel_id()
    start, stop = 0, len(model.forward_funcs) if dp == 0 else 0
    if spec.parallel_write:
        start, stop = partition_uniform(len(model.forward_funcs), spec.dp)[dp : dp + 2]
    return [str(model._local_start + i) for i in range(start, stop)]


def train_pipeline(model: PipelineModule, optimizer: Any, config: dict[str, Any], vocab: int, seed: int) -> Any:
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = micro_batches(vocab, 1000 * seed + engine.grid.get_data_parallel_id())
    for _ in range(STEPS):
        engine.train_batch(batches)
    check_run(engine)
    return engine


def micro_batches(vocab: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(vocab, (BATCH, LENGTH), generator=data)
        yield ids, ids


def pipe_share(engine: Any) -> Share:
    grid = engine.grid
    share = share_of(engine, pp=grid.get_stage_id(), tp=grid.get_slice_parallel_rank(), dp=grid.get_data_parallel_id())
    share.notes["layer_files"] = layer_files(engine.module)
    return share


def layer_files(model: PipelineModule) -> dict[str, str]:
    """The layers of this stage that have a file -> the module whose contents it holds."""
    names = {id(m): name for name, m in model.named_modules()}
    owned = {id(m): f"tied_modules.{key}" for key, m in model.tied_modules.items()}
    files = {}
    for number, layer in enumerate(model.forward_funcs, start=model._local_start):
        if isinstance(layer, torch.nn.Module):
            files[f"layer_{number:02d}"] = owned.get(id(layer)) or names[id(layer)]
        elif not (isinstance(layer, partial) or callable(layer)):
            raise RuntimeError(f"layer {number} is {layer!r}")
    return files


def merge_stages(shares: list[Share]) -> tuple[States, dict[str, list[str]]]:
    """One copy of everything, the lowest stage's of what several have; and the states in which a name's copies differ.

    Only for one slice per stage: the slices must be merged before.
    """
    states: States = {}
    differing: dict[str, set[str]] = {}
    for s in sorted((s for s in shares if s.dp == 0), key=lambda s: s.pp):
        for key, tensors in s.states.items():
            merged = states.setdefault(key, {})
            for name, t in tensors.items():
                if not bit_equal(merged.setdefault(name, t), t):
                    differing.setdefault(name, set()).add(key)
    return states, {name: sorted(keys) for name, keys in differing.items()}


def pipe_info(shares: list[Share], differing: dict[str, list[str]]) -> dict[str, Any]:
    firsts = sorted((s for s in shares if s.dp == 0 and s.tp == 0), key=lambda s: s.pp)
    slices = 1 + max(s.tp for s in shares)
    stage_names = [set(s.states["weights"]) for s in firsts]
    return {
        "replicated_over_stages": sorted(n for n in stage_names[0] if any(n in names for names in stage_names[1:])),
        "differing_over_stages": differing,
        "layer_files": {
            file: {"stage": s.pp, "module": m} for s in firsts for file, m in s.notes["layer_files"].items()
        },
        "group_param_names": {f"mp_rank_{s.pp * slices:02d}": s.groups for s in firsts},
    }
