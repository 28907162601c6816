"""Names of each architecture: there and back, the values that differ, and what chooses the table."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import CheckpointView, FormatError
from lazyckpt.testing.oracle import same

from . import tiny_models
from .conftest import need

LAYER, OURS = "model.layers.1.", "decoder.layers.1."
# one name of each architecture that is not as in Llama: Megatron's -> Hugging Face's
NAMES = {
    "gemma2": {
        "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    },
    "gemma3_text": {
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    },
    "glm4": {
        "post_self_attn_layernorm.weight": "post_self_attn_layernorm.weight",
        "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
    },
    "glm4_moe": {
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.3.down_proj.weight",
    },
    "qwen2_moe": {
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    },
    "deepseek_v2": {"self_attention.linear_q_proj.weight": "self_attn.q_proj.weight"},
    "deepseek_v3": {
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    },
    "minimax_m2": {"mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"},
    "gpt_oss": {
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "mlp.router.bias": "mlp.router.bias",
    },
    "nemotron": {"mlp.linear_fc1.weight": "mlp.up_proj.weight"},
}


def moved(tmp_path: Path, model: str) -> tuple[CheckpointView, CheckpointView, dict[str, torch.Tensor]]:
    """A recorded model, the same under Megatron's names, and its tensors."""
    tensors = tiny_models.write(tmp_path / "hf", model)
    view = lazyckpt.open(tmp_path / "hf")
    return view, view.rename("megatron"), tensors


def of_megatron(path: Path, tensors: dict[str, torch.Tensor], **args: Any) -> CheckpointView:
    """Tensors in Megatron's names, as a file with args and without config.json."""
    given = {"num_attention_heads": 4, "kv_channels": 6, "num_query_groups": 2, "group_query_attention": True}
    torch.save({"model": tensors, "args": Namespace(**given | {"hidden_size": 16, **args})}, path)
    return lazyckpt.open(path)


@pytest.mark.parametrize("model", tiny_models.CONFIGS)
def test_there_and_back_bit_for_bit(tmp_path: Path, model: str) -> None:
    view, there, tensors = moved(tmp_path, model)
    assert there.problems == view.problems
    own = ("embedding.", "decoder.", "output_layer.", "vision_tower.", "visual.", "multi_modal_projector.")
    assert all(name.removeprefix("language_model.").startswith(own) for name in there.specs)
    for ours, theirs in NAMES.get(model, {}).items():
        same(there[OURS + ours][...], tensors[LAYER + theirs], ours)
    back = there.rename("hf")
    if model == "nemotron_h":  # transformers 5.3 reads both names, and writes the one that NVIDIA's files do not have
        tensors["backbone.embeddings.weight"] = tensors.pop("backbone.embedding.weight")
    assert set(back.specs) == set(tensors) and back.problems == view.problems
    for name, truth in tensors.items():
        same(back[name][...], truth, name)
        same(back[name][1:], truth[1:], name)


@pytest.mark.parametrize("model", tiny_models.FUSED)
def test_experts_that_transformers_writes_in_one_tensor(tmp_path: Path, model: str) -> None:
    """As the older naming, in Megatron's terms and back."""
    _, there, tensors = moved(tmp_path, f"{model} fused")
    fused, down = tensors[f"{LAYER}mlp.experts.gate_up_proj"], tensors[f"{LAYER}mlp.experts.down_proj"]
    assert not [line for line in there.problems if line.code == "not-renamed"]
    back = there.rename("hf")
    assert set(back.specs) == set(tiny_models.recorded()[model])
    experts = "block_sparse_moe.experts" if model == "mixtral" else "mlp.experts"
    gate, second = ("w1", "w2") if model == "mixtral" else ("gate_proj", "down_proj")
    for n in range(4):
        same(there[f"{OURS}mlp.experts.local_experts.{n}.linear_fc1.weight"][...], fused[n], "gate above up")
        same(back[f"{LAYER}{experts}.{n}.{gate}.weight"][...], fused[n][: len(fused[n]) // 2], "gate")
        same(back[f"{LAYER}{experts}.{n}.{second}.weight"][2:5], down[n][2:5], "down")


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """[in, out], and the columns of gate and up in turns, as `GptOssExperts._apply_gate` reads them."""
    _, there, tensors = moved(tmp_path, "gpt_oss")
    fused, bias = (tensors[f"{LAYER}mlp.experts.gate_up_proj{kind}"] for kind in ("", "_bias"))
    for n in range(4):
        expert = f"{OURS}mlp.experts.local_experts.{n}."
        same(there[f"{expert}linear_fc1.weight"][...], torch.cat([fused[n].T[::2], fused[n].T[1::2]]), "weight")
        same(
            there[f"{expert}linear_fc1.weight"][5:30:3, 2],
            torch.cat([fused[n].T[::2], fused[n].T[1::2]])[5:30:3, 2],
            "",
        )
        same(there[f"{expert}linear_fc1.bias"][...], torch.cat([bias[n][::2], bias[n][1::2]]), "bias")
        same(there[f"{expert}linear_fc2.weight"][...], tensors[f"{LAYER}mlp.experts.down_proj"][n].T, "down")
    again = there.rename("hf")[f"{LAYER}mlp.experts.gate_up_proj"]
    same(again[2:, 3, 4:9], fused[2:, 3, 4:9], "a slice")


def test_experts_of_gpt_oss_by_transformer_engine(tmp_path: Path) -> None:
    """``linear_fc1.weight3`` of TEGroupedMLP; a missing one is told, and no stack without it is made."""
    _, there, tensors = moved(tmp_path, "gpt_oss")
    grouped = {}
    for name, one in there.items():
        head, _, rest = name.partition(".local_experts.")
        number, _, tail = rest.partition(".")
        grouped[f"{head}.{tail}{number}" if rest else name] = one[...]
    view = of_megatron(tmp_path / "x.pt", grouped).rename("hf")
    assert set(view.specs) == set(tensors) and not view.problems
    same(view[f"{LAYER}mlp.experts.gate_up_proj"][...], tensors[f"{LAYER}mlp.experts.gate_up_proj"], "stacked")
    del grouped[f"{OURS}mlp.experts.linear_fc1.weight0"]
    view = of_megatron(tmp_path / "y.pt", grouped).rename("hf")
    assert f"{OURS}mlp.experts.linear_fc1.weight1" in view and f"{LAYER}mlp.experts.gate_up_proj" not in view
    assert [line for line in view.problems if line.code == "not-renamed"]


def test_gpt2_without_its_head(tmp_path: Path) -> None:
    """As the hub has it: the names of `GPT2Model`."""
    tensors = tiny_models.write(tmp_path, "gpt2")
    save_file({name.removeprefix("transformer."): one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems and set(there.rename("hf").specs) == set(tensors)
    same(there["decoder.layers.1.mlp.linear_fc2.weight"][...], tensors["transformer.h.1.mlp.c_proj.weight"].T, "turned")


# -- what chooses the table


# what names do not tell from others
ASKED = ("phi3", "minimax_m2", "mamba2", "gemma3", "qwen2_5_vl")


@pytest.mark.parametrize("model", [m for m in tiny_models.CONFIGS if m not in ASKED])
def test_names_decide_where_no_model_type_is_known(tmp_path: Path, model: str) -> None:
    config = tiny_models.config_of(model)
    _, there, tensors = moved(tmp_path, model)
    heads = {
        "num_attention_heads": config.get("num_attention_heads", 4),
        "num_query_groups": config.get("num_key_value_heads", 4),
        "kv_channels": config.get("head_dim", 4),
    }
    back = of_megatron(tmp_path / "x.pt", {name: there[name][...] for name in there.specs}, **heads).rename("hf")
    tensors = {name.replace("backbone.embedding.", "backbone.embeddings."): one for name, one in tensors.items()}
    assert set(back.specs) == set(tensors)
    for name, truth in tensors.items():
        same(back[name][...], truth, name)
    (tmp_path / "hf" / "config.json").unlink()
    again = lazyckpt.open(tmp_path / "hf").rename("megatron")
    fused = {
        name for name in there.specs if ".linear_qkv." in name and "layer_norm" not in name
    }  # (heads are not known)
    assert set(there.specs) - fused <= set(again.specs)


def test_an_architecture_without_a_table_is_refused(tmp_path: Path) -> None:
    """Its names may be Llama's, and mean something else: OLMo 2 has its norms behind attention and MLP."""
    tiny_models.write(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.config_of("llama") | {"model_type": "olmo2"}))
    view = lazyckpt.open(tmp_path)
    with pytest.raises(FormatError, match=r"olmo2.*qwen3_moe"):
        view.rename("megatron")
    assert f"{OURS}mlp.linear_fc1.weight" in view.rename("llama", reverse=True), "the user's own choice"
    with pytest.raises(FormatError, match="did you mean 'qwen3_moe'"):
        view.rename("qwen3_mo")
    assert set(view.rename("qwen3", reverse=True)) == set(view.rename("llama", reverse=True))


def test_names_of_no_architecture_or_of_several_are_refused(tmp_path: Path) -> None:
    save_file({"bert.encoder.layer.0.attention.self.query.weight": torch.ones(4, 4)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match="no table has names"):
        lazyckpt.open(tmp_path / "x.safetensors").rename("megatron")
    _, there, _ = moved(tmp_path, "mixtral")
    tensors = {name: there[name][...] for name in there.specs} | {f"{OURS}mlp.router.expert_bias": torch.ones(4)}
    with pytest.raises(FormatError, match="no architecture"):
        of_megatron(tmp_path / "y.pt", tensors).rename("hf")
    both = {
        f"model.layers.0.mlp.{name}.down_proj.weight": torch.ones(4, 4) for name in ("shared_expert", "shared_experts")
    }
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(FormatError, match=r"several architectures \(qwen_moe, glm_moe"):
        lazyckpt.open(tmp_path / "both.safetensors").rename("megatron")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, tmp_path / "up.safetensors")
    with pytest.raises(FormatError, match="no table has names"):  # (its gate may be in another file)
        lazyckpt.open(tmp_path / "up.safetensors").rename("megatron")
    # (a name of several architectures that means the same in all of them is no question)
    only = {"model.layers.0.post_attention_layernorm.weight": torch.ones(4)}
    save_file(only, tmp_path / "z.safetensors")
    assert list(lazyckpt.open(tmp_path / "z.safetensors").rename("megatron")) == [
        "decoder.layers.0.pre_mlp_layernorm.weight"
    ]


# -- values that mean something else


@pytest.mark.parametrize(
    ("model", "given", "told"),
    [
        ("llama", {"apply_layernorm_1p": True}, True),
        ("llama", {"apply_layernorm_1p": False}, False),
        ("llama", {}, False),
        ("gemma2", {"apply_layernorm_1p": True}, False),
        ("gemma2", {"apply_layernorm_1p": False}, True),
        ("nemotron", {"apply_layernorm_1p": True}, False),
        ("glm4", {"rotary_interleaved": True}, False),
        ("glm4", {"rotary_interleaved": False}, True),
        ("llama", {"rotary_interleaved": True}, True),
    ],
)
def test_norms_less_one_and_rotary_embeddings(tmp_path: Path, model: str, given: dict[str, bool], told: bool) -> None:
    _, there, _ = moved(tmp_path, model)
    tensors = {name: there[name][...] for name in there.specs}
    view = of_megatron(tmp_path / "x.pt", tensors, **given)
    for which in ("hf", model):
        if (which, model) == ("hf", "nemotron"):  # (its names without biases are those of Arcee, too)
            tensors = tensors | {"decoder.final_layernorm.bias": torch.ones(16)}
            view = of_megatron(tmp_path / "x.pt", tensors, num_attention_heads=4, **given)
        assert bool([line for line in view.rename(which).problems if line.code == "unlike-values"]) is told


def test_the_args_of_gemma_that_to_megatron_writes(tmp_path: Path) -> None:
    _, there, _ = moved(tmp_path, "gemma")
    there.to_megatron(tmp_path / "megatron")
    assert lazyckpt.open(tmp_path / "megatron").meta["args"].apply_layernorm_1p is True


# -- layers that predict further tokens


def test_layers_behind_the_last_one(tmp_path: Path) -> None:
    """DeepSeek V3's layer 61 is ``mtp.layers.0``; transformers leaves it out, so it is made of a copy of layer 1."""
    tensors = tiny_models.write(tmp_path, "deepseek_v3")
    more = {name.replace("layers.1.", "layers.2."): one + 1 for name, one in tensors.items() if "layers.1." in name}
    more |= {f"model.layers.2.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {"model.layers.2.eh_proj.weight": torch.randn(16, 32)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems and "decoder.layers.2.eh_proj.weight" not in there
    same(there["mtp.layers.0.eh_proj.weight"][...], more["model.layers.2.eh_proj.weight"], "eh_proj")
    same(there["mtp.layers.0.final_layernorm.weight"][...], more["model.layers.2.shared_head.norm.weight"], "norm")
    name = "mlp.shared_experts.linear_fc2.weight"
    same(
        there[f"mtp.layers.0.transformer_layer.{name}"][...],
        more["model.layers.2.mlp.shared_experts.down_proj.weight"],
        name,
    )
    back = there.rename("hf")
    assert set(back.specs) == {*tensors, *more}
    for name, truth in (tensors | more).items():
        same(back[name][...], truth, name)
    # the name of the inner layer in newer versions of megatron-core; how many layers there are is in the args
    newer = {name.replace("transformer_layer", "mtp_model_layer"): there[name][...] for name in there.specs}
    hf = of_megatron(tmp_path / "x.pt", newer, num_layers=2).rename("hf")
    assert set(hf.specs) == {*tensors, *more}
    assert set(hf.rename("megatron").specs) == set(newer)
    unknown = of_megatron(tmp_path / "y.pt", newer).rename("hf")
    assert "mtp.layers.0.eh_proj.weight" in unknown and [p for p in unknown.problems if p.code == "not-renamed"]


# -- the same as the writers


@pytest.mark.full
def test_recorded_names_are_those_that_transformers_writes() -> None:
    need("transformers")
    found = tiny_models.recorded()
    for model in tiny_models.CONFIGS:
        assert found[model] == tiny_models.shapes(model), model
    for model in tiny_models.FUSED:
        assert found[f"{model} fused"] == tiny_models.shapes(model, fused=True), model


@pytest.mark.full
def test_logits_of_megatrons_models_are_those_of_transformers() -> None:
    need("transformers", "megatron")
    command = [sys.executable, "-W", "ignore", "-m", "tests.writers.megatron_logits"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=Path(__file__).resolve().parents[1], check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(far < 1e-4 for far in found.values()), found
