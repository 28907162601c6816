"""One tensor of a large checkpoint takes the memory of that tensor, not of its model.

Peaks are those of a fresh process: VmHWM, which counts mapped pages of files as well.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from . import processes
from .conftest import need
from .writers.deepspeed_zero import ZeroSpec, write_many

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")]

ALLOWED = 64 << 20  # beside the tensor itself

_CHILD = """
import hashlib, json, sys
import torch
import lazyckpt


def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))


path, state, name, expression = sys.argv[1:]
torch.ones(1000, 1000).sum()  # what torch sets up at its first use
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
before = kib("VmRSS")
view = lazyckpt.open(path)
repr(view)
t = (view.states[state] if state else view)[name] if name else None
got = eval(expression)
grown = (kib("VmHWM") - before) << 10
digest = hashlib.sha256(got.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() if got is not None else ""
print(json.dumps([grown, digest]))
"""


def _measured(path: Path, state: str, name: str, expression: str) -> tuple[int, str]:
    """-> (bytes by which the process grew at most, digest of what it read)."""
    done = processes.run("-c", _CHILD, path, state, name, expression)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    grown, digest = json.loads(done.stdout)
    return grown, digest


def _digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def test_one_tensor_of_a_large_zero_checkpoint(tmp_path: Path) -> None:
    need("deepspeed")
    specs = {f"zero{n}": ZeroSpec(stage=n, dp=2, hidden=384, layers=6, vocab=8192) for n in (2, 3)}
    cases = write_many(tmp_path, specs)
    allowed = 24 << 20
    reads = [
        ("zero2", "fp32", "blocks.2.fc1.weight", "t[...]"),
        ("zero2", "weights", "blocks.0.fc2.weight", "t[...]"),
        ("zero2", "exp_avg", "embed.weight", "t[:, 77]"),  # one element of every page of 12 MiB
        ("zero3", "fp32", "blocks.2.fc1.weight", "t[...]"),
        ("zero3", "exp_avg_sq", "embed.weight", "t[:, 77]"),
    ]
    for case, state, name, expression in reads:
        files = cases[case].path.glob("*/*.pt")
        want: torch.Tensor = eval(expression, {"t": cases[case].truth[state][name]})
        assert sum(path.stat().st_size for path in files) > 3 * (want.nbytes + allowed), "much larger than a tensor"
        grown, digest = _measured(cases[case].path, state, name, expression)
        assert digest == _digest(want), (case, name)
        assert grown <= want.nbytes + allowed, (
            f"{case} {state} {name} {expression}: {grown:,} for {want.nbytes:,} bytes"
        )
    for folder in specs:
        shutil.rmtree(tmp_path / folder)  # hundreds of megabytes


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """16 tensors of 32 MiB each."""
    with torch.serialization.skip_data():
        torch.save({f"layers.{n}.weight": torch.empty(1 << 12, 1 << 11) for n in range(16)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize(
    ("expression", "nbytes"),
    [
        ("t[...]", 32 << 20),
        ("t[:, 3]", 1 << 14),
        ("t[:, ::2]", 16 << 20),
        ("t.to(dtype=torch.bfloat16)", (32 + 16) << 20),  # both, while it is converted
        ("t.to(copy=False)[7]", 0),
    ],
)
def test_one_tensor_of_a_large_file(sparse: Path, expression: str, nbytes: int) -> None:
    grown, _ = _measured(sparse, "", "layers.7.weight", expression)
    assert grown <= nbytes + ALLOWED, f"{expression}: {grown:,} for {nbytes:,} bytes"


def test_a_module_is_filled_one_tensor_at_a_time(sparse: Path) -> None:
    module = (
        "(m := torch.nn.ModuleDict({'layers': torch.nn.ModuleList("
        "torch.nn.Linear(2048, 4096, bias=False, device='meta') for _ in range(16))}).to_empty(device='cpu'))"
        " and [p.requires_grad_(False).fill_(1) for p in m.parameters()]"
    )
    built, _ = _measured(sparse, "", "", f"{module} and None")
    filled, _ = _measured(sparse, "", "", f"{module} and view.load_into(m) and None")
    assert filled <= built + (32 << 20) + ALLOWED, f"{filled:,} beside a module of {built:,}"
