"""Megatron-FSDP's checkpoints: a DCP folder of uneven chunks, under the names of the model on one rank."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

import lazyckpt
from lazyckpt.errors import MissingFileError
from lazyckpt.testing.contract import CHECKS, Check
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.megatron_fsdp import CASES, load_case

KINDS = ("dp3_uneven", "dp2_ep2", "tp2_dp2_mla")


@pytest.fixture(scope="module")
def cases(checkpoints: Any) -> dict[str, Case]:
    folder = checkpoints("megatron_fsdp")
    return {name: load_case(folder, name) for name in CASES}


@pytest.mark.product
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", KINDS)
def test_contract(cases: dict[str, Case], name: str, check: Check) -> None:
    check(cases[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inside", ["", "iter_0000003"])
def test_every_state_equals_what_the_ranks_held(cases: dict[str, Case], name: str, inside: str) -> None:
    case, spec = cases[name], CASES[name]
    view = lazyckpt.open(case.path / inside)
    assert set(view.states) == set(case.truth)
    for state, truth in case.truth.items():
        assert set(view.states[state]) == set(truth), state
        for key, whole in truth.items():
            same(view.states[state][key][...], whole, (state, key))
    assert (view.format, view.mesh) == ("megatron-fsdp", lazyckpt.Mesh(spec.tp, spec.pp, spec.dp, spec.ep))
    assert (view.meta["iteration"], view.meta["checkpoint_version"]) == (3, 3.0)
    assert view.problems == ()


def test_gated_matrices_are_joined_and_say_so(cases: dict[str, Case]) -> None:
    view = lazyckpt.open(cases["tp2_dp2"].path)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert "weight_w above weight_v" in view[name].explain()
    assert not any(key.endswith(("_w", "_v")) for state in view.states.values() for key in state)
    assert f"model.module.{name}_w" in view.stored
    same(view[name][5:30, ::2], cases["tp2_dp2"].truth["weights"][name][5:30, ::2], name)


def test_the_options_of_parameters_are_in_meta(cases: dict[str, Case]) -> None:
    groups = lazyckpt.open(cases["dp2"].path).meta["optimizer"]["param_to_group_meta"]
    assert {group["step"] for group in groups.values()} == {3}
    assert {group["wd_mult"] for group in groups.values()} == {0.0, 1.0}


def test_an_iteration_without_metadata_is_unfinished(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cases["dp2"].path, tmp_path / "run"))
    (folder / "iter_0000003" / ".metadata").unlink()
    with pytest.raises(MissingFileError):
        lazyckpt.open(folder / "iter_0000003")


def test_several_iterations(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cases["dp2"].path, tmp_path / "run"))
    shutil.copytree(cases["dp2_gelu_tied"].path / "iter_0000003", folder / "iter_0000004")
    view = lazyckpt.open(folder)
    assert set(view) == set(cases["dp2"].truth["weights"])
    assert [p.code for p in view.problems] == ["unfinished-save"]
    other = lazyckpt.open(folder, tag="4")
    assert set(other) == set(cases["dp2_gelu_tied"].truth["weights"]) and other.problems == ()
    assert lazyckpt.open(folder, format="megatron-fsdp", tag="3").format == "megatron-fsdp"


# -- what the installed writer does not make on a CPU: keys and cuts of its functions, saved by torch


def _saved(folder: Path, model: dict[str, torch.Tensor], **others: Any) -> lazyckpt.CheckpointView:
    state = {"checkpoint_version": 3.0, "model": {f"module.{k}": v for k, v in model.items()}, **others}
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return lazyckpt.open(folder)


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        ("self_attention.in_proj.weight", {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 2, "alpha": 2}),
        ("self_attention.in_proj.weight", {"query": 4, "key": 4, "value": 8, "g": 4, "gate": 8}),
        ("self_attention.conv1d.bias", {"query": 4, "key": 4, "value": 8}),
        ("mixer.in_proj.weight", {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 2}),
        ("mixer.conv1d.weight", {"x": 8, "B": 4, "C": 4}),
    ],
)
def test_parts_of_token_mixers_are_joined(tmp_path: Path, module: str, parts: dict[str, int]) -> None:
    """`handle_gdn_in_state_dict`, `handle_mamba_in_state_dict_v2`: a tensor for each part; optimizers keep a number
    with each."""
    name = f"decoder.layers.0.{module}"
    shape = () if module.endswith("bias") else (3,)
    whole = torch.rand(sum(parts.values()), *shape)
    pieces = dict(zip(parts, whole.split(list(parts.values())), strict=True))
    optim = {
        f"module.module.module.{name}.{part}": {"exp_avg": piece * 2, "step": torch.tensor(7.0)}
        for part, piece in pieces.items()
    }
    view = _saved(tmp_path / "ckpt", {f"{name}.{p}": t for p, t in pieces.items()}, optimizer={"state": optim})
    assert view.format == "megatron-fsdp" and view.problems == ()
    assert [list(view.states[state]) for state in ("weights", "exp_avg", "step")] == [[name]] * 3
    same(view[name][...], whole, name)
    same(view.states["exp_avg"][name][...], whole * 2, name)
    assert float(view.states["step"][name][...]) == 7


def test_grouped_experts_and_mtp_keep_their_names(tmp_path: Path) -> None:
    names = {
        "decoder.layers.0.mlp.experts.linear_fc1.weight": ("0", "1", "10"),
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": ("",),
    }
    wholes = {f"{name}{n}": torch.rand(6, 2) for name, ends in names.items() for n in ends}
    halves = {f"{name}_{h}": t for name, w in wholes.items() for h, t in zip("wv", w.chunk(2), strict=True)}
    view = _saved(tmp_path / "ckpt", halves)
    assert set(view) == set(wholes)
    for name, whole in wholes.items():
        same(view[name][...], whole, name)


def test_a_half_alone_stays_a_half(tmp_path: Path) -> None:
    half = torch.rand(3, 2)
    view = _saved(tmp_path / "ckpt", {"decoder.layers.0.mlp.linear_fc1.weight_w": half})
    assert list(view) == ["decoder.layers.0.mlp.linear_fc1.weight_w"]


def test_names_that_ranks_shared_are_told(tmp_path: Path) -> None:
    """The writer numbers layers by stage, and biases of grouped experts by rank: they overwrite each other."""
    args = argparse.Namespace(num_layers=4, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    model = {f"decoder.layers.{n}.mlp.experts.linear_fc2.bias0": torch.rand(2) for n in range(2)}
    view = _saved(tmp_path / "ckpt", model, args=args)
    assert [p.code for p in view.problems] == ["missing-tensor", "missing-tensor"]
    assert view.mesh == lazyckpt.Mesh(1, 2, 1, 2)


def test_other_folders_of_torch_stay_what_they_are(tmp_path: Path) -> None:
    state = {"checkpoint_version": 3.0, "model": {"decoder.weight": torch.rand(2)}}
    save(state, storage_writer=FileSystemWriter(tmp_path / "run" / "iter_0000005"), no_dist=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    view = lazyckpt.open(tmp_path / "run")
    assert view.format == "dcp" and list(view) == ["decoder.weight"]


@pytest.mark.parametrize("root", [True, False])
def test_files_of_megatron_bridge_beside_the_tensors(cases: dict[str, Case], tmp_path: Path, root: bool) -> None:
    """Its names: megatron/bridge/training/utils/checkpoint_utils.py (`run_config.yaml`, `train_state.pt`)."""
    case = cases["dp2"]
    folder = Path(shutil.copytree(case.path, tmp_path / "run"))
    inside = folder / "iter_0000003"
    (inside / "run_config.yaml").write_text("model:\n  tensor_model_parallel_size: 1\n")
    torch.save({"step": torch.tensor(3)}, inside / "train_state.pt")
    torch.save({"step": torch.tensor(3)}, folder / "latest_train_state.pt")
    view = lazyckpt.open(folder if root else inside)
    assert (view.format, view.problems) == ("megatron-fsdp", ())
    for key, whole in case.truth["weights"].items():
        same(view[key][...], whole, key)


# -- damage, and what it becomes


def test_a_lost_file_is_told_and_the_rest_is_read(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["dp3_uneven"]
    folder = Path(shutil.copytree(case.path, tmp_path / "run"))
    (folder / "iter_0000003" / "__2_0.distcp").unlink()
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} >= {"missing-file"} and set(view) == set(case.truth["weights"])
    name = "decoder.layers.0.mlp.linear_fc1.weight"  # gate: 10 rows on rank 1, 10 on rank 2; up: on rank 2
    same(view[name][:10], case.truth["weights"][name][:10], name)
    with pytest.raises(lazyckpt.LazyckptError, match=r"__2_0\.distcp"):
        view[name][...]


def test_names_do_not_depend_on_what_is_lost(cases: dict[str, Case], tmp_path: Path) -> None:
    """Rank 0 saves all objects."""
    case = cases["dp2"]
    folder = Path(shutil.copytree(case.path, tmp_path / "run"))
    (folder / "iter_0000003" / "__0_0.distcp").unlink()
    view = lazyckpt.open(folder)
    assert view.format == "megatron-fsdp" and "missing-file" in {p.code for p in view.problems}
    assert set(view) == set(case.truth["weights"]) and set(view.states) == set(case.truth)


def test_a_damaged_object_is_a_problem(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["dp2_ep2"]
    folder = Path(shutil.copytree(case.path, tmp_path / "run"))
    meta = lazyckpt.open(case.path / "iter_0000003").meta
    item = meta.parts[0].items["args"][1]
    path = folder / "iter_0000003" / item.path
    data = bytearray(path.read_bytes())
    data[item.offset : item.offset + item.length] = bytes(item.length)
    path.write_bytes(data)
    view = lazyckpt.open(folder)
    assert [p.code for p in view.problems] == ["unreadable-object"] and "args" not in view.meta
    assert view.mesh == lazyckpt.Mesh() and view.meta["iteration"] == 3
    for key, whole in case.truth["weights"].items():
        same(view[key][...], whole, key)


@pytest.mark.parametrize("way", ["safetensors", "dcp", "zarr"])
def test_written_in_another_format_it_is_the_same(cases: dict[str, Case], tmp_path: Path, way: str) -> None:
    case = cases["tp2_dp2"]
    getattr(lazyckpt.open(case.path), f"to_{way}")(tmp_path / f"out.{way}")
    again = lazyckpt.open(tmp_path / f"out.{way}")
    assert set(again) == set(case.truth["weights"])
    for key, whole in case.truth["weights"].items():
        same(again[key][...], whole, key)
