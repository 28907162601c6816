"""Runs DeepSpeed writers in a child process, so that neither its global state nor a failed rank reaches the caller.

A spec says what to train and names the module that does it on every rank; one child (:mod:`.deepspeed_child`) pays the
import of DeepSpeed once for all its specs.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from . import Case, TruthFiles

__all__ = ["Spec", "launch", "load_case"]


class Spec(Protocol):
    """One training run. Pickled to the child."""

    @property
    def world(self) -> int:
        """How many ranks."""

    @property
    def writer(self) -> str:
        """The module beside this one whose ``write(spec, rank, out)`` every rank calls."""


def launch(out_dir: Path, specs: Mapping[str, Spec], tools: Mapping[str, Sequence[str]] | None = None) -> None:
    """Write each spec to ``out_dir/NAME``, one after the other, then run the tools (:mod:`.deepspeed_tools`) on it."""
    for name in specs:
        if (out_dir / name).exists():
            raise FileExistsError(out_dir / name)
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]  # the folder the package is imported from
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # Muon's kernels, which take a minute to compile
        "PYTHONHASHSEED": "0",  # DeepSpeed orders the parameter groups of experts by iterating over a set of strings
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job.pkl"
        job.write_bytes(pickle.dumps((out_dir.resolve(), dict(specs), dict(tools or {}), Path(scratch))))
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


def load_case(folder: Path) -> Case:
    """What a writer left in ``folder``: the checkpoint in ``ckpt``, the rest in ``truth``."""
    truth = folder / "truth"
    return Case(
        path=folder / "ckpt",
        truth=TruthFiles(truth / "states"),
        info=json.loads((truth / "info.json").read_text()),
        rank_buffers=TruthFiles(truth / "buffers"),
        shards=TruthFiles(truth / "shards"),
        reference=TruthFiles(truth / "reference"),
    )
