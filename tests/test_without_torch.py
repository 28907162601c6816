"""What needs no torch imports none: opening, listing and describing checkpoints, and the command line's own help."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.core.dtypes import DTYPES, F32, FROM_NAME, DType, dtype_of, to_numpy
from lazyckpt.core.extents import Extent
from lazyckpt.core.specs import TensorSpec
from lazyckpt.errors import DataError

from .writers import Case, megatron_core

ROOT = Path(__file__).parents[1]

_LOOK = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import lazyckpt
from lazyckpt.cli import app

path = sys.argv[1]
view = lazyckpt.open(path)
for state in [view, *view.states.values(), view.stored]:
    repr(state), state.tree(), state.explain(), state._repr_html_(), state.problems, state.nbytes, state.files
    for name in state:
        repr(state[name]), state[name].nbytes, state[name].name, len(state[name].fragments)
app(["ls", path], standalone_mode=False)
app(["ls", path, "--json"], standalone_mode=False)
app(["info", path], standalone_mode=False)
"""
# Fixture, name of the case.
_CASES = {
    "safetensors": ("huggingface_cases", "llama_sharded"),
    "torch": ("torch_cases", "training"),
    "legacy": ("torch_cases", "legacy_training"),
    "zero1": ("zero_cases", "zero1_bf16_dp2"),
    "zero3": ("zero_cases", "zero3_bf16_dp3"),
    "dcp": ("dcp_cases", "fsdp2_uneven"),
    "ranks": ("rank_cases", "verl_fsdp2"),
    "megatron": ("megatron_cases", "tp2_gelu_tied"),
    "megatron-dist": ("megatron_dist_cases", "tp2_pp2_distopt_tied"),
}


def without_torch(code: str, *args: str) -> str:
    """What a fresh interpreter prints that cannot import torch."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def megatron_dist_cases(megatron_folder: Path) -> dict[str, Case]:
    return {name: megatron_core.load_case(megatron_folder, name, "dist") for _, name in [_CASES["megatron-dist"]]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _CASES)
def test_describing_a_checkpoint(kind: str, request: pytest.FixtureRequest) -> None:
    fixture, name = _CASES[kind]
    case: Case = request.getfixturevalue(fixture)[name]
    assert "elements" in without_torch(_LOOK, str(case.path))


@pytest.mark.slow
def test_describing_a_zarr_hierarchy(torch_cases: dict[str, Case], tmp_path: Path) -> None:
    lazyckpt.open(torch_cases["training"].path).to_zarr(tmp_path / "x.zarr")
    assert "elements" in without_torch(_LOOK, str(tmp_path / "x.zarr"))


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["formats"], ["ls", "--help"], ["info", "--help"]])
def test_the_command_line_itself(args: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; from lazyckpt.cli import app; app({args!r})"
    assert without_torch(code)


# -- the table of dtypes


@pytest.mark.parametrize("name", sorted(n for n, d in vars(torch).items() if isinstance(d, torch.dtype)))
def test_the_table_agrees_with_torch(name: str) -> None:
    theirs: torch.dtype = getattr(torch, name)
    ours = FROM_NAME[name]
    assert ours.torch is theirs and dtype_of(theirs) is ours and str(ours) == str(theirs)
    assert (ours.itemsize, ours.is_complex) == (theirs.itemsize, theirs.is_complex)
    assert ours.is_floating_point == theirs.is_floating_point
    if ours.is_number:
        assert ours.is_signed == theirs.is_signed
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.empty(1, dtype=theirs, device="cpu").to(torch.float32)
        converts = True
    except (NotImplementedError, RuntimeError):
        converts = False
    assert ours.is_number == converts


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_number and d.name != "complex32"], ids=str)
def test_the_table_agrees_with_numpy(dtype: DType) -> None:
    assert dtype.numpy.itemsize == dtype.itemsize
    assert dtype_of(dtype.numpy) is dtype
    numbers = torch.tensor([1.0, 0.5, 2.0] if dtype.is_floating_point else [0.0, 1.0, 2.0], device="cpu").to(
        dtype.torch
    )
    assert to_numpy(numbers).tobytes() == to_numpy(numbers.double()).astype(dtype.numpy).tobytes()


def test_a_dtype_is_one_object_that_never_changes() -> None:
    assert copy.copy(F32) is copy.deepcopy(F32) is pickle.loads(pickle.dumps(F32)) is F32
    assert {F32: 1}[dtype_of("float")] == 1
    with pytest.raises(AttributeError):
        F32.name = "float64"
    with pytest.raises(AttributeError):
        del F32.name


def test_it_equals_the_dtype_of_torch() -> None:
    assert F32 == torch.float32 and torch.float32 == F32  # noqa: SIM300 - both ways
    assert F32 not in (torch.float64, "float32", np.float32)


def test_what_describes_a_tensor_takes_the_dtype_of_torch() -> None:
    extent = Extent("x", 0, torch.float32, (2,), (1,))  # type: ignore[arg-type]
    spec = TensorSpec("w", (2,), torch.bfloat16, ())  # type: ignore[arg-type]
    assert extent.dtype is F32 and spec.dtype is dtype_of("bf16")
    assert extent == Extent("x", 0, F32, (2,), (1,)) and hash(extent) == hash(Extent("x", 0, F32, (2,), (1,)))


@pytest.mark.parametrize("wrong", ["float31", object(), None, np.dtype("datetime64[s]"), 3])
def test_what_is_no_dtype(wrong: object) -> None:
    with pytest.raises(DataError):
        dtype_of(wrong)  # type: ignore[arg-type]
