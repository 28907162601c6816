"""A script for `tests.windows`: write, replace, resume, lock and prune in the folder that the argument names."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.io import system
from lazyckpt.jobs.publish import unfinished

assert not system.POSIX and system.fcntl is None and system.mapping_library() is None
folder = Path(sys.argv[1])
truth = {"w": torch.randn(300, 70), "a.b": torch.randn(9, 3).bfloat16(), "a.c": torch.arange(5)}
save_file(truth, folder / "m.safetensors")
view = lazyckpt.open(folder / "m.safetensors")


def check(path: Path) -> None:
    found = lazyckpt.open(path, cache=False)
    assert all(torch.equal(found[name][...], tensor) for name, tensor in truth.items()), path
    print(path.name)


for dest, write in {
    "out": view.to_safetensors,
    "one.safetensors": view.to_safetensors,
    "bin": view.to_torch,
    "dcp": view.to_dcp,
    "z.zarr": view.to_zarr,
    "z.zip": view.to_zarr,
}.items():
    result = write(folder / dest)
    check(folder / dest)
    assert result.nbytes > 0
    write(folder / dest, overwrite=True)  # another file or folder is replaced
    check(folder / dest)
    if "." not in dest:
        (folder / f"{dest}-empty").mkdir()
        write(folder / f"{dest}-empty")
        check(folder / f"{dest}-empty")


# an export that fails is resumed
class Failing:
    """A function that raises after a number of calls."""

    def __init__(self, call: Any, left: int) -> None:
        self.call, self.left = call, left

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "no luck")
        return self.call(*args, **options)


for dest, write, name, left in (
    ("again", view.to_safetensors, "fsync", 0),
    ("again.zarr", view.to_zarr, "replace", 2),
):
    whole = getattr(os, name)
    setattr(os, name, Failing(whole, left))
    try:
        write(folder / dest, verify=True)
    except lazyckpt.DestinationError:
        print("kept" if unfinished(folder / dest) else "lost")
    finally:
        setattr(os, name, whole)
    write(folder / dest)
    check(folder / dest)
    assert unfinished(folder / dest) is None

# two processes do not write to the same place
code = """
import sys, time
from tests import windows
windows.pretend()
from pathlib import Path
from typing import Any
from lazyckpt.jobs import publish
with publish.staged(Path(sys.argv[1]), "f" * 64):
    print("ready", flush=True)
    sys.stdin.read()
"""
other = subprocess.Popen(
    [sys.executable, "-c", code, str(folder / "both")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert other.stdout.readline() == "ready\n"
try:
    view.to_safetensors(folder / "both")
except lazyckpt.DestinationError as e:
    assert "another export is writing" in str(e)
else:
    raise AssertionError
other.communicate()
view.to_safetensors(folder / "both")
check(folder / "both")
assert not list(folder.glob(".*")), list(folder.glob(".*"))

run = folder / "run"
for step in (1, 2, 3):
    view.to_torch(run / f"checkpoint-{step}")
found = lazyckpt.prune(run, 1, delete=True)
assert sorted(path.name for path in run.iterdir()) == ["checkpoint-3"], found
print("pruned")
