"""Folders of rank files of torch.save, written on gloo ranks; the truth is what these gather.

verl cannot be installed beside what the other tests need, so what its ``FSDPCheckpointManager.save_checkpoint`` calls
is called here, with the arguments that it gives (verl/utils/checkpoint/fsdp_checkpoint_manager.py). accelerate's own
functions write its layouts.

``python -m tests.writers.rank_files FOLDER`` writes every case of :data:`CASES`, as torch_dcp.py does.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from . import Case, torch_dcp
from .dcp_contents import Block, TinyNet, adam, train
from .torch_dcp import Spec, States, full, line, sharded, states_of, truth_of

__all__ = ["CASES", "load_case", "write_all"]

CASES: dict[str, Spec] = {}


def case(world: int, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, {"archives": False, **info})
        return write

    return add


# -- verl


def save_verl(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What `FSDPCheckpointManager.save_checkpoint` writes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out.mkdir(parents=True, exist_ok=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with _sharded(model):
        torch.save(model.state_dict(), out / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), out / f"optim_world_size_{world}_rank_{rank}.pt")
        rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        extra = {"lr_scheduler": schedule.state_dict(), "rng": rng}
        torch.save(extra, out / f"extra_state_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        version = 1 if isinstance(model, FullyShardedDataParallel) else 2
        (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world}))
        (out / "huggingface").mkdir(exist_ok=True)
        (out / "huggingface" / "config.json").write_text('{"model_type": "tiny", "architectures": ["TinyNet"]}')
    dist.barrier()


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    """verl/utils/fsdp_utils.py `get_fsdp_state_ctx`."""
    if not isinstance(model, FullyShardedDataParallel):
        yield
        return
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    ):
        yield


def fsdp1(original: bool, mesh: DeviceMesh | None = None) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    model = FullyShardedDataParallel(
        TinyNet(),
        use_orig_params=original,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    )
    optimizer = adam(model)
    train(model, optimizer)
    return model, optimizer


def truth_of_fsdp1(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> States:
    with _sharded(model):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return states_of(full(model.state_dict()), states)


@case(1, format="rank-files", dp=1)
def verl_one(out: Path) -> States:
    """FSDP of one rank shards nothing: plain tensors."""
    model, optimizer = fsdp1(True, line(1))
    save_verl(out, model, optimizer)
    return truth_of_fsdp1(model, optimizer)


@case(1, format="fsdp-dtensor", dp=1)
def verl_fsdp2_one(out: Path) -> States:
    model, optimizer = sharded(line(1))
    save_verl(out, model, optimizer)
    return truth_of(model, optimizer)


@case(2, format="fsdp-dtensor", dp=2)
def verl_fsdp1_flat(out: Path) -> States:
    """The optimizer's states are flat parameters."""
    model, optimizer = fsdp1(False, line(2))
    save_verl(out, model, optimizer)
    return truth_of_fsdp1(model, optimizer)


@case(2, format="fsdp-dtensor", dp=2)
def verl_fsdp1_slices(out: Path) -> States:
    """The optimizer's states are slices of parameters."""
    model, optimizer = fsdp1(True, line(2))
    save_verl(out, model, optimizer)
    return truth_of_fsdp1(model, optimizer)


@case(3, format="fsdp-dtensor", dp=3)
def verl_fsdp2(out: Path) -> States:
    model, optimizer = sharded(line(3), hidden=5, inner=4, vocab=11)
    save_verl(out, model, optimizer)
    return truth_of(model, optimizer)


@case(4, format="fsdp-dtensor", dp=4)
def verl_hsdp(out: Path) -> States:
    model, optimizer = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")))
    save_verl(out, model, optimizer)
    return truth_of(model, optimizer)


# -- scripts


@case(2, format="fsdp-dtensor", dp=2)
def whole_states(out: Path) -> States:
    """One file a rank for everything, states by name."""
    model, optimizer = sharded(line(2))
    weights, optim = get_state_dict(model, optimizer)
    out.mkdir(parents=True, exist_ok=True)
    torch.save({"model": weights, "optimizer": optim, "step": 12}, out / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    return truth_of(model, optimizer)


@case(4, format="fsdp-dtensor", dp=2, tp=2)
def tensor_parallel(out: Path) -> States:
    """TP x FSDP2: shards of a shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def plan(model: TinyNet) -> None:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    model, optimizer = sharded(mesh["dp"], plan, hidden=8, inner=12)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / f"model_rank{dist.get_rank():02d}.bin")
    torch.save(optimizer.state_dict(), out / f"optimizer_rank{dist.get_rank():02d}.bin")
    dist.barrier()
    return truth_of(model, optimizer)


@case(4, format="fsdp-dtensor", dp=2, tp=2)
def tensor_parallel_uneven(out: Path) -> States:
    """Several runs of a dimension on one rank. The truth is the model before it was cut: torch cannot gather these."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = TinyNet(hidden=6, inner=7)
    whole = full(model.state_dict())
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    out.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "step": 3}, out / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    return {"weights": whole}


@case(4, format="fsdp-dtensor", dp=2, tp=2, tied={"tied": "both"})
def meshes(out: Path) -> States:
    """Meshes and placements of all kinds; views of larger storages; ranks outside of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "ep_fsdp"))
    torch.manual_seed(9)
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]])
    tensors = {
        "uneven": distribute_tensor(torch.randn(7, 5), mesh, [Shard(0), Shard(0)]),
        "strided": distribute_tensor(torch.randn(8, 3), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "runs": distribute_tensor(torch.randn(12, 3), mesh, [_StridedShard(0, split_factor=3), Replicate()]),
        "both": distribute_tensor(torch.randn(5, 7).bfloat16(), mesh, [Shard(1), Shard(0)]),
        "one": distribute_tensor(torch.randn(1), mesh, [Shard(0), Replicate()]),
        "same": distribute_tensor(torch.randn(3, 3), mesh, [Replicate(), Replicate()]),
        "scalar": distribute_tensor(torch.tensor(2.5), mesh, [Replicate(), Replicate()]),
        "empty": distribute_tensor(torch.zeros(0, 7), mesh, [Shard(0), Shard(1)]),
        "sliced": distribute_tensor(torch.randn(6, 5), mesh["tp"], [Shard(1)]),
        "flattened": distribute_tensor(torch.randn(6, 5), mesh["dp", "tp"]._flatten("all"), [Shard(0)]),
        "experts": distribute_tensor(torch.randn(3, 5, 7), experts, [Shard(0), Shard(1)]),
        "columns": distribute_tensor(torch.randn(9, 2), columns, [Shard(0), Shard(1)]),
        "plain": torch.arange(6.0),
    }
    tensors["transposed"] = tensors["uneven"].t()
    tensors["tied"] = tensors["both"]
    out.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    return {"weights": full(tensors)}


@case(2, format="fsdp-dtensor", dp=2)
def partial(out: Path) -> States:
    mesh = line(2)
    summand = DTensor.from_local(torch.full((3,), float(dist.get_rank() + 1)), mesh, [Partial()])
    tensors = {"w": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "sum": summand}
    out.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    return {"weights": full({"w": tensors["w"]})}


# -- accelerate


def _accelerate(out: Path, original: bool, kind: str) -> States:
    from accelerate.utils import fsdp_utils

    fsdp_utils.logger = logging.getLogger(__name__)  # its own wants a state of accelerate
    model, optimizer = fsdp1(original)
    configs = {
        "SHARDED": (ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)),
        "LOCAL": (LocalStateDictConfig(), LocalOptimStateDictConfig()),
    }[kind]
    plugin = SimpleNamespace(
        fsdp_version=1,
        state_dict_type=StateDictType[f"{kind}_STATE_DICT"],
        state_dict_config=configs[0],
        optim_state_dict_config=configs[1],
    )
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(out), use_dcp=False)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out), use_dcp=kind == "LOCAL")
    dist.barrier()
    return truth_of_fsdp1(model, optimizer)


@case(2, format="fsdp-sharded", dp=2)
def accelerate_sharded(out: Path) -> States:
    return _accelerate(out, False, "SHARDED")


@case(2, format="fsdp-local", dp=2, archives=True)
def accelerate_local(out: Path) -> States:
    return _accelerate(out, False, "LOCAL")


@case(3, format="fsdp-local", dp=3, archives=True)
def accelerate_local_original(out: Path) -> States:
    return _accelerate(out, True, "LOCAL")


# -- running them


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    return torch_dcp.write_all(folder, "rank_files")


def load_case(folder: Path, name: str) -> Case:
    return torch_dcp.load_case(folder, name)


def main(folder: Path) -> None:
    from tests.writers import rank_files as named

    torch_dcp.run(folder, named.CASES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
