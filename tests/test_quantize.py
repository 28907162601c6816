"""Quantized views: what the libraries that load them quantize, in parts as in the whole; written, loaded, and back."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import app
from lazyckpt.core.expr import make, wanted
from lazyckpt.core.ops.bitsandbytes import NF4, dynamic_map
from lazyckpt.core.select import Selection
from lazyckpt.derive.quantize import KINDS
from lazyckpt.errors import DataError
from lazyckpt.testing import opened

from .lanes import rounds
from .test_dequantize_ops import array, check_parts
from .writers.quantized_models import linears, llama

BLOCKS = {"fp8": (128, 128), "int8": (1, 96), "nf4": (64,), "dynamic8": (256,), "mxfp4": (1, 32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama(96, 160, torch.bfloat16, tied=True).save_pretrained(folder, max_shard_size="100KB")
    return folder


# -- What the libraries compute, in their own words.


def fp8(weight: Tensor) -> Tensor:
    """transformers 5.3 `Fp8Quantize` and `Fp8Dequantize`, on blocks that may be shorter."""
    out = torch.empty(weight.shape)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            part = weight[i : i + 128, j : j + 128].float()
            largest = part.abs().amax()
            scale = 448.0 / largest if largest > 0 else torch.ones(())
            codes = (part * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            out[i : i + 128, j : j + 128] = codes.float() * (1.0 / scale)
    return out


def int8(weight: Tensor) -> Tensor:
    """compressed-tensors 0.20 `calculate_qparams`; `quantize` of the weight in float32."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    codes = (weight.float() / scale.float()).round().clamp(-128, 127)
    return codes * scale.float()


def by_table(flat: Tensor, size: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of each code, and the scale of each block: bitsandbytes 0.50.2 backends/default/ops.py."""
    values, scales = [], []
    for part in flat.split(size):
        largest = part.abs().amax().clamp(min=1e-38)
        scaled = part * (1.0 / largest) if len(part) == size else part / largest
        values.append(table[torch.bucketize(scaled.clamp(-1, 1), (table[:-1] + table[1:]) / 2)])
        scales.append(largest)
    return torch.cat(values), torch.stack(scales)


def over(scales: Tensor, size: int, count: int) -> Tensor:
    return scales.repeat_interleave(size)[:count]


def nf4(weight: Tensor) -> Tensor:
    values, scales = by_table(weight.reshape(-1).float(), 64, torch.tensor(NF4))
    return (values * over(scales, 64, len(values))).view(weight.shape)


def nf4_double(weight: Tensor) -> Tensor:
    """bitsandbytes 0.50.2 `quantize_4bit(compress_statistics=True)`, with the mean of the scales in float64."""
    values, scales = by_table(weight.reshape(-1).float(), 64, torch.tensor(NF4))
    mean = scales.double().mean().float()
    nested, factors = by_table(scales - mean, 256, torch.tensor(dynamic_map()))
    scales = nested * over(factors, 256, len(nested)) + mean
    return (values * over(scales, 64, len(values))).view(weight.shape)


def mxfp4(weight: Tensor) -> Tensor:
    """OCP Microscaling Formats 1.0, with the exponents of compressed-tensors 0.20 `generate_mx_scales`."""
    parts = weight.float().view(weight.shape[0], -1, 32)
    largest = parts.abs().amax(-1, keepdim=True)
    exponent = torch.floor(torch.log2(largest.double())) + (largest >= 1.75 * 2 ** torch.floor(torch.log2(largest)))
    power = 2.0 ** (exponent - 2)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    distance = ((parts / power).abs().clamp(max=6.0).unsqueeze(-1) - table).abs()
    near = distance == distance.amin(-1, keepdim=True)
    even = torch.where(near, torch.arange(8) % 2, 2).argmin(-1)  # of two nearest, that with an even code
    return ((table[even] * parts.sign()) * power).view(weight.shape).float()


ORACLES = {"fp8-block": fp8, "int8": int8, "nf4": nf4, "nf4-double": nf4_double, "mxfp4": mxfp4}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_as_the_library_of_the_format(model: Path, kind: str) -> None:
    plain = lazyckpt.open(model)
    quantized = plain.quantize(kind)
    back = quantized.dequantize(torch.float32)
    assert set(back) == set(plain) and back.problems == plain.problems
    done = 0
    for name, t in plain.items():
        if back[name].spec.rule == "dequantized":
            done += 1
            assert torch.equal(back[name][...], ORACLES[kind](t[...])), name
        else:
            assert torch.equal(back[name][...], t[...]), name
    assert done == 14
    config = quantized.meta["config"]["quantization_config"]
    left = config.get("ignore") or config.get("modules_to_not_convert") or config["llm_int8_skip_modules"]
    assert left == ["lm_head", "model.embed_tokens"]  # the head is tied


@pytest.mark.parametrize("kind", KINDS)
def test_written_weights_are_those_of_the_view(model: Path, kind: str, tmp_path: Path) -> None:
    view = lazyckpt.open(model).quantize(kind)
    told = CliRunner().invoke(
        app, ["convert", str(model), str(tmp_path / "out"), "--to", "safetensors", "--quantize", kind]
    )
    assert told.exit_code == 0, told.output
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"] == view.meta["config"]["quantization_config"]
    written = {k: t for path in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(path).items()}
    for name, t in written.items():
        assert torch.equal(t.view(torch.uint8), view[name][...].view(torch.uint8)), name
    again = lazyckpt.open(tmp_path / "out").dequantize(torch.float32)
    for name, t in view.dequantize(torch.float32).items():
        assert torch.equal(again[name][...], t[...]), name


class Anything(types.ModuleType):
    """A module in the place of triton, whose kernels are not run on CPUs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "language":
            return sys.modules["triton.language"]
        if name == "constexpr":
            return int
        return lambda *args, **kwargs: args[0] if args and callable(args[0]) else (lambda function: function)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded by transformers, the model computes what it computes with the dequantized weights. On CPUs transformers
    dequantizes fp8 while it loads; the others need the packages of their formats."""
    needs = {
        "nf4": "bitsandbytes",
        "nf4-double": "bitsandbytes",
        "int8": "compressed_tensors",
        "mxfp4": "compressed_tensors",
    }.get(kind)
    if needs is not None:
        pytest.importorskip(needs)
    elif importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.compile_fx")  # looks for triton, too
        with monkeypatch.context() as patch:
            for name in ("triton", "triton.language"):
                patch.setitem(sys.modules, name, Anything(name))
            importlib.import_module("transformers.integrations.finegrained_fp8")
    llama(256, 256, torch.bfloat16).save_pretrained(tmp_path / "in")
    call = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "safetensors", "--quantize", kind]
    assert CliRunner().invoke(app, call).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, device_map="cpu")
    dtype = torch.bfloat16
    if kind == "fp8-block":  # transformers leaves the weights in float32
        loaded, dtype = loaded.float(), torch.float32
    back = lazyckpt.open(tmp_path / "out").dequantize(dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=dtype)
    with torch.no_grad():
        for name, layer in linears(expected).items():
            layer.weight.copy_(back[f"{name}.weight"][...])
        ids = torch.arange(7)[None]
        a, b = loaded(ids).logits, expected(ids).logits
    assert (a - b).abs().max() <= (0.0 if kind == "fp8-block" else 0.02) * b.abs().max()


def test_stacked_experts(tmp_path: Path) -> None:
    """Experts as transformers 5 stacks them: fp8 as it reads them. Other kinds leave them, and say so."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=160, intermediate_size=96, moe_intermediate_size=72, num_hidden_layers=1,
        num_experts=3, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    state = {name: t.bfloat16() for name, t in Qwen3MoeForCausalLM(config).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    view = lazyckpt.open(tmp_path)
    stacks = [name for name in view if view[name].ndim == 3]
    assert sorted(name.rpartition(".")[2] for name in stacks) == ["down_proj", "gate_up_proj"]
    quantized = view.quantize("fp8-block")
    back = quantized.dequantize(torch.float32)
    assert set(back) == set(view) and back.problems == view.problems
    for name in stacks:
        assert quantized[name].dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in quantized
        for n, expert in enumerate(view[name][...]):
            assert torch.equal(back[name][n], fp8(expert)), name
        assert torch.equal(back[name][1:, 5:40:3, 7], back[name][...][1:, 5:40:3, 7])
    for kind in ("int8", "nf4", "mxfp4"):
        other = view.quantize(kind)
        (problem,) = [one for one in other.problems if "more than two dimensions" in str(one)]
        assert problem.code == "not-quantized" and all(other[name].dtype == torch.bfloat16 for name in stacks)
    kept = view.quantize("fp8-block", skip=["*.experts.*", "lm_head"])
    assert all(kept[name].dtype == torch.bfloat16 for name in stacks)


def _gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=128, n_layer=1, n_head=4)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(folder)
    return folder


def test_transposed_layers(tmp_path: Path) -> None:
    """GPT-2's Conv1D: bitsandbytes quantizes the matrix of the linear layer. transformers loads no other kind."""
    view = lazyckpt.open(_gpt2(tmp_path / "in"))
    layers = [
        name for name in view if name.rpartition(".")[0].endswith(("c_attn", "c_proj", "c_fc")) and view[name].ndim == 2
    ]
    quantized = view.quantize("nf4")
    back = quantized.dequantize(torch.float32)
    assert set(back) == set(view) and back.problems == view.problems and len(layers) == 4
    for name in layers:
        state = json.loads(bytes(quantized[f"{name}.quant_state.bitsandbytes__nf4"][...]))
        assert state["shape"] == list(view[name].shape)[::-1]
        assert torch.equal(back[name][...], nf4(view[name][...].t().contiguous()).t()), name
        assert torch.equal(back[name][3:50:7, 5], back[name][...][3:50:7, 5])
    for kind in ("fp8-block", "int8", "mxfp4"):
        with pytest.raises(DataError, match="no matrix"):
            view.quantize(kind)


def test_transformers_loads_transposed_layers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    call = ["convert", str(_gpt2(tmp_path / "in")), str(tmp_path / "out"), "--to", "safetensors", "--quantize", "nf4"]
    assert CliRunner().invoke(app, call).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, device_map="cpu")
    back = lazyckpt.open(tmp_path / "out").dequantize()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(back[name.removeprefix("transformer.") if name not in back else name][...])
        ids = torch.arange(7)[None]
        a, b = loaded(ids).logits, expected(ids).logits
    assert (a - b).abs().max() <= 0.02 * b.abs().max()


def test_dry_run_says_what_would_be_written(model: Path, tmp_path: Path) -> None:
    call = ["convert", str(model), str(tmp_path / "out"), "--to", "safetensors", "--quantize", "nf4", "--dry-run"]
    told = CliRunner().invoke(app, call)
    assert told.exit_code == 0 and "how the model is quantized" in told.output
    assert not (tmp_path / "out").exists()
    wrong = CliRunner().invoke(app, [*call[:-1], "--stored"])
    assert wrong.exit_code == 2 and not (tmp_path / "out").exists()


def test_skips_what_one_says_and_what_does_not_fit(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(8, 36), "b.weight": torch.randn(8, 64), "b.bias": torch.randn(8),
        "experts.weight": torch.randn(2, 8, 64), "lm_head.weight": torch.randn(8, 64),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path).quantize("mxfp4")
    assert set(view) == {*tensors, "b.weight_packed", "b.weight_scale"} - {"b.weight"}
    said = [str(one) for one in view.problems if one.code == "not-quantized"]
    assert len(said) == 2 and "a.weight" in said[0] + said[1] and "experts.weight" in said[0] + said[1]
    assert "lm_head.weight_packed" in lazyckpt.open(tmp_path).quantize("mxfp4", skip=["a"])
    with pytest.raises(DataError, match="no matrix"):
        lazyckpt.open(tmp_path).quantize("nf4", skip=["*"])
    with pytest.raises(DataError, match="name one of fp8-block, int8, nf4, nf4-double, mxfp4"):
        lazyckpt.open(tmp_path).quantize("int3")
    with pytest.raises(DataError, match="quantized already"):
        view.quantize("nf4")
    assert "b.weight.absmax" in view.dequantize().quantize("nf4")


@pytest.mark.parametrize("scheme", BLOCKS)
def test_edges(scheme: str, tmp_path: Path) -> None:
    """Zeros, and a block with one value: no division by zero."""
    weight = torch.zeros(3, 96) if len(BLOCKS[scheme]) == 2 else torch.zeros(160)
    weight.view(-1)[-1] = -2.0
    for op in ("quantize.codes", "quantize.scales"):
        params = {"scheme": scheme, "block": BLOCKS[scheme], "scale_dtype": torch.float32}
        folder = tmp_path / op
        folder.mkdir()
        t = array(folder, {"w": weight}, lambda o, op=op, params=params: make(op, o["w"], **params))
        assert t[...].float().isfinite().all()


@settings(max_examples=rounds(40), deadline=None)
@given(data=st.data())
def test_parts_equal_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(sorted(BLOCKS)))
    op = data.draw(st.sampled_from(["quantize.codes", "quantize.scales"]))
    shape = tuple(data.draw(st.integers(1, 20)) for _ in BLOCKS[scheme])
    block = tuple(data.draw(st.integers(1, 7)) for _ in shape)
    weight = torch.randn(shape) * 3
    params = {"scheme": scheme, "block": block, "scale_dtype": torch.bfloat16}
    folder = tmp_path_factory.mktemp("parts")
    check_parts(array(folder, {"w": weight}, lambda o: make(op, o["w"], **params)), data.draw)
    if op == "quantize.codes" and scheme in ("nf4", "mxfp4"):
        high = data.draw(st.booleans())
        pairs = array(
            folder, {"w": weight}, lambda o: make("quantize.pairs", make(op, o["w"], **params), high=high, pad=7)
        )
        check_parts(pairs, data.draw)


def test_reads_the_blocks_of_a_slice(model: Path) -> None:
    view, counts = opened(model)
    t = view.quantize("fp8-block")["model.layers.0.mlp.gate_proj.weight"]  # 160 x 96, bf16
    for key, elements in (((3,), 128 * 96), ((slice(120, 130), 5), 160 * 96), ((159,), 32 * 96)):
        counts.clear()
        _ = t[key]
        assert counts.bytes == 2 * elements
        parts = wanted(t.spec, Selection.all(t.shape)[key].reads().want)
        assert sum(len(want[0]) * len(want[1]) for _, want in parts) == elements


def test_what_is_computed_from_dequantized_models_is_quantized_again() -> None:
    stored = lazyckpt.open(Path(__file__).parent / "golden" / "quantized" / "deepseek_fp8")
    model = stored.dequantize()
    for computed in (
        0.5 * model + 0.5 * model.astype(torch.float32),
        lazyckpt.merge([model, 2 * model], weights=[1, 3]),
    ):
        again = computed.quantize("int8").dequantize(torch.float32)
        name = "model.layers.0.self_attn.q_a_proj.weight"
        value = computed[name][...].float()
        error = (again[name][...] - value).abs().amax(1)
        assert error.max() > 0 and (error <= value.abs().amax(1) / 127).all()
    with pytest.raises(DataError, match="quantized already"):
        stored.quantize("int8")


def test_double_quantization_has_the_states_of_bitsandbytes(tmp_path: Path) -> None:
    """More than one block of scales; the state is JSON, whose size does not depend on the mean."""
    weight = torch.randn(37, 1000).half()
    for scale in (1e-4, 1.0):
        save_file({"a.weight": weight * scale}, tmp_path / "model.safetensors")
        view = lazyckpt.open(tmp_path, cache=False).quantize("nf4-double")
        state = view["a.weight.quant_state.bitsandbytes__nf4"]
        said = json.loads(bytes(state[...]))
        assert bytes(state[3:90:7]) == bytes(state[...])[3:90:7]
        _, scales = by_table((weight * scale).reshape(-1).float(), 64, torch.tensor(NF4))
        assert said.pop("nested_offset") == pytest.approx(float(scales.double().mean()), rel=1e-7)
        assert said == {
            "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [37, 1000], "nested_blocksize": 256,
            "nested_dtype": "float32",
        }  # fmt: skip
        assert view["a.weight.absmax"].dtype == torch.uint8 and view["a.weight.absmax"].shape == (579,)
        assert view["a.weight.nested_absmax"].shape == (3,)
        back = view.dequantize(torch.float32)["a.weight"]
        assert torch.equal(back[...], nf4_double(weight * scale))
        assert torch.equal(back[20:22, 5:900:3], back[...][20:22, 5:900:3])
