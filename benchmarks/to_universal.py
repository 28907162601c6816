"""Universal checkpoints, against DeepSpeed's ds_to_universal: wall time and peak memory, each in a fresh process.

The checkpoint is of real DeepSpeed: bf16, ZeRO-2 on two ranks, more than 1 GiB of fp32 weights with both moments.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from deepspeed_convert import checkpoint
from harness import Row, report, run_fresh, show_seconds

MIB = 1 << 20
RUNS = 3

_OURS = "import lazyckpt, torch"
_THEIRS = """
import argparse
from deepspeed.checkpoint import ds_to_universal
"""
_THEIR_WORK = (
    "ds_to_universal.main(argparse.Namespace(input_folder={source!r}, output_folder={out!r}, num_extract_workers=4, "
    "num_merge_workers=2, keep_temp_folder=False, strict=True, inject_missing_state=True))"
)


def main(folder: Path) -> list[Row]:
    source = checkpoint(folder, 2)
    tag = source / (source / "latest").read_text()
    out = folder / "universal"
    programs = (
        (_OURS, f"lazyckpt.open({str(tag)!r}).to_universal({str(out)!r}, progress=False)"),
        (_THEIRS, _THEIR_WORK.format(source=str(tag), out=str(out))),
    )
    ours, theirs, copies = [], [], []
    for _ in range(RUNS):
        for (setup, work), found in zip(programs[::-1], (theirs, ours), strict=True):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # what the one before wrote is not this one's to wait for
            found.append(run_fresh(setup, work))
        os.sync()
        start = time.perf_counter()
        subprocess.run(["cp", "-r", out, f"{out}-copy"], check=True)
        copies.append(time.perf_counter() - start)
        shutil.rmtree(f"{out}-copy")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)
    seconds = [statistics.median(r.seconds for r in found) for found in (ours, theirs)]
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))
    peaks = [max(r.peak for r in found) for found in (ours, theirs)]
    copied = statistics.median(copies)
    what = f"ZeRO-2 to a universal checkpoint, {size / MIB:,.0f} MiB"
    rows = [
        Row(f"{what}, peer ds_to_universal", show_seconds(seconds[0]), show_seconds(seconds[1]), ratio, 0.15),
        Row(
            f"{what}, for comparison `cp -r` of the result",
            show_seconds(seconds[0]),
            show_seconds(copied),
            seconds[0] / copied,
            float("inf"),
        ),
        Row(f"{what}: peak memory / 1.25 GiB", f"{peaks[0] / MIB:.0f} MiB", "1280 MiB", peaks[0] / (1280 * MIB), 1),
    ]
    report("universal checkpoints", rows)
    return rows
