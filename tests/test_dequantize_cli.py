"""`lazyckpt convert --dequantize`: weights, config.json and the tokenizer of the unquantized model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.derive.dequantize.evidence import without_quantization
from lazyckpt.errors import DataError
from lazyckpt.recipes.parts import with_dtype

from .test_dequantize_ops import same_bits
from .test_dequantize_scales import GOLDEN


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [str(a) for a in ("convert", *arguments)])
    return result.exit_code, result.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(GOLDEN / "deepseek_fp8", folder)
    (folder / "truth.safetensors").rename(tmp_path / "truth.safetensors")
    (folder / "writer.json").unlink()
    (folder / "tokenizer.json").write_text('{"model": "π"}')
    return folder


def test_a_folder_of_the_unquantized_model(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = run(source, out, "--to", "safetensors", "--dequantize", "--dtype", "bf16", "--max-shard-size", "60KB")
    assert code == 0, text
    truth = load_file(tmp_path / "truth.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) >= set(truth) and not any("scale" in name for name in index["weight_map"])
    view = lazyckpt.open(out)
    for name, expected in truth.items():
        same_bits(view[name][...], expected)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    code, text = run(source, out, "--to", "safetensors", "--dequantize")
    assert code == 2 and "exists already" in text
    out = tmp_path / "other"
    for more in ((), ("--overwrite",)):
        code, text = run(source, out, "--to", "safetensors", "--dequantize", "--dtype", "fp32", *more)
        assert code == 0, text
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert lazyckpt.open(out)["model.layers.0.self_attn.q_a_proj.weight"].dtype == torch.float32
    assert lazyckpt.open(out)["model.norm.weight"].dtype == torch.bfloat16


def test_a_plan_writes_nothing(source: Path, tmp_path: Path) -> None:
    code, text = run(source, tmp_path / "out", "--to", "safetensors", "--dequantize", "--dry-run")
    assert code == 0 and "config.json, tokenizer.json" in text
    assert not (tmp_path / "out").exists()
    code, text = run(source, tmp_path / "out", "--to", "safetensors", "--dequantize", "--dry-run", "--json")
    assert json.loads(text)["plan"]["options"]["dequantize"] is True


def test_other_outputs(source: Path, tmp_path: Path) -> None:
    truth = load_file(tmp_path / "truth.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    for target in ("one.safetensors", "one.pt", "one.zarr"):
        code, text = run(source, tmp_path / target, "--dequantize", "--select", "*kv_b_proj.weight")
        assert code == 0, text
        view = lazyckpt.open(tmp_path / target)
        assert [n for n in view if "layers.0" in n] == [name]
        same_bits(view[name][...], truth[name])
    code, text = run(source, tmp_path / "x.safetensors", "--dequantize", "--stored")
    assert code == 2 and "--dequantize" in text


def test_a_model_that_stays_quantized_is_refused(source: Path, tmp_path: Path) -> None:
    path = next(source.glob("*00002.safetensors"))
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith("_scale_inv"))
    del tensors[lost]
    save_file(tensors, path, {"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    code, text = run(source, tmp_path / "out", "--to", "safetensors", "--dequantize")
    assert code == 2 and "quantized" in text
    assert not (tmp_path / "out").exists()


def test_configurations_of_parts_are_cleaned() -> None:
    config = {
        "model_type": "two",
        "text_config": {"dtype": "float16", "quantization_config": {}, "layers": 2},
        "compression_config": {"format": "dense"},
        "other": {"quantization_config": {"kept": 1}},
    }
    assert with_dtype(without_quantization(config), torch.bfloat16) == {
        "model_type": "two",
        "text_config": {"dtype": "bfloat16", "layers": 2},
        "other": {"quantization_config": {"kept": 1}},
        "dtype": "bfloat16",
    }


def test_a_model_that_is_not_quantized_is_told(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_file({"w.weight": torch.ones(2, 2)}, tmp_path / "plain" / "model.safetensors")
    code, text = run(tmp_path / "plain", tmp_path / "out.safetensors", "--dequantize", "--quiet")
    assert code == 0 and "note: no tensor that is written is quantized" in text
    assert lazyckpt.open(tmp_path / "out.safetensors")["w.weight"].dtype == torch.float32
    code, text = run(tmp_path / "plain", tmp_path / "two.safetensors", "--quiet")
    assert (code, text) == (0, "")


def test_a_config_that_is_none(source: Path) -> None:
    with pytest.raises(DataError, match=r"config=\[1\]: give the contents of config.json, or its path"):
        lazyckpt.open(source).dequantize(config=[1])  # type: ignore[arg-type]


FP8 = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}


def fp8(folder: Path, value: float, config: dict[str, object] | None) -> Path:
    """Write a torch file, whose reader does not look for config.json, with FP8 weights of blocks of 2x2."""
    folder.mkdir()
    weights = {"m.weight": torch.full((4, 4), value).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.ones(2, 2)}
    torch.save(weights, folder / "model.pt")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_configuration_of_a_delta(tmp_path: Path) -> None:
    base, new = fp8(tmp_path / "base", 1.0, FP8), fp8(tmp_path / "new", 2.0, FP8)
    lazyckpt.delta(new, base).write(tmp_path / "delta", progress=False)
    view = lazyckpt.open(tmp_path / "delta").dequantize()
    assert sorted(view) == ["m.weight"] and float(view["m.weight"][0, 0]) == 2.0 and not view.problems
    # what the folder of the base says is not taken for the delta if the delta's own folder says something else
    (tmp_path / "delta" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "other"}}))
    odd = lazyckpt.open(tmp_path / "delta").dequantize()
    assert sorted(odd) == ["m.weight", "m.weight_scale_inv"]
    assert "contradicting-quantization" in {problem.code for problem in odd.problems}
    assert float(lazyckpt.open(tmp_path / "delta").dequantize(config=FP8)["m.weight"][0, 0]) == 2.0


def test_the_configuration_of_a_later_model_counts(tmp_path: Path) -> None:
    a, b = fp8(tmp_path / "a", 1.0, None), fp8(tmp_path / "b", 2.0, FP8)
    views = [lazyckpt.open(one).dequantize(config=FP8) for one in (a, b)]
    assert float(lazyckpt.mean(views)["m.weight"][0, 0]) == 1.5
    lazyckpt.delta(b, a).write(tmp_path / "delta", progress=False)
    (tmp_path / "delta" / "config.json").write_text(json.dumps(FP8))  # that of the base is missing
    assert float(lazyckpt.open(tmp_path / "delta").dequantize()["m.weight"][0, 0]) == 2.0


@pytest.mark.slow
def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    expected = {}
    for name, t in list(tensors.items()):
        expected[name] = t
        if "proj" in name:
            scale = (t.float().abs().max() / 448).reshape(1, 1)
            tensors[name] = (t.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            expected[name] = (tensors[name].float() * scale).to(torch.bfloat16)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    code, text = run(tmp_path / "model", tmp_path / "out", "--to", "safetensors", "--dequantize")
    assert code == 0, text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = model.state_dict()
    for name, value in expected.items():
        same_bits(state[name], value)
    assert model.lm_head.weight is model.model.embed_tokens.weight
