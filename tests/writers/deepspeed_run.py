"""Two stretches of a training by DeepSpeed, saved after each step: ZeRO-2 on two ranks, then ZeRO-3 on four."""

from __future__ import annotations

from pathlib import Path

from . import Case
from .deepspeed_launch import launch
from .deepspeed_zero import TagsSpec, ZeroSpec, load_tags

SPECS = {
    "zero2": TagsSpec(zero=ZeroSpec(stage=2, dp=2, hidden=12, layers=1, vocab=31)),
    "zero3": TagsSpec(zero=ZeroSpec(stage=3, dp=4, hidden=12, layers=1, vocab=31, seed=1)),
}


def write(folder: Path) -> None:
    launch(folder, SPECS)


def load(folder: Path) -> dict[str, dict[str, Case]]:
    """Stretch -> tag -> the case."""
    return {name: load_tags(folder / name, spec) for name, spec in SPECS.items()}
