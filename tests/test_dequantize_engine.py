"""Transformer Engine's tensors: pickles of the layout that its sources give, because it runs on GPUs only.

``python`` of a child process has stand-ins for its classes, which pickle as they do; lazyckpt never imports them.
"""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import lazyckpt

# Float8Tensor and the others pickle (_make_in_reduce_ex of the class, arguments); pybind11's enumerations pickle as
# their class and number. Sources: see lazyckpt/derive/dequantize/engine.py.
_WRITER = """
import sys, types, torch

class DType:
    def __init__(self, number): self.number = number
    def __reduce_ex__(self, protocol): return DType, (self.number,)

DType.__module__ = "transformer_engine_torch"
sys.modules[DType.__module__] = types.ModuleType(DType.__module__)
sys.modules[DType.__module__].DType = DType

def kind(name, file):
    module = f"transformer_engine.pytorch.tensor.{file}"
    class Kind:
        def __init__(self, *args): self.args = args
        @classmethod
        def _make_in_reduce_ex(cls, *args): return cls(*args)
        def __reduce_ex__(self, protocol): return type(self)._make_in_reduce_ex, self.args
    Kind.__name__ = Kind.__qualname__ = name
    Kind.__module__ = module
    for n in range(1, 5):
        above = ".".join(module.split(".")[:n])
        sys.modules.setdefault(above, types.ModuleType(above))
    setattr(sys.modules[module], name, Kind)
    return Kind

Float8 = kind("Float8Tensor", "float8_tensor")
Mxfp8 = kind("MXFP8Tensor", "mxfp8_tensor")
Blockwise = kind("Float8BlockwiseQTensor", "float8_blockwise_tensor")
torch.manual_seed(0)

def codes(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)

def over(scales, rows, columns, block):
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]

state, truth = {}, {}
for name, number, more in (("a", 6, ()), ("b", 7, (torch.Size((24, 40)),))):
    data, scale = codes(24, 40), torch.rand(1)
    state[f"{name}.weight"] = Float8(data.view(torch.uint8), DType(number), scale, torch.bfloat16, *more)
    truth[f"{name}.weight"] = data.float() * scale
data, powers = codes(40, 96), torch.randint(110, 140, (128, 4), dtype=torch.uint8)
state["c.weight"] = Mxfp8(data.view(torch.uint8), powers, None, None, DType(7), torch.bfloat16, data.shape, None)
truth["c.weight"] = data.float() * over(torch.ldexp(torch.ones(40, 3), powers[:40, :3].int() - 127), 40, 96, (1, 32))
data, scales = codes(200, 300), torch.rand(2, 4)
args = (data.shape, data.view(torch.uint8), scales, None, None, DType(7), torch.bfloat16, None, True)
state["d.weight"] = Blockwise(*args)
truth["d.weight"] = data.float() * over(scales[:, :3], 200, 300, (128, 128))
state["e.weight"] = Float8(codes(3, 4).view(torch.uint8), DType(8), torch.ones(1), torch.bfloat16)
state["a.bias"] = truth["a.bias"] = torch.ones(24)
torch.save({"model": state} if sys.argv[2] == "nested" else state, sys.argv[1] + "/model.pt")
torch.save(truth, sys.argv[1] + "/truth.pt")
"""


@pytest.mark.parametrize("nested", ["nested", "flat"])
def test_products_of_codes_and_scales(tmp_path: Path, nested: str) -> None:
    subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path), nested], check=True, timeout=120)
    truth = torch.load(tmp_path / "truth.pt")
    stored = lazyckpt.open(tmp_path / "model.pt")
    for dtype in (torch.bfloat16, torch.float32):
        view = stored.dequantize(dtype)
        for name, t in truth.items():
            assert torch.equal(view[name][...], t if name == "a.bias" else t.to(dtype)), name
            assert torch.equal(view[name][3:7], view[name][...][3:7])
        assert set(view) == {*truth, "e.weight.0", "e.weight.2"}
        (problem,) = [one for one in view.problems if one not in stored.problems]
        assert problem.code == "undecided-quantization" and "number 8, which is not known: e.weight" in str(problem)
    assert "transformer_engine" not in sys.modules


# -- scales in _extra_state, as get_extra_state of Transformer Engine 1 returns them


def _state(form: str, **scales: torch.Tensor) -> Any:
    variables = {"num_gemms": 1, "fp8_checkpoint": True}
    state = {"amax_history_fwd": torch.zeros(4, 6), **scales, "extra_fp8_variables": variables}
    if form == "pickle":
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=form != "legacy")
    return buffer if form == "object" else torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _saved(kind: str, state: dict[str, Any], folder: Path) -> Path:
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]
        return folder
    path = folder / f"model.{kind}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"model": state} if kind == "nested" else state, path)
    return path


FORMS = ("pickle", "zip", "legacy", "object")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["pt", "nested", "dcp", "safetensors"])
def test_scales_in_the_extra_state(kind: str, tmp_path: Path) -> None:
    inverse = torch.tensor([3.0, 0.3, 5.0, 7.0, 1 / 7, 11.0])
    codes = torch.randn(24, 40).to(torch.float8_e4m3fn)
    state: dict[str, Any] = {"head.weight": torch.ones(3, 4)}
    truth: dict[str, torch.Tensor] = {}
    for form in FORMS if kind != "safetensors" else FORMS[:3]:
        extra = _state(form, scale_fwd=1 / inverse, scale_inv_fwd=inverse)
        state |= {
            f"{form}.fc1_weight": codes,
            f"{form}.fc2_weight": codes.view(torch.uint8),
            f"{form}._extra_state": extra,
        }
        truth |= {f"{form}.fc1_weight": codes.float() * inverse[1], f"{form}.fc2_weight": codes.float() * inverse[4]}
        state |= {f"{form}.proj.weight": codes.clone(), f"{form}.proj._extra_state": extra}
        truth[f"{form}.proj.weight"] = codes.float() * inverse[1]
    stored = lazyckpt.open(
        _saved(kind, {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in state.items()}, tmp_path)
    )
    for dtype in (torch.float32, torch.bfloat16):
        view = stored.dequantize(dtype)
        assert view.problems == stored.problems and set(view) == {*truth, "head.weight"}
        for name, expected in truth.items():
            assert torch.equal(view[name][...], expected.to(dtype)), name
            assert torch.equal(view[name][3:7, ::3], expected.to(dtype)[3:7, ::3])


class _Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "extra",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.zeros(40, dtype=torch.uint8),
        torch.ones(4),
        _state("pickle", scale_fwd=torch.ones(6)),
        _state("zip", scale_inv_fwd=torch.ones(1)),
        _state("pickle", scale_inv_fwd=torch.ones(2, 3)),
        _state("pickle", scale_inv_fwd=torch.ones(12)[::2]),
        torch.frombuffer(bytearray(pickle.dumps({"scale_inv_fwd": _Runs()})), dtype=torch.uint8),
    ],
)
def test_states_without_a_scale(extra: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    torch.save({"a.weight": codes, "a._extra_state": extra}, "model.pt")
    view = lazyckpt.open("model.pt").dequantize()
    (problem,) = [one for one in view.problems if one.code == "contradicting-quantization"]
    assert problem.path == "a.weight" and "_extra_state" in str(problem)
    assert view["a.weight"].dtype == torch.float8_e4m3fn and not Path("executed").exists()


@pytest.mark.parametrize("form", FORMS[:3])
def test_damaged_states(form: str, tmp_path: Path) -> None:
    data = _state(form, scale_inv_fwd=torch.tensor([3.0, 0.3, 5.0]))
    chance = random.Random(0)
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    state: dict[str, torch.Tensor] = {}
    for n in range(60):
        bad = data.clone()
        for _ in range(chance.randint(1, 3)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        state |= {
            f"m{n}.weight": codes.clone(),
            f"m{n}._extra_state": bad[: chance.choice([len(bad), chance.randrange(len(bad))])].clone(),
        }
    save_file(state, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path / "model.safetensors").dequantize(torch.float32)
    told = {one.path for one in view.problems if one.code == "contradicting-quantization"}
    assert told and all(
        (view[name].dtype == torch.float32) is (name not in told) for name in view if name.endswith("weight")
    )
