"""The walk through the demo's checkpoints."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .files import digests, write
from .meter import meter

BARS = "▁▂▃▄▅▆▇█"  # the values of `heat`, from small to large
_WIDTH = 64  # columns of the longest bar


class Step(NamedTuple):
    """One step of the walk."""

    code: str
    """A line of Python, a command that begins with "$ ", or "" for a remark."""
    text: str
    """What the line printed, or the remark."""


_WALK = """
# 1. A checkpoint is a dictionary of tensors. Four processes trained a small Llama with DeepSpeed ZeRO-3; this is the
# model that they trained, in one piece. DeepSpeed is not needed to read it, and opening reads no tensor data.
$ lazyckpt ls zero3 --depth 3
import lazyckpt
view = lazyckpt.open(folder / "zero3")
w = view["layers.1.mlp.down_proj.weight"]
w
w[6:8, :3]
w.stats()
# The states of the optimizer have the names of the parameters:
list(view.states)
view.states["exp_avg_sq"]["layers.1.mlp.down_proj.weight"][6:8, :3]
# 2. Where it lies. No file holds a whole tensor: each process saved its part of the weights and of AdamW's state.
@files
# `explain` shows where four rows of a matrix lie, and reads nothing:
print(w.explain(slice(6, 10)))
# The same slice through a file system that counts every byte that is asked of it, as an object store does. The first
# read of a file also checks the headers of its records:
metered = lazyckpt.open(f"metered://{folder.as_posix()}/zero3")
meter.reset()
rows = metered["layers.1.mlp.down_proj.weight"][6:10]
print(bars({"in the files": size, "read": meter.bytes}))
# The four rows, magnitudes from small to large:
print(heat(rows))
# 3. Conversion: the same tensors as one safetensors file, written in bounded memory.
[path.name for path in view.to_safetensors(folder / "converted")]
# Proof: lazyckpt compares both checkpoints element by element ...
lazyckpt.diff(view, folder / "converted")
# ... and the SHA-256 of every converted tensor is the one that the training processes computed in memory.
converted = lazyckpt.open(folder / "converted")
all(sha256(converted[name][...]) == digest for name, digest in trained["fp32"].items())
# 4. A file that runs a command when pickle loads it. lazyckpt executes nothing that a file names.
bomb = lazyckpt.open(folder / "bomb.pt")
print(*bomb.problems)
bomb["weight"][...]
(folder / "it_ran").exists()
# 5. Other files work the same way: three safetensors shards, a training checkpoint of torch.save.
model = lazyckpt.open(folder / "model")
print(model.tree(depth=2))
{name: tuple(tensor.shape) for name, tensor in model["layers.1.mlp"].to("cpu").items()}
all(torch.equal(model[name][...], tensor) for name, tensor in written.items())
run = lazyckpt.open(folder / "training.pt")
list(run.states), run.meta["epoch"], run.meta["scheduler"]["last_epoch"]
"""


def walk(folder: Path) -> Iterator[Step]:
    """Write the checkpoints and walk through them, line by line.

    Parameters
    ----------
    folder
        An empty folder.

    Yields
    ------
    Step
        A line that has run, with its output, or a remark.
    """
    written = write(folder)
    files = [path for path in (folder / "zero3").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    names: dict[str, Any] = {
        "folder": folder,
        "written": written,
        "trained": digests(),
        "size": size,
        "meter": meter,
        "bars": bars,
        "heat": heat,
        "sha256": sha256,
        "torch": torch,
    }
    ranks = "\n".join(f"{p.stat().st_size:>8,} bytes  {p.relative_to(folder).as_posix()}" for p in sorted(files))
    for block in _blocks(_WALK.strip().splitlines()):
        if block == "@files":
            yield Step("", f"{len(files)} files, in {folder}:\n{ranks}")
        elif block.startswith("# "):
            yield Step("", block)
        elif block.startswith("$ "):
            yield Step(block, _run(block[2:], folder))
        else:
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(block, "<demo>", "single"), names)  # a line of _WALK
            yield Step(block, printed.getvalue())


def _blocks(lines: list[str]) -> Iterator[str]:
    """The lines, with adjacent lines of a remark together."""
    remark: list[str] = []
    for line in lines:
        if line.startswith("# "):
            remark.append(line)
            continue
        if remark:
            yield "\n".join(remark)
            remark = []
        yield line


def _run(command: str, folder: Path) -> str:
    """Run a command of lazyckpt in the folder, and return its output."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    plain = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    env = plain | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"}
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return done.stdout


def sha256(t: torch.Tensor) -> str:
    """Return the SHA-256 of the elements in C order."""
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def bars(sizes: dict[str, int]) -> str:
    """Return numbers of bytes as bars, the largest of which has `_WIDTH` columns."""
    most = max(sizes.values())
    label = max(map(len, sizes))
    lines = []
    for name, size in sizes.items():
        bar = BARS[-1] * round(_WIDTH * size / most) or "|"
        lines.append(f"{name:<{label}}  {bar} {size:,} bytes" + ("" if size == most else f" ({size / most:.1%})"))
    return "\n".join(lines)


def heat(t: torch.Tensor) -> str:
    """Return a matrix as characters of `BARS`, by the rank of each magnitude among all magnitudes."""
    order = t.abs().flatten().argsort().argsort()
    levels = (order * len(BARS) // t.numel()).reshape(t.shape).tolist()
    return "\n".join("".join(BARS[level] for level in row) for row in levels)
