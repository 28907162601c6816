"""Folders of rank files: the contract on each kind of them, names and states, what opening costs, lost files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.core.extents import Hole
from lazyckpt.formats.ranks.fragments import MeshFragments
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(rank_case: Case, check: Check) -> None:
    check(rank_case)


def test_format_mesh_and_problems(rank_case: Case) -> None:
    view = lazyckpt.open(rank_case.path)
    info = rank_case.info
    assert view.format == info["format"]
    assert view.mesh == lazyckpt.Mesh(dp=info["dp"], tp=info.get("tp", 1))
    assert view.problems == ()


def _copy(case: Case, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case.path, tmp_path / "copy"))


# -- names, states, what is no tensor


def test_verl_writes_neighbours(rank_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(rank_cases["verl_fsdp2"].path)
    meta: Any = view.meta
    assert meta["fsdp_config"] == {"FSDP_version": 2, "world_size": 3}
    assert meta["config"]["model_type"] == "tiny"
    assert meta["optim"]["param_groups"][0]["lr"] == 0.01
    assert meta["extra_state"]["lr_scheduler"]["last_epoch"] == 0
    name = "extra_state_world_size_3_rank_0.pt/rng.cpu"
    assert meta["extra_state"]["rng"]["cpu"].name == name
    same(view.stored[name][...], view.stored[name.replace("rank_0", "rank_1")][...], "forked alike")
    assert "model" not in meta


def test_explain_says_how_a_tensor_lies(rank_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(rank_cases["tensor_parallel"].path)
    text = view["layers.0.up.weight"].explain()
    assert "dp=2: _StridedShard(0, split_factor=2), tp=2: Shard(0)" in text
    assert "model_rank03.bin" in text
    view = lazyckpt.open(rank_cases["accelerate_local"].path)
    text = view["layers.0.up.bias"].explain()
    assert "'layers.0._flat_param'" in text and "known from the optimizer's states" in text


def test_each_file_is_looked_at_once_and_no_data_is(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(1 << 20), "b": torch.ones(3)}, tmp_path / f"rank{rank}.pt")
    view, counts = opened(tmp_path)
    assert counts.bytes < 50_000 and counts.requests < 30
    view, counts = opened(rank_cases["verl_fsdp2"].path)
    pickles = [r for r in counts.log if r.path == "model_world_size_3_rank_1.pt" and r.length > 1024]
    assert len(pickles) <= 2, "the end of the file, and its pickle"
    counts.clear()
    view["emb.weight"][0]
    assert counts.paths == {"model_world_size_3_rank_0.pt"}


@pytest.mark.slow
def test_stored_has_each_rank_s_own(rank_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(rank_cases["accelerate_sharded"].path)
    names = [n for n in view.stored if n.startswith("pytorch_model_fsdp_0_rank1.bin/emb.weight")]
    assert len(names) == 1
    whole = rank_cases["accelerate_sharded"].truth["weights"]["emb.weight"]
    same(view.stored[names[0]][...], whole[6:], "rank 1's rows")


def test_sums_are_no_tensors(rank_cases: dict[str, Case]) -> None:
    case = rank_cases["partial"]
    view = lazyckpt.open(case.path)
    same(view["w"][...], case.truth["weights"]["w"], "w")
    assert any(line.code == "unmerged-tensor" for line in view.problems)
    with pytest.raises(lazyckpt.errors.DataError, match="Partial"):
        view["sum"][...]


def test_one_file_alone_is_its_rank_s(rank_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(rank_cases["verl_fsdp2"].path / "model_world_size_3_rank_1.pt")
    assert view.format == "torch"
    assert sum(line.code == "part-of-checkpoint" for line in view.problems) == 1
    same(view["emb.weight._local_tensor"][...], rank_cases["verl_fsdp2"].truth["weights"]["emb.weight"][4:8], "rows")


def test_buffers_that_differ_are_told(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"a": torch.full((3,), float(rank)), "b": torch.ones(3)}, tmp_path / f"rank{rank}.pt")
    view = lazyckpt.open(tmp_path)
    assert view.format == "rank-files"
    assert [line for line in view.problems if "(a)" in line and "ranks 1" in line] == list(view.problems)
    same(view["a"][...], torch.zeros(3), "the lowest rank's")


def test_a_model_beside_is_what_the_folder_is(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"x": torch.ones(2)}, tmp_path / "rank0.pt")
    assert lazyckpt.open(tmp_path).format == "huggingface"


# -- flat parameters


FLAT = {
    "_flat_param": {"emb.weight": [11, 6], "head.weight": [5, 6], "head.bias": [5]},
    "layers.0._flat_param": {"gain": [1], "norm.weight": [6], "norm.bias": [6], "up.weight": [7, 6], "up.bias": [7],
                             "down.weight": [6, 7]},
    "layers.1._flat_param": {"gain": [1], "norm.weight": [6], "norm.bias": [6], "up.weight": [9, 6], "up.bias": [9],
                             "down.weight": [6, 9]},
}  # fmt: skip


@pytest.mark.parametrize("name", ["accelerate_local", "accelerate_local_original"])
def test_flat_parameters_without_a_hint(rank_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = rank_cases[name]
    folder = _copy(case, tmp_path)
    shutil.rmtree(folder / "optimizer_0")
    view = lazyckpt.open(folder)
    assert any(line.code == "flat-parameter" for line in view.problems)
    weights = case.truth["weights"]
    if name == "accelerate_local":
        flat = torch.cat([weights[n].ravel() for n in FLAT["_flat_param"]])
        same(view["_flat_param"][...], flat, "flat")
        same(view["layers.0.stat"][...], weights["layers.0.stat"], "a buffer")
    else:  # each rank saved its slices, so places are known
        for key, whole in weights.items():
            same(view[key][...], whole.ravel() if whole.ndim > 1 else whole, key)
    rules = {glob: {"flat": shapes} for glob, shapes in FLAT.items()}
    view = lazyckpt.open(folder, rules=rules)
    assert view.problems == ()
    for key, whole in weights.items():
        same(view[key][...], whole, key)
        same(view[key][-1:] if whole.ndim else view[key][...], whole[-1:] if whole.ndim else whole, key)


def test_rules_that_do_not_fit_are_refused(rank_cases: dict[str, Case]) -> None:
    folder = rank_cases["accelerate_local"].path
    for rule, what in (
        ({"flat": {"w": [3]}}, "3 elements together, it has 101"),
        ({"flat": {"w": "3"}}, "not understood"),
        ({"flat": {}}, "not understood"),
        ({"flat": {"w": [101]}, "parts": 2}, "not understood"),
    ):
        with pytest.raises(lazyckpt.errors.FormatError, match=what):
            lazyckpt.open(folder, rules={"_flat_param": rule})
    view = lazyckpt.open(folder, rules={"*.nothing._flat_param": {"flat": {"w": [3]}}})
    assert any(line.code == "unused-rule" for line in view.problems)
    view = lazyckpt.open(folder, rules={"head.weight": "row"})
    assert any(line.code == "unused-rule" for line in view.problems)


def test_rules_from_a_file(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    from lazyckpt.cli.options import read_rules

    (tmp_path / "rules.toml").write_text(
        '[rules."_flat_param".flat]\n"emb.weight" = [11, 6]\n"head.weight" = [5, 6]\n"head.bias" = [5]\n'
    )
    rules = read_rules(tmp_path / "rules.toml")
    view = lazyckpt.open(rank_cases["accelerate_local"].path, rules=rules)
    assert "rules['_flat_param']" in view["head.bias"].explain()


# -- lost, truncated and left-over files


@pytest.mark.parametrize("how", ["missing", "truncated"])
@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("verl_fsdp2", "model_world_size_3_rank_1.pt"),
        ("accelerate_sharded", "pytorch_model_fsdp_0_rank1.bin"),
        ("accelerate_local", "pytorch_model_fsdp_rank1.bin"),
        ("accelerate_local_original", "pytorch_model_fsdp_rank1.bin"),
        ("meshes", "rank2.pt"),
    ],
)
def test_a_lost_file_is_a_hole(rank_cases: dict[str, Case], tmp_path: Path, name: str, victim: str, how: str) -> None:
    case = rank_cases[name]
    folder = _copy(case, tmp_path)
    if how == "missing":
        (folder / victim).unlink()
    else:
        (folder / victim).write_bytes((folder / victim).read_bytes()[:-100])
    view = lazyckpt.open(folder)
    assert any(victim in line for line in view.problems)
    read = lost = 0
    for key, whole in case.truth["weights"].items():
        if key not in view:
            continue
        t = view[key]
        try:
            t._check()
        except lazyckpt.errors.MissingFileError as e:
            lost += 1
            assert victim in str(e)
            assert any(isinstance(f.extent, Hole) for f in t.fragments)
            with pytest.raises(lazyckpt.errors.MissingFileError, match=victim):
                t[...]
            continue
        read += 1
        same(t[...], whole, key)
    assert read and lost


def test_replicas_stand_in_for_a_lost_file(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    case = rank_cases["verl_hsdp"]
    folder = _copy(case, tmp_path)
    (folder / "model_world_size_4_rank_0.pt").unlink()
    (folder / "optim_world_size_4_rank_3.pt").unlink()
    view = lazyckpt.open(folder)
    assert len([line for line in view.problems if line.code == "missing-file"]) == 2
    for state, table in case.truth.items():
        for key, whole in table.items():
            same(view.states[state][key][...], whole, (state, key))


def test_left_over_files_are_told_and_not_mixed_in(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copy(rank_cases["verl_fsdp2"], tmp_path)
    for path in rank_cases["verl_hsdp"].path.glob("*_rank_3.pt"):
        shutil.copy(path, folder)
    view = lazyckpt.open(folder)
    assert len(view.problems) == 3 and all(line.code == "left-over-file" for line in view.problems)
    for key, whole in rank_cases["verl_fsdp2"].truth["weights"].items():
        same(view[key][...], whole, key)


def test_files_of_a_larger_world_of_the_same_names(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    """Names that do not tell the world size: what contradicts the lowest ranks is left over."""
    folder = tmp_path / "x"
    folder.mkdir()
    for name, ranks in (("verl_fsdp1_slices", range(2)), ("verl_hsdp", range(2, 4))):
        for rank in ranks:
            (path,) = rank_cases[name].path.glob(f"model_*_rank_{rank}.pt")
            shutil.copy(path, folder / f"rank{rank}.pt")
    view = lazyckpt.open(folder)
    assert [line for line in view.problems if line.code == "left-over-file"] == list(view.problems)
    for key, whole in rank_cases["verl_fsdp1_slices"].truth["weights"].items():
        same(view[key][...], whole, key)


def test_ranks_that_disagree(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    """Two models over the same ranks."""
    folder = _copy(rank_cases["verl_hsdp"], tmp_path)
    for path in rank_cases["tensor_parallel"].path.glob("model_rank03.bin"):
        shutil.copy(path, folder / "model_world_size_4_rank_3.pt")
    view = lazyckpt.open(folder)
    assert any(line.code == "unmerged-tensor" or line.code == "left-over-file" for line in view.problems)
    for t in view.values():
        try:
            t[...]
        except lazyckpt.errors.LazyckptError as e:
            assert "rank 3" in str(e) or "rank_3" in str(e)


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(lazyckpt.errors.CorruptError, match="rank_0"):
        lazyckpt.open(tmp_path)


def test_missing_ranks_that_only_the_mesh_tells(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    shutil.copy(rank_cases["verl_fsdp2"].path / "model_world_size_3_rank_0.pt", folder / "rank_0.pt")
    view = lazyckpt.open(folder)
    assert any("rank_1.pt, rank_2.pt" in line for line in view.problems)
    with pytest.raises(lazyckpt.errors.MissingFileError, match=r"rank_1\.pt is missing"):
        view["emb.weight"][...]
    same(view["emb.weight"][:4], rank_cases["verl_fsdp2"].truth["weights"]["emb.weight"][:4], "rank 0's")


# -- scale


def test_a_thousand_ranks_are_few_facts(rank_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(rank_cases["verl_fsdp2"].path)
    t = view["emb.weight"]
    assert isinstance(t.fragments, MeshFragments)
    assert t.fragments.team is view["head.weight"].fragments.team, "what ranks share is kept once"  # type: ignore[attr-defined]
    assert len(t.fragments.meeting((range(4, 5), range(5)))) == 1


def test_over_a_url_and_again(rank_cases: dict[str, Case]) -> None:
    import fsspec

    case = rank_cases["accelerate_local"]
    memory = fsspec.filesystem("memory")
    memory.put(f"{case.path}/", "/lazyckpt-ranks/", recursive=True)
    view = lazyckpt.open("memory://lazyckpt-ranks")
    for key, whole in case.truth["weights"].items():
        same(view[key][...], whole, key)
    memory.rm("/lazyckpt-ranks", recursive=True)


def test_exports(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    for name in ("meshes", "accelerate_local_original", "verl_fsdp1_flat"):
        case = rank_cases[name]
        view = lazyckpt.open(case.path)
        view.to_safetensors(tmp_path / name)
        for key, tensor in lazyckpt.open(tmp_path / name).to().items():
            same(tensor, case.truth["weights"][key], key)
    assert json.loads((rank_cases["verl_one"].path / "fsdp_config.json").read_text())["world_size"] == 1


@pytest.mark.parametrize("name", ["verl_fsdp2", "verl_hsdp"])
def test_intact_is_told_without_a_plan(rank_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = _copy(rank_cases[name], tmp_path)
    (folder / f"model_world_size_{rank_cases[name].info['dp']}_rank_0.pt").unlink()
    for path, wanted in ((rank_cases[name].path, True), (folder, name == "verl_hsdp")):
        fragments = lazyckpt.open(path)["emb.weight"].fragments
        assert isinstance(fragments, MeshFragments)
        assert fragments.intact == wanted


def test_composers_saves_are_not_merged(tmp_path: Path) -> None:
    """composer/callbacks/checkpoint_saver.py: a file for each save of rank 0, and a link to the last one."""
    for batch in (10, 20):
        state = {"model": {"a.weight": torch.full((2, 3), float(batch))}, "optimizers": {}}
        torch.save({"state": state, "rng": []}, tmp_path / f"ep0-ba{batch}-rank0.pt")
        os.utime(tmp_path / f"ep0-ba{batch}-rank0.pt", (batch, batch))
    os.symlink("ep0-ba20-rank0.pt", tmp_path / "latest-rank0.pt")
    view = lazyckpt.open(tmp_path)
    assert list(view) == ["a.weight"] and (view["a.weight"][...] == 20).all() and not view.problems
    assert lazyckpt.open_run(tmp_path).steps == (10, 20)
    (tmp_path / "ep0-ba20-rank1.pt").write_bytes((tmp_path / "ep0-ba20-rank0.pt").read_bytes())  # sharded by ranks
    view = lazyckpt.open(tmp_path)
    assert view.format == "rank-files" and [p.code for p in view.problems] == ["left-over-file"]
