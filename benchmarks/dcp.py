"""Distributed checkpoints: one tensor, against `dcp.load` of the same key; and the whole to safetensors, against
`dcp_to_torch_save` and writing that file again as safetensors.

The checkpoint is of torch itself: 1 GiB in 16 tensors, each cut over two ranks. Cold, both read the same bytes, so what
the disk takes for them is a floor that no reader is below: the row against plain positioned reads says how near it is.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import Row, drop_cache, paired, report, run_fresh, seconds, show_seconds

import lazyckpt

MIB = 1 << 20
RUNS = 5
ROWS, COLUMNS = 4096, 4096  # 64 MiB of float32

_WRITE = f"""
import sys, tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def write(rank, store, out):
    dist.init_process_group("gloo", "file://" + store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    state = {{}}
    for n in range(16):
        state[f"layers.{{n}}.weight"] = distribute_tensor(torch.randn({ROWS}, {COLUMNS}), mesh, [Shard(0)])
    dcp.save({{"model": state, "step": 3}}, checkpoint_id=out)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(write, args=(scratch + "/store", sys.argv[1]), nprocs=2, start_method="fork")
"""
_THEIRS = """
import torch, os
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def convert(source, out):
    os.makedirs(out)
    dcp_to_torch_save(source, out + "/whole.pt")
    whole = torch.load(out + "/whole.pt", mmap=True)
    save_file(whole["model"], out + "/model.safetensors")
"""
_OURS = """
import lazyckpt, torch
def convert(source, out):
    lazyckpt.open(source).to_safetensors(out, max_shard_size=None)
"""


def main(folder: Path) -> list[Row]:
    source = checkpoint(folder)
    rows = [*_one(source), *_row(source), *_convert(source, folder / "converted")]
    report("distributed checkpoints", rows)
    return rows


def checkpoint(folder: Path) -> Path:
    """The checkpoint, written if it is not there yet."""
    source = folder / "dcp-1g"
    if not (source / ".metadata").exists():
        shutil.rmtree(source, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "write_dcp.py"
        script.write_text(_WRITE)
        subprocess.run([sys.executable, script, source], check=True)
    return source


def _load(source: Path) -> torch.Tensor:
    state = {"model.layers.7.weight": torch.empty(ROWS, COLUMNS)}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    return state["model.layers.7.weight"]


def _one(source: Path) -> list[Row]:
    """From opening to the tensor, a new view each time."""
    rows = []

    def ours() -> torch.Tensor:
        return lazyckpt.open(source, cache=False)["layers.7.weight"][...]

    assert torch.equal(ours(), _load(source))
    a, b, ratio = paired(ours, lambda: _load(source))
    rows.append(Row("one 64 MiB tensor of 1 GiB, peer dcp.load", show_seconds(a), show_seconds(b), ratio, 0.5))
    cold: tuple[list[float], ...] = ([], [], [])
    for _ in range(RUNS):
        for do, found in zip((ours, lambda: _load(source), lambda: _plain(source)), cold, strict=True):
            for path in source.iterdir():
                drop_cache(path)
            found.append(seconds(do))
    for what, limit, other in (
        ("the same, files cold", 0.5, cold[1]),
        ("the same, peer plain reads of the same bytes (8 threads, 1 MiB each)", 1.25, cold[2]),
    ):
        a, b = statistics.median(cold[0]), statistics.median(other)
        ratio = statistics.median(x / y for x, y in zip(cold[0], other, strict=True))
        rows.append(Row(what, show_seconds(a), show_seconds(b), ratio, limit))
    return rows


def _plain(source: Path) -> torch.Tensor:
    """64 MiB of the two files, about where the tensor lies, into new memory: what the disk can do."""
    half, step = ROWS * COLUMNS * 2, MIB
    out = torch.empty(2 * half, dtype=torch.uint8)
    files = [os.open(path, os.O_RDONLY) for path in sorted(source.glob("*.distcp"))]
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

    def read(at: int) -> None:
        os.preadv(files[at // half], [out.numpy()[at : at + step].data], 7 * half + at % half)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, 2 * half, step)))
    for file in files:
        os.close(file)
    return out


def _row(source: Path) -> list[Row]:
    """dcp.load has no slices: what a row of one tensor costs there is the tensor."""
    a, b, ratio = paired(
        lambda: lazyckpt.open(source, cache=False)["layers.7.weight"][100:116].clone(),
        lambda: _load(source)[100:116].clone(),
    )
    return [Row("16 rows (256 KiB) of it, peer dcp.load", show_seconds(a), show_seconds(b), ratio, 0.5)]


def _convert(source: Path, out: Path) -> list[Row]:
    """In turn, a new process and a new folder each time; importing is not timed."""
    ours, theirs = [], []
    for _ in range(RUNS):
        for setup, found in ((_OURS, ours), (_THEIRS, theirs)):
            shutil.rmtree(out, ignore_errors=True)
            found.append(run_fresh(setup, f"convert({str(source)!r}, {str(out)!r})"))
    shutil.rmtree(out)
    a, b = (statistics.median(r.seconds for r in found) for found in (ours, theirs))
    ratio = statistics.median(x.seconds / y.seconds for x, y in zip(ours, theirs, strict=True))
    peaks = [max(r.peak for r in found) for found in (ours, theirs)]
    shown = [f"{p / MIB:.0f} MiB" for p in peaks]
    what = "1 GiB to safetensors"
    return [
        Row(f"{what}, peer dcp_to_torch_save and save_file", show_seconds(a), show_seconds(b), ratio, 0.5),
        Row(f"{what}: peak memory / 128 MiB", shown[0], "128 MiB", peaks[0] / (128 * MIB), 1),
        Row(f"{what}: peak memory, peer the same", *shown, peaks[0] / peaks[1], 1),
    ]
