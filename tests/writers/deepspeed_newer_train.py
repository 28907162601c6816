"""Trains the small nasty model with DeepSpeed's newer writers: the child's side of :mod:`.deepspeed_newer`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as engine_module
from safetensors.torch import save_file
from torch import nn

from . import deepspeed_replaced as replaced
from .deepspeed_held import held, muon_momenta
from .deepspeed_newer import NewerSpec
from .deepspeed_train import BATCH, LENGTH, STEPS, TAG, base_config, check_run
from .deepspeed_truth import tied_names
from .nasty_model import NastyModel
from .optimizers import make_optimizer


def make_config(spec: NewerSpec) -> dict[str, Any]:
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["zero_optimization"] |= spec.zero
    if spec.kind == "muon":
        params = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "torch_adam": True}  # DeepSpeed's is compiled
        config["optimizer"] = {"type": "Muon", "params": params}
    if spec.kind == "compressed":
        freeze = "var_freeze_step" if spec.optimizer == "ZeroOneAdam" else "freeze_step"
        config["optimizer"] = {
            "type": spec.optimizer,
            "params": {"lr": 1e-3, freeze: 1, "comm_backend_name": "compressed"},
        }
    if spec.fast:
        writer = {"type": "fast", "io_buffer_size": 8192, "data_parallel": "replica"}
        config["checkpoint"] = {"writer": writer}
    return config


def make_engine(spec: NewerSpec, model: nn.Module) -> Any:
    given: dict[str, Any] = {}
    trained = [p for p in model.parameters() if p.requires_grad]
    if spec.kind == "muon":
        given["model_parameters"] = model.param_groups()  # type: ignore[operator]
    elif spec.kind == "compressed":
        given["model_parameters"] = trained
    elif spec.kind == "fused":
        engine_module.FusedAdam = Fused  # type: ignore[attr-defined]
        groups: list[Any] = trained
        if spec.groups == "decay":
            groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2]}]
        elif spec.groups == "named":
            groups = list(model.named_parameters())[::-1]
        given["optimizer"] = Fused(groups, lr=1e-2)
    else:  # (MiCS_Init flattens the parameters: their dimensions make no groups)
        every: Any = [{"params": trained}] if spec.mics else model.param_groups()  # type: ignore[operator]
        given["optimizer"] = make_optimizer("adamw", every)
    engine, *_ = deepspeed.initialize(model=model, config=make_config(spec), **given)
    return engine


class Fused(torch.optim.AdamW):
    """In the place of FusedAdam, which is compiled: FP16_Optimizer calls it the same way."""


def make_model(spec: NewerSpec) -> NastyModel:
    model = NastyModel(spec.hidden, spec.layers, spec.vocab, with_empty=False)
    if spec.kind == "muon":
        # DeepSpeed takes whatever has two dimensions or more; its Newton-Schulz iteration takes matrices.
        model.mix = nn.Parameter(torch.randn(3))
        model.conv.weight.requires_grad_(False)
    if spec.kind in ("fused", "compressed"):
        model.requires_grad_(True)
    return model


def write(spec: NewerSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    if spec.fast:
        replaced.asynchronous_writes()
    if spec.kind == "compressed":
        replaced.compressed_all_reduce()
    if spec.mics:
        replaced.coalesced_gathers()
        with deepspeed.zero.MiCS_Init(config_dict_or_path=make_config(spec)):
            model = make_model(spec)
    else:
        model = make_model(spec)
    tied = tied_names(model)
    engine = make_engine(spec, model)
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        logits = engine(ids).float()
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        engine.step()
    check_run(engine)
    states = held(engine)
    if spec.kind == "muon" and spec.stage in (1, 2) and "momentum_buffer" not in states:
        names = {id(p): name for name, p in engine.module.named_parameters()}
        states["momentum_buffer"] = muon_momenta(engine.optimizer, names)
    frozen = [n for n, p in engine.module.named_parameters() if not p.requires_grad]
    engine.save_checkpoint(str(out / "ckpt"))
    also: dict[str, list[str]] = {}
    if spec.weights:
        engine.save_16bit_model(str(out / "also" / "whole"))
        engine.save_16bit_model(str(out / "also" / "trained"), "model.bin", exclude_frozen_parameters=True)
        also = {"whole/pytorch_model.bin": [], "trained/model.bin": frozen}
    buffers = [n for n, _ in engine.module.named_buffers() if n in states["weights"]]
    for folder in ("states", "buffers"):
        (out / "truth" / folder).mkdir(parents=True, exist_ok=True)
    save_file({n: states["weights"][n] for n in buffers}, out / "truth" / "buffers" / f"rank{rank}.safetensors")
    if rank == 0:
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
            "buffers": buffers,
            "states": sorted(states),
            "wrapper": type(engine.optimizer).__name__,
            "also": also,
            "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
        }
        (out / "truth" / "info.json").write_text(json.dumps(info, indent=1))
    dist.barrier()
