"""What DeepSpeed's own tools make of checkpoints: both are run on each, in one child process, whatever comes of it.

``python -m``, with a file of JSON: {"cases": {name: folder of the checkpoint}, "converted": {name: its universal
checkpoint}, "out": folder}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from . import TruthFiles

TOOLS = ("zero_to_fp32", "universal")


def outcomes(folder: Path, cases: Mapping[str, Path], converted: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Case -> tool -> the error it ended with, "" if none. What they wrote: `fp32_of` and ``NAME/universal``.

    ``converted``: what ds_to_universal has already made of some cases, without an error.
    """
    job = folder / "job.json"
    paths = {kind: {n: str(p) for n, p in them.items()} for kind, them in (("cases", cases), ("converted", converted))}
    job.write_text(json.dumps({**paths, "out": str(folder)}))
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.deepspeed_outcomes", str(job)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"the tools' process failed with code {done.returncode}; its output:\n{done.stdout[-5000:]}")
    found: dict[str, dict[str, str]] = json.loads((folder / "outcomes.json").read_text())
    return found


def fp32_of(folder: Path, name: str) -> TruthFiles:
    """What zero_to_fp32 gave for a case, under "zero_to_fp32"."""
    return TruthFiles(folder / name)


def _zero_to_fp32(checkpoint: Path, out: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    tensors = {name: t.detach().contiguous().clone() for name, t in state.items()}
    save_file(tensors, out / "zero_to_fp32.safetensors")


def _universal(checkpoint: Path, out: Path) -> None:
    """Without ``strict`` where only that stops it (an unused pattern)."""
    from deepspeed.checkpoint import ds_to_universal

    args = {
        "input_folder": str(checkpoint / (checkpoint / "latest").read_text()),
        "output_folder": str(out / "universal"),
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "inject_missing_state": True,
    }
    try:
        ds_to_universal.main(argparse.Namespace(**args, strict=True))
    except AssertionError as e:
        if "Unused patterns" not in str(e):
            raise
        args["output_folder"] = str(out / "lax")
        ds_to_universal.main(argparse.Namespace(**args, strict=False))
        raise


def _outcome(tool: Callable[[Path, Path], None], checkpoint: Path, out: Path) -> str:
    try:
        tool(checkpoint, out)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def main(job: Path) -> None:
    asked = json.loads(job.read_text())
    found = {}
    for name, folder in asked["cases"].items():
        out = Path(asked["out"]) / name
        out.mkdir()
        print(f"=== {name}", flush=True)
        found[name] = {
            "zero_to_fp32": _outcome(_zero_to_fp32, Path(folder), out),
            "universal": "" if name in asked["converted"] else _outcome(_universal, Path(folder), out),
        }
        if name in asked["converted"]:
            (out / "universal").symlink_to(asked["converted"][name])
    (Path(asked["out"]) / "outcomes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
