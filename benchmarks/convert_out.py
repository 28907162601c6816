"""Safetensors out of other formats, against `cp` of the bytes that come out: wall time, and peak memory for two sizes.

The sources are of their own writers (DeepSpeed, torch.distributed.checkpoint, torch.save, huggingface_hub), 1 GiB and
more of float32. Both sides read what is in the system's cache, write new files to the same disk, and start when nothing
waits to be written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dcp
import deepspeed_convert
from harness import Row, report, run_fresh, seconds, show_seconds

MIB = 1 << 20
RUNS = 7
MEMORY = 256 * MIB  # what the exports are allowed, besides what a process takes anyway (as much again)

_WRITE = """
import sys, torch
torch.manual_seed(0)
state = {f"layers.{n}.weight": torch.randn(4096, 4096) for n in range(16)}
if sys.argv[1] == "torch":
    torch.save(state, sys.argv[2])
else:
    import os
    from huggingface_hub import save_torch_state_dict
    os.makedirs(sys.argv[2], exist_ok=True)
    save_torch_state_dict(state, sys.argv[2], max_shard_size="300MB")
"""
_OURS = """
import lazyckpt
def convert(source, state, out, some=1):
    view = lazyckpt.open(source)
    view = view.states[state] if state else view
    names = set(list(view)[::some])
    view.select(names.__contains__).to_safetensors(out, max_shard_size=None, progress=False, memory="256MiB")
"""


def main(folder: Path) -> list[Row]:
    out = folder / "converted"
    rows = [row for what, source, state in _sources(folder) for row in _convert(what, source, state, out)]
    report("conversion to safetensors", rows)
    return rows


def _sources(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """What it is, where, and the state that is converted ("" for the weights)."""
    for stage in (2, 3):
        yield f"ZeRO-{stage}", deepspeed_convert.checkpoint(folder, stage), "fp32"
    yield "DCP", dcp.checkpoint(folder), ""
    for what, form, name in (("torch file", "torch", "torch-1g.pt"), ("Hugging Face folder", "hf", "hf-1g")):
        source = folder / name
        if not source.exists():
            made = source.with_name(f"{name}.part")
            shutil.rmtree(made, ignore_errors=True)
            subprocess.run([sys.executable, "-c", _WRITE, form, made], check=True)
            made.rename(source)
        yield what, source, ""


def _convert(what: str, source: Path, state: str, out: Path) -> list[Row]:
    """In turn, a new process and a new folder each time; importing is not timed."""
    work = f"convert({str(source)!r}, {state!r}, {str(out)!r}, some={{}})"
    copy = out.with_name(f"{out.name}-copy")
    _warm(source)
    ours, copies = [], []
    for _ in range(RUNS):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        ours.append(run_fresh(_OURS, work.format(1)))
        os.sync()
        copies.append(seconds(lambda: subprocess.run(["cp", "-r", out, copy], check=True)))
        shutil.rmtree(copy)
    size = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    part = run_fresh(_OURS, work.format(4)).peak
    shutil.rmtree(out)
    a, b = statistics.median(r.seconds for r in ours), statistics.median(copies)
    ratio = statistics.median(r.seconds / s for r, s in zip(ours, copies, strict=True))
    peak = max(r.peak for r in ours)
    title = f"{what}, {size / MIB:,.0f} MiB"
    return [
        Row(f"{title}, peer `cp` of the result", show_seconds(a), show_seconds(b), ratio, 1.25),
        Row(f"{title}: peak memory / 512 MiB", f"{peak / MIB:.0f} MiB", "512 MiB", peak / (2 * MEMORY), 1),
        Row(
            f"{title}: peak memory, less that of a quarter of the tensors / 32 MiB",
            f"{peak / MIB:.0f} MiB",
            f"{part / MIB:.0f} MiB",
            (peak - part) / (32 * MIB),
            1,
        ),
    ]


def _warm(source: Path) -> None:
    """Bring the files to the system's cache."""
    for path in [source] if source.is_file() else source.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(8 * MIB):
                    pass
