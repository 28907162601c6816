"""Statistics of all tensors, against loading them and asking torch for the same numbers; and digests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import LAZYCKPT, Fresh
from ..sample import Timed, warm

MIB = 1 << 20
GOALS = {torch.float32: 0.35, torch.bfloat16: 0.15}


def _stats(settings: Settings, dtype: torch.dtype) -> Contest:
    path = data.stats(settings, dtype)
    warm(path)
    theirs = _theirs(path)
    for row in _ours(path):
        for key, value in theirs[row.name].items():
            got = getattr(row, key)
            if abs(got - value) > 1e-9 * max(1.0, abs(value)):
                raise AssertionError(f"{row.name}: {key} is {got}, torch finds {value}")
    memory = Fresh(LAZYCKPT, f"lazyckpt.open({str(path)!r}, cache=False).stats(progress=False)")
    peer = ("load_file and torch", Timed(lambda: _theirs(path)))
    return Contest(Timed(lambda: _ours(path)), peer, calls=1, rehearse=False, most=7, once=[memory])


def _ours(path: Path) -> Any:
    return lazyckpt.open(path, cache=False).stats(progress=False)


def _theirs(path: Path) -> dict[str, dict[str, float]]:
    return {name: _numbers(t) for name, t in load_file(path).items()}


def _numbers(t: torch.Tensor) -> dict[str, float]:
    """The same numbers with the same accumulation (float64), tensor after tensor, on torch's own threads."""
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


def _digest(settings: Settings) -> Contest:
    """Against `sha256sum` of the file, which uses one core."""
    path = data.torch_file(settings)
    warm(path)
    view = lazyckpt.open(path, cache=False)
    memory = Fresh(LAZYCKPT, f"lazyckpt.open({str(path)!r}, cache=False).digest(progress=False)")
    peer = ("sha256sum", Timed(lambda: subprocess.run(["sha256sum", path], check=True, capture_output=True)))
    ours = Timed(lambda: view.digest(progress=False))
    return Contest(ours, peer, calls=1, most=7, once=[memory])


def _small(settings: Settings) -> Contest:
    """Many small tensors, against as many bytes in a few large ones."""
    count = settings.pick(262_144, 16_384)
    paths = data.saved(settings, f"4k-{count}", "safetensors", count, (1024,)), data.torch_file(settings)
    for path in paths:
        warm(path)
    many, few = (lazyckpt.open(path, cache=False) for path in paths)
    peer = ("16 tensors of the same size", Timed(lambda: few.digest(progress=False)))
    return Contest(Timed(lambda: many.digest(progress=False)), peer, calls=1, most=7)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    for dtype, goal in GOALS.items():
        goals = [Goal(goal), Goal(1.0, "peak", 192.0 * MIB, "peak memory", "192 MiB")]
        short = str(dtype).removeprefix("torch.")
        what = f"statistics of {settings.pick(1024, 64)} MiB of {short}"
        yield Case(what, partial(_stats, settings, dtype), goals)
    size = settings.pick(1024, 64)
    goals = [Goal(1.25), Goal(1.0, "peak", 256.0 * MIB, "peak memory", "256 MiB")]
    yield Case(f"digest of {size} MiB", partial(_digest, settings), goals)
    yield Case(f"digest of {size} MiB in tensors of 4 KiB", partial(_small, settings), [Goal(1.5)])


AREA = Area(
    "statistics",
    "Statistics and digests",
    "Mean, standard deviation, norms, extremes and zeros of every tensor. Before timing, the numbers are compared. "
    "Digests are SHA-256 on all cores.",
    _cases,
)
