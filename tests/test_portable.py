"""Reading without what only Linux has: `LAZYCKPT_PORTABLE` takes it away, as it is on macOS and Windows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]

_READ = """
import sys, threading
import torch
from safetensors.torch import load_file
import lazyckpt
from lazyckpt.io import system

assert system.PORTABLE and system.mapping_library() is None
truth = load_file(sys.argv[1])
view = lazyckpt.open(sys.argv[1])
for name, tensor in truth.items():
    assert torch.equal(view[name][...], tensor)
    assert torch.equal(view[name][::3, 1], tensor[::3, 1])
    assert torch.equal(view[name][-5:, ::-1], tensor[-5:].flip(1))
    assert torch.equal(view[name].to(copy=False), tensor)

def look(seed):
    for n in range(200):
        row = (seed * 7919 + n * 104729) % 3000
        if not torch.equal(view["w"][row], truth["w"][row]):
            wrong.append(row)

wrong = []
threads = [threading.Thread(target=look, args=(seed,)) for seed in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
assert not wrong, wrong
all_of_it = view.to("cpu")
assert all(torch.equal(all_of_it[name], tensor) for name, tensor in truth.items())
with open(sys.argv[1], "r+b") as file:
    file.truncate(2000)
try:
    view["w"][...]
except lazyckpt.ChangedFileError as e:
    print("changed")
"""


def test_reading_without_what_only_linux_has(tmp_path: Path) -> None:
    save_file({"w": torch.randn(3000, 700), "v": torch.randn(9, 3).bfloat16()}, tmp_path / "m.safetensors")
    command = [sys.executable, "-c", _READ, str(tmp_path / "m.safetensors")]
    env = os.environ | {"LAZYCKPT_PORTABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "changed\n"), done.stderr


# What not every system has. Writers lock and guard their folders with the means of POSIX.
_OWN = {
    "preadv", "pwritev", "pread", "pwrite", "posix_fadvise", "copy_file_range", "sendfile", "mincore",
    "register_at_fork",
    "CDLL", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "memfd_create", "uname", "geteuid", "fwalk",
}  # fmt: skip
_ASKS = ("io/system.py", "io/storage/mapping.py")  # the second only where `system.mapping_library` gives something
_WRITERS = ("jobs/", "export/", "runs/prune.py")


@pytest.mark.slow
def test_one_module_asks_what_the_system_has() -> None:
    package = ROOT / "lazyckpt"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name in _ASKS or name.startswith(_WRITERS):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not used & _OWN, name
        assert not imported & {"fcntl", "msvcrt", "resource", "pwd"}, name


@pytest.mark.parametrize("value", ["", "0"])
def test_it_is_off_unless_it_is_asked_for(value: str) -> None:
    code = "from lazyckpt.io import system; print(system.PORTABLE)"
    env = os.environ | {"LAZYCKPT_PORTABLE": value}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
