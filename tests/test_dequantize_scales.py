"""Dequantized views of FP8, MXFP4, NVFP4, modelopt and compressed-tensors: what the writers' own code computes.

tests/golden/quantized has checkpoints with their truth; tests/writers/quantized_scales.py writes them. Each case says
in which dtype its library computes. In that dtype, and in bfloat16, the values are equal bit for bit.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import DataError
from lazyckpt.testing import opened

from .test_dequantize_ops import bits, same_bits

GOLDEN = Path(__file__).parent / "golden" / "quantized"
WRITERS = ("deepseek", "finegrained", "fbgemm", "gpt_oss", "modelopt", "compressed")
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name.startswith(WRITERS))


def same(a: torch.Tensor, b: torch.Tensor, about: Any = "") -> None:
    """Equal bit for bit, but for the bits of NaN."""
    assert torch.equal(a.isnan(), b.isnan()), about
    same_bits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0), about)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder for a copy of a case that a test changes."""
    return tmp_path / "model"


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted((GOLDEN / case).glob("model-*")) for name, t in load_file(path).items()}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_writer(case: str) -> None:
    truth = load_file(GOLDEN / case / "truth.safetensors")
    about = json.loads((GOLDEN / case / "writer.json").read_text())
    own = getattr(torch, about["dtype"])
    stored = lazyckpt.open(GOLDEN / case)
    view = stored.dequantize(own)
    assert set(view) == set(truth) | {"lm_head.weight"}
    assert view.owner("lm_head.weight") == "model.embed_tokens.weight"
    codes = {problem.code for problem in view.problems} - {"left-out-scale"}
    assert codes == {problem.code for problem in stored.problems}
    changed = 0
    for name, expected in truth.items():
        t = view[name]
        assert t.shape == expected.shape, name
        same(t[...], expected, name)
        if name not in stored or stored[name].dtype != t.dtype:
            changed += 1
            same(stored.dequantize()[name][...], expected.to(torch.bfloat16), name)
    assert changed
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(bits(again[name][...]), bits(view[name][...]))


@pytest.mark.parametrize("case", CASES)
def test_a_slice_reads_its_codes_and_scales(case: str) -> None:
    view, counts = opened(GOLDEN / case)
    view = view.dequantize()
    chance = random.Random(0)
    for name in view:
        t = view[name]
        if t.spec.expr is None:
            continue
        whole = t[...]
        for _ in range(4):
            key = tuple(
                chance.choice([chance.randrange(n), slice(chance.randrange(n), None, chance.choice([1, 3]))])
                for n in t.shape
            )
            same_bits(t[key], whole[key], (name, key))
            needed = t._cost(t._sel[key]).nbytes
            counts.clear()
            t[key]
            assert counts.bytes >= needed  # a file cannot be mapped here: neighbours of strided elements are read, too
        t[0]
        counts.clear()
        t[0]
        assert counts.bytes == t._cost(t._sel[0]).nbytes


def test_a_row_of_codes_of_four_bits(tmp_path: Path) -> None:
    rows, columns = 64, 4096
    tensors = {
        "m.weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "m.weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn),
        "m.weight_scale_2": torch.tensor(0.01),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    view, counts = opened(tmp_path / "model.safetensors")
    t = view.dequantize()["m.weight"]
    t[3]
    counts.clear()
    assert t[3].shape == (columns,)
    assert counts.bytes == columns // 2 + columns // 16 + 4


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_other_formats(kind: str, tmp_path: Path) -> None:
    source = GOLDEN / "deepseek_fp8"
    tensors = tensors_of("deepseek_fp8")
    if kind == "torch":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        import torch.distributed.checkpoint as dcp

        dcp.save(tensors, checkpoint_id=tmp_path)
    shutil.copy(source / "config.json", tmp_path)
    view = lazyckpt.open(tmp_path).dequantize()
    truth = load_file(source / "truth.safetensors")
    assert set(view) - {"lm_head.weight"} == set(truth)
    for name, expected in truth.items():
        same_bits(view[name][...], expected)
    (tmp_path / "config.json").unlink()
    given = lazyckpt.open(tmp_path).dequantize(config=source)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    same_bits(given[name][...], truth[name])


def test_the_view_takes_a_part_and_is_exported(tmp_path: Path) -> None:
    case = GOLDEN / "gpt_oss_mxfp4"
    truth = load_file(case / "truth.safetensors")
    view = lazyckpt.open(case)
    layer = view["model.layers.1"].dequantize()
    assert set(layer) == {n.removeprefix("model.layers.1.") for n in truth if n.startswith("model.layers.1.")}
    blocks = view.select("*_blocks").dequantize()
    assert set(blocks) == {n for n in truth if n.endswith("proj")}
    same(
        blocks["model.layers.0.mlp.experts.down_proj"][1, :, 5], truth["model.layers.0.mlp.experts.down_proj"][1, :, 5]
    )
    view.dequantize().to_safetensors(tmp_path / "out", progress=False)
    out = lazyckpt.open(tmp_path / "out")
    for name, expected in truth.items():
        same(out[name][...], expected)


def changed(
    case: str, to: Path, tensors: Mapping[str, torch.Tensor | None] = {}, **config: Any
) -> lazyckpt.CheckpointView:
    """A case with other tensors (None removes one) or another configuration."""
    to.mkdir()
    kept = {**tensors_of(case), **tensors}
    save_file({name: t for name, t in kept.items() if t is not None}, to / "model.safetensors")
    settings = json.loads((GOLDEN / case / "config.json").read_text())
    own = settings.get("quantization_config", {})
    for key, value in config.items():
        own[key] = value
    (to / "config.json").write_text(json.dumps({**settings, "quantization_config": own}))
    return lazyckpt.open(to)


NAME = "model.layers.1.self_attn.kv_b_proj.weight"


Q_A = "model.layers.0.self_attn.q_a_proj.weight"
PACKED = "model.layers.0.self_attn.q_proj.weight_packed"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
OF_TWO = torch.zeros(3, 96, 2, dtype=torch.uint8)
MARLIN = "model.layers.0.self_attn.q_proj.weight_packed"
SMALL_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
OTHER_BITS = SMALL_GROUPS | {"num_bits": 8, "group_size": 128}
SMOOTHED = "model.layers.0.self_attn.q_proj"
FUSED = "model.layers.1.feed_forward.experts.gate_up_proj"
M_INT4 = f"{SMOOTHED}.weight"
NO_BITS = {"g": {"targets": 7, "weights": {"num_bits": 0}}}
UNDECIDED, CONTRADICTING = "undecided-quantization", "contradicting-quantization"


@pytest.mark.parametrize(
    ("case", "tensors", "config", "code", "name"),
    [
        ("deepseek_fp8", {}, {"quant_method": "marvellous"}, UNDECIDED, NAME),
        ("deepseek_fp8", {f"{NAME}_scale_inv": None}, {}, UNDECIDED, NAME),
        ("deepseek_fp8", {}, {"weight_block_size": [64, 128]}, CONTRADICTING, Q_A),
        ("deepseek_fp8", {}, {"modules_to_not_convert": ["kv_b_proj"]}, CONTRADICTING, NAME),
        ("deepseek_fp8", {f"{NAME}_scale": torch.ones(1)}, {}, CONTRADICTING, NAME),
        ("deepseek_fp8", {f"{NAME}_scale_inv": torch.ones(3, 3)}, {}, CONTRADICTING, NAME),
        ("compressed_pack_4", {}, {"ignore": ["re:.*layers.0.*"]}, CONTRADICTING, PACKED),
        ("compressed_pack_4", {}, {"config_groups": {}}, CONTRADICTING, PACKED),
        ("compressed_nvfp4", {PACKED.replace("_packed", "_global_scale"): None}, {}, CONTRADICTING, PACKED),
        ("compressed_pack_4", {}, {"ignore": ["re:(a+)+$"]}, UNDECIDED, PACKED),
        ("compressed_pack_4", {}, {"config_groups": NO_BITS}, CONTRADICTING, PACKED),
        ("compressed_pack_4", {}, {"ignore": 7, "config_groups": [1]}, CONTRADICTING, PACKED),
        (
            "compressed_marlin_24",
            {},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": SMALL_GROUPS}}},
            CONTRADICTING,
            MARLIN,
        ),
        (
            "compressed_marlin_24",
            {},
            {"config_groups": {"g": {"targets": ["Linear"], "weights": OTHER_BITS}}},
            CONTRADICTING,
            MARLIN,
        ),
        ("modelopt_nvfp4_svd", {f"{SMOOTHED}.svdquant_lora_b": None}, {}, CONTRADICTING, f"{SMOOTHED}.weight"),
        (
            "modelopt_nvfp4_svd",
            {f"{SMOOTHED}.svdquant_lora_b": torch.ones(2, 4)},
            {},
            CONTRADICTING,
            f"{SMOOTHED}.weight",
        ),
        ("modelopt_nvfp4_awq", {f"{SMOOTHED}.pre_quant_scale": torch.ones(7)}, {}, CONTRADICTING, f"{SMOOTHED}.weight"),
        (
            "modelopt_nvfp4_awq",
            {f"{FUSED}_weight_scale": torch.ones(3, 5, 8).to(torch.float8_e4m3fn)},
            {},
            CONTRADICTING,
            FUSED,
        ),
        (
            "modelopt_fp8",
            {M_INT4: torch.zeros(12, 64, dtype=torch.uint8)},
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            CONTRADICTING,
            M_INT4,
        ),
        ("gpt_oss_mxfp4", {f"{EXPERTS}_scales": OF_TWO}, {}, CONTRADICTING, f"{EXPERTS}_blocks"),
    ],
)
def test_what_is_not_certain_stays(
    case: str, tensors: dict[str, Any], config: dict[str, Any], code: str, name: str, model: Path
) -> None:
    stored = changed(case, model, tensors, **config)
    view = stored.dequantize()
    assert code in {problem.code for problem in view.problems}
    assert name in view
    same_bits(view[name][...], stored[name][...])


def test_a_row_of_marlin_24_reads_its_words() -> None:
    view, _ = opened(GOLDEN / "compressed_marlin_24")
    t = view.dequantize()["model.layers.0.self_attn.q_proj.weight"]
    # For each of 12 tiles: 4 words of 4 bytes and 2 of meta; the scales of 3 groups.
    assert t._cost(t._sel[5]).nbytes == 12 * (4 * 4 + 2 * 2) + 3 * 2


def test_blocks_without_a_configuration(model: Path) -> None:
    stored = changed("deepseek_fp8", model)
    (model / "config.json").unlink()
    view = lazyckpt.open(model).dequantize()
    assert "assumed-quantization" in {problem.code for problem in view.problems}
    same_bits(view[NAME][...], load_file(GOLDEN / "deepseek_fp8" / "truth.safetensors")[NAME])
    assert not any(problem.code == "assumed-quantization" for problem in stored.dequantize().problems)


def test_scales_of_activations_are_told() -> None:
    view = lazyckpt.open(GOLDEN / "modelopt_fp8").dequantize()
    (problem,) = view.problems
    assert problem.code == "left-out-scale" and "4 scales" in problem
    assert "model.layers.0.self_attn.k_proj.k_scale" in view.stored


def test_nothing_is_quantized(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(3, 4), "b": torch.ones(2).bfloat16()}, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    same_bits(view.dequantize()["a.weight"][...], torch.ones(3, 4))
    assert view.dequantize().problems == view.problems
    with pytest.raises(DataError, match="float32"):
        view.dequantize(torch.int8)


def test_a_tied_weight_is_tied_again(tmp_path: Path) -> None:
    codes, scales = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.tensor(2.0)
    state = {"embed.weight": codes, "embed.weight_scale": scales, "head.weight": codes, "head.weight_scale": scales}
    torch.save(state, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt").dequantize()
    assert view.owner("head.weight") == view.owner("embed.weight") and set(view) == {"embed.weight", "head.weight"}
    del state["head.weight_scale"]
    torch.save(state, tmp_path / "other.pt")
    view = lazyckpt.open(tmp_path / "other.pt").dequantize()
    assert view.owner("head.weight") == view.owner("embed.weight")
    same_bits(view["head.weight"][...], torch.full((4, 4), 2.0).bfloat16())
