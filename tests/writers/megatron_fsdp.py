"""Checkpoints of Megatron-FSDP (``--ckpt-format fsdp_dtensor``), trained by megatron-core on gloo ranks.

``python -m tests.writers.megatron_fsdp FOLDER`` writes every case of :data:`CASES` to ``FOLDER/NAME``: ``ckpt`` (a
run's folder) and ``truth.pt`` (what the ranks held, under the names of the model on one rank).

What Megatron-FSDP needs on a CPU, beyond :mod:`.megatron_cpu`: device meshes of type "cpu" in place of "cuda", streams
and events that do nothing, collectives that gloo has (`on_cpu`), and the states that Transformer Engine's FusedAdam
keeps (`as_fused`). None of that touches what is written. The state dict is made by megatron-core's own functions, in
the order of Megatron-LM's megatron/training/checkpointing.py `generate_state_dict` and
`preprocess_fsdp_dtensor_state_dict` (megatron.training is not part of the package).
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import Case
from .megatron_core import GELU, STEPS, MegatronSpec, _run, build, run_schedule, start
from .megatron_save import args_of, rng_state, unwrap
from .megatron_truth import _merge, _whole_name

__all__ = ["CASES", "load_case", "write_all"]


@dataclass(frozen=True)
class HybridSpec(MegatronSpec):
    """A run of hybrid FSDP: the ``dp`` ranks are ``instances`` groups that hold the same weights. ``outer``: whether
    the states of the optimizer are the same in each group, or cut over all ranks."""

    instances: int = 1
    outer: Literal["no_shard", "optim"] = "no_shard"


SHARDED = MegatronSpec(distributed=True, bf16=True)  # (gated layers are found only below a Float16Module)
CASES: dict[str, MegatronSpec] = {
    "single": replace(SHARDED, seed=30),
    "dp2": replace(SHARDED, dp=2, groups=2, seed=31),
    "dp3_uneven": replace(SHARDED, dp=3, hidden=24, ffn=20, qk_norm=True, seed=32),
    "dp2_gelu_tied": replace(SHARDED, dp=2, tied=True, bf16=False, qkv_bias=True, **GELU, seed=33),
    "tp2_dp2": replace(SHARDED, tp=2, dp=2, groups=2, bias=True, norm="LayerNorm", seed=34),
    "dp2_ep2": replace(SHARDED, dp=2, ep=2, experts=4, shared=12, seed=35),
    "tp2_dp2_mla": replace(SHARDED, tp=2, dp=2, mla=True, seed=36),
    "dp4_hybrid": HybridSpec(distributed=True, bf16=True, dp=4, instances=2, groups=2, seed=37),
    "dp4_hybrid_optim": HybridSpec(distributed=True, bf16=True, dp=4, instances=2, outer="optim", seed=38),
}


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    _run("megatron_fsdp", str(folder))
    return folder


def load_case(folder: Path, name: str) -> Case:
    truth = torch.load(folder / name / "truth.pt")
    info = json.loads((folder / name / "info.json").read_text()) | {"tied": {}, "archives": True}
    return Case(folder / name / "ckpt", truth, info)


# -- in the child


class _Stream:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    wait_event = record = wait = synchronize = wait_stream

    def record_event(self, *_: Any) -> _Stream:
        return self


class _Device(str):
    """The CPU; as the number in "cuda:0", a number."""

    def __format__(self, _: str) -> str:
        return "0"


def on_cpu() -> None:
    """Before anything of Megatron-FSDP is made; after `megatron_cpu.patch`."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    from_group = torch.distributed.DeviceMesh.from_group

    class Mesh:
        @staticmethod
        def from_group(*args: Any, device_type: str = "", **kwargs: Any) -> Any:
            return from_group(*args, device_type="cpu", **kwargs)

    adapter.DeviceMesh = Mesh
    adapter.TELinear = type("TELinear", (), {})
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _Device("cpu")
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: nullcontext()
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: 0
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    gather = torch.distributed.all_gather_into_tensor

    def all_gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        """At once: nothing waits for the streams' work, and the input may be a part of the output."""
        gather(output_tensor, input_tensor.clone(), group=group)
        return _Stream()

    torch.distributed.all_gather_into_tensor = all_gather
    buffers._coalescing_manager = lambda *_, **__: nullcontext(_Stream())


def prepare(spec: MegatronSpec, chunk: Any) -> tuple[Any, Any]:
    """What trains: the wrapped model, and the optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = chunk.config
    hybrid: dict[str, Any] = {}
    if isinstance(spec, HybridSpec):
        hybrid = {
            "num_distributed_optimizer_instances": spec.instances,
            "outer_dp_sharding_strategy": spec.outer,
        }
    ddp = DistributedDataParallelConfig(
        **hybrid,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # its reduction is one of NCCL
        grad_reduce_in_fp32=spec.bf16,
    )
    model = FullyShardedDataParallel(
        config, ddp, Float16Module(config, chunk) if spec.bf16 else chunk, device=torch.device("cpu")
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=spec.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if hybrid:
        config.no_sync_func = model.no_sync  # as Megatron-LM: the groups reduce after the last microbatch
    model.config = config
    return model, optimizer


def as_fused(optimizer: Any, after: bool) -> None:
    """Keep states as Transformer Engine's FusedAdam does: for every parameter, also those of which this rank holds no
    element (torch's AdamW passes over parameters without a gradient, and Megatron-FSDP's functions then wait for each
    other forever), and the step count (``after`` training) in the groups."""
    adam = optimizer.optimizer
    for group in adam.param_groups:
        for p in group["params"]:
            if after:
                del adam.state[p]["step"]
            else:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[p] = {"step": torch.tensor(0.0), **zeros}
        if after:
            group["step"] = STEPS


def _case(spec: MegatronSpec, rank: int, out: Path) -> None:
    start(spec, spec.instances if isinstance(spec, HybridSpec) else 1)
    (chunk,) = build(spec)
    model, optimizer = prepare(spec, chunk)
    fused = spec.dp > 1
    if fused:
        as_fused(optimizer, after=False)
    train(spec, model, optimizer, range(STEPS))
    if fused:
        as_fused(optimizer, after=True)
    save(spec, out / "ckpt", model, optimizer)
    truth = gather(spec, model, optimizer)
    if rank == 0:
        torch.save(truth, out / "truth.pt")
        (out / "info.json").write_text(json.dumps(asdict(spec) | {"world": spec.world}))


def train(spec: MegatronSpec, model: Any, optimizer: Any, steps: range, alike: bool = False) -> list[float]:
    """Train some steps. ``alike``: with the same data on all data-parallel ranks. Return the loss of each."""
    losses = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = run_schedule(spec, [model], step, alike=alike)
        optimizer.step()
        losses.append(sum(float(one["loss"]) for one in batches) / len(batches))
    return losses


def save(spec: MegatronSpec, root: Path, model: Any, optimizer: Any) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as of
    from megatron.core.utils import unwrap_model
    from torch.distributed import checkpoint as dcp

    folder = root / f"iter_{STEPS:07d}"
    (inner,) = unwrap_model([model])
    args = args_of(spec)
    args.ckpt_format = "fsdp_dtensor"
    weights = inner.state_dict_for_save_checkpoint()  # (it puts the sharded parameters into the model)
    optim = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    of.handle_fp8_extra_state_case(weights)
    if spec.gated:
        weights, optim = of.handle_swiglu_in_state_dict(inner, weights, optim)
    if spec.experts:
        weights = of.handle_experts_in_state_dict(weights, spec.experts)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "model": weights,
        "optimizer": optim,
        "rng_state": {"(0, 0)": rng_state()},
        "num_floating_point_operations_so_far": 1e9,
    }
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def gather(spec: MegatronSpec, model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """All states under the names of the model on one rank (on rank 0; {} on the others), put together from what
    Megatron-FSDP says of each sharded parameter: which flat interval it is of this tensor-parallel rank's part."""
    from megatron.core import mpu

    bare = unwrap(model)
    modules = dict(bare.named_modules())
    states = optimizer.optimizer.state
    mine = {}
    for name, p in bare.named_parameters():
        expert = ".experts." in name
        rank, size = mpu.get_tensor_model_parallel_rank(), spec.tp
        if expert:
            rank, size = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
        span = (p.megatron_fsdp_slice.start, p.megatron_fsdp_slice.stop)
        held = {"weights": p, **states[p]}
        values = {state: getattr(t, "_local_tensor", t).detach().clone().reshape(-1) for state, t in held.items()}
        if "step" in values:
            values["step"] = values["step"].reshape(())
        cut = bool(getattr(p, "tensor_model_parallel", False)) and size > 1
        dim = p.partition_dim if cut else None
        mine[_whole_name(name, modules)] = {
            "values": values,
            "spans": {state: span for state in values if state != "step"},
            "shape": tuple(n // size if d == dim else n for d, n in enumerate(p.shape)),
            "rank": rank,
            "cut": (dim, p.partition_stride) if cut else None,
            "dp": mpu.get_data_parallel_rank(),
            "stack": None,
        }
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return _merge(everyone) if everyone is not None else {}


def main(folder: Path, only: list[str]) -> None:
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import megatron_fsdp as named

    from .megatron_cpu import patch
    from .megatron_ranks import run_ranks

    patch()
    on_cpu()
    worlds = {name: spec.world for name, spec in CASES.items() if name in only or not only}
    for name in worlds:
        (folder / name).mkdir()
    run_ranks(worlds, lambda name, rank: named._case(named.CASES[name], rank, folder / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
