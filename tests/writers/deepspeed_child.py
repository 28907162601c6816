"""The process that trains with DeepSpeed, saves, and writes down what its ranks hold (``python -m``, with a job file).

DeepSpeed is imported once, then every case gets freshly forked ranks: its module-level state (process groups, the
communication backend) starts clean each time.  Two things of DeepSpeed are patched, and neither touches what it writes:

* its shared-memory all-reduce, which would be compiled at first use and leaves 66 MB per rank in /dev/shm, is off;
  gloo reduces instead;
* on CPUs without native fp16 its check "Type fp16 is not supported on your device" is answered yes: torch computes fp16
  on any CPU, only slowly.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator

from .deepspeed_launch import Spec

# What DeepSpeed would import at the first initialize, in every fork: seconds' worth of torch.compile, above all.
_LATE = (
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "numpy.ctypeslib",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def run_rank(rank: int, out: Path, spec: Spec, store: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.world)}
    torch.set_num_threads(1)
    # (not the attribute deepspeed.comm.torch, which is torch itself)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        dist_backend="gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{store}",  # needs no free port, so test processes cannot race for one
        rank=rank,
        world_size=spec.world,
        timeout=timedelta(seconds=120),
    )
    _module(spec.writer).write(spec, rank, out)
    dist.barrier()
    dist.destroy_process_group()


def run_tool(_: int, out: Path, tool: str) -> None:
    torch.set_num_threads(1)
    getattr(_module("deepspeed_tools"), tool)(out)


def _has(name: str) -> bool:
    """Whether this version of DeepSpeed has the module."""
    return (Path(deepspeed.__file__).parent.joinpath(*name.split(".")[1:])).with_suffix(".py").exists()


def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)


def main(job: Path) -> None:
    start = time.monotonic()
    for name in _LATE:
        if not name.startswith("deepspeed.") or _has(name):
            importlib.import_module(name)
    out_dir, specs, tools, scratch = pickle.loads(job.read_bytes())
    for writer in {spec.writer for spec in specs.values()}:
        _module(writer)
    if tools:
        _module("deepspeed_tools")
    gc.freeze()  # DeepSpeed collects garbage all the time; the forks need not look through what was imported
    for number, (name, spec) in enumerate(specs.items()):
        print(f"=== {name} after {time.monotonic() - start:.1f} s: {spec}", flush=True)
        _fork(run_rank, (out_dir / name, spec, scratch / f"store{number}"), spec.world)
        for tool in tools.get(name, ()):
            _fork(run_tool, (out_dir / name, tool), 1)


def _fork(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    mp.start_processes(function, args=args, nprocs=count, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
