"""Trains the small nasty model with DeepSpeed's newer writers: the child's side of :mod:`.deepspeed_newer`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from .deepspeed_held import held, muon_momenta
from .deepspeed_newer import NewerSpec
from .deepspeed_train import BATCH, LENGTH, STEPS, TAG, base_config, check_run
from .deepspeed_truth import tied_names
from .nasty_model import NastyModel
from .optimizers import make_optimizer


def make_config(spec: NewerSpec) -> dict[str, Any]:
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["zero_optimization"] |= spec.zero
    if spec.muon:
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}}
    return config | spec.config


def write(spec: NewerSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    model = NastyModel(spec.hidden, spec.layers, spec.vocab, with_empty=False)
    if spec.muon:
        # DeepSpeed takes whatever has two dimensions or more; its Newton-Schulz iteration takes matrices.
        model.mix = nn.Parameter(torch.randn(3))
        model.conv.weight.requires_grad_(False)
    tied = tied_names(model)
    kwargs = {"model_parameters": model.param_groups()} if spec.muon else {}
    if not spec.muon:
        kwargs["optimizer"] = make_optimizer("adamw", model.param_groups())  # type: ignore[assignment]
    engine, *_ = deepspeed.initialize(model=model, config=make_config(spec), **kwargs)
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        logits = engine(ids).float()
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        engine.step()
    check_run(engine)
    states = held(engine)
    if spec.muon and spec.stage in (1, 2) and "momentum_buffer" not in states:
        names = {id(p): name for name, p in engine.module.named_parameters()}
        states["momentum_buffer"] = muon_momenta(engine.optimizer, names)
    frozen = [n for n, p in engine.module.named_parameters() if not p.requires_grad]
    engine.save_checkpoint(str(out / "ckpt"))
    also: dict[str, list[str]] = {}
    if spec.weights:
        engine.save_16bit_model(str(out / "also" / "whole"))
        engine.save_16bit_model(str(out / "also" / "trained"), "model.bin", exclude_frozen_parameters=True)
        also = {"whole/pytorch_model.bin": [], "trained/model.bin": frozen}
    if rank == 0:
        (out / "truth" / "states").mkdir(parents=True)
        for name, tensors in states.items():
            save_file(tensors, out / "truth" / "states" / f"{name}.safetensors")
        info = {
            "spec": asdict(spec),
            "stage": spec.stage,
            "dp": spec.dp,
            "step": STEPS,
            "tag": TAG,
            "tied": tied,
            "frozen": frozen,
            "buffers": [n for n, _ in engine.module.named_buffers() if n in states["weights"]],
            "states": sorted(states),
            "wrapper": type(engine.optimizer).__name__,
            "also": also,
        }
        (out / "truth" / "info.json").write_text(json.dumps(info, indent=1))
    dist.barrier()
