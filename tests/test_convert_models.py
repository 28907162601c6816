"""`lazyckpt convert` of models with other layers and experts, and of averages of runs: tensors and config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.cli.choices import numbers, steps_of
from lazyckpt.errors import DataError
from lazyckpt.recipes import to_hf

from .test_restacking import SMALL, mixture, model


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    return result.exit_code, result.output


def convert(*arguments: str | Path) -> str:
    code, text = run("convert", *arguments, "--to", "safetensors")
    assert code == 0, text
    return text


def same(folder: Path, expected: lazyckpt.CheckpointView) -> None:
    """Assert that a folder holds a view, and the config.json that `to_hf` gives it."""
    found = lazyckpt.open(folder)
    assert list(found) == list(expected)
    assert lazyckpt.diff(found, expected).equal


def config_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def test_layers(tmp_path: Path) -> None:
    view = model(tmp_path / "model", layer_types=["a", "b", "c", "d"], torch_dtype="float32")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    text = convert(tmp_path / "model", tmp_path / "out", "--layers", "0-2,1-3", "--dry-run")
    assert "config.json, tokenizer.json; config.json says which layers" in text
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "model", tmp_path / "out", "--layers", "0-2,1-3", "--dtype", "bf16")
    same(tmp_path / "out", view.layers(range(3), range(1, 4)).astype(torch.bfloat16))
    assert config_of(tmp_path / "out") == {
        "num_hidden_layers": 6, "layer_types": ["a", "b", "c", "b", "c", "d"], "torch_dtype": "bfloat16"
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    convert(tmp_path / "model", tmp_path / "named", "--layers", "model.layers=3", "--quiet")
    same(tmp_path / "named", view.layers(3, stack="model.layers"))
    code, text = run("convert", tmp_path / "model", tmp_path / "out", "--layers", "3", "--to", "safetensors")
    assert code == 2 and "exists already" in text


def test_the_configuration_of_other_formats_is_adapted(tmp_path: Path) -> None:
    view = model(tmp_path / "model")
    view.to_torch(tmp_path / "run" / "model.pt")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    convert(tmp_path / "run" / "model.pt", tmp_path / "out", "--layers", "0,3")
    same(tmp_path / "out", view.layers(0, 3))
    convert(tmp_path / "run", tmp_path / "folder", "--layers", "0,3")
    for name in ("out", "folder"):
        assert config_of(tmp_path / name) == {"num_hidden_layers": 2}


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked: bool, tmp_path: Path) -> None:
    view = mixture(tmp_path / "model", stacked)
    convert(tmp_path / "model", tmp_path / "kept", "--keep-experts", "3,0-1")
    same(tmp_path / "kept", view.keep_experts([3, 0, 1]))
    assert config_of(tmp_path / "kept")["num_local_experts"] == 3
    convert(tmp_path / "model", tmp_path / "each", "--drop-experts", "0:1;1:3", "--layers", "0-1")
    same(tmp_path / "each", view.drop_experts({0: [1], 1: [3]}))


def test_an_upcycled_model_is_that_of_python(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "dense")
    options = "4,top_k=1,router=normal,std=0.1,seed=7"
    convert(tmp_path / "dense", tmp_path / "out", "--upcycle", options, "--dtype", "bf16")
    view = lazyckpt.open(tmp_path / "dense").upcycle(4, top_k=1, std=0.1, seed=7)
    same(tmp_path / "out", view.astype(torch.bfloat16))
    to_hf(view, tmp_path / "python", dtype=torch.bfloat16)
    assert config_of(tmp_path / "out") == config_of(tmp_path / "python")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0-9"], "no layer 4"),
        (["--layers", "3-1"], "0-11,8-19"),
        (["--layers", "x=0"], "'x' is no stack of layers; there are: model.layers"),
        (["--keep-experts", "1"], "no experts"),
        (["--keep-experts", "1;2"], "--keep-experts"),
        (["--keep-experts", "1", "--drop-experts", "2"], "exclude each other"),
        (["--upcycle", "four"], "--upcycle 'four'"),
        (["--upcycle", "4,width=2"], "top_k=2"),
        (["--upcycle", "4"], "model_type|llama"),
        (["--layers", "0", "--stored"], "--stored"),
        (["--ema", "0.5"], "--average"),
        (["--average", "all", "--state", "weights"], "--average"),
    ],
)
def test_errors(options: list[str], message: str, tmp_path: Path) -> None:
    model(tmp_path / "model")
    code, text = run("convert", tmp_path / "model", tmp_path / "out", "--to", "safetensors", *options)
    assert code == 2
    assert any(part in text for part in message.split("|")), text
    assert not (tmp_path / "out").exists()


def a_run(folder: Path) -> lazyckpt.RunView:
    for step in (100, 200, 300):
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file({"up.weight": torch.full((4, 3), float(step))}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"step": step}))
    return lazyckpt.open_run(folder)


def test_averages_of_runs(tmp_path: Path) -> None:
    steps = a_run(tmp_path / "run")
    text = convert(tmp_path / "run", tmp_path / "out", "--average", "last:2", "--dry-run")
    assert "mean of 2 steps: 200, 300" in text and "config.json" in text and not (tmp_path / "out").exists()
    convert(tmp_path / "run", tmp_path / "out", "--average", "last:2")
    same(tmp_path / "out", steps.mean([200, 300]))
    assert config_of(tmp_path / "out") == {"step": 300}
    convert(tmp_path / "run", tmp_path / "ema", "--average", "100-250", "--ema", "0.9", "--dtype", "bf16")
    same(tmp_path / "ema", steps.ema(0.9, [100, 200]).astype(torch.bfloat16))
    code, text = run("convert", tmp_path / "run", tmp_path / "one.pt", "--average", "all", "--ema", "0.5")
    assert code == 0, text
    assert lazyckpt.open(tmp_path / "one.pt")["up.weight"][0, 0] == 225
    code, text = run("convert", tmp_path / "run", tmp_path / "no.pt", "--average", "150")
    assert code == 2 and "no step 150; it has 100, 200, 300" in text
    code, text = run("convert", tmp_path / "run", tmp_path / "run", "--to", "safetensors", "--average", "all")
    assert code == 2 and "is the folder of the run" in text
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_lists_of_numbers_and_steps() -> None:
    assert numbers("0-1, 5,1", "--layers") == [0, 1, 5, 1]
    for text in ("", "-1", "1-", "a", "1.5"):
        with pytest.raises(DataError, match="--layers"):
            numbers(text, "--layers")
    steps = (10, 20, 30, 40)
    assert steps_of("all", steps) == list(steps)
    assert steps_of("last:1", steps) == [40]
    assert steps_of("30-,10", steps) == [10, 30, 40]
    assert steps_of("15-30,20", steps) == [20, 30]
    for text in ("", "last:0", "last:9", "last", "15", "50-", "1--2"):
        with pytest.raises(DataError, match="--average"):
            steps_of(text, steps)
