"""NeMo 1: archives and folders by NeMo's own connectors, as the model on one rank is."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
import lazyckpt.recipes
from lazyckpt.errors import CorruptError, FormatError, MissingFileError
from lazyckpt.io.plain_yaml import parse_yaml
from lazyckpt.testing.contract import CHECKS, Check
from lazyckpt.testing.oracle import same

from .megatron_handmade import columns, halves, rows
from .writers import Case
from .writers.nemo_files import CASES, SPEECH, load_case


@pytest.fixture(scope="module")
def cases(checkpoints: Any) -> dict[str, Case]:
    folder = checkpoints("nemo")
    return {name: load_case(folder, name) for name in CASES}


def unpacked(case: Case, folder: Path) -> Path:
    with tarfile.open(case.path) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def folders(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Some cases as folders, which the contract reads with torch, too."""
    names = (SPEECH, "dist_tp2")
    found = {name: replace(cases[name], path=unpacked(cases[name], tmp_path_factory.mktemp(name))) for name in names}
    return {**found, "pp2_folder": cases["pp2_folder"]}


@pytest.mark.product
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [SPEECH, "pp2_folder", "dist_tp2"])
def test_contract(folders: dict[str, Case], name: str, check: Check) -> None:
    check(folders[name])


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_what_the_ranks_held(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    case, spec = cases[name], CASES[name]
    paths = [case.path, unpacked(case, tmp_path)] if case.path.is_file() else [case.path]
    for path in paths:
        view = lazyckpt.open(path)
        assert (view.problems, list(view.states)) == ((), ["weights"])
        assert view.format == ("nemo" if spec is None else "megatron-nemo")
        assert set(view) == set(case.truth["weights"])
        for key, whole in case.truth["weights"].items():
            same(view[key][...], whole, key)
        if spec is not None:
            assert (view.mesh.tp, view.mesh.pp, view.mesh.ep) == (spec.model.tp, spec.model.pp, spec.model.ep)
            assert view.meta["model_config"]["num_layers"] == view.meta["args"].num_layers == spec.model.layers


def test_a_model_that_is_not_megatrons_keeps_its_names(cases: dict[str, Case]) -> None:
    view = lazyckpt.open(cases[SPEECH].path)
    assert "model.decoder.weight" in view and view.meta["model_config"]["labels"] == ["a", "b", "ä"]


def test_raw_names_and_rules_are_shown(cases: dict[str, Case]) -> None:
    view = lazyckpt.open(cases["tp2_pp2_tied_half"].path)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    assert "tp_rank_01_pp_rank_001/model_weights.ckpt" in view[name].explain()
    assert "concatenated in 2 parts" in view[name].explain()
    own = "model.decoder.layers.1.mlp.linear_fc1.weight"
    assert f"tp_rank_01_pp_rank_001/model_weights.ckpt/{own}" in view.stored
    truth = cases["tp2_pp2_tied_half"].truth["weights"][name]
    same(view[name][3:40:5, ::2], truth[3:40:5, ::2], "a slice")


def test_a_rename_and_other_degrees(cases: dict[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(cases["tp2"].path)
    assert "model.layers.1.mlp.gate_proj.weight" in view.rename("hf")
    view.to_megatron(tmp_path / "run", tp=1, pp=2)
    back = lazyckpt.open(tmp_path / "run")
    for key, whole in cases["tp2"].truth["weights"].items():
        same(back[key][...], whole, key)


def test_to_hf_cuts_the_vocabulary(cases: dict[str, Case], tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lazyckpt.recipes.to_hf(cases["single"].path, tmp_path / "hf", config=tmp_path)
    found = lazyckpt.open(tmp_path / "hf")
    truth = cases["single"].truth["weights"]
    same(found["model.embed_tokens.weight"][...], truth["embedding.word_embeddings.weight"][:61], "rows")
    gate = truth["decoder.layers.1.mlp.linear_fc1.weight"][:24]
    same(found["model.layers.1.mlp.gate_proj.weight"][...], gate, "a half")


@pytest.mark.parametrize("name", ["tp2", "dist_tp2"])
def test_round_trips(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    view = lazyckpt.open(cases[name].path)
    view.to_safetensors(tmp_path / "one.safetensors")
    view.to_dcp(tmp_path / "dcp")
    view.to_zarr(tmp_path / "zarr")
    for path in ("one.safetensors", "dcp", "zarr"):
        back = lazyckpt.open(tmp_path / path)
        for key, whole in cases[name].truth["weights"].items():
            same(back[key][...], whole, (path, key))


# -- what is missing or damaged


def test_a_lost_rank(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = unpacked(cases["tp2"], tmp_path)
    (folder / "mp_rank_01" / "model_weights.ckpt").unlink()
    view = lazyckpt.open(folder)
    assert ("missing-file", "mp_rank_01/model_weights.ckpt") in [(p.code, p.path) for p in view.problems]
    truth = cases["tp2"].truth["weights"]["embedding.word_embeddings.weight"]
    same(view["embedding.word_embeddings.weight"][:32], truth[:32], "the first rank's rows")
    with pytest.raises(MissingFileError, match="mp_rank_01"):
        view["embedding.word_embeddings.weight"][...]
    shutil.rmtree(folder / "mp_rank_01")
    assert "missing-file" in {p.code for p in lazyckpt.open(folder).problems}


def test_without_the_configuration(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = unpacked(cases["tp2"], tmp_path)
    (folder / "model_config.yaml").unlink()
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} == {"missing-metadata", "unmerged-tensor"} and view.mesh.tp == 2
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    same(view[name][...], cases["tp2"].truth["weights"][name], "its rule is known by its name")
    with pytest.raises(lazyckpt.LazyckptError):
        view["decoder.layers.0.mlp.linear_fc1.weight"][...]  # gated or not


def test_a_configuration_of_another_model(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = unpacked(cases["dist_tp2"], tmp_path)
    path = folder / "model_config.yaml"
    path.write_text(path.read_text().replace("num_layers: 2", "num_layers: 3"))
    (problem,) = lazyckpt.open(folder).problems
    assert (problem.code, problem.path) == ("inconsistent-metadata", "model_config.yaml")


def test_weights_that_are_there_twice_or_not_at_all(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = unpacked(cases["tp2"], tmp_path / "a")
    shutil.copy(folder / "mp_rank_00" / "model_weights.ckpt", folder)
    assert "other-checkpoint" in {p.code for p in lazyckpt.open(folder).problems}
    path = tmp_path / "empty.nemo"
    with tarfile.open(path, "w") as archive:
        archive.add(folder / "model_config.yaml", "./model_config.yaml")
    with pytest.raises(MissingFileError, match="no weights"):
        lazyckpt.open(path)


def test_archives_that_are_compressed_or_cut_off(cases: dict[str, Case], tmp_path: Path) -> None:
    folder = unpacked(cases["single"], tmp_path / "a")
    with tarfile.open(tmp_path / "old.nemo", "w:gz") as archive:  # as NeMo before 1.7
        archive.add(folder, arcname=".")
    with pytest.raises(FormatError, match=r"gunzip -c old\.nemo"):
        lazyckpt.open(tmp_path / "old.nemo")
    (tmp_path / "cut.nemo").write_bytes(cases["single"].path.read_bytes()[:30000])
    with pytest.raises(CorruptError, match="truncated"):
        lazyckpt.open(tmp_path / "cut.nemo")


_BOMB = "c0: &c0 [1, 2]\n" + "".join(f"c{n}: &c{n} [{', '.join([f'*c{n - 1}'] * 20)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    "text",
    [
        _BOMB,
        "a: &a [*a]",
        "a: &a {x: 1}\nb:\n  <<: *a\n",
        "a: 1\na: 2\n",
        "[" * 1500,
        "a: " + "9" * 5000,
        "a: {b",
        "\x00",
    ],
    ids=["bomb", "itself", "merge", "twice", "deep", "number", "cut", "binary"],
)  # fmt: skip
def test_configurations_that_cannot_be(cases: dict[str, Case], tmp_path: Path, text: str) -> None:
    folder = unpacked(cases[SPEECH], tmp_path)
    (folder / "model_config.yaml").write_text(text)
    view = lazyckpt.open(folder)
    assert [(p.code, p.path) for p in view.problems] == [("unreadable-file", "model_config.yaml")]
    assert set(view) == set(cases[SPEECH].truth["weights"])


@pytest.mark.parametrize("name", ["self", "__class__", "__dict__"])
def test_names_of_fields_that_python_reserves(cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = unpacked(cases[SPEECH], tmp_path)
    config = folder / "model_config.yaml"
    config.write_text(f"{config.read_text()}\ntensor_model_parallel_size: 1\n{name}: x\n")
    view = lazyckpt.open(folder)
    assert view.problems == ()
    assert view.meta["model_config"][name] == "x"
    assert set(view) == set(cases[SPEECH].truth["weights"])


def test_tags_make_no_objects() -> None:
    text = b"a: !!python/object/apply:os.system ['false']\nb: !!python/tuple [1, 2]\nc: &c [1]\nd: *c\n"
    found = parse_yaml(text, "x.yaml")
    assert found == {
        "a": {"_tag_": "python/object/apply:os.system", "_value_": ["false"]},
        "b": {"_tag_": "python/tuple", "_value_": [1, 2]},
        "c": [1],
        "d": [1],
    }


# -- NeMo's own models, from before megatron-core: nemo/collections/nlp/modules/common/megatron/mlp.py `ParallelMLP`


@pytest.mark.parametrize(("activation", "fused"), [("swiglu", False), ("fast-swiglu", True), ("gelu", False)])
def test_models_of_nemo_itself(tmp_path: Path, activation: str, fused: bool) -> None:
    torch.manual_seed(0)
    head = "model.language_model.encoder.layers.0."
    wholes = {
        "model.language_model.embedding.word_embeddings.weight": (torch.randn(8, 4), rows),
        f"{head}self_attention.query_key_value.weight": (torch.randn(12, 4), rows),
        f"{head}mlp.dense_h_to_4h.weight": (torch.randn(8, 4), halves if fused else rows),
        f"{head}mlp.dense_4h_to_h.weight": (torch.randn(4, 4), columns),
    }
    if activation == "swiglu":
        wholes[f"{head}mlp.dense_h_to_4h_2.weight"] = torch.randn(8, 4), rows
    path = tmp_path / "model.nemo"
    config = f"tensor_model_parallel_size: 2\nnum_layers: 1\nhidden_size: 4\nactivation: {activation}\n"
    with tarfile.open(path, "w") as archive:
        _add(archive, "./model_config.yaml", config.encode())
        for rank in range(2):
            data = io.BytesIO()
            torch.save({name: cut(whole, rank, 2).clone() for name, (whole, cut) in wholes.items()}, data)
            _add(archive, f"./mp_rank_{rank:02d}/model_weights.ckpt", data.getvalue())
    view = lazyckpt.open(path)
    assert view.problems == ()
    for name, (whole, _) in wholes.items():
        same(view[name.removeprefix("model.")][...], whole, name)


def test_stacks_of_an_encoder_and_a_decoder_on_stages(tmp_path: Path) -> None:
    """T5, whose encoder is on the first stage and whose decoder is on the next two; and a module with a number that no
    rule explains."""
    torch.manual_seed(1)
    head = "enc_dec_model.{}.model.layers.{}.input_layernorm.weight"
    stages = [
        {head.format("encoder", 0): torch.randn(4), head.format("encoder", 1): torch.randn(4)},
        {head.format("decoder", 0): torch.randn(4), "enc_dec_model.adapters.0.weight": torch.randn(3)},
        {head.format("decoder", 0): torch.randn(4), "enc_dec_model.adapters.0.weight": torch.randn(3)},
    ]
    path = tmp_path / "t5.nemo"
    with tarfile.open(path, "w") as archive:
        _add(archive, "model_config.yaml", b"tensor_model_parallel_size: 1\npipeline_model_parallel_size: 3\n")
        for pp, tensors in enumerate(stages):
            data = io.BytesIO()
            torch.save(tensors, data)
            _add(archive, f"tp_rank_00_pp_rank_{pp:03d}/model_weights.ckpt", data.getvalue())
    view = lazyckpt.open(path)
    same(view[head.format("encoder", 1)][...], stages[0][head.format("encoder", 1)], "encoder")
    same(view[head.format("decoder", 0)][...], stages[1][head.format("decoder", 0)], "decoder")
    same(view[head.format("decoder", 1)][...], stages[2][head.format("decoder", 0)], "decoder, last stage")
    assert len(view) == 4 and [p.code for p in view.problems] == ["unnumbered-layer"]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
