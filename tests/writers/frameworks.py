"""Checkpoints of further training frameworks, written by their own functions on the CPU (nanotron, torchsnapshot).

``python -m tests.writers.frameworks FOLDER`` writes every case of :data:`CASES`, as tests/writers/trainers.py does. The
truth is what the processes held when they saved, put together here by hand.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from . import Case
from .trainers import Spec, States, _bare, held

__all__ = ["CASES", "can_write", "load_case", "write_all"]

CASES: dict[str, Spec] = {}


def case(needs: str, world: int = 1, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    """``needs``: the packages that write it."""

    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, tuple(needs.split()), info)
        return write

    return add


def can_write(spec: Spec) -> bool:
    return all(importlib.util.find_spec(package) for package in spec.needs)


# -- nanotron


def _type(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"recoverable_errors": ()})


_UNUSED = (
    *(f"nanotron.config{end}" for end in ("", ".config", ".utils_config")),
    "nanotron.models",
    "nanotron.parallel.pipeline_parallel.engine",
)


def _without(*names: str) -> None:
    """Replace modules that no function used here needs: those of nanotron 0.4 import each other, and OLMo-core's are
    for remote files."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _type  # type: ignore[method-assign]
        sys.modules.setdefault(name, module)


def _nanotron(
    out: Path, tp: int, pp: int, dp: int, zero: bool, fp32: bool = True, steps: tuple[int, ...] = (2,)
) -> States:
    """A stage of each pipeline rank has a fused column-parallel layer, a row-parallel one and a norm."""
    _without(*_UNUSED)
    import nanotron.distributed as ndist
    from nanotron import optim
    from nanotron.optim.gradient_accumulator import FP32GradientAccumulator
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.parallel.tensor_parallel.enum import TensorParallelLinearMode
    from nanotron.parallel.tensor_parallel.nn import TensorParallelColumnLinear, TensorParallelRowLinear
    from nanotron.parallel.tied_parameters import create_pg_for_tied_weights, tie_parameters
    from nanotron.serialize.metadata import save_meta
    from nanotron.serialize.optimizer import save_lr_scheduler, save_optimizer
    from nanotron.serialize.weights import save_weights

    ParallelContext.set_device = lambda self: None
    torch_zeros, torch_empty = torch.zeros, torch.empty
    torch.zeros = lambda *size, **how: torch_zeros(*size, **how | {"device": "cpu"})  # theirs are on "cuda"
    torch.empty = lambda *size, **how: torch_empty(*size, **how | {"device": "cpu"})
    context = ParallelContext(tp, pp, dp)
    mode = TensorParallelLinearMode.ALL_REDUCE
    chunks = (8, 4, 4)  # q, k, v
    stage, rank = ndist.get_rank(context.pp_pg), ndist.get_rank(context.tp_pg)
    torch.manual_seed(7)
    whole: dict[str, Tensor] = {}
    for n in range(pp):
        whole |= {
            f"decoder.{n}.qkv_proj.weight": torch.randn(16, 6),
            f"decoder.{n}.up.weight": torch.randn(8, 6),
            f"decoder.{n}.up.bias": torch.randn(8),
            f"decoder.{n}.down.weight": torch.randn(6, 8),
            f"decoder.{n}.norm.weight": torch.randn(5),
        }
    dtype = torch.bfloat16 if fp32 else torch.float32
    whole = {name: t.to(dtype) for name, t in whole.items()}
    block = nn.Module()
    block.qkv_proj = TensorParallelColumnLinear(
        6, 16, context.tp_pg, mode, False, dtype=dtype, contiguous_chunks=chunks
    )
    block.up = TensorParallelColumnLinear(6, 8, context.tp_pg, mode, True, dtype=dtype)
    block.down = TensorParallelRowLinear(8, 6, context.tp_pg, mode, False, dtype=dtype)
    block.norm = nn.Module()
    block.norm.weight = NanotronParameter(torch.zeros(5, dtype=dtype))
    model = nn.Module()
    model.decoder = nn.ModuleDict({str(stage): block})

    def cut(name: str, t: Tensor, r: int) -> Tensor:
        if "qkv" in name:
            return torch.cat([c.chunk(tp)[r] for c in t.split(chunks)])
        if ".up." in name:
            return t.chunk(tp)[r]
        return t.chunk(tp, 1)[r] if ".down." in name else t

    def put(name: str, shards: list[Tensor]) -> Tensor:
        if "qkv" in name:
            parts = [s.split([c // tp for c in chunks]) for s in shards]
            return torch.cat([torch.cat(row) for row in zip(*parts, strict=True)])
        if ".up." in name:
            return torch.cat(shards)
        return torch.cat(shards, 1) if ".down." in name else shards[0]

    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(cut(name, whole[name], rank))
    ranks = tuple(dist.get_process_group_ranks(context.tp_pg))
    names = [name for name, p in model.named_parameters() if not p.is_sharded]
    for name in names:
        tie_parameters(model, [(name, ranks)], context, None)
    create_pg_for_tied_weights(model, context)
    named = list(model.named_parameters())

    def adam(groups: Any) -> Any:
        return optim.NamedOptimizer(groups, lambda params: torch.optim.AdamW(params, lr=0.05))

    def accumulating(groups: Any) -> Any:
        return optim.OptimizerFromGradientAccumulator(lambda named: FP32GradientAccumulator(named), groups, adam)

    build = accumulating if fp32 else adam
    if zero:
        optimizer = optim.ZeroDistributedOptimizer(named, build, context.dp_pg)
    else:
        optimizer = build(named)
    base = optimizer.get_base_optimizer()
    names_of = optimizer.id_to_name
    kept: dict[int, States] = {}
    for step in range(1, max(steps) + 1):
        torch.manual_seed(step)
        grads = {name: torch.randn(t.shape) for name, t in whole.items()}
        for name, p in named:
            p.grad = cut(name, grads[name], rank).to(p.dtype)
        for group in base.param_groups if fp32 else ():
            for p in group["params"]:
                name = names_of[id(p)]
                g = cut(name, grads[name], rank).to(p.dtype)
                if zero:
                    lo, hi = optimizer.param_name_to_dp_rank_offsets[name][ndist.get_rank(context.dp_pg)]
                    g = g.reshape(-1)[int(lo) : int(hi)]
                p.grad = g.clone()
        base.step()
        if step not in steps:
            continue
        root = out / str(step)
        root.mkdir(parents=True, exist_ok=True)
        save_weights(model, context, root)
        save_optimizer(optimizer, context, root)
        schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda s: 1.0)
        save_lr_scheduler(schedule, context, root)
        save_meta(context, root, {"last_train_step": step, "consumed_train_samples": 8 * step})
        state = {names_of[id(p)]: {k: v.detach().clone() for k, v in s.items()} for p, s in base.state.items()}
        if fp32:
            for name, elt in optimizer.state_dict()["gradient_accumulator"].items():
                state[name]["fp32"] = elt.detach().clone()
        everyone: list[Any] = [None] * dist.get_world_size()
        weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
        dist.all_gather_object(everyone, (stage, rank, ndist.get_rank(context.dp_pg), weights, state))
        found: States = {"weights": {}}
        for n in range(pp):
            at = {(t, d): (w, s) for p, t, d, w, s in everyone if p == n}
            for name in at[0, 0][0]:
                found["weights"][name] = put(name, [at[t, 0][0][name] for t in range(tp)])
                for key in next(iter(at[0, 0][1].values())):
                    if key == "step":
                        found.setdefault(key, {})[name] = at[0, 0][1][name][key]
                        continue
                    shards = []
                    for t in range(tp):
                        flat = [at[t, d][1][name][key] for d in range(dp if zero else 1) if name in at[t, d][1]]
                        shards.append(torch.cat(flat).view(at[t, 0][0][name].shape) if zero else flat[0])
                    found.setdefault(key, {})[name] = put(name, shards)
        kept[step] = found
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "latest.txt").write_text(str(max(steps)))
        torch.save(kept[min(steps)], out.parent / "older.pt")
    return kept[max(steps)]


@case("nanotron dacite", 4, format="nanotron")
def nanotron_tp2_zero(out: Path) -> States:
    return _nanotron(out, 2, 1, 2, True, steps=(1, 2))


@case("nanotron dacite", 4, format="nanotron", archives=False)
def nanotron_tp2_pp2(out: Path) -> States:
    return _nanotron(out, 2, 2, 1, False)


@case("nanotron dacite", 3, format="nanotron")
def nanotron_dp3_zero_fp32(out: Path) -> States:
    return _nanotron(out, 1, 1, 3, True, fp32=False)


# -- torchsnapshot


class _State(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def _snapshot(out: Path, **how: Any) -> States:
    from torchsnapshot import Snapshot, StateDict, knobs

    from .dcp_contents import TinyNet, adam, train

    torch.manual_seed(5)
    model = TinyNet()
    optimizer = adam(model)
    for _ in range(2):
        train(model, optimizer)
    state = {
        "model": model,
        "optim": optimizer,
        "progress": StateDict(step=2, lr=0.5, name="a/b%", done=True, seen=(3, 4)),
    }
    batching = how.pop("batching", False)
    small = how.pop("chunk", None)
    with contextlib.ExitStack() as stack:
        if not batching:
            stack.enter_context(knobs.override_is_batching_disabled(True))
        if small:
            stack.enter_context(knobs.override_max_chunk_size_bytes(small))
        Snapshot.take(str(out), state, **how)
    return held(model.state_dict(), model.named_parameters(), optimizer)


@case("torchsnapshot", 2, format="torchsnapshot")
def snapshot_replicated(out: Path) -> States:
    return _snapshot(out, replicated=["**"])


@case("torchsnapshot", 1, format="torchsnapshot")
def snapshot_batched_chunks(out: Path) -> States:
    return _snapshot(out, batching=True, chunk=64)


@case("torchsnapshot", 2, format="torchsnapshot")
def snapshot_sharded(out: Path) -> States:
    """A ShardedTensor over two ranks, complex numbers, and values that differ between the ranks."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.api import Shard
    from torchsnapshot import Snapshot

    whole = torch.arange(42.0).view(7, 6)
    rank = dist.get_rank()
    rows = slice(0, 4) if rank == 0 else slice(4, 7)
    shard = Shard.from_tensor_and_offsets(whole[rows].clone(), [rows.start, 0], rank)
    tensor = init_from_local_shards([shard], 7, 6)
    turned = torch.arange(6.0).to(torch.complex64).view(2, 3) * 1j
    half = torch.arange(6, dtype=torch.bfloat16)  # (of an odd number, 0.1.0 loses the last one)
    state = {"table": tensor, "turned": turned, "half": half, "one": torch.tensor(2.5)}
    Snapshot.take(str(out), {"model": _State(state), "rank": _State(number=rank)})
    return {"weights": {**state, "table": whole}}


# -- OLMo-core


@case("olmo_core", 2, format="olmo-core")
def olmo_core(out: Path) -> States:
    """The trainer's checkpoints of two steps; the model is FSDP2's."""
    _bare("olmo_core.train")
    _without(
        "cached_path",
        "cached_path.schemes",
        "boto3",
        "botocore",
        "botocore.exceptions",
        "botocore.config",
        "google.api_core",
    )
    _without("google", "google.api_core.exceptions", "google.auth", "google.cloud", "google.cloud.storage", "torchao")
    from olmo_core.train.checkpoint import Checkpointer
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from .dcp_contents import TinyNet, adam, train
    from .torch_dcp import line
    from .trainers import gathered

    model = TinyNet()
    fully_shard(model, mesh=line(2))
    optimizer = adam(model)
    kept: States = {}
    for step in (1, 2):
        train(model, optimizer)
        weights, optim = get_state_dict(model, optimizer)
        module: Any = types.SimpleNamespace(state_dict_to_save=lambda w=weights, o=optim: {"model": w, "optim": o})
        checkpointer = Checkpointer(work_dir=out.parent / "work")
        state = {"global_step": step, "rank": dist.get_rank(), "epoch": 1, "rng": {"cpu": torch.get_rng_state()}}
        checkpointer.save(out / f"step{step}", module, state)
        if dist.get_rank() == 0:
            checkpointer.write_file(out / f"step{step}", "config.json", json.dumps({"model": {"d_model": 6}}))
        kept = gathered(model, optimizer)
        if step == 1 and dist.get_rank() == 0:
            torch.save(kept, out.parent / "older.pt")
    return kept


# -- running them


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    return run("frameworks", folder)


def run(module: str, folder: Path) -> Path:
    """Write all cases of a module of writers, in a child process of their own."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.writers.{module}", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"the writer failed with code {done.returncode}; its output:\n{done.stdout[-8000:]}")
    return folder


def load_case(folder: Path, name: str) -> Case:
    truth = torch.load(folder / name / "truth.pt")
    info = {"tied": {}, "archives": True, **json.loads((folder / name / "info.json").read_text())}
    return Case(folder / name / "ckpt" / info.get("file", ""), truth, info)


def _rank(rank: int, module: str, name: str, folder: Path, rendezvous: Path) -> None:
    spec = _cases(module)[name]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(spec.world), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=spec.world, timeout=wait)
    out = folder / name / "ckpt"
    if rank == 0:
        out.parent.mkdir(parents=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = spec.write(out)
    if rank == 0:
        torch.save(truth, folder / name / "truth.pt")
        (folder / name / "info.json").write_text(json.dumps(dict(spec.info)))
    dist.barrier()


def _cases(module: str) -> dict[str, Spec]:
    cases: dict[str, Spec] = importlib.import_module(f"tests.writers.{module}").CASES
    return cases


def main(module: str, folder: Path, names: list[str]) -> None:
    """Write the cases of a module of writers that can be written, or those that are named."""
    from tests.writers import frameworks as named  # what a rank pickles must not be a class of __main__

    failed = []
    cases = _cases(module)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or [name for name, spec in cases.items() if can_write(spec)]:
            print(f"=== {name}", flush=True)
            try:
                mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
                    named._rank, (module, name, folder, Path(scratch) / name), cases[name].world, start_method="fork"
                )
            except Exception:
                traceback.print_exc()
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main("frameworks", Path(sys.argv[1]), sys.argv[2:])
