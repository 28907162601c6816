"""nanotron: the contract on what it wrote, runs, lost and damaged files, slices that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import CorruptError, LazyckptError, MissingFileError
from lazyckpt.testing.oracle import same

from .writers import Case

UP = "decoder.0.up.weight"
SHARD = "model/decoder/0/up/model_weight_pp-rank-0-of-1_tp-rank-{}-of-2.safetensors"
QKV = "model/decoder/0/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-{}-of-2.safetensors"


@pytest.fixture
def case(framework_cases: Mapping[str, Case]) -> Case:
    return framework_cases["nanotron_tp2_zero"]


@pytest.fixture
def step(case: Case, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case.path, tmp_path / "run")) / "2"


def _codes(view: lazyckpt.CheckpointView) -> list[str]:
    return [problem.code for problem in view.problems]


def test_steps_of_a_run(case: Case) -> None:
    view = lazyckpt.open(case.path)
    assert Path(view.root).name == "2" and view.meta["step"] == 2
    assert view.meta["checkpoint_metadata"]["metas"]["consumed_train_samples"] == 16
    older = torch.load(case.path.parent / "older.pt")
    view = lazyckpt.open(case.path, tag="1")
    for state, table in older.items():
        for name, tensor in table.items():
            same(view.states[state][name][...], tensor, (state, name))
    with lazyckpt.open_run(case.path) as run:
        assert run.steps == (1, 2)


def test_degrees_and_meta(framework_cases: Mapping[str, Case]) -> None:
    view = lazyckpt.open(framework_cases["nanotron_tp2_pp2"].path)
    assert (view.mesh.tp, view.mesh.pp, view.mesh.dp) == (2, 2, 1)
    assert view.meta["optimizer"]["param_groups"][0]["lr"] == 0.05
    assert "lr_scheduler" in view.meta
    assert QKV.replace("of-1", "of-2").format(0) + "/data" in view.stored


def test_an_unfinished_step_is_passed_over(step: Path) -> None:
    (step / "checkpoint_metadata.json").unlink()
    view = lazyckpt.open(step.parent)
    assert Path(view.root).name == "1" and _codes(view) == ["unfinished-save"]


def test_an_unfinished_step_by_itself(step: Path) -> None:
    (step / "checkpoint_metadata.json").unlink()
    for name in ("config.yaml", "model_config.json"):
        (step / name).write_text("{}")
    assert "unfinished-save" in _codes(lazyckpt.open(step))


def test_a_lost_shard_is_a_hole(case: Case, step: Path) -> None:
    (step / SHARD.format(1)).unlink()
    view = lazyckpt.open(step)
    assert "missing-file" in _codes(view)
    same(view[UP][:4], case.truth["weights"][UP][:4], "the rows of rank 0")
    with pytest.raises(MissingFileError, match="tp-rank-1-of-2"):
        view[UP][:5]
    assert any(problem.code == "unmerged-tensor" and problem.path == UP for problem in view.problems)
    same(view.states["exp_avg"]["decoder.0.up.bias"][...], case.truth["exp_avg"]["decoder.0.up.bias"], "bias")


def test_a_lost_rank_of_the_optimizer_is_a_hole(case: Case, step: Path) -> None:
    (step / "optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt").unlink()
    view = lazyckpt.open(step)
    assert _codes(view) == ["missing-file"]
    t = view.states["exp_avg"][UP]
    same(t[:2], case.truth["exp_avg"][UP][:2], "the first half of rank 0")
    same(t[4:], case.truth["exp_avg"][UP][4:], "rank 1")
    with pytest.raises(MissingFileError, match="dp-1-of-2_tp-0-of-2"):
        t[2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unsharded_shape", None),
        ("unsharded_shape", "(4,)"),
        ("unsharded_shape", "(99999999999999999999, 6)"),
        ("local_global_slices_pairs", "0,4,None|None,None,None#6,10,None|None,None,None"),
        ("local_global_slices_pairs", "0,8,2|None,None,None#0,8,2|None,None,None"),
        ("local_global_slices_pairs", "-4,4,None#0,4,None"),
        ("local_global_slices_pairs", "None,None,None"),
    ],
)
def test_slices_that_do_not_fit(case: Case, step: Path, key: str, value: str | None) -> None:
    file = step / SHARD.format(1)
    tensors = load_file(file)
    slices = "None,None,None|None,None,None#4,8,None|None,None,None"
    about = {"version": "1.2", "unsharded_shape": "(8, 6)", "local_global_slices_pairs": slices}
    save_file(tensors, file, {k: v for k, v in (about | {key: value}).items() if v is not None})
    view = lazyckpt.open(step)
    assert "unreadable-file" in _codes(view)
    same(view[UP][:4], case.truth["weights"][UP][:4], "the rows of rank 0")
    with pytest.raises(LazyckptError):
        view[UP][...]


def test_shards_of_two_shapes(step: Path) -> None:
    file = step / SHARD.format(1)
    slices = "None,None,None|None,None,None#4,8,None|None,None,None"
    about = {"version": "1.2", "unsharded_shape": "(9, 6)", "local_global_slices_pairs": slices}
    save_file(load_file(file), file, about)
    with pytest.raises(CorruptError, match="in another file"):
        lazyckpt.open(step)


def test_sizes_as_numpy_2_prints_them(case: Case) -> None:
    """The writer's sizes of fused layers are numpy's; with numpy 2 their text is another."""
    file = case.path / "2" / QKV.format(0)
    header = json.loads(file.read_bytes()[8:].split(b'"data"')[0].rstrip(b",") + b"}")
    assert "16" in header["__metadata__"]["unsharded_shape"]
    same(lazyckpt.open(case.path)["decoder.0.qkv_proj.weight"][...],
         case.truth["weights"]["decoder.0.qkv_proj.weight"], "qkv")  # fmt: skip


def test_a_slice_reads_the_shards_that_hold_it(case: Case) -> None:
    t = lazyckpt.open(case.path)[UP]
    assert "tp-rank-1" not in t.explain(slice(0, 4)) and "tp-rank-0" in t.explain(slice(0, 4))
    assert "local_global_slices_pairs" in lazyckpt.open(case.path).states["exp_avg"][UP].explain()
