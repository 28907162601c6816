"""`lazyckpt.distributed.LazyReader` in one process: any checkpoint through `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import lazyckpt
from lazyckpt.distributed import LazyReader
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.dcp_contents import TinyNet, adam
from .writers.nasty_model import NastyModel

pytestmark = pytest.mark.filterwarnings("ignore")


def everything(reader: Any, keys: set[str] | None = None) -> dict[str, Any]:
    """What `dcp_to_torch_save` would save."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys), no_dist=True)
    return state


def alike(a: Any, b: Any, where: str = "") -> None:
    if isinstance(b, torch.Tensor):
        same(a.resolve_conj(), b.resolve_conj(), where)
    elif isinstance(b, dict):
        assert set(a) == set(b), where
        for key in b:
            alike(a[key], b[key], f"{where}.{key}")
    elif isinstance(b, list | tuple):
        assert len(a) == len(b)
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            alike(x, y, f"{where}.{n}")
    elif type(b).__module__ in ("builtins", "torch"):
        assert a == b, where


@pytest.mark.parametrize(
    "name",
    ["fsdp2", "wrapped", "flat_optimizer", "tensor_parallel", "experts", "odd", "flat", "not_flattened", "numbered"],
)
def test_all_of_a_distributed_checkpoint_is_what_torch_reads(dcp_cases: dict[str, Case], name: str) -> None:
    path = dcp_cases[name].path
    alike(everything(LazyReader(path)), everything(dcp.FileSystemReader(path)))


@pytest.mark.parametrize(
    "name", ["no_collectives", "as_safetensors", "zstd", "hub_ranks", "hub_consolidated", "hub_mapped"]
)
def test_what_torch_reads_only_with_other_readers(dcp_cases: dict[str, Case], name: str) -> None:
    case = dcp_cases[name]
    state = everything(LazyReader(case.path))
    for tensor, truth in case.truth["weights"].items():
        same(state.get("model", state)[tensor], truth, tensor)


def test_one_key_reads_one_key(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["fsdp2"]
    state = everything(LazyReader(case.path), {"model.emb.weight"})
    assert list(state) == ["model"] and list(state["model"]) == ["emb.weight"]
    same(state["model"]["emb.weight"], case.truth["weights"]["emb.weight"], "emb")


def trained(sizes: dict[str, int]) -> tuple[TinyNet, torch.optim.Optimizer, dict[str, Any]]:
    model = TinyNet(**sizes)
    optimizer = adam(model)
    weights, optim = get_state_dict(model, optimizer)
    return model, optimizer, {"model": weights, "optim": optim}


def check_states(
    case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer, weights: str = "weights"
) -> None:
    for name, tensor in model.state_dict().items():
        same(tensor, case.truth[weights][name], name)
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            if name in case.truth[state]:
                same(optimizer.state[parameter][state], case.truth[state][name], f"{name} {state}")


@pytest.mark.parametrize("name", ["fsdp2", "wrapped", "flat_optimizer", "fsdp1", "numbered", "not_flattened"])
def test_weights_and_states_of_any_wrapping(dcp_cases: dict[str, Case], name: str) -> None:
    """{"model", "optim"} from checkpoints whose keys begin otherwise, or whose optimizer numbers its parameters."""
    case = dcp_cases[name]
    small = name in ("numbered", "not_flattened")
    model, optimizer, state = trained({"hidden": 4, "inner": 3, "vocab": 9} if small else {})
    reader = LazyReader(case.path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    check_states(case, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    if name == "fsdp2":
        assert reader.kept == []


def test_numbers_do_not_replace_names(tmp_path: Path) -> None:
    """A checkpoint of `optimizer.state_dict()`, under the keys of `get_state_dict`, which names parameters."""
    held = torch.nn.Linear(3, 2)
    saved = torch.optim.Adam(held.parameters(), lr=0.03)
    held(torch.ones(1, 3)).sum().backward()
    saved.step()
    dcp.save({"model": held.state_dict(), "optim": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    weights, optim = get_state_dict(model, optimizer)
    reader = LazyReader(tmp_path)
    dcp.load({"model": weights, "optim": optim}, storage_reader=reader, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
    assert optim["param_groups"][0]["params"] == ["weight", "bias"]
    assert reader.kept == ["optim.param_groups.0.params"] and optimizer.param_groups[0]["lr"] == 0.03
    same(optimizer.state[model.bias]["exp_avg"], saved.state[held.bias]["exp_avg"], "bias")
    numbered = torch.optim.Adam(model.parameters()).state_dict()
    numbered["param_groups"][0]["params"] = [7, 7]
    dcp.load({"optim": {"param_groups": numbered["param_groups"]}}, storage_reader=LazyReader(tmp_path), no_dist=True)
    assert numbered["param_groups"][0]["params"] == [0, 1]


def test_a_deepspeed_checkpoint(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero3_fp32_dp4"]
    spec = case.info["spec"]
    model = NastyModel(spec["hidden"], spec["layers"], spec["vocab"], with_empty=False)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, optim = get_state_dict(model, optimizer)
    names = set(lazyckpt.open(case.path).states["exp_avg"])
    optim["state"] = {name: states for name, states in optim["state"].items() if name in names}
    state = {"model": weights, "optimizer": optim, "global_steps": 0}
    reader = LazyReader(case.path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in weights.items():
        same(tensor, case.truth["fp32"].get(name, case.truth["weights"][name]), name)
    for name, states in optim["state"].items():
        same(states["exp_avg"], case.truth["exp_avg"][name], name)
        same(states["exp_avg_sq"], case.truth["exp_avg_sq"][name], name)
        assert states["step"] == case.info["step"]
    assert state["global_steps"] == case.info["step"]
    assert "optimizer.param_groups.0.params" in reader.kept, "they are numbers in the checkpoint"
    assert optim["param_groups"][0]["lr"] != 1e-3


def test_files_of_weights(tmp_path: Path) -> None:
    weights = {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.arange(4).bfloat16()}
    save_file(weights, tmp_path / "x.safetensors")
    torch.save(
        {"model": {"w": weights["model.a"]}, "scheduler": {"last_epoch": 5, "milestones": [1, 2]}}, tmp_path / "x.pt"
    )
    reader = LazyReader(tmp_path / "x.safetensors")
    for prefix in ("", "model.", "app.model."):
        state = {prefix + name: torch.zeros_like(t) for name, t in weights.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        for name, t in weights.items():
            same(state[prefix + name], t, name)
    alike(everything(reader), weights)
    run: dict[str, Any] = {"model": {"w": torch.zeros(2, 3)}, "scheduler": {"last_epoch": 0, "milestones": []}}
    dcp.load(run, storage_reader=reader, checkpoint_id=tmp_path / "x.pt", no_dist=True)
    same(run["model"]["w"], weights["model.a"], "w")
    assert run["scheduler"] == {"last_epoch": 5, "milestones": [1, 2]}
    assert everything(reader)["scheduler"] == run["scheduler"]


def test_dtypes_and_strides_of_the_target_are_kept(tmp_path: Path) -> None:
    w = torch.randn(5, 7)
    save_file({"w": w, "s": torch.tensor(3.0)}, tmp_path / "x.safetensors")
    for target in (torch.empty(7, 5).t(), torch.empty(5, 7, dtype=torch.bfloat16), torch.empty(5, 14)[:, ::2]):
        state = {"w": target, "s": torch.tensor(0, dtype=torch.int64)}
        dcp.load(state, storage_reader=LazyReader(tmp_path), no_dist=True)
        assert state["w"] is target and state["s"] == 3
        same(target, w.to(target.dtype), "w")


def test_views_and_parts_of_them(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["fsdp2"]
    view = lazyckpt.open(case.path)
    state = {"up.weight": torch.zeros(7, 6)}
    dcp.load(state, storage_reader=LazyReader(view["layers.0"]), no_dist=True)
    same(state["up.weight"], case.truth["weights"]["layers.0.up.weight"], "a part")
    moments = {"layers.0.up.weight": torch.zeros(7, 6)}
    dcp.load(moments, storage_reader=LazyReader(view.states["exp_avg"]), no_dist=True)
    same(moments["layers.0.up.weight"], case.truth["exp_avg"]["layers.0.up.weight"], "a state")
    dcp.load(moments, storage_reader=LazyReader({"layers.0.up.weight": view["layers.0.up.weight"]}), no_dist=True)
    same(moments["layers.0.up.weight"], case.truth["weights"]["layers.0.up.weight"], "a mapping")


def test_it_reads_what_is_wanted(tmp_path: Path) -> None:
    weights = {name: torch.randn(64, 8) for name in "abc"}
    save_file(weights, tmp_path / "x.safetensors")
    view, counts = opened(tmp_path / "x.safetensors")
    counts.clear()
    dcp.load({"b": torch.empty(64, 8)}, storage_reader=LazyReader(view), no_dist=True)
    assert counts.bytes == 64 * 8 * 4


def test_errors(tmp_path: Path, dcp_cases: dict[str, Case]) -> None:
    with pytest.raises(lazyckpt.MissingFileError):
        LazyReader(tmp_path / "nothing")
    assert not LazyReader.validate_checkpoint_id(tmp_path / "nothing")
    assert LazyReader.validate_checkpoint_id(tmp_path) and LazyReader.validate_checkpoint_id("s3://bucket/x")
    folder = shutil.copytree(dcp_cases["fsdp2"].path, tmp_path / "copy")
    for state, word in (
        ({"model.nope": torch.zeros(2)}, "model.nope"),
        ({"model.emb.weight": torch.zeros(2, 3)}, "Size mismatch"),
        ({"optim.state.emb.weight.nope": torch.zeros(2)}, "nope"),
    ):
        with pytest.raises((CheckpointException, RuntimeError, ValueError)) as error:
            dcp.load(state, storage_reader=LazyReader(folder), no_dist=True)
        assert word in str(error.value)
    (folder / "__1_0.distcp").unlink()
    good = {"model.emb.weight": torch.zeros(11, 6)}
    with pytest.raises((CheckpointException, lazyckpt.MissingFileError)) as error:
        dcp.load(good, storage_reader=LazyReader(folder), no_dist=True)
    assert "__1_0.distcp" in str(error.value)


def test_either_of_two_tensors_is_no_answer(tmp_path: Path) -> None:
    """{"model": {"w": ...}} and {"model.w": ...} have the same key for torch."""
    save_file({"w": torch.zeros(2), "model.w": torch.ones(2)}, tmp_path / "x.safetensors")
    reader = LazyReader(tmp_path)
    state = {"w": torch.empty(2)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"].sum() == 0
    with pytest.raises((CheckpointException, lazyckpt.TensorNotFoundError), match=r"may be 'model\.w' or 'w'"):
        dcp.load({"model.w": torch.empty(2)}, storage_reader=reader, no_dist=True)
    inner = {"w": torch.empty(2)}
    dcp.load(inner, storage_reader=LazyReader(lazyckpt.open(tmp_path)["model"]), no_dist=True)
    assert inner["w"].sum() == 2


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch it_ran",)


def test_nothing_of_the_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": {"w": torch.zeros(2)}, "bomb": (Bomb(), 1)}, checkpoint_id=tmp_path / "x", no_dist=True)
    state = everything(LazyReader(tmp_path / "x"))
    assert isinstance(state["bomb"][0], lazyckpt.Opaque) and state["bomb"][1] == 1
    assert not (tmp_path / "it_ran").exists()
