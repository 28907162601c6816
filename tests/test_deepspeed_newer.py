"""What DeepSpeed's newer and removed writers saved, against what the training processes held."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.core.extents import Hole
from lazyckpt.errors import MissingFileError
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check

from .conftest import complete
from .writers import Case, bit_equal
from .writers.deepspeed_newer import OLDER, SPECS

# elastic_checkpoint cuts as many elements off the momenta as a partition has padding: their ends are lost
LOST = {"muon_zero2_elastic": "momentum_buffer"}
COMPRESSED = {"onebit_adam_fp16": {"undecided-layout"}, "zero_one_adam_fp16": {"undecided-layout"}}
EXPECTED = {
    "muon_zero2_elastic": {"undecided-layout"},
    "muon_zero2_round_robin": {"inconsistent-metadata"},
    **COMPRESSED,
}
BY_VALUES = {"fused_fp16", "fused_groups", *COMPRESSED}


@pytest.mark.parametrize("name", [*SPECS, *OLDER])
def test_every_state_equals_what_the_processes_held(newer_cases: Mapping[str, Case], name: str) -> None:
    case = newer_cases[name]
    view = lazyckpt.open(case.path)
    codes = {p.code for p in view.problems}
    if name in BY_VALUES:  # nothing was read when it was opened
        assert "undecided-name" in codes
    for state, tensors in case.truth.items():
        if state == "weights" and "weights" not in view.states:  # ZeRO-3 saves none
            continue
        if LOST.get(name) == state:
            assert state not in view.states
            continue
        found = view.states[state]
        for key, tensor in tensors.items():
            assert bit_equal(found[key][...], tensor), (state, key)
    buffers = {p.path for p in view.problems if p.code == "differing-replicas"}
    assert buffers <= set(case.info["buffers"])
    problems = {p.code for p in view.problems} - {"differing-replicas"}
    assert problems == EXPECTED.get(name, set())
    assert view.mesh.dp == case.info["dp"]


@pytest.mark.product
@pytest.mark.parametrize("name", ["muon_zero1", "muon_zero2_aligned", "fast_zero1"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(newer_cases: Mapping[str, Case], name: str, check: Check) -> None:
    check(complete(newer_cases[name]))


@pytest.mark.parametrize("name", ["weights_zero1", "weights_zero3"])
def test_weights_alone(newer_cases: Mapping[str, Case], name: str) -> None:
    case = newer_cases[name]
    for path, left_out in case.info["also"].items():
        view = lazyckpt.open(case.path.parent / "also" / path)
        truth = {n: t for n, t in case.truth["weights"].items() if n not in left_out}
        assert view.keys() == truth.keys() and view.problems == ()
        assert all(bit_equal(view[n][...], t) for n, t in truth.items())


# -- Muon


def test_a_lost_rank_loses_its_elements_of_a_momentum(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = newer_cases["muon_zero1"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    (folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} == {"missing-file"}
    momenta = view.states["momentum_buffer"]
    lost = {n: [f for f in t.spec.fragments if isinstance(f.extent, Hole)] for n, t in momenta.items()}
    assert any(lost.values())
    for name, tensor in momenta.items():
        truth = case.truth["momentum_buffer"][name]
        if lost[name]:
            with pytest.raises(MissingFileError):
                tensor[...]
        else:
            assert bit_equal(tensor[...], truth)


# -- FastPersist


def test_the_model_states_of_any_writer_are_read(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = newer_cases["fast_zero1"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    (folder / "global_step3" / "mp_rank_00_model_states.pt-0.2").unlink()
    view = lazyckpt.open(folder)
    buffers = case.rank_buffers["rank1"]
    assert all(bit_equal(view[n][...], t) for n, t in buffers.items())
    (problem,) = view.problems
    assert (problem.code, problem.path) == ("missing-file", "global_step3/mp_rank_00_model_states.pt-0.2")


@pytest.mark.parametrize("name", ["fast_zero0", "fast_zero1"])
def test_copies_of_several_writers_are_compared(newer_cases: Mapping[str, Case], name: str, tmp_path: Path) -> None:
    case = newer_cases[name]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    first, second = sorted(folder.glob("*/mp_rank_00_model_states.pt-*.2"))
    mine, others = case.rank_buffers["rank0"], case.rank_buffers["rank1"]
    differing = {n for n, t in mine.items() if not bit_equal(t, others[n])}
    told = {p.path for p in lazyckpt.open(folder).problems if p.code == "differing-replicas"}
    assert differing and told == differing
    shutil.copy(first, second)
    assert lazyckpt.open(folder).problems == ()
    state = torch.load(first, weights_only=False)
    tensor = "anchor"  # a frozen one: of trained ones, ZeRO-1 saves the flat buffer
    state["module"][tensor] = state["module"][tensor] + 1
    torch.save(state, second)
    assert ("differing-replicas", tensor) in {(p.code, p.path) for p in lazyckpt.open(folder).problems}
    if name == "fast_zero0":  # whose optimizer is in the same file
        state = torch.load(first, weights_only=False)
        state["optimizer"]["state"][0]["exp_avg"] += 1
        torch.save(state, second)
        assert {p.path for p in lazyckpt.open(folder).problems} == {"optimizer.state.0.exp_avg"}
    second.unlink()
    assert [(p.code, p.path) for p in lazyckpt.open(folder).problems] == [
        ("missing-file", second.relative_to(folder).as_posix())
    ]


def test_a_damaged_copy_of_the_first_writer(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = newer_cases["fast_zero0"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    path = next(folder.glob("*/mp_rank_00_model_states.pt-0.2"))
    path.write_bytes(path.read_bytes()[:100])
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} == {"unreadable-file"}
    assert all(bit_equal(view[n][...], t) for n, t in case.rank_buffers["rank1"].items())


def test_a_part_of_a_file_is_a_problem(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(newer_cases["fast_zero1"].path, tmp_path / "copy"))
    (path,) = folder.glob("*/*_pp_rank_1_*-1.2")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    view = lazyckpt.open(folder)
    (problem,) = (p for p in view.problems if p.code == "unreadable-file")
    assert "writers" in problem
    assert any(isinstance(f.extent, Hole) for t in view.states["fp32"].values() for f in t.spec.fragments)


def test_a_save_of_more_writers_replaces_one_of_fewer(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = newer_cases["fast_zero1"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    for path in list(folder.glob("*/*.pt-*.2")):
        shutil.copy(path, path.with_name(path.name.removesuffix("2") + "4"))  # newer
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} == {"left-over-file", "missing-file", "differing-replicas"}
    assert all(".2" in (p.path or "") for p in view.problems if p.code == "left-over-file")
    assert all(bit_equal(view.states["fp32"][n][...], t) for n, t in case.truth["fp32"].items())


# -- FP16_Optimizer


def _fused(tmp_path: Path, order: list[str], **group: object) -> lazyckpt.CheckpointView:
    """Return the view of a checkpoint whose flat copies are in this order."""
    module = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(10.0, 16).view(3, 2), "c": torch.arange(20.0, 24)}
    flat = torch.cat([module[n].flatten() for n in order])
    states = {"exp_avg": flat / 2, "step": torch.tensor(3.0)}
    optimizer = {
        "fp32_groups_flat": [flat],
        "optimizer_state_dict": {"state": {0: states}, "param_groups": [{"params": [0], **group}]},
    }
    model = {"module": {n: t.half() for n, t in module.items()}, "optimizer": optimizer, "buffer_names": []}
    torch.save({**model, "dp_world_size": 1, "mp_world_size": 1}, tmp_path / "mp_rank_00_model_states.pt")
    return lazyckpt.open(tmp_path)


def test_flat_copies_in_the_order_of_the_module(tmp_path: Path) -> None:
    view = _fused(tmp_path, ["a", "b", "c"])
    assert set(view.states["exp_avg"]) == {"a", "b", "c"} and view.problems == ()
    assert torch.equal(view.states["exp_avg"]["b"][...], torch.arange(10.0, 16).view(3, 2) / 2)


def test_flat_copies_in_another_order_get_no_name(tmp_path: Path) -> None:
    view = _fused(tmp_path, ["b", "c", "a"])
    assert not {"a", "b", "c"} & set(view.states["exp_avg"])
    assert [p.code for p in view.problems] == ["undecided-name"]


@pytest.mark.parametrize("order", [["a", "b"], ["a", "c"]])
def test_flat_copies_of_some_parameters_are_undecided(tmp_path: Path, order: list[str]) -> None:
    view = _fused(tmp_path, order)
    assert set(view.states) == {"weights"} and [p.code for p in view.problems] == ["undecided-name"]


def test_flat_copies_of_listed_parameters(tmp_path: Path) -> None:
    view = _fused(tmp_path, ["b", "a"], param_names=["b", "a"])
    assert set(view.states["exp_avg"]) == {"a", "b"} and view.problems == ()
    assert torch.equal(view.states["fp32"]["a"][...], torch.arange(6.0).view(2, 3))


# -- ZenFlow


def test_matrices_of_zenflow_are_turned_back(newer_cases: Mapping[str, Case], tmp_path: Path) -> None:
    """Under ZeRO-3, ZenFlow's files differ from others in the configuration and in that matrices are transposed."""
    case = newer_cases["weights_zero3"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    for path in folder.glob("*/*_model_states.pt"):
        model = torch.load(path, weights_only=False)
        model["ds_config"]["zero_optimization"]["zenflow"] = {"topk_ratio": 0.2}
        torch.save(model, path)
    view = lazyckpt.open(folder)
    for state in ("fp32", "exp_avg"):
        for name, tensor in case.truth[state].items():
            whole = tensor.T if tensor.ndim == 2 else tensor
            assert bit_equal(view.states[state][name][...], whole.contiguous()), (state, name)
    embedding = case.truth["fp32"]["embed.weight"].T
    assert torch.equal(view["embed.weight"][1:3, 4:], embedding[1:3, 4:])
    assert "ZenFlow" in str(view["embed.weight"].explain())
