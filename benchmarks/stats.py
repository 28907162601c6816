"""Statistics of all tensors: files of 1 GiB in the system's cache, against loading them and asking torch.

The peer computes the same numbers with the same accumulation (float64), tensor after tensor, on torch's own threads.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
from harness import Row, paired, report, run_fresh, show_seconds
from safetensors.torch import load_file, save_file

import lazyckpt

SIZES = {torch.float32: 16, torch.bfloat16: 32}  # tensors of 4096 x 4096: 1 GiB
RUNS = 3


def main(folder: Path) -> list[Row]:
    rows = []
    for dtype, count in SIZES.items():
        short = str(dtype).removeprefix("torch.")
        path = folder / f"stats-{short}.safetensors"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            save_file({f"layers.{n}.weight": torch.randn(4096, 4096).to(dtype) for n in range(count)}, path)
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
        _compare(path)
        ours, theirs, ratio = paired(lambda path=path: _ours(path), lambda path=path: _theirs(path), RUNS)  # type: ignore[misc]
        what = f"statistics of {short} weights, 1 GiB; peer: load_file and torch"
        rows.append(Row(what, show_seconds(ours), show_seconds(theirs), ratio, 1.0))
        grown = run_fresh("import lazyckpt, torch", f"lazyckpt.open({str(path)!r}).stats(progress=False)").peak
        what = f"memory that this takes, {short} (of 192 MiB)"
        rows.append(Row(what, f"{grown >> 20} MiB", "192 MiB", grown / (192 << 20), 1.0))
    report("statistics", rows)
    return rows


def _ours(path: Path) -> Any:
    return lazyckpt.open(path, cache=False).stats(progress=False)


def _theirs(path: Path) -> dict[str, dict[str, float]]:
    return {name: _numbers(t) for name, t in load_file(path).items()}


def _numbers(t: torch.Tensor) -> dict[str, float]:
    finite = torch.isfinite(t)
    if not finite.all():
        raise ValueError("the benchmark's weights are finite")
    x = t.double()
    low, high = torch.aminmax(t)
    mean = x.mean()
    found = {
        "zeros": t.numel() - torch.count_nonzero(t),
        "mean": mean,
        "l1": torch.linalg.vector_norm(x, 1),
        "l2": torch.linalg.vector_norm(x),
        "min": low,
        "max": high,
        "std": (x - mean).square_().mean().sqrt(),
    }
    return {key: value.item() for key, value in found.items()}


def _compare(path: Path) -> None:
    """Both find the same."""
    theirs = _theirs(path)
    for row in _ours(path):
        for key, value in theirs[row.name].items():
            got = getattr(row, key)
            if abs(got - value) > 1e-9 * max(1.0, abs(value)):
                raise AssertionError(f"{row.name}: {key} is {got}, torch finds {value}")
