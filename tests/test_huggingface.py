"""Hugging Face folders, as transformers writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(huggingface_case: Case, check: Check) -> None:
    check(huggingface_case)


def test_format_config_and_stored(huggingface_case: Case) -> None:
    case = huggingface_case
    view: Any = lazyckpt.open(case.path)
    assert view.format == "huggingface"
    assert view.problems == ()
    assert view.meta["config"] == json.loads((case.path / "config.json").read_text())
    both_are_written = any(path.suffix == ".bin" for path in case.path.iterdir())
    on_disk = set(case.truth["weights"]) - (set() if both_are_written else set(case.info["tied"]))
    assert set(view.stored) == on_disk, "raw names, without what is only tied to them"
    weights = {p.name for p in case.path.iterdir() if p.suffix in (".safetensors", ".bin")}
    assert weights <= set(view.files)


def _copied(case: Case, folder: Path) -> Path:
    return Path(shutil.copytree(case.path, folder / "copy"))


@pytest.mark.parametrize(
    ("name", "index"),
    [("llama_sharded", "model.safetensors.index.json"), ("bin_sharded", "pytorch_model.bin.index.json")],
)
def test_the_index_can_be_opened_itself(huggingface_cases: dict[str, Case], name: str, index: str) -> None:
    case = huggingface_cases[name]
    view = lazyckpt.open(case.path / index)
    assert view.format == "huggingface"
    for key, tensor in view.to().items():
        same(tensor, case.truth["weights"][key], key)
    assert set(view) == set(case.truth["weights"])
    meta: Any = view.meta
    assert meta["index"] == json.loads((case.path / index).read_text())["metadata"]


def test_one_shard_is_a_file_of_its_own(huggingface_cases: dict[str, Case]) -> None:
    case = huggingface_cases["llama_sharded"]
    index = json.loads((case.path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index["model.embed_tokens.weight"]
    view = lazyckpt.open(case.path / shard)
    assert view.format == "safetensors"
    assert set(view) == {name for name, path in index.items() if path == shard}
    same(view["embed_tokens.weight"][3], case.truth["weights"]["model.embed_tokens.weight"][3], "one row")


@pytest.mark.parametrize("name", ["llama_sharded", "bin_sharded"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_lost_shard_is_told_and_the_rest_reads(
    huggingface_cases: dict[str, Case], tmp_path: Path, name: str, damage: str
) -> None:
    case = huggingface_cases[name]
    folder = _copied(case, tmp_path)
    (index_path,) = folder.glob("*.index.json")
    index = json.loads(index_path.read_text())["weight_map"]
    lost = index["model.layers.1.mlp.up_proj.weight"]
    if damage == "missing":
        (folder / lost).unlink()
    else:
        data = (folder / lost).read_bytes()
        (folder / lost).write_bytes(data[: len(data) // 2])
    view = lazyckpt.open(folder)
    assert any(lost in line for line in view.problems), view.problems
    gone = {key for key, path in index.items() if path == lost}
    for key, whole in case.truth["weights"].items():
        if case.info["tied"].get(key, key) in gone or key in gone:
            with pytest.raises(lazyckpt.MissingFileError) as error:
                _ = view[key][...]
            assert lost in str(error.value)
        else:
            same(view[key][...], whole, key)
    assert repr(view) and view.tree() and view.explain()


@pytest.mark.parametrize("name", ["llama_sharded", "bin_sharded"])
def test_all_shards_lost(huggingface_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = _copied(huggingface_cases[name], tmp_path)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        path.unlink()
    with pytest.raises(lazyckpt.MissingFileError) as error:
        lazyckpt.open(folder)
    assert "00001-of-" in str(error.value)


def test_without_config_nothing_is_tied(huggingface_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(huggingface_cases["llama_sharded"], tmp_path)
    (folder / "config.json").unlink()
    view = lazyckpt.open(folder)
    assert dict(view.aliases) == {}
    assert "lm_head.weight" not in view


def test_an_architecture_that_nobody_knows(huggingface_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(huggingface_cases["llama_sharded"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["FutureForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    view = lazyckpt.open(folder)
    assert dict(view.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert any("lm_head.weight" in line for line in view.problems), "a guess is told as one"
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    assert dict(lazyckpt.open(folder).aliases) == {}


def test_a_shard_that_the_index_does_not_list(huggingface_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(huggingface_cases["llama_sharded"], tmp_path)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    dropped = "model.layers.0.input_layernorm.weight"
    del index["weight_map"][dropped]
    index_path.write_text(json.dumps(index))
    view = lazyckpt.open(folder)
    assert dropped not in list(view)
    assert dropped in view.stored, "nothing hidden"
    assert any(dropped in line for line in view.problems)


def test_one_tensor_reads_one_shard(huggingface_cases: dict[str, Case]) -> None:
    case = huggingface_cases["llama_sharded"]
    index = json.loads((case.path / "model.safetensors.index.json").read_text())["weight_map"]
    view, counts = opened(case.path)
    for name, path in index.items():
        counts.clear()
        same(view[name][...], case.truth["weights"][name], name)
        assert counts.paths == {path} and counts.requests == 1
        assert counts.bytes == view[name].nbytes


def test_loose_files_are_the_shards_of_one_model(huggingface_cases: dict[str, Case], tmp_path: Path) -> None:
    case = huggingface_cases["mixtral"]
    folder = _copied(case, tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    view = lazyckpt.open(folder)
    assert set(view) == set(case.truth["weights"])
    assert any("index" in line for line in view.problems)


@pytest.mark.slow
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_real_model_loads(huggingface_cases: dict[str, Case], tied: bool, on_meta: bool) -> None:
    import transformers

    case = huggingface_cases["llama_sharded" if tied else "llama_single"]
    config = transformers.LlamaConfig.from_pretrained(case.path)
    with torch.device("meta" if on_meta else "cpu"):
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, case.info["dtype"]))  # type: ignore[no-untyped-call]
    view = lazyckpt.open(case.path)
    if on_meta:
        assert view.load_into(model) == ([], [])
    else:
        assert model.load_state_dict(view) == ([], [])
    for name, tensor in model.state_dict().items():
        same(tensor, case.truth["weights"][name], name)
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
