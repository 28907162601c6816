"""Consolidating fp32 weights, against DeepSpeed's own converter: wall time and peak memory, each in a fresh process.

The checkpoints are of real DeepSpeed (bf16, two ranks, more than 1 GiB of fp32 weights with all of Adam's states).
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import Row, report, run_fresh, show_seconds

MIB = 1 << 20
RUNS = 5

_WRITE = """
import sys
sys.path.insert(0, {root!r})
from tests.writers.deepspeed_zero import ZeroSpec, write_many
from pathlib import Path
out = Path({out!r})
spec = ZeroSpec(stage={stage}, dtype="bf16", dp=2, hidden=2048, layers=16, vocab=16384)
write_many(out.parent, {{out.name: spec}})
"""
# DeepSpeed's converter cannot write tied parameters as safetensors: their other names are taken out of the files.
_UNTIE = """
import torch
from pathlib import Path
for path in Path({out!r}).glob("ckpt/*/*model_states.pt"):
    saved = torch.load(path, weights_only=False)
    for alias in saved["shared_params"]:
        saved["module"].pop(alias)
    saved["shared_params"] = {{}}
    torch.save(saved, path)
"""
_OURS = "import torch; from lazyckpt.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as convert"
_THEIRS = "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert"


def main(folder: Path) -> list[Row]:
    rows = []
    for stage in (2, 3):
        source = checkpoint(folder, stage)
        for safe in (True, False):
            rows += _convert(source, folder / "converted", stage, safe)
    report("fp32 consolidation", rows)
    return rows


def checkpoint(folder: Path, stage: int) -> Path:
    """The checkpoint of a stage, written if it is not there yet."""
    source = folder / f"zero{stage}-1g"
    if not (source / "truth" / "info.json").exists():
        root = Path(__file__).parent.parent
        for program in (_WRITE, _UNTIE):
            filled = program.format(root=str(root), out=str(source), stage=stage)
            subprocess.run([sys.executable, "-c", filled], check=True, cwd=root)
    return source / "ckpt"


def _convert(source: Path, out: Path, stage: int, safe: bool) -> list[Row]:
    """In turn, a new process and a new folder each time; importing is not timed."""
    work = f"convert({str(source)!r}, {str(out)!r}, safe_serialization={safe})"
    ours, theirs, copies = [], [], []
    for _ in range(RUNS):
        for setup, found in ((_OURS, ours), (_THEIRS, theirs)):
            shutil.rmtree(out, ignore_errors=True)
            found.append(run_fresh(setup, work))
        file = next(out.glob("*.safetensors" if safe else "*.bin"))
        start = time.perf_counter()
        subprocess.run(["cp", file, out / "copy"], check=True)
        copies.append(time.perf_counter() - start)
    size = file.stat().st_size
    shutil.rmtree(out)
    seconds = [statistics.median(r.seconds for r in found) for found in (ours, theirs)]
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))
    peaks = [max(r.peak for r in found) for found in (ours, theirs)]
    what = f"ZeRO-{stage}, {size / MIB:,.0f} MiB of fp32 to {'safetensors' if safe else 'torch'}"
    return [
        Row(f"{what}, peer deepspeed", show_seconds(seconds[0]), show_seconds(seconds[1]), ratio, 0.3),
        Row(
            f"{what}, for comparison `cp` of the result",
            show_seconds(seconds[0]),
            show_seconds(statistics.median(copies)),
            seconds[0] / statistics.median(copies),
            float("inf"),
        ),
        Row(f"{what}: peak memory / 512 MiB", f"{peaks[0] / MIB:.0f} MiB", "512 MiB", peaks[0] / (512 * MIB), 1),
        Row(f"{what}: peak memory, peer deepspeed", *(f"{p / MIB:.0f} MiB" for p in peaks), peaks[0] / peaks[1], 1),
    ]
