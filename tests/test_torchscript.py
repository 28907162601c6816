"""Files of torch.jit.save: what the saved module held, and what a damaged or hostile file does."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyckpt

from .writers import bit_equal, torch_files
from .writers.torch_programs import Outer


def saved(path: Path, trace: bool = False, freeze: bool = False) -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        module = Outer().eval()
        script = torch.jit.trace(module, torch.ones(2, 4)) if trace else torch.jit.script(module)
        if freeze:
            script = torch.jit.freeze(script)
        torch.jit.save(script, path)
    return script


def same(state: object, truth: dict[str, torch.Tensor]) -> bool:
    return set(state) == set(truth) and all(bit_equal(state[k][...], truth[k]) for k in truth)  # type: ignore[index,call-overload]


@pytest.mark.parametrize("trace", [False, True])
def test_weights_have_the_names_of_the_state_dict(tmp_path: Path, trace: bool) -> None:
    script = saved(tmp_path / "model.pt", trace)
    view = lazyckpt.open(tmp_path / "model.pt")
    assert view.format == "torchscript"
    assert same(view, dict(script.state_dict()))
    assert dict(view.aliases) == {"b.linear.weight": "a.linear.weight"}
    assert [p.code for p in view.problems] == ["unread-program"]
    assert any(name.startswith("code/") for name in view.meta["code"])


def test_other_tensors_are_states_of_their_own(tmp_path: Path) -> None:
    saved(tmp_path / "script.pt")
    view = lazyckpt.open(tmp_path / "script.pt")
    table = torch.arange(6).reshape(2, 3)
    parts = {"parts.0": torch.ones(2), "parts.1": torch.zeros(3)}
    assert same(view.states["attributes"], {"a.table": table, "b.table": table, **parts})
    saved(tmp_path / "trace.pt", trace=True)
    assert same(lazyckpt.open(tmp_path / "trace.pt").states["constants"], {"0": torch.tensor([1.0, 2.0, 3.0])})


def test_frozen_modules_have_constants_only(tmp_path: Path) -> None:
    script = saved(tmp_path / "model.pt", freeze=True)
    view = lazyckpt.open(tmp_path / "model.pt")
    assert view.format == "torchscript" and not list(view)
    held = [node.t("value") for node in script.graph.findAllNodes("prim::Constant") if node.kindOf("value") == "t"]
    read = [t[...] for t in view.states["constants"].values()]
    assert held and all(any(bit_equal(one, other) for other in read) for one in held if one.ndim)


def test_packed_parameters(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)))
        torch.jit.save(torch.jit.script(quantized), tmp_path / "model.pt")
        weight, bias = quantized.state_dict()["0._packed_params._packed_params"]
    view = lazyckpt.open(tmp_path / "model.pt")
    prefix = "0._packed_params._packed_params"
    assert same(view, {f"{prefix}.0": weight.int_repr(), f"{prefix}.1": bias.detach()})


@pytest.mark.parametrize("name", ["data.pkl", "constants.pkl", "data/0"])
def test_damage_is_told(tmp_path: Path, name: str) -> None:
    path, _ = torch_files.write_torchscript(tmp_path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith(f"/{name}"))
    at = data.index(info.filename.encode()) - 30
    begin = (
        at + 30 + int.from_bytes(data[at + 26 : at + 28], "little") + int.from_bytes(data[at + 28 : at + 30], "little")
    )
    data[begin] ^= 0xFF
    path.write_bytes(data)
    if name == "data/0":
        assert not lazyckpt.verify(path).ok
    else:
        with pytest.raises(lazyckpt.CorruptError, match="checksum"):
            lazyckpt.open(path)


def test_tuples_that_are_in_tuples_twice_are_looked_at_once(tmp_path: Path) -> None:
    nested: tuple[object, ...] = ()
    for _ in range(90):
        nested = (nested, nested)
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        for name, value in (("data/0", b""), ("data.pkl", nested), ("constants.pkl", ())):
            archive.writestr(f"m/{name}", value if isinstance(value, bytes) else pickle.dumps(value, 2))
    with pytest.raises(lazyckpt.CorruptError):  # what the tuples stand for is more than the file can mean
        lazyckpt.open(tmp_path / "m.pt")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path, _ = torch_files.write_torchscript(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(lazyckpt.CorruptError):
        lazyckpt.open(path)
