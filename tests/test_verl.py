"""Folders of verl beyond the contract: steps and roles of a run, unfinished and damaged saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.fixture
def run(verl_cases: Mapping[str, Case], tmp_path: Path) -> Path:
    return Path(shutil.copytree(verl_cases["verl_megatron"].path, tmp_path / "run"))


@pytest.fixture
def role(verl_cases: Mapping[str, Case], tmp_path: Path) -> Path:
    return Path(shutil.copytree(verl_cases["verl_megatron_vpp"].path, tmp_path / "role"))


def codes(view: lazyckpt.CheckpointView) -> list[str]:
    return [problem.code for problem in view.problems]


def test_the_roles_of_a_step(run: Path) -> None:
    view = lazyckpt.open(run)
    meta: Any = view.meta
    assert Path(view.root).name == "global_step_2" and meta["step"] == 2 and meta["data"]["_sampler_iter_yielded"] == 2
    assert meta["critic"]["ckpt_contents"]["role"] == "critic" and meta["actor"]["args"].num_layers == 1
    assert {name.partition(".")[0] for name in view} == {"actor", "critic"}
    assert "decoder.final_layernorm.weight" in view["actor"]
    raw = "actor/optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    assert f"{raw}.exp_avg" in view.stored and "critic/decoder.final_layernorm.weight" in view.stored
    alone = lazyckpt.open(run / "global_step_2" / "critic")
    for state in ("weights", "exp_avg"):
        for name, tensor in alone.states[state].items():
            same(view.states[state][f"critic.{name}"][...], tensor[...], name)
    assert lazyckpt.open(run / "global_step_2", tag="critic").root == alone.root


def test_a_step_with_one_role_has_its_names(run: Path) -> None:
    view = lazyckpt.open(run, tag="global_step_1")
    assert view.format == "megatron-dist" and view.meta["step"] == 1
    assert "decoder.final_layernorm.weight" in view


def test_the_tensors_of_an_older_step(verl_cases: Mapping[str, Case]) -> None:
    case = verl_cases["verl_megatron"]
    view = lazyckpt.open(case.path, tag="global_step_1")
    for state, table in torch.load(case.path.parent / "older.pt").items():
        assert view.states[state].keys() == table.keys()
        for name, tensor in table.items():
            same(view.states[state][name][...], tensor, (state, name))


def test_a_run(run: Path) -> None:
    shutil.rmtree(run / "global_step_2" / "critic")
    steps = lazyckpt.open_run(run)
    assert list(steps.steps) == [1, 2]
    name = "decoder.final_layernorm.weight"
    same(steps[name][-1], lazyckpt.open(run)[name][...], name)


def test_a_step_that_the_tracker_does_not_name_yet(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    view = lazyckpt.open(run)
    assert Path(view.root).name == "global_step_1" and codes(view) == ["unfinished-save"]
    assert "unfinished-save" in [p.code for p in lazyckpt.open_run(run).problems]


def test_verification_of_a_role(role: Path) -> None:
    found = lazyckpt.verify(role)
    assert {finding.code for finding in found.findings} == {"constant-values"}


def test_a_role_without_its_manifest(role: Path) -> None:
    (role / "ckpt_contents.json").unlink()
    view = lazyckpt.open(role)
    assert codes(view) == ["unfinished-save"] and "exp_avg" in view.states


@pytest.mark.parametrize(
    ("gone", "code", "states"),
    [
        ("optimizer", "missing-file", {"weights"}),
        ("model", "missing-weights", {"fp32", "exp_avg", "exp_avg_sq"}),
        ("extra", "missing-file", {"weights", "fp32", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_a_role_without_a_part(role: Path, gone: str, code: str, states: set[str]) -> None:
    shutil.rmtree(role / gone)
    view = lazyckpt.open(role)
    assert code in codes(view) and "missing-file" in codes(view)
    assert {state for state, table in view.states.items() if table} == states


def test_damaged_documents(role: Path) -> None:
    (role / "transformer_config.json").write_text("[1")
    view = lazyckpt.open(role)
    assert codes(view) == ["unreadable-file"] and view.mesh.pp == 1 and "exp_avg" in view.states
    manifest = json.loads((role / "ckpt_contents.json").read_text())
    manifest |= {"contents": [1], "world_size": "x", "global_step": None}
    (role / "ckpt_contents.json").write_text(json.dumps(manifest))
    assert "step" not in lazyckpt.open(role).meta


@pytest.mark.parametrize("name", ["verl_megatron_flat", "verl_megatron_vpp"])
def test_names_that_are_guessed_without_the_configuration(
    verl_cases: Mapping[str, Case], name: str, tmp_path: Path
) -> None:
    role = Path(shutil.copytree(verl_cases[name].path, tmp_path / "role"))
    (role / "transformer_config.json").unlink()
    view = lazyckpt.open(role)
    assert ("missing-metadata", "transformer_config.json") in [(p.code, p.path) for p in view.problems]


def test_weights_of_two_kinds(role: Path, verl_cases: Mapping[str, Case]) -> None:
    shutil.copytree(
        verl_cases["verl_bridge"].path / "model" / "huggingface", role / "model" / "huggingface", dirs_exist_ok=True
    )
    view = lazyckpt.open(role)
    assert codes(view) == ["other-checkpoint"] and "decoder.final_layernorm.weight" in view
    shutil.rmtree(role / "model" / "dist_ckpt")
    view = lazyckpt.open(role)
    assert "lm_head.weight" in view and codes(view) == ["missing-file", "undecided-name"]


def test_a_broken_role_leaves_the_other(run: Path) -> None:
    (run / "global_step_2" / "critic" / "model" / "dist_ckpt" / ".metadata").write_bytes(b"\x80")
    view = lazyckpt.open(run)
    assert codes(view) == ["unreadable-file"] and {name.partition(".")[0] for name in view} == {"actor"}


def test_an_adapter_of_fsdp(verl_cases: Mapping[str, Case], tmp_path: Path) -> None:
    run = Path(shutil.copytree(verl_cases["verl_fsdp_lora_only"].path, tmp_path / "run"))
    view = lazyckpt.open(run)
    assert view.meta["lora_train_meta"] == {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
    assert all(".lora_" in name for name in view)
    (run / "global_step_1" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    assert codes(lazyckpt.open(run)) == ["missing-file"]


def test_megatrons_layers_get_names_of_hugging_face(role: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(role).rename("hf")
    assert "model.layers.3.self_attn.k_proj.weight" in view and not codes(view)
    view.to_safetensors(tmp_path / "model.safetensors")
    again = lazyckpt.open(tmp_path / "model.safetensors")
    for name, tensor in view.items():
        same(again[name][...], tensor[...], name)


def test_a_conversion_tells_of_states_under_other_names(verl_cases: Mapping[str, Case], tmp_path: Path) -> None:
    """verl's default: weights under Hugging Face's names by a bridge, states of the optimizer under Megatron's."""
    view = lazyckpt.open(verl_cases["verl_bridge"].path)
    result = view.to_dcp(tmp_path / "dcp")
    assert "decoder" in result.left_out["optim.state"]
    again = lazyckpt.open(tmp_path / "dcp")
    for state in view.states:
        for name, tensor in view.states[state].items():
            found = again.stored[f"fp32.{name}"] if state == "fp32" else again.states[state][name]
            same(found[...], tensor[...], (state, name))


def test_random_states_alone_are_no_weights(tmp_path: Path) -> None:
    state = {"lr_scheduler": {"last_epoch": 2}, "rng": {"cpu": torch.get_rng_state(), "random": [3, 4]}}
    torch.save(state, tmp_path / "extra_state_world_size_1_rank_0.pt")
    for path in (tmp_path, tmp_path / "extra_state_world_size_1_rank_0.pt"):
        view = lazyckpt.open(path)
        assert list(view) == [] and list(view.stored) == ["rng.cpu"]
        assert view.meta["rng"]["random"] == [3, 4]
