"""Folders of NeMo 2 and Megatron-Bridge: a checkpoint of megatron-core with descriptions of its model and its run.

Neither package installs without Transformer Engine. megatron-core wrote the checkpoints; the descriptions have the form
of nemo/lightning/io/mixin.py `io_dump` (the graph: as fiddle 0.3's `serialization.dump_json` writes it) and of
megatron/bridge/training/config.py `ConfigContainer.to_yaml`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemWriter, save

import lazyckpt
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.megatron_fsdp import load_case as load_fsdp

CASE = "tp2_pp2_bf16"
MODEL = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "gated_linear_unit": True}
BRIDGE: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "data_parallel_size": 1,
    "model": {
        "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
        **MODEL,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    },
}


def graph(**degrees: int) -> dict[str, Any]:
    about = {"type": {"type": "pyref", "module": "fiddle._src.config", "name": "BuildableTraverserMetadata"}}
    built = {
        "type": "pyref",
        "module": "nemo.lightning.pytorch.strategies.megatron_strategy",
        "name": "MegatronStrategy",
    }
    items = [[f"Attr(name='{key}')", {"type": "leaf", "value": value, "paths": []}] for key, value in degrees.items()]
    return {
        "root": {"type": "ref", "key": "trainer_context_1"},
        "objects": {
            "metadata_1": {**about, "items": [["Attr(name='fn_or_cls')", built]], "metadata": None},
            "megatron_strategy_1": {
                "type": {"type": "pyref", "module": "fiddle._src.config", "name": "Config"},
                "items": items,
                "metadata": {"type": "ref", "key": "metadata_1"},
            },
        },
        "version": "0.0.1",
    }


@pytest.fixture(scope="module")
def truth(megatron_cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    return dict(megatron_cases[CASE].truth["weights"])


def written(megatron_cases: dict[str, Case], folder: Path) -> Path:
    """The checkpoint without the arguments of Megatron-LM, under the names of a module around the model."""
    source = next((megatron_cases[CASE].path.parent / "dist").glob("iter_*"))
    view = lazyckpt.open(source)
    tensors = {
        f"module.{name}": spec[...]
        for name, spec in view.stored.items()
        if name.startswith(("decoder", "output", "embedding"))
    }
    moments = {
        f"optimizer.state.exp_avg.module.{name.removeprefix('optimizer.state.exp_avg.')}": spec[...]
        for name, spec in view.stored.items()
        if name.startswith("optimizer.state.exp_avg.")
    }
    save({**tensors, **moments}, storage_writer=FileSystemWriter(folder))
    shutil.copy(source / "metadata.json", folder)
    torch.save({"global_step": 3, "pytorch-lightning_version": "2.4.0"}, folder / "common.pt")
    return folder


def nemo(megatron_cases: dict[str, Case], folder: Path, model: dict[str, Any], degrees: dict[str, int]) -> Path:
    written(megatron_cases, folder / "weights")
    (folder / "context").mkdir()
    about = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": model}
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump(about))
    (folder / "context" / "io.json").write_text(json.dumps(graph(**degrees)))
    return folder


DEGREES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def test_nemo_2(megatron_cases: dict[str, Case], truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    folder = nemo(megatron_cases, tmp_path / "llama", {**MODEL, "transformer_impl": "local"}, DEGREES)
    view = lazyckpt.open(folder)
    assert (view.format, view.problems, view.mesh) == ("megatron-dist", (), lazyckpt.Mesh(tp=2, pp=2))
    assert set(view) == set(truth)
    for key, whole in truth.items():
        same(view[key][...], whole, key)
        same(view.states["exp_avg"][key][...], megatron_cases[CASE].truth["exp_avg"][key], key)
    assert "module.decoder.layers.mlp.linear_fc2.weight" in view.stored
    assert view.meta["context"]["model"]["_target_"].endswith("LlamaModel") and view.meta["args"].num_layers == 4
    assert "context/io.json" in view.files and "weights/common.pt" in view.files
    alone = lazyckpt.open(folder / "weights")
    assert alone.mesh == lazyckpt.Mesh() and set(alone.states) == set(view.states)


def test_a_save_that_nemo_has_not_finished(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    """nemo/lightning/pytorch/callbacks/model_checkpoint.py `set_checkpoint_unfinished_marker`."""
    folder = nemo(megatron_cases, tmp_path / "llama--step=3-last", MODEL, DEGREES)
    (tmp_path / "llama--step=3-last-unfinished").touch()
    shutil.copytree(folder, tmp_path / "llama--step=2")
    assert [p.code for p in lazyckpt.open(folder).problems] == ["unfinished-save"]
    assert lazyckpt.open(tmp_path / "llama--step=2").problems == ()
    run = lazyckpt.open_run(tmp_path)
    assert "unfinished-save" in {p.code for p in run.problems} and list(run.steps) == [2, 3]
    (tmp_path / "llama--step=3-last-unfinished").unlink()
    assert lazyckpt.open(folder).problems == ()
    assert "unfinished-save" not in {p.code for p in lazyckpt.open_run(tmp_path).problems}


def test_degrees_that_contradict_each_other(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    model = {**MODEL, "tensor_model_parallel_size": 4, "num_layers": 5}
    view = lazyckpt.open(nemo(megatron_cases, tmp_path / "llama", model, DEGREES))
    assert [(p.code, p.path) for p in view.problems] == [("inconsistent-metadata", "context/model.yaml")] * 2
    assert view.mesh.tp == 2


@pytest.mark.parametrize(("name", "text"), [("io.json", "{"), ("io.json", "[]"), ("model.yaml", "a: [")])
def test_damaged_descriptions(megatron_cases: dict[str, Case], tmp_path: Path, name: str, text: str) -> None:
    folder = nemo(megatron_cases, tmp_path / "llama", MODEL, DEGREES)
    (folder / "context" / name).write_text(text)
    view = lazyckpt.open(folder)
    assert {(p.code, p.path) for p in view.problems} <= {("unreadable-file", f"context/{name}")} and len(view)
    assert view.mesh.tp == (2 if name == "model.yaml" else 1)


def bridge(megatron_cases: dict[str, Case], folder: Path, config: dict[str, Any]) -> Path:
    iteration = written(megatron_cases, folder / "iter_0000003")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    (iteration / "run_config.yaml").write_text(yaml.safe_dump(config))
    torch.save({"step": torch.tensor(3), "do_train": torch.tensor(True)}, iteration / "train_state.pt")
    shutil.copy(iteration / "train_state.pt", folder / "latest_train_state.pt")
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_megatron_bridge(
    megatron_cases: dict[str, Case], truth: dict[str, torch.Tensor], tmp_path: Path, nested: bool
) -> None:
    model = BRIDGE["model"]
    config = {**BRIDGE, "model": {"_target_": "x.GPTModelConfig", "transformer": model}} if nested else BRIDGE
    folder = bridge(megatron_cases, tmp_path / "run", config)
    for path in (folder, folder / "iter_0000003"):
        view = lazyckpt.open(path)
        assert (view.format, view.problems, view.mesh) == ("megatron-dist", (), lazyckpt.Mesh(tp=2, pp=2))
        name = "decoder.layers.3.mlp.linear_fc1.weight"
        same(view[name][...], truth[name], name)
        assert view.meta["run_config"]["model"] == config["model"]
        assert set(view.meta["train_state"]) == {"step", "do_train"}
        assert int(view.stored["train_state.pt/step"][...]) == 3


def test_a_run_config_of_another_model(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    config = {**BRIDGE, "model": {**BRIDGE["model"], "hidden_size": 32}}
    folder = bridge(megatron_cases, tmp_path / "run", config)
    (problem,) = lazyckpt.open(folder).problems
    assert (problem.code, problem.path) == ("inconsistent-metadata", "iter_0000003/run_config.yaml")
    (folder / "iter_0000003" / "run_config.yaml").write_text("model: 3\n")
    (folder / "iter_0000003" / "train_state.pt").write_bytes(b"")
    codes = {p.code for p in lazyckpt.open(folder).problems}
    assert codes == {"missing-metadata", "unreadable-file"}


def test_the_generators_say_how_many_ranks_there_were(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(megatron_cases[CASE].path.parent / "dist", tmp_path / "run"))
    config = {**BRIDGE, "model": {**BRIDGE["model"], "tensor_model_parallel_size": 8}}
    (folder / "iter_0000003" / "run_config.yaml").write_text(yaml.safe_dump(config))
    (problem,) = lazyckpt.open(folder).problems
    assert problem.code == "inconsistent-metadata" and "tensor_model_parallel_size = 8, the checkpoint has 2" in problem


def test_megatron_bridge_with_megatron_fsdp(checkpoints: Any, tmp_path: Path) -> None:
    case = load_fsdp(checkpoints("megatron_fsdp"), "dp2")
    folder = Path(shutil.copytree(case.path, tmp_path / "run"))
    (folder / "iter_0000003" / "run_config.yaml").write_text(yaml.safe_dump(BRIDGE))
    view = lazyckpt.open(folder)
    assert (view.format, view.problems, view.mesh) == ("megatron-fsdp", (), lazyckpt.Mesh(dp=2))
    assert view.meta["run_config"] == BRIDGE and view.meta["args"].num_layers == 2, "Megatron-LM's own arguments"


def test_common_pt_of_both_kinds_of_torch_save(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = written(megatron_cases, tmp_path / "iter_0000003")
    common = {"iteration": 3, "optimizer": {"state": {"common_step": torch.tensor(7.0)}}}
    for zipped in (True, False):
        torch.save(common, folder / "common.pt", _use_new_zipfile_serialization=zipped)
        view = lazyckpt.open(folder, cache=False)
        assert view.problems == () and view.meta["iteration"] == 3
        assert {float(t[...]) for t in view.states["step"].values()} == {7.0}
