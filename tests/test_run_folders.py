"""Folders of LitGPT, Composer, ColossalAI and MLX beyond the contract: runs, links, unfinished and damaged saves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.fixture
def copied(folder_cases: Mapping[str, Case], tmp_path: Path) -> Any:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder_cases[name].path, tmp_path / name, symlinks=True))

    return copy


def codes(view: lazyckpt.CheckpointView) -> list[str]:
    return [problem.code for problem in view.problems]


# -- LitGPT


def test_steps_of_litgpt(copied: Any) -> None:
    run = copied("litgpt_pretrain")
    view = lazyckpt.open(run, tag="step-00000001")
    assert view.meta["step"] == 1 and view.meta["model_config"].startswith("attention_") and not view.problems
    steps = lazyckpt.open_run(run)
    assert steps.steps == (1, 2)
    same(steps["lm_head.weight"][0], view["lm_head.weight"][...], "lm_head")
    for name in ("step-00000001", "step-00000002"):
        shutil.rmtree(run / name)
    view = lazyckpt.open(run)
    assert Path(view.root).name == "final" and "exp_avg" in view.states and not view.problems


def test_litgpts_adapter_beside_the_merged_model(copied: Any) -> None:
    folder = copied("litgpt_pretrain") / "final"
    shutil.copy(copied("litgpt_lora") / "lit_model.pth.lora", folder)
    view = lazyckpt.open(folder)
    assert codes(view) == ["other-checkpoint"] and "lm_head.weight" in view
    (folder / "model_config.yaml").write_bytes(b"x" * (1 << 20) + b"\xff")
    assert codes(lazyckpt.open(folder)) == ["unreadable-file", "other-checkpoint"][::-1]


def test_a_model_of_the_hub_that_litgpt_converted(copied: Any) -> None:
    folder = copied("litgpt_pretrain") / "final"
    torch.save({"model.norm.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    assert list(lazyckpt.open(folder)) == ["model.norm.weight"]


# -- Composer


@pytest.mark.parametrize(("case", "end"), [("composer_files", "-rank0.pt"), ("composer_sharded", "")])
def test_saves_of_composer(copied: Any, case: str, end: str) -> None:
    run = copied(case)
    steps = lazyckpt.open_run(run)
    assert steps.steps == (1, 2) and not steps.problems
    first = lazyckpt.open(run, tag=f"ep0-ba1{end}")
    name = next(iter(first))
    same(steps[name][0], first[name][...], name)
    (run / "latest.symlink").write_text(f"tiny/checkpoints/ep0-ba1{end}")
    view = lazyckpt.open(run / "latest.symlink")
    same(view.states["exp_avg"][name][...], first.states["exp_avg"][name][...], name)
    assert not lazyckpt.open(run).problems


def test_links_of_composer_that_lead_nowhere(copied: Any) -> None:
    run = copied("composer_sharded")
    link = run / "latest.symlink"
    link.write_text("tiny/ep0-ba7")
    with pytest.raises(lazyckpt.MissingFileError, match="ep0-ba7"):
        lazyckpt.open(link)
    for text in ("", "..", "a/../..", "latest.symlink", "a" * 5000, "a\0b"):
        link.write_text(text)
        with pytest.raises(lazyckpt.CorruptError):
            lazyckpt.open(link)


@pytest.mark.parametrize("case", ["composer_files", "composer_sharded"])
def test_a_link_to_a_missing_save_is_a_problem(copied: Any, case: str) -> None:
    run = copied(case)
    last = "ep0-ba2-rank0.pt" if case == "composer_files" else "ep0-ba2"
    name = next(iter(lazyckpt.open(run)))
    os.rename(run / last, run.parent / last)
    (run / "latest-rank0.pt").unlink(missing_ok=True)
    os.symlink(f"/elsewhere/{last}", run / "latest-rank0.pt")
    view = lazyckpt.open(run)
    same(view[name][...], lazyckpt.open_run(run)[name][-1], name)
    for problems in (view.problems, lazyckpt.open_run(run).problems):
        assert [(p.code, p.path) for p in problems] == [("missing-file", last)]
        assert "latest-rank0.pt" in problems[0]
    with pytest.raises(lazyckpt.MissingFileError, match=last):
        lazyckpt.open(run / "latest-rank0.pt")
    (run / "latest-rank0.pt").unlink()
    assert lazyckpt.open(run).problems == ()
    (run / "latest-rank0.pt.symlink").write_text(f"bucket/run/{last}\n")
    assert [(p.code, p.path) for p in lazyckpt.open(run).problems] == [("missing-file", last)]
    os.rename(run.parent / last, run / last)
    assert lazyckpt.open(run).problems == ()
    (run / "latest-rank0.pt.symlink").write_text("")
    assert [p.code for p in lazyckpt.open(run).problems] == ["unreadable-file"]


def test_a_link_to_a_save_that_is_beside_it(copied: Any) -> None:
    """A folder that was moved: the link has the path of another machine, and what it names was moved, too."""
    run = copied("composer_files")
    (run / "latest-rank0.pt").unlink(missing_ok=True)
    os.symlink("/elsewhere/ep0-ba2-rank0.pt", run / "latest-rank0.pt")
    assert lazyckpt.open(run).problems == ()


def test_a_link_to_the_last_file_is_no_save(copied: Any) -> None:
    run = copied("composer_files")
    assert os.path.islink(run / "latest-rank0.pt") or (run / "latest-rank0.pt").exists()
    assert Path(lazyckpt.open(run / "latest-rank0.pt").root) == run


# -- ColossalAI


def test_an_optimizer_of_colossalai_alone(copied: Any, folder_cases: Mapping[str, Case]) -> None:
    folder = copied("colossalai_sharded")
    view = lazyckpt.open(folder / "optimizer")
    assert set(view.states) == {"exp_avg", "exp_avg_sq", "step"} and codes(view) == ["undecided-name"]
    truth = folder_cases["colossalai_sharded"].truth["exp_avg"]
    same(view.states["exp_avg"]["0"][...], truth["up.weight"], "number 0")


def test_damaged_folders_of_colossalai(copied: Any) -> None:
    folder = copied("colossalai_sharded")
    (folder / "running_states.json").unlink()
    assert codes(lazyckpt.open(folder)) == ["unfinished-save"]
    (folder / "optimizer" / "pytorch_optim-00003.bin").unlink()
    view = lazyckpt.open(folder)
    assert codes(view) == ["missing-file", "unfinished-save"] and set(view.states["exp_avg"]) < set(view)
    (folder / "optimizer" / "pytorch_optim_group.bin").unlink()
    assert "undecided-name" in codes(lazyckpt.open(folder))
    index = folder / "optimizer" / "pytorch_optim.bin.index.json"
    for text in ({"weight_map": {"0": "../modeling/pytorch_model-00001.bin"}}, {"weight_map": []}, {"metadata": 3}):
        index.write_text(json.dumps(text))
        assert "unreadable-file" in codes(lazyckpt.open(folder))
    with pytest.raises(lazyckpt.CorruptError):
        lazyckpt.open(folder / "optimizer")
    shutil.rmtree(folder / "modeling")
    with pytest.raises(lazyckpt.LazyckptError):
        lazyckpt.open(folder)


# -- MLX


def test_a_file_of_colossalai_in_the_place_of_another(copied: Any) -> None:
    folder = copied("colossalai_sharded")
    (optimizer,) = folder.rglob("optimizer")
    shutil.copy(optimizer / "pytorch_optim-00001.bin", optimizer / "pytorch_optim-00003.bin")
    (problem,) = lazyckpt.open(folder).problems
    assert (problem.code, problem.path) == ("inconsistent-metadata", "optimizer/pytorch_optim-00003.bin")


def test_saves_of_mlx_lm(copied: Any) -> None:
    folder = copied("mlx_adapters")
    older = lazyckpt.open(folder, tag="0000001_adapters.safetensors")
    name = "layers.0.lora_b"
    assert not torch.equal(older[name][...], lazyckpt.open(folder)[name][...])
    assert lazyckpt.open_run(folder).steps == (1, 2)
    (folder / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(lazyckpt.CorruptError):
        lazyckpt.open(folder)


def test_weights_of_mlx_in_several_files(copied: Any, folder_cases: Mapping[str, Case]) -> None:
    folder = copied("mlx_npz")
    whole = np.load(folder / "weights.npz")
    (folder / "weights.npz").unlink()
    names = sorted(whole)
    for n, part in enumerate((names[:2], names[2:])):
        np.savez(folder / f"weights.{n:02d}.npz", **{name: whole[name] for name in part})
    view = lazyckpt.open(folder)
    for name, tensor in folder_cases["mlx_npz"].truth["weights"].items():
        same(view[name][...], tensor, name)
    (folder / "weights.01.npz").write_bytes(b"PK")
    assert codes(lazyckpt.open(folder)) == ["unreadable-file"]
    shutil.copy(folder / "weights.00.npz", folder / "weights.01.npz")
    with pytest.raises(lazyckpt.CorruptError, match="repeats"):
        lazyckpt.open(folder)


# -- ms-swift


def test_weights_beside_an_iteration_of_megatron(megatron_folder: Path, tmp_path: Path) -> None:
    """swift/megatron/trainers/base.py `save_checkpoint` writes both into checkpoint-N."""
    folder = Path(shutil.copytree(megatron_folder / "single" / "dist", tmp_path / "checkpoint-3"))
    torch.save({"model.norm.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    view = lazyckpt.open(folder)
    assert view.format == "megatron-dist" and codes(view) == ["other-checkpoint"]
    assert list(lazyckpt.open(folder / "pytorch_model.bin")) == ["model.norm.weight"]
