"""Opening a checkpoint of 1,024 ranks of a 405B model: time, memory, and what a slice then takes."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Row, peak_growth, report, seconds, show_seconds

import lazyckpt

GIB, MIB = 1 << 30, 1 << 20
NAME = "model.layers.3.mlp.up_proj.weight"
# How each is written; by a child, since DeepSpeed's and transformers' imports are no part of what is measured.
LAYOUTS = {
    "zero3": "write_zero3(folder, frozen=False)",
    "zero3_frozen": "write_zero3(folder, frozen=True)",
    "zero2": "write_zero2(folder)",
}


def write(root: Path, layout: str) -> Path:
    folder = root / f"405b_{layout}"
    if not (folder / "latest").exists():
        shutil.rmtree(folder, ignore_errors=True)
        program = f"from pathlib import Path\nfrom deepspeed_sparse import *\nfolder = Path({str(folder)!r})\n"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, "-c", program + LAYOUTS[layout]], check=True, env=environment)
    return folder


def load_all(folder: Path) -> None:
    """The peer: torch.load of every file, as DeepSpeed's own tools load them, but without reading the tensors.

    The model states of ZeRO-2 it is spared: their 0.8 TB are more than a machine of usual size lets it map."""
    for path in sorted(folder.glob("*/*.pt")):
        if path.stat().st_size < 100 * GIB:
            torch.load(path, mmap=True, map_location="cpu", weights_only=False)


def best(do: Callable[[], Any], runs: int) -> float:
    """Seconds of the quickest run: what disturbs a run of seconds only makes it longer."""
    taken = []
    for _ in range(runs):
        gc.collect()
        taken.append(seconds(do))
    return min(taken)


def opening(folder: Path, layout: str) -> list[Row]:
    import deepspeed  # noqa: F401 - the peer's pickles import it, which is no part of loading them

    torch.load(next(folder.glob("*/*optim_states.pt")), mmap=True, weights_only=False)
    ours = best(lambda: lazyckpt.open(folder, cache=False), 5)
    peer = best(lambda: load_all(folder), 1)
    files = sorted(folder.glob("*/*.pt"))
    size, disk = sum(p.stat().st_size for p in files), sum(p.stat().st_blocks * 512 for p in files)
    what = (
        f"open {layout}, 405B on 1,024 ranks ({len(files):,} files, {size / 1e12:.1f} TB, of which "
        f"{disk / MIB:,.0f} MiB on disk), peer torch.load(mmap=True) of each file"
    )
    # ZeRO-2's pickles all differ, and the peer reads them in C: no more than twice its time, model states left out.
    rows = [Row(what, show_seconds(ours), show_seconds(peer), ours / peer, 2.0 if layout == "zero2" else 0.5)]
    grown = peak_growth("import lazyckpt, torch", f"view = lazyckpt.open({str(folder)!r}, cache=False)")
    what = f"open {layout}: peak memory growth, beside 1 GiB"
    return [*rows, Row(what, f"{grown / MIB:.0f} MiB", "1,024 MiB", grown / GIB, 1.0)]


def using(folder: Path, layout: str) -> list[Row]:
    """Figures without a peer; the limit is what a person takes for instant."""
    view = lazyckpt.open(folder, cache=False)
    rows = []
    for state in ("fp32", "exp_avg"):
        taken = seconds(lambda state=state: view.states[state][NAME][:8])
        rows.append(_instant(f"{layout}: the first {state}[{NAME!r}][:8], 512 KiB", taken, 0.1))
    rows.append(_instant(f"{layout}: the next of it", seconds(lambda: view.states["exp_avg"][NAME][8:16]), 0.1))
    for what, do in (
        ("repr(view)", lambda: repr(view)),
        ("view.tree(2)", lambda: view.tree(2)),
        ("view.files", lambda: view.files),
    ):
        rows.append(_instant(f"{layout}: {what}", seconds(do), 1.0))
    return rows


def _instant(what: str, taken: float, limit: float) -> Row:
    return Row(f"{what}, beside {show_seconds(limit)}", show_seconds(taken), "", taken / limit, 1.0)


def main(root: Path) -> list[Row]:
    rows = []
    for layout in LAYOUTS:
        start = time.perf_counter()
        folder = write(root, layout)
        print(f"\n{layout} is there after {time.perf_counter() - start:.0f} s")
        found = opening(folder, layout) + using(folder, layout)
        report(f"A checkpoint of 1,024 ranks, {layout}", found)
        rows += found
    return rows
