"""Reading and writing without what only Linux has: `LAZYCKPT_PORTABLE` disables it, tests/windows.py removes it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.io import system
from lazyckpt.jobs import places

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


def test_writing_as_on_windows(tmp_path: Path) -> None:
    """Files, folders and zips, without POSIX's calls, where nothing that is open can be renamed or removed."""
    command = [sys.executable, "-m", "tests.windows", "tests/writing_on_windows.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-6:] == ["kept", "again", "kept", "again.zarr", "both", "pruned"]


_COMMANDS = """
import sys
from tests import windows
windows.pretend()
from lazyckpt.cli.program import main

for line in ("--version", "ls m.safetensors", "convert m.safetensors out.pt"):
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as e:
        assert not e.code, (line, e.code)
"""


def test_the_command_line_as_on_windows(tmp_path: Path) -> None:
    save_file({"w": torch.randn(3, 7)}, tmp_path / "m.safetensors")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"lazyckpt {lazyckpt.__version__}\n") and "[3, 7]" in done.stdout
    assert (tmp_path / "out.pt").exists()


def test_names_that_windows_reserves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "refuses", system.is_reserved)
    save_file({"aux.weight": torch.randn(3)}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors")
    with pytest.raises(lazyckpt.DestinationError, match=r"aux.*rename"):
        view.to_zarr(tmp_path / "z")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    view.to_safetensors(tmp_path / "one.safetensors")


# What not every system has.
_OWN = {
    "preadv", "pwritev", "pread", "pwrite", "posix_fadvise", "copy_file_range", "sendfile", "mincore",
    "register_at_fork", "CDLL", "supports_dir_fd",
    "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "memfd_create", "uname", "geteuid", "fwalk",
}  # fmt: skip
_MODULES = {"fcntl", "msvcrt", "resource", "pwd"}
# The third only where `system.mapping_library` returns a library, the fourth is started only where there is preadv.
_ASKS = (
    "io/system.py",
    "io/directories.py",
    "io/storage/mapping.py",
    "inspect/child.py",
    "io/containers/hdf5_child.py",
)


@pytest.mark.slow
def test_one_module_asks_what_the_system_has() -> None:
    package = ROOT / "lazyckpt"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name in _ASKS:
            continue
        text = path.read_text("utf-8")
        if not any(word in text for word in _OWN | _MODULES):
            continue  # parsing takes long
        tree = ast.parse(text)
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not used & _OWN, name
        assert not imported & _MODULES, name


@pytest.mark.parametrize("value", ["", "0"])
def test_it_is_off_unless_it_is_asked_for(value: str) -> None:
    code = "from lazyckpt.io import system; print(system.PORTABLE)"
    env = os.environ | {"LAZYCKPT_PORTABLE": value}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
