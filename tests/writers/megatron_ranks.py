"""The ranks of megatron-core's writers: processes that are forked once for each number of ranks, without a GPU."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(worlds: Mapping[str, int], case: Callable[[str, int], None]) -> None:
    """Run ``case(name, rank)`` on the ranks of every name. ``worlds``: name -> number of ranks.

    `megatron_cpu.patch` was called before. ``case`` must not be of the module ``__main__``: ranks pickle its classes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for world in sorted(set(worlds.values())):
            names = [name for name, size in worlds.items() if size == world]
            args = (world, Path(scratch) / f"store{world}", names, case)
            torch.multiprocessing.start_processes(_rank, args=args, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]


def _rank(rank: int, world: int, rendezvous: Path, names: list[str], case: Callable[[str, int], None]) -> None:
    from .megatron_cpu import OnCPU

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    for name in names:
        if rank == 0:
            print(f"=== {name}", flush=True)
        with warnings.catch_warnings(), OnCPU():
            warnings.simplefilter("ignore")
            case(name, rank)
        dist.barrier()
    dist.destroy_process_group()
