"""ZeRO-1/2/3 and BF16_Optimizer checkpoints of :mod:`.nasty_model`, saved by real DeepSpeed.

The training runs in a child process (:mod:`.deepspeed_child`), so that neither DeepSpeed's global state nor a failed
rank reaches the caller.  :func:`write_many` pays the child's start once for all its cases.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import Case, TruthFiles

__all__ = ["ZeroSpec", "write_many", "write_zero"]


@dataclass(frozen=True, kw_only=True)
class ZeroSpec:
    """One training run of three steps, saved at its end."""

    stage: Literal[1, 2, 3]
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    dp: int = 2
    seed: int = 0
    hidden: int = 26
    layers: int = 2
    vocab: int = 103
    optimizer: Literal["adamw", "amsgrad", "sgd", "lion"] = "adamw"
    round_robin: bool = False
    sub_group_size: int | None = None
    """ZeRO-3: elements of a rank's partition per sub-group."""
    exclude_frozen: bool = False
    elastic: bool = False
    parameter_alignment: bool = False
    bf16_optimizer: bool = False
    """fp32 gradient accumulation, which makes DeepSpeed take its BF16_Optimizer (needs stage 1 and bf16)."""
    client_state: dict[str, Any] | None = None
    """Pickled to the child: its classes must be importable there."""


def write_zero(out_dir: Path, **options: Any) -> Case:
    """Write one checkpoint to ``out_dir/ckpt`` and its truth to ``out_dir/truth``; the options are ZeroSpec's."""
    return write_many(out_dir.parent, {out_dir.name: ZeroSpec(**options)})[out_dir.name]


def write_many(out_dir: Path, specs: Mapping[str, ZeroSpec]) -> dict[str, Case]:
    """Write each checkpoint to ``out_dir/NAME``, one after the other from one child process."""
    for name in specs:
        if (out_dir / name).exists():
            raise FileExistsError(out_dir / name)
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]  # the folder the package is imported from
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job.pkl"
        job.write_bytes(pickle.dumps((out_dir.resolve(), dict(specs), Path(scratch))))
        done = subprocess.run(
            [sys.executable, "-m", f"{package}.deepspeed_child", str(job)],
            env=env,
            cwd=scratch,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"the DeepSpeed writer failed with code {done.returncode}; its output:\n{done.stdout}")
    return {name: _case(out_dir / name) for name in specs}


def _case(folder: Path) -> Case:
    truth = folder / "truth"
    return Case(
        path=folder / "ckpt",
        truth=TruthFiles(truth / "states"),
        info=json.loads((truth / "info.json").read_text()),
        rank_buffers=TruthFiles(truth / "buffers"),
    )
