"""Running checks on gloo ranks: ``python -m tests.writers.ranks MODULE FOLDER`` runs the checks of a module.

A module has ``CHECKS``: name -> (number of ranks, function of FOLDER). One set of forked ranks serves all checks of the
same size; what each rank raised is left in ``FOLDER/NAME.RANK.txt`` (empty: nothing), and `verdict` reads it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["Checks", "run_all", "verdict"]

Checks = Mapping[str, tuple[int, Callable[[Path], None]]]


def run_all(module: str, folder: Path) -> Path:
    """Run all checks of a module in a child process of its own."""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.writers.ranks", module, str(folder)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    (folder / "output.txt").write_text(done.stdout)
    return folder


def verdict(folder: Path, name: str, world: int) -> str:
    """What went wrong in a check; empty if nothing did."""
    said = []
    for rank in range(world):
        file = folder / f"{name}.{rank}.txt"
        text = file.read_text() if file.exists() else f"it did not run:\n{(folder / 'output.txt').read_text()[-4000:]}"
        said += [f"rank {rank}: {text}"] if text else []
    return "\n".join(said)


def _rank(rank: int, world: int, module: str, folder: Path, rendezvous: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    checks: Checks = importlib.import_module(module).CHECKS
    for name, (wanted, check) in checks.items():
        if wanted != world:
            continue
        said = ""
        try:
            check(folder)
        except BaseException:  # torch's CheckpointException is one
            said = traceback.format_exc()
        (folder / f"{name}.{rank}.txt").write_text(said)
        if said:  # the others may wait for it in vain
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


def main(module: str, folder: Path) -> None:
    from tests.writers import ranks as named

    checks: Checks = importlib.import_module(module).CHECKS
    with tempfile.TemporaryDirectory() as scratch:
        for world in sorted({world for world, _ in checks.values()}):
            args = (world, module, folder, Path(scratch) / f"store{world}")
            try:
                mp.start_processes(named._rank, args=args, nprocs=world, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]
            except mp.ProcessExitedException as e:
                print(e, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
