"""The process that trains with DeepSpeed, saves, and writes down what its ranks hold (``python -m``, with a job file).

DeepSpeed is imported once, then every case gets freshly forked ranks: its module-level state (process groups, the
communication backend) starts clean each time.  Two things of DeepSpeed are patched, and neither touches what it writes:

* its shared-memory all-reduce, which would be compiled at first use and leaves 66 MB per rank in /dev/shm, is off;
  gloo reduces instead;
* on CPUs without native fp16 its check "Type fp16 is not supported on your device" is answered yes: torch computes fp16
  on any CPU, only slowly.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file

from .deepspeed_truth import gather, tied_names
from .deepspeed_zero import ZeroSpec
from .nasty_model import NastyModel

STEPS = 3
BATCH, LENGTH = 2, 7


class Lion(torch.optim.Optimizer):
    """Lion has a single state, and no ``step``: nothing here may assume Adam."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


def make_optimizer(name: str, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if name == "lion":
        return Lion(groups, lr=1e-3)
    if name in ("adamw", "amsgrad"):
        return torch.optim.AdamW(groups, lr=1e-2, amsgrad=name == "amsgrad")
    raise ValueError(f"no optimizer {name!r} here")


def make_config(spec: ZeroSpec) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": spec.stage, "reduce_bucket_size": 100_000}
    if spec.round_robin:
        zero["round_robin_gradients"] = True
    if spec.sub_group_size is not None:
        zero["sub_group_size"] = spec.sub_group_size
    if spec.elastic:
        zero["elastic_checkpoint"] = True
    if spec.parameter_alignment:
        zero["parameter_alignment"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2}},
    }
    if spec.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif spec.dtype == "fp16":  # a low first scale: no step may overflow and be skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 6}
    if spec.bf16_optimizer:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def train(spec: ZeroSpec, rank: int) -> tuple[Any, dict[str, str]]:
    torch.manual_seed(spec.seed)
    model = NastyModel(spec.hidden, spec.layers, spec.vocab, with_empty=spec.stage < 3)
    tied = tied_names(model)  # by identity, while no ZeRO-3 hook has touched the module
    optimizer = make_optimizer(spec.optimizer, model.param_groups())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(spec))
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        logits = engine(ids).float()
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        engine.step()
    if engine.skipped_steps:
        raise RuntimeError(f"{engine.skipped_steps} of {STEPS} steps were skipped for overflow")
    if spec.bf16_optimizer != (type(engine.optimizer).__name__ == "BF16_Optimizer"):
        raise RuntimeError(f"DeepSpeed chose {type(engine.optimizer).__name__} for {spec}")
    return engine, tied


def run_rank(rank: int, out: Path, spec: ZeroSpec, store: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.dp)}
    torch.set_num_threads(1)
    # (not the attribute deepspeed.comm.torch, which is torch itself)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        dist_backend="gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{store}",  # needs no free port, so test processes cannot race for one
        rank=rank,
        world_size=spec.dp,
        timeout=timedelta(seconds=120),
    )
    engine, tied = train(spec, rank)
    truth = gather(engine, spec)
    engine.save_checkpoint(
        str(out / "ckpt"), client_state=spec.client_state or {}, exclude_frozen_parameters=spec.exclude_frozen
    )
    states, buffers = out / "truth" / "states", out / "truth" / "buffers"
    if rank == 0:
        states.mkdir(parents=True)
        buffers.mkdir()
        for name, tensors in truth.states.items():
            save_file(tensors, states / f"{name}.safetensors")
    dist.barrier()
    save_file(truth.buffers, buffers / f"rank{rank}.safetensors")
    dist.barrier()
    if rank == 0:
        info = truth.info | {"tied": tied, "step": STEPS, "tag": f"global_step{STEPS}"}
        (out / "truth" / "info.json").write_text(json.dumps(info, indent=1))
    dist.destroy_process_group()


def main(job: Path) -> None:
    # DeepSpeed would import these two, two seconds' worth of torch.compile, at the first initialize: in every fork.
    importlib.import_module("torch._dynamo")
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    out_dir, specs, scratch = pickle.loads(job.read_bytes())
    for number, (name, spec) in enumerate(specs.items()):
        print(f"=== {name}: {spec}", flush=True)
        args = (out_dir / name, spec, scratch / f"store{number}")
        mp.start_processes(run_rank, args=args, nprocs=spec.dp, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
