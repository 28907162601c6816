"""Checkpoints of torch.distributed.checkpoint, written by torch itself on gloo ranks; the truth is what these gather.

``python -m tests.writers.torch_dcp FOLDER`` writes every case of :data:`CASES` to ``FOLDER/NAME/ckpt``, and what the
ranks held to ``FOLDER/NAME/truth.pt``. One set of forked ranks serves all cases of the same size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from . import Case
from .dcp_contents import Reversed, TinyNet, Zstd, adam, odd_objects, odd_tensors, train

__all__ = ["CASES", "load_case", "write_all"]

States = dict[str, dict[str, Tensor]]


# -- the cases: each saves to a folder and returns what must be read, by state


class Spec(NamedTuple):
    world: int
    write: Callable[[Path], States]
    info: Mapping[str, Any]


CASES: dict[str, Spec] = {}


def case(world: int, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, info)
        return write

    return add


def full(value: Any) -> Any:
    """A state dict with what ranks gather in place of shards."""
    if isinstance(value, Mapping):
        return {k: full(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        return full(value.full_tensor())
    if isinstance(value, ShardedTensor):
        whole = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, whole)
        return whole
    return value.detach().clone() if isinstance(value, Tensor) else value


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """Weights and states by parameter name, gathered by torch (on rank 0)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optim = get_state_dict(model, optimizer, options=options)
    return states_of(full(weights), optim.get("state", {}))  # only rank 0 gets them


def states_of(weights: dict[str, Tensor], slots: Mapping[Any, Any]) -> States:
    found: States = {"weights": weights}
    for name, states in slots.items():
        for state, value in states.items():
            found.setdefault(state, {})[str(name)] = full(value)
    return found


def sharded(mesh: Any, plan: Callable[[TinyNet], None] | None = None, **sizes: int) -> tuple[TinyNet, Any]:
    model = TinyNet(**sizes)
    if plan is not None:
        plan(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model)
    train(model, optimizer)
    return model, optimizer


def save(
    out: Path, model: nn.Module, optimizer: Any, names: tuple[str, str] = ("model", "optim"), **how: Any
) -> States:
    options = how.pop("options", None)
    weights, optim = get_state_dict(model, optimizer, options=options)
    state = {names[0]: weights, names[1]: optim, "step": 12}
    if "wrap" in how:
        state = {how.pop("wrap"): state}
    writer = how.pop("writer", None)
    if how.pop("background", False):
        dcp.async_save(state, checkpoint_id=out).result()
    elif writer is not None:
        dcp.save(state, storage_writer=writer(out), **how)
    else:
        dcp.save(state, checkpoint_id=out, **how)
    return truth_of(model, optimizer)


def line(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


@case(1)
def odd(out: Path) -> States:
    extra = {
        "list": [torch.arange(3), 5, {"x": torch.ones(2)}],
        "pair": (torch.arange(4.0), 7),
        "rng": torch.get_rng_state(),
    }
    dcp.save({"model": odd_tensors(), **odd_objects(), **extra, 3: torch.zeros(2)}, checkpoint_id=out)
    return {"weights": odd_tensors()}


@case(1)
def flat(out: Path) -> States:
    weights = full(TinyNet().state_dict())
    dcp.save({f"model.{name}": tensor for name, tensor in weights.items()}, checkpoint_id=out)
    return {"weights": {f"model.{name}": tensor for name, tensor in weights.items()}}


@case(1)
def numbered(out: Path) -> States:
    model = TinyNet(hidden=4, inner=3, vocab=9)
    optimizer = adam(model)
    train(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=out)
    return truth_of(model, optimizer)


@case(1)
def not_flattened(out: Path) -> States:
    model = TinyNet(hidden=4, inner=3, vocab=9)
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=out, planner=DefaultSavePlanner(flatten_state_dict=False))
    return truth_of(model, optimizer)


@case(1)
def zstd(out: Path) -> States:
    big = {"model": {**odd_tensors(), "large": torch.arange(300_000.0).view(600, 500)}, "epoch": 3}
    dcp.save(big, storage_writer=dcp.FileSystemWriter(out, _extensions=[Zstd()]))
    return {"weights": big["model"]}  # type: ignore[dict-item]


@case(1)
def unknown_codec(out: Path) -> States:
    state = {"model": {"w": torch.arange(4.0)}, "epoch": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(out, _extensions=[Reversed()]))
    return {"weights": {"w": torch.arange(4.0)}}


@case(2)
def fsdp2(out: Path) -> States:
    return save(out, *sharded(line(2)))


@case(2)
def threads(out: Path) -> States:
    return save(out, *sharded(line(2)), writer=lambda o: dcp.FileSystemWriter(o, thread_count=3))


@case(2)
def file_per_item(out: Path) -> States:
    return save(out, *sharded(line(2)), writer=lambda o: dcp.FileSystemWriter(o, single_file_per_rank=False))


@case(2)
def background(out: Path) -> States:
    return save(out, *sharded(line(2)), background=True)


@case(2)
def no_collectives(out: Path) -> States:
    return save(out, *sharded(line(2)), use_collectives=False)


@case(2)
def flat_optimizer(out: Path) -> States:
    return save(out, *sharded(line(2)), options=StateDictOptions(flatten_optimizer_state_dict=True))


@case(2)
def wrapped(out: Path) -> States:
    return save(out, *sharded(line(2)), wrap="app")


@case(2)
def fsdp1(out: Path) -> States:
    wrapper = FullyShardedDataParallel(TinyNet(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adam(wrapper)
    train(wrapper, optimizer)
    weights, optim = get_state_dict(wrapper, optimizer)  # (asking it for full tensors crashes on CPUs)
    dcp.save({"model": weights, "optimizer": optim}, checkpoint_id=out)
    return states_of(full(weights), optim["state"])


def _plain_and_sharded(world: int) -> dict[str, Any]:
    mesh = line(world)
    torch.manual_seed(9)
    return {
        "even": distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)]),
        "uneven": distribute_tensor(torch.randn(7, 5), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(4, 9).bfloat16(), mesh, [Shard(1)]),
        "single": distribute_tensor(torch.randn(1), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.randn(3, 3), mesh, [Replicate()]),
        "plain": torch.arange(6.0),
        "scalar": torch.tensor(0.5),
    }


@case(2, format="dcp-safetensors")
def as_safetensors(out: Path) -> States:
    tensors = _plain_and_sharded(2)
    writer = dcp.FileSystemWriter(out, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": tensors, "epoch": 3}, storage_writer=writer)
    return {"weights": full(tensors)}


@case(3, format="huggingface-dcp")
def hub_ranks(out: Path) -> States:
    tensors = _plain_and_sharded(3)
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(out), save_distributed=True))
    return {"weights": full(tensors)}


@case(3, format="huggingface-dcp")
def hub_mapped(out: Path) -> States:
    tensors = _plain_and_sharded(3)
    mapping = {name: 1 + n % 2 for n, name in enumerate(tensors)}
    writer = dcp.HuggingFaceStorageWriter(str(out), fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(tensors, storage_writer=writer)
    return {"weights": full(tensors)}


@case(2, format="huggingface")
def hub_consolidated(out: Path) -> States:
    tensors = _plain_and_sharded(2)
    writer = dcp.HuggingFaceStorageWriter(str(out), save_distributed=True, enable_consolidation=True)
    dcp.save(tensors, storage_writer=writer)
    return {"weights": full(tensors)}


@case(1, format="huggingface")
def hub_single(out: Path) -> States:
    tensors = {name: t.clone() for name, t in TinyNet().state_dict().items()}
    mapping = {name: 1 + n % 2 for n, name in enumerate(tensors)}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(out), fqn_to_index_mapping=mapping))
    return {"weights": tensors}


@case(3)
def fsdp2_uneven(out: Path) -> States:
    return save(out, *sharded(line(3), hidden=5, inner=4, vocab=11))


@case(4)
def hsdp(out: Path) -> States:
    return save(out, *sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


@case(4)
def tensor_parallel(out: Path) -> States:
    """TP x FSDP2: shards of a shard, whose chunks are in no order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def plan(model: TinyNet) -> None:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return save(out, *sharded(mesh["dp"], plan, hidden=8, inner=12))


@case(4)
def experts(out: Path) -> States:
    """Experts over ("ep", "ep_fsdp"), the rest over all ranks; neither divides its dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "ep_fsdp"))
    torch.manual_seed(9)
    tensors = {
        "router.weight": distribute_tensor(torch.randn(3, 5), line(4), [Shard(0)]),
        "experts.w1": distribute_tensor(torch.randn(3, 5, 7), mesh, [Shard(0), Shard(1)]),
        "experts.w2": distribute_tensor(torch.randn(5, 7, 5), mesh, [Shard(0), Shard(0)]),
        "experts.b": distribute_tensor(torch.randn(6, 4), mesh, [Shard(0), Replicate()]),
    }
    dcp.save({"model": tensors}, checkpoint_id=out)
    return {"weights": full(tensors)}


# -- running them


def write_all(folder: Path, module: str = "torch_dcp") -> Path:
    """Write all cases (of another writer that is made like this one), in a child process of their own."""
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.{module}", str(folder)],
        env=env,
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
    return Case(folder / name / "ckpt", truth, info)


def _rank(rank: int, world: int, folder: Path, rendezvous: Path, cases: Mapping[str, Spec]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    for name, spec in cases.items():
        if spec.world != world:
            continue
        out = folder / name / "ckpt"
        if rank == 0:
            print(f"=== {name}", flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            truth = spec.write(out)
        if rank == 0:
            torch.save(truth, folder / name / "truth.pt")
            (folder / name / "info.json").write_text(json.dumps(dict(spec.info)))
        dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, cases: Mapping[str, Spec]) -> None:
    """Write the cases on forked ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        for world in sorted({spec.world for spec in cases.values()}):
            args = (world, folder, Path(scratch) / f"store{world}", cases)
            mp.start_processes(_rank, args=args, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]


def main(folder: Path) -> None:
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import torch_dcp as named

    named.run(folder, named.CASES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
