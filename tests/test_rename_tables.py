"""Names of each architecture: there and back, the values that differ, and what chooses the table."""

from __future__ import annotations

import json
import shutil
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
from .writers import ranks

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
    "exaone4": {
        "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
    },
    "starcoder2": {"mlp.linear_fc1.weight": "mlp.c_fc.weight", "mlp.linear_fc2.bias": "mlp.c_proj.bias"},
    "llama4_text": {
        "mlp.router.weight": "feed_forward.router.weight",
        "mlp.shared_experts.linear_fc2.weight": "feed_forward.shared_expert.down_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    },
    "qwen3_next": {
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        "mlp.experts.local_experts.3.linear_fc2.weight": "mlp.experts.3.down_proj.weight",
    },
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
    own += ("encoder.", "encoder_relative_pos_emb.", "decoder_relative_pos_emb.", "lm_head.", "pooler.", "binary_head.")
    own += ("vision_model.", "vision_projection.", "audio_tower.")
    assert all(name.removeprefix("language_model.").startswith(own) for name in there.specs)
    for ours, theirs in NAMES.get(model, {}).items():
        same(there[OURS + ours][...], tensors[LAYER + theirs], ours)
    back = there.rename("hf")
    if model == "nemotron_h":  # transformers 5.3 reads both names, and writes the one that NVIDIA's files do not have
        tensors["backbone.embeddings.weight"] = tensors.pop("backbone.embedding.weight")
    assert set(back.specs) == set(tensors) and back.problems == view.problems
    for name, truth in tensors.items():
        if model == "qwen3_vl_moe" and ".experts." in name:  # transformers reads both ways, and writes the newer one
            truth = truth.transpose(1, 2)
        same(back[name][...], truth, name)
        same(back[name][1:], truth[1:], name)


@pytest.mark.parametrize("model", [model for model in tiny_models.FUSED if model != "nemotron_h"])
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


def test_the_naming_of_nemotron_h_in_transformers(tmp_path: Path) -> None:
    """``model`` in place of ``backbone``, and experts without a gate in one tensor."""
    _, there, tensors = moved(tmp_path, "nemotron_h fused")
    assert not [line for line in there.problems if line.code == "not-renamed"]
    experts = there["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"]
    same(experts[...], tensors["model.layers.2.mixer.experts.up_proj"][3], "an expert")
    names = {
        name.replace("backbone.embedding.", "backbone.embeddings.") for name in tiny_models.recorded()["nemotron_h"]
    }
    assert set(there.rename("hf").specs) == names


@pytest.mark.parametrize("model", ["nemotron", "phi3", "glm4", "starcoder2"])
def test_norms_in_linear_layers(tmp_path: Path, model: str) -> None:
    """As Transformer Engine has them: `mlp.linear_fc1.layer_norm_weight`."""
    _, there, tensors = moved(tmp_path, model)
    fused = {}
    for name, one in there.items():
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        fused[name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")] = one[...]
    heads = {"num_query_groups": 2, "kv_channels": tiny_models.config_of(model).get("head_dim", 4)}
    back = of_megatron(tmp_path / "x.pt", fused, **heads).rename(model)
    assert set(back.specs) == set(tensors)
    for name, truth in tensors.items():
        same(back[name][...], truth, name)


@pytest.mark.parametrize("model", ["falcon 7b", "bert", "exaone4"])
def test_norms_that_a_model_does_not_have(tmp_path: Path, model: str) -> None:
    """A norm within a linear layer keeps its name there, and is told of."""
    name = f"{'encoder' if model == 'bert' else 'decoder'}.layers.0.mlp.linear_fc1.layer_norm_weight"
    view = of_megatron(tmp_path / "x.pt", {name: torch.ones(16)}).rename(tiny_models.config_of(model)["model_type"])
    assert list(view) == [name] and [line for line in view.problems if line.code == "not-renamed"]


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
ASKED = {"phi3", "minimax_m2", "mamba2", "starcoder2", "falcon", "falcon 7b", "falcon rw", "ernie4_5_moe"}
ASKED |= {
    "dots1",
    "exaone_moe",
    "glm_moe_dsa",
    "qwen2_audio",
    "llama4_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
}
ASKED |= {model for model, config in tiny_models.CONFIGS.items() if "vision_config" in config}


@pytest.mark.parametrize("model", [m for m in tiny_models.CONFIGS if m not in ASKED])
def test_names_decide_where_no_model_type_is_known(tmp_path: Path, model: str) -> None:
    config = tiny_models.config_of(model)
    _, there, tensors = moved(tmp_path, model)
    heads = {
        "num_attention_heads": config.get("num_attention_heads", 4),
        "num_query_groups": config.get("num_key_value_heads", 1 if model == "gpt_bigcode" else 4),
        "kv_channels": config.get("head_dim", config.get("d_kv", 4)),
    }
    heads |= {"squared_relu": True} if model == "nemotron" else {}
    back = of_megatron(tmp_path / "x.pt", {name: there[name][...] for name in there.specs}, **heads).rename("hf")
    tensors = {name.replace("backbone.embedding.", "backbone.embeddings."): one for name, one in tensors.items()}
    assert set(back.specs) == set(tensors)
    for name, truth in tensors.items():
        same(back[name][...], truth, name)
    (tmp_path / "hf" / "config.json").unlink()
    again = lazyckpt.open(tmp_path / "hf").rename("megatron")
    fused = {
        name for name in there.specs if (".linear_qkv." in name or ".linear_kv." in name) and "layer_norm" not in name
    }  # (heads are not known)
    assert set(there.specs) - fused <= set(again.specs)


@pytest.mark.parametrize(
    ("model", "without", "args", "candidates"),
    [
        ("nemotron", (), {}, r"nemotron, starcoder2"),
        ("starcoder2", (".bias",), {}, r"nemotron, starcoder2"),
        ("falcon", (), {}, r"nemotron, starcoder2, falcon"),
        ("falcon", (), {"squared_relu": False}, r"starcoder2, falcon"),
        ("gpt_neox", ("attention.dense.bias", "query_key_value.bias"), {}, r"nemotron, gpt_neox"),
        ("gpt_bigcode", (), None, r"gpt_bigcode, gpt2"),
    ],
)
def test_names_that_several_architectures_have_are_a_question(
    tmp_path: Path, model: str, without: tuple[str, ...], args: dict[str, Any] | None, candidates: str
) -> None:
    """They compute different results: with another activation, or attention and MLP side by side."""
    tensors = tiny_models.write(tmp_path / "hf", model)
    norms = ("layernorm.bias", "norm.bias", "ln_1.bias", "ln_2.bias", "ln_f.bias")
    gone = {name for name in tensors if without and name.endswith(without) and not name.endswith(norms)}
    save_file({n: t for n, t in tensors.items() if n not in gone}, tmp_path / "hf" / "model.safetensors")
    there = lazyckpt.open(tmp_path / "hf").rename("megatron")
    held = {name: there[name][...].contiguous() for name in there.specs}
    if args is None:
        save_file(held, tmp_path / "x.safetensors")
        view = lazyckpt.open(tmp_path / "x.safetensors")
    else:
        view = of_megatron(tmp_path / "x.pt", held, **args)
    with pytest.raises(FormatError, match=candidates):
        view.rename("hf")
    assert set(view.rename(model)) >= set(tensors) - gone - {n for n in tensors if "attn" in n}, "the user's choice"


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


@pytest.mark.parametrize(
    ("model", "wrong", "named"),
    [
        ("gpt2", {"model_type": "gpt_bigcode"}, r"c_attn.*\[16, 48\].*gpt_bigcode"),
        ("gpt_bigcode", {"model_type": "gpt2"}, r"c_attn.*\[24, 16\].*gpt2"),
        ("gpt2", {"n_head": 3}, r"c_attn.*48.*3 heads"),
        ("llama", {"hidden_size": 64}, r"\[32, 16\].*64"),
        ("llama", {"vocab_size": 64}, r"embed_tokens.*32 rows.*64"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj.*\[12, 16\].*num_key_value_heads.*24"),
        ("llama", {"intermediate_size": 11}, r"intermediate_size.*11"),
        ("gpt_neox", {"num_attention_heads": 3}, r"query_key_value.*48.*heads.*44"),
        ("falcon", {"num_kv_heads": 4}, r"query_key_value.*32.*heads.*48"),
        ("qwen3_next", {"linear_key_head_dim": 5}, r"in_proj_ba.* rows are not .* 2 heads of 5"),
        ("glm4_moe", {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}, r"1 layer, .*layer 1"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    tmp_path: Path, model: str, wrong: dict[str, Any], named: str
) -> None:
    tiny_models.write(tmp_path, model)
    right = json.loads((tmp_path / "config.json").read_text())
    assert lazyckpt.open(tmp_path).rename("megatron").problems == ()
    (tmp_path / "config.json").write_text(json.dumps(right | wrong))
    with pytest.raises(FormatError, match=named):
        lazyckpt.open(tmp_path).rename("megatron")
    if model == "llama":
        with pytest.raises(FormatError, match=named):
            lazyckpt.open(tmp_path).to_gguf(tmp_path / "x.gguf")
    if model == "llama" and "num_key_value_heads" not in wrong:  # (q, k and v would keep their names)
        with pytest.raises(FormatError, match=r"config.json is not of this model"):
            lazyckpt.open(tmp_path).rename("llama", reverse=True).to_megatron(tmp_path / "out")


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
        ("mamba2", {"mamba_num_groups": 8}, True),
        ("mamba2", {"mamba_num_groups": 1}, False),
    ],
)
def test_norms_less_one_and_rotary_embeddings(tmp_path: Path, model: str, given: dict[str, bool], told: bool) -> None:
    _, there, _ = moved(tmp_path, model)
    tensors = {name: there[name][...] for name in there.specs}
    view = of_megatron(tmp_path / "x.pt", tensors, **given)
    for which in (model,) if model == "mamba2" else ("hf", model):  # (names alone say that it is of Nemotron-H's kind)
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


INNER = "mtp.layers.0.transformer_layer."


def with_mtp(tensors: dict[str, torch.Tensor], prefix: str, own: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The tensors of a layer that predicts a further token: those of layer 1 plus 1, and some of its own."""
    layer = LAYER if any(name.startswith(LAYER) for name in tensors) else "model.language_model.layers.1."
    found = {name.replace(layer, f"{prefix}."): one + 1 for name, one in tensors.items() if name.startswith(layer)}
    return found | {name: torch.randn(shape) for name, shape in own.items()}


@pytest.mark.parametrize("model", ["qwen3", "qwen3_next", "qwen3_5_moe_text", "exaone_moe"])
def test_qwens_layers_that_predict_further_tokens(tmp_path: Path, model: str) -> None:
    """``mtp.layers.0`` and ``mtp.fc``, which transformers leaves out when it loads a model."""
    tensors = tiny_models.write(tmp_path, model)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    more = with_mtp(tensors, "mtp.layers.0", {"mtp.fc.weight": [16, 32], **{f"mtp.{n}.weight": [16] for n in norms}})
    save_file(tensors | more, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems
    same(there["mtp.layers.0.eh_proj.weight"][...], more["mtp.fc.weight"], "eh_proj")
    same(there["mtp.layers.0.final_layernorm.weight"][...], more["mtp.norm.weight"], "norm")
    for name in ("self_attention.linear_qkv.weight", "self_attention.k_layernorm.weight"):
        same(there[INNER + name][...], there[OURS + name][...] + 1, name)
    back = there.rename("hf")
    assert set(back.specs) == {*tensors, *more}
    for name, truth in (tensors | more).items():
        same(back[name][...], truth, name)
    newer = {name.replace("transformer_layer", "mtp_model_layer"): there[name][...] for name in there.specs}
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }
    hf = of_megatron(tmp_path / "x.pt", newer, **heads).rename(model)
    assert set(hf.specs) == {*tensors, *more} and set(hf.rename(model, reverse=True).specs) == set(newer)


def test_mimos_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """It multiplies the hidden state and the next token's embedding in the other order."""
    tensors = tiny_models.write(tmp_path, "qwen2")
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.config_of("qwen2") | {"model_type": "mimo"}))
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    own = {f"model.mtp_layers.0.{n}.weight": [16] for n in norms} | {"model.mtp_layers.0.input_proj.weight": [16, 32]}
    more = with_mtp(tensors, "model.mtp_layers.0", own)
    save_file(tensors | more, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems
    given = more["model.mtp_layers.0.input_proj.weight"]
    same(there["mtp.layers.0.eh_proj.weight"][...], torch.cat([given[:, 16:], given[:, :16]], 1), "swapped")
    same(there["mtp.layers.0.eh_proj.weight"][3, 10:20], torch.cat([given[3, 26:], given[3, :4]]), "a slice")
    same(there["mtp.layers.0.enorm.weight"][...], more["model.mtp_layers.0.token_layernorm.weight"], "enorm")
    back = there.rename("hf")
    assert set(back.specs) == {*tensors, *more}
    for name, truth in (tensors | more).items():
        same(back[name][...], truth, name)


def test_layers_of_nemotron_h_that_predict_further_tokens(tmp_path: Path) -> None:
    """Two layers for each of two tokens, numbered one after the other at Hugging Face."""
    tensors = tiny_models.write(tmp_path, "nemotron_h")
    more = {}
    for n in range(4):  # attention, mixture of experts
        stem = f"backbone.layers.{1 + n % 2}."
        more |= {name.replace(stem, f"mtp.layers.{n}."): one + n for name, one in tensors.items() if stem in name}
    for n in (0, 2):
        more |= {f"mtp.layers.{n}.eh_proj.weight": torch.randn(16, 32), f"mtp.layers.{n}.enorm.weight": torch.randn(16)}
        more |= {f"mtp.layers.{n + 1}.final_layernorm.weight": torch.randn(16)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems
    inner = "mtp.layers.1.mtp_model_layer.layers."
    same(there["mtp.layers.1.eh_proj.weight"][...], more["mtp.layers.2.eh_proj.weight"], "eh_proj")
    same(there["mtp.layers.1.final_layernorm.weight"][...], more["mtp.layers.3.final_layernorm.weight"], "norm")
    same(there[f"{inner}0.input_layernorm.weight"][...], more["mtp.layers.2.norm.weight"], "norm")
    same(
        there[f"{inner}1.mlp.experts.local_experts.2.linear_fc1.weight"][...],
        more["mtp.layers.3.mixer.experts.2.up_proj.weight"],
        "an expert",
    )
    back = there.rename("hf")
    for name, truth in more.items():
        same(back[name][...], truth, name)
    del more["mtp.layers.3.final_layernorm.weight"]  # how many layers a block has is not clear then
    save_file(tensors | more, tmp_path / "model.safetensors")
    view = lazyckpt.open(tmp_path).rename("megatron")
    assert "mtp.layers.3.mixer.gate.weight" in view and [p for p in view.problems if p.code == "not-renamed"]


# -- values and shapes that differ


def test_the_norm_of_a_delta_net_is_stored_less_one(tmp_path: Path) -> None:
    """`Qwen3NextRMSNormGated` takes its weights as they are, megatron-core's adds 1, as to all others."""
    tensors = tiny_models.write(tmp_path, "qwen3_next")
    name, ours = "model.layers.0.linear_attn.norm.weight", "decoder.layers.0.self_attention.out_norm.weight"
    moments = {key: {"exp_avg": one * 2, "ema": one * 3} for key, one in tensors.items()}
    torch.save({"model": tensors, "optimizer": {"state": moments}}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt").rename("qwen3_next", reverse=True)
    same(view[ours][...], tensors[name] - 1, "less 1")
    same(view[ours][2:4], tensors[name][2:4] - 1, "a slice")
    same(view.states["exp_avg"][ours][...], tensors[name] * 2, "a moment")
    same(view.states["ema"][name][...], tensors[name] * 3, "of weights or of gradients")
    assert [line for line in view.problems if line.code == "not-renamed"]
    same(view.rename("qwen3_next")[name][...], tensors[name], "and back")
    assert "plus -1" in view[ours].explain()


def test_a_vision_tower_of_llama_4(tmp_path: Path) -> None:
    _, there, tensors = moved(tmp_path, "llama4")
    same(there["vision_model.class_token"][...], tensors["vision_model.class_embedding"].view(1, 1, -1), "the class")
    one = "language_model.model.layers.1.feed_forward.experts."
    inner = "language_model.decoder.layers.1.mlp.experts.local_experts.2."
    same(there[f"{inner}linear_fc1.weight"][...], tensors[f"{one}gate_up_proj"][2].T, "[in, out]")


# -- naming of towers, of older folders and of parts


@pytest.mark.parametrize("model", ["qwen2_5_vl", "gemma3"])
def test_mbridges_names_of_vision_towers(tmp_path: Path, model: str) -> None:
    """Megatron-Bridge leaves them as they are; `rename("hf")` reads both."""
    view, bridge, tensors = moved(tmp_path, model)
    there = view.rename(f"mbridge_{model}", reverse=True)
    assert there.problems == view.problems
    assert all(name.startswith(("language_model.", "vision_model.", "vision_projection.")) for name in there.specs)
    assert not any(name.startswith("vision_model.") for name in bridge.specs)
    fused = there["vision_model.decoder.layers.0.self_attention.linear_qkv.weight"]
    if model == "qwen2_5_vl":
        given = tensors["visual.blocks.0.attn.qkv.weight"].view(3, 2, 8, 16)
    else:
        stem = next(name for name in tensors if name.endswith("0.self_attn.q_proj.weight") and "vision" in name)
        given = torch.stack([tensors[stem.replace("q_proj", f"{x}_proj")] for x in "qkv"]).view(3, 2, 8, 16)
    same(fused[...], given.transpose(0, 1).reshape(48, 16), "q, k and v of each head")
    back = there.rename("hf")
    assert {name.replace("vision_tower.vision_model.", "vision_tower.") for name in back.specs} == {
        name.replace("vision_tower.vision_model.", "vision_tower.") for name in tensors
    }
    for name in back.specs:
        same(back[name][...], tensors.get(name, tensors.get(name.replace(".vision_model.", "."))), name)


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl"])
def test_names_of_the_model_in_transformers(tmp_path: Path, model: str) -> None:
    """``model.language_model`` and ``model.visual``, which `save_pretrained` turns into the older ones."""
    _, there, tensors = moved(tmp_path / "older", model)
    newer = {
        f"model.{n}" if n.startswith("visual.") else n.replace("model.", "model.language_model."): one
        for n, one in tensors.items()
    }
    (tmp_path / "newer").mkdir()
    save_file(newer, tmp_path / "newer" / "model.safetensors")
    (tmp_path / "newer" / "config.json").write_text(json.dumps(tiny_models.config_of(model)))
    view = lazyckpt.open(tmp_path / "newer").rename("megatron")
    assert set(view.specs) == set(there.specs)
    for name in there.specs:
        same(view[name][...], there[name][...], name)


def test_names_of_models_with_code_of_their_own(tmp_path: Path) -> None:
    """InternVL 3, Ling and Hunyuan 3, which transformers does not have: q, k and v, and names that differ."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 6}
    fused = torch.randn(48, 16)
    by_group = [*fused[:24].split(12), *fused[24:].split(6)]
    layer = "model.layers.1."
    cases = {
        "bailing_moe_v2": (
            config,
            {f"{layer}attention.query_key_value.weight": fused, f"{layer}mlp.gate.expert_bias": torch.ones(4)},
            {"self_attention.linear_qkv.weight": by_group, "mlp.router.expert_bias": 0},
        ),
        "hy_v3": (
            config,
            {f"{layer}mlp.router.gate.weight": torch.ones(4, 16), f"{layer}mlp.expert_bias": torch.ones(4)},
            {"mlp.router.weight": 0, "mlp.router.expert_bias": 0},
        ),
        "internvl_chat": (
            {"llm_config": config, "vision_config": {"hidden_size": 16, "num_attention_heads": 2}},
            {"vision_model.encoder.layers.1.attn.qkv.weight": fused, "mlp1.3.bias": torch.ones(3)},
            {"vision_model.decoder.layers.1.self_attention.linear_qkv.weight": fused.split(8)},
        ),
    }
    for model, (about, tensors, wanted) in cases.items():
        (tmp_path / model).mkdir()
        save_file(tensors, tmp_path / model / "model.safetensors")
        (tmp_path / model / "config.json").write_text(json.dumps({"model_type": model, **about}))
        view = lazyckpt.open(tmp_path / model)
        there = view.rename("megatron")
        assert there.problems == view.problems
        for name, parts in wanted.items():
            found = there[name if name.startswith("vision") else OURS + name][...]
            if isinstance(parts, int):
                continue
            order = [0, 2, 4, 1, 3, 5]  # q, k and v of each group
            same(found, torch.cat([parts[n] for n in order]), name)
        for name, one in tensors.items():
            same(there.rename("hf")[name][...], one, name)


_ATTENTION = {
    "self_attn.q_proj.weight": [24, 16],
    "self_attn.k_proj.weight": [12, 16],
    "self_attn.v_proj.weight": [12, 16],
    "self_attn.o_proj.weight": [16, 24],
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 6}
_SPARSE = {
    "mlp.gate.weight": [2, 16],
    "mlp.experts.1.gate_proj.weight": [8, 16],
    "mlp.experts.1.up_proj.weight": [8, 16],
    "mlp.experts.1.down_proj.weight": [16, 8],
}
# models of which transformers 5.3 has none, by the mappings of Megatron-Bridge: `model_type`, config.json, names and
# shapes behind "model.layers.1." or from the beginning, and some of them with their names there
_BRIDGED: dict[str, tuple[dict[str, Any], dict[str, list[int]], dict[str, str]]] = {
    "sarvam_moe": (
        _HEADS,
        {**_SPARSE, "attention.query_key_value.weight": [48, 16], "mlp.gate.expert_bias": [2]},
        {"mlp.gate.expert_bias": "decoder.layers.1.mlp.router.expert_bias"},
    ),
    "sarvam_mla": (
        _HEADS,
        {**_SPARSE, "self_attn.kv_a_proj_with_mqa.weight": [12, 16], "mlp.gate.e_score_correction_bias": [2]},
        {"self_attn.kv_a_proj_with_mqa.weight": "decoder.layers.1.self_attention.linear_kv_down_proj.weight"},
    ),
    "kimi_k25": (
        {"text_config": _HEADS},
        {
            **{f"language_model.model.layers.1.{name}": shape for name, shape in _SPARSE.items()},
            "language_model.model.layers.1.self_attn.kv_b_proj.weight": [12, 16],
            "language_model.lm_head.weight": [32, 16],
            "vision_tower.encoder.blocks.0.wqkv.weight": [48, 16],
            "mm_projector.proj.0.weight": [16, 16],
        },
        {
            "language_model.model.layers.1.self_attn.kv_b_proj.weight": "language_model.decoder.layers.1."
            "self_attention.linear_kv_up_proj.weight",
            "language_model.lm_head.weight": "language_model.output_layer.weight",
            "mm_projector.proj.0.weight": "mm_projector.proj.0.weight",
        },
    ),
    "minimax_m3_vl": (
        {"text_config": _HEADS},
        {
            **{f"language_model.model.layers.1.{name}": shape for name, shape in _ATTENTION.items()},
            "language_model.model.layers.1.block_sparse_moe.gate.weight": [2, 16],
            "language_model.model.layers.1.block_sparse_moe.e_score_correction_bias": [2],
            "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight": [16, 8],
            "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight": [8, 16],
            "language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight": [8, 16],
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight": [8, 16],
            "language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight": [16, 8],
            "language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight": [8, 16],
            "language_model.model.layers.1.self_attn.index_q_norm.weight": [4],
            "vision_tower.vision_model.layers.0.layer_norm1.weight": [16],
            "patch_merge_mlp.linear_1.weight": [16, 16],
        },
        {
            "language_model.model.layers.1.self_attn.index_q_norm.weight": "lightning_indexers.1.q_norm.weight",
            "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight": "language_model.decoder."
            "layers.1.mlp.shared_experts.linear_fc2.weight",
        },
    ),
    "exaone4_5": (
        {"text_config": _HEADS, "vision_config": {"hidden_size": 16, "num_heads": 4, "num_key_value_heads": 2}},
        {
            **{f"model.language_model.layers.1.{name}": shape for name, shape in _ATTENTION.items()},
            **{f"mtp.layers.0.{name}": shape for name, shape in _ATTENTION.items()},
            "mtp.fc.weight": [16, 32],
            "mtp.norm.weight": [16],
            "mtp.layers.0.post_attention_layernorm.weight": [16],
            "model.language_model.layers.1.post_feedforward_layernorm.weight": [16],
            "model.visual.blocks.0.attn.qkv.weight": [32, 16],
            "model.visual.merger.ln_q.weight": [16],
            "model.visual.merger.mlp.2.bias": [16],
            "lm_head.weight": [32, 16],
        },
        {
            "model.visual.merger.ln_q.weight": "vision_model.merger.patch_norm.weight",
            "mtp.fc.weight": "language_model.mtp.layers.0.eh_proj.weight",
            "mtp.layers.0.post_attention_layernorm.weight": "language_model.mtp.layers.0.transformer_layer."
            "self_attention.linear_proj.post_layernorm.weight",
        },
    ),
    "mimo_v2_flash": (
        {
            **_HEADS,
            "v_head_dim": 4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 6,
            "swa_v_head_dim": 4,
            "hybrid_layer_pattern": [0, 1],
        },
        {
            **_SPARSE,
            "self_attn.q_proj.weight": [24, 16],
            "self_attn.k_proj.weight": [6, 16],
            "self_attn.v_proj.weight": [4, 16],
            "self_attn.attention_sink_bias": [4],
            "model.layers.0.self_attn.q_proj.weight": [24, 16],
            "model.layers.0.self_attn.k_proj.weight": [12, 16],
            "model.layers.0.self_attn.v_proj.weight": [8, 16],
            "model.mtp.layers.0.self_attn.q_proj.weight": [24, 16],
            "model.mtp.layers.0.self_attn.k_proj.weight": [6, 16],
            "model.mtp.layers.0.self_attn.v_proj.weight": [4, 16],
            "model.mtp.layers.0.pre_mlp_layernorm.weight": [16],
            "model.mtp.layers.0.eh_proj.weight": [16, 32],
        },
        {
            "self_attn.attention_sink_bias": "decoder.layers.1.self_attention.core_attention.softmax_offset",
            "model.mtp.layers.0.pre_mlp_layernorm.weight": "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
        },
    ),
    "nemotron-nas": (
        {
            "num_attention_heads": 4,
            "hidden_size": 24,
            "num_key_value_heads": None,
            "block_configs": [{"attention": {"n_heads_in_group": n}} for n in (2, 4)],
        },
        {
            "model.layers.0.self_attn.q_proj.weight": [24, 24],
            "model.layers.0.self_attn.k_proj.weight": [12, 24],
            "model.layers.0.self_attn.v_proj.weight": [12, 24],
            "self_attn.q_proj.weight": [24, 24],
            "self_attn.k_proj.weight": [6, 24],
            "self_attn.v_proj.weight": [6, 24],
        },
        {},
    ),
}


@pytest.mark.parametrize("model", _BRIDGED)
def test_names_of_models_that_only_the_bridge_has(tmp_path: Path, model: str) -> None:
    config, shapes, told = _BRIDGED[model]
    own = ("model.", "mtp.", "language_model.", "lm_head.", "vision_tower.", "mm_projector.", "patch_merge_mlp.")
    full = {name: name if name.startswith(own) else f"model.layers.1.{name}" for name in (*shapes, *told)}
    tensors = {full[name]: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, **config}))
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert there.problems == view.problems
    for name, ours in told.items():
        same(there[ours][...], tensors[full[name]], name)
    back = there.rename("hf")
    assert set(back.specs) == set(tensors)
    for name, truth in tensors.items():
        same(back[name][...], truth, name)
    for layer, groups, dim, value in {
        "mimo_v2_flash": [(0, 2, 6, 4), (1, 1, 6, 4)],
        "nemotron-nas": [(0, 2, 6, 6)],
    }.get(model, []):  # q, k and v of each group
        q, k, v = (tensors[f"model.layers.{layer}.self_attn.{one}_proj.weight"] for one in "qkv")
        cut = zip(q.split(24 // groups), k.split(dim), v.split(value), strict=True)
        fused = torch.cat([rows for group in cut for rows in group])
        same(there[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"][...], fused, "q, k and v")


def test_names_of_qwen_omni(tmp_path: Path) -> None:
    """Megatron-Bridge's and mbridge's; what speaks has none."""
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 6}
    config = {"text_config": text, "vision_config": {"hidden_size": 16, "num_heads": 2}}
    fused = torch.randn(48, 16)
    tensors = {
        "thinker.model.layers.1.mlp.experts.0.down_proj.weight": torch.randn(16, 8),
        "thinker.audio_tower.layers.0.fc1.weight": torch.randn(4, 4),
        "thinker.visual.blocks.0.attn.qkv.weight": fused,
        "thinker.visual.merger_list.0.mlp.2.bias": torch.randn(4),
        "talker.model.norm.weight": torch.randn(16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": config}))
    view = lazyckpt.open(tmp_path)
    bridge, mbridge = view.rename("megatron"), view.rename("mbridge_qwen3_omni_moe", reverse=True)
    expert = "language_model.decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    assert {"thinker.audio_model.layers.0.fc1.weight", f"thinker.{expert}", "talker.model.norm.weight"} < set(bridge)
    qkv = "vision_model.decoder.layers.0.self_attention.linear_qkv.weight"
    assert set(mbridge) == {
        expert,
        qkv,
        "audio_model.layers.0.fc1.weight",
        "vision_model.decoder.deepstack_merger_list.0.linear_fc2.bias",
        "talker.model.norm.weight",
    }
    same(mbridge[qkv][...], fused.view(3, 2, 8, 16).transpose(0, 1).reshape(48, 16), "q, k and v of each head")
    for there in (bridge, mbridge):
        back = there.rename("hf")
        assert set(back) == set(tensors) and all(torch.equal(back[name][...], tensors[name]) for name in tensors)


@pytest.mark.parametrize("model", ["qwen3_5", "glm4v_moe"])
def test_mbridges_names_of_towers_that_it_leaves_as_they_are(tmp_path: Path, model: str) -> None:
    view, bridge, tensors = moved(tmp_path, model)
    there = view.rename(f"mbridge_{model}", reverse=True)
    assert there.problems == view.problems
    name = "blocks.0.attn.qkv.weight"
    same(there[f"vision_model.{name}"][...], tensors[f"model.visual.{name}"], "q, k and v")
    assert f"vision_model.{name}" not in bridge and set(there.rename("hf")) == set(tensors)


def test_older_names_of_bert(tmp_path: Path) -> None:
    """``LayerNorm.gamma`` of folders that come from TensorFlow, and `BertModel` without its heads."""
    _, there, tensors = moved(tmp_path / "new", "bert")
    (tmp_path / "old").mkdir()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in tensors.items()
    }
    save_file(old, tmp_path / "old" / "model.safetensors")
    (tmp_path / "old" / "config.json").write_text(json.dumps(tiny_models.config_of("bert")))
    view = lazyckpt.open(tmp_path / "old").rename("megatron")
    assert set(view.specs) == set(there.specs) and set(view.rename("hf").specs) == set(tensors)
    alone = {name.removeprefix("bert."): one for name, one in tensors.items() if name.startswith("bert.")}
    save_file(alone, tmp_path / "old" / "model.safetensors")
    view = lazyckpt.open(tmp_path / "old").rename("megatron")
    assert not [line for line in view.problems if line.code == "not-renamed"]
    assert set(view.specs) == {name for name in there.specs if not name.startswith(("lm_head", "output", "binary"))}


def test_a_head_of_t5_that_is_not_tied(tmp_path: Path) -> None:
    tensors = tiny_models.write(tmp_path, "t5") | {"lm_head.weight": torch.randn(32, 16)}
    save_file(tensors, tmp_path / "model.safetensors")
    there = lazyckpt.open(tmp_path).rename("megatron")
    same(there["lm_head.output_layer.weight"][...], tensors["lm_head.weight"], "the head")
    assert set(there.rename("hf").specs) == set(tensors)


def test_falcons_names_by_nemo(tmp_path: Path) -> None:
    """Which norms a layer has says which names they have."""
    _, new, tensors = moved(tmp_path / "40b", "falcon")
    same(new[f"{OURS}input_layernorm.weight"][...], tensors["transformer.h.1.ln_attn.weight"], "before attention")
    same(new[f"{OURS}pre_mlp_layernorm.weight"][...], tensors["transformer.h.1.ln_mlp.weight"], "before the MLP")
    _, old, tensors = moved(tmp_path / "rw", "falcon rw")
    name = "transformer.h.1.post_attention_layernorm.weight"
    same(old[f"{OURS}post_self_attn_layernorm.weight"][...], tensors[name], "behind attention")


def test_falcon_by_the_configuration_of_nemo(tmp_path: Path) -> None:
    """Its names are those of Nemotron in megatron-core, whose layers are others."""
    _, there, tensors = moved(tmp_path / "40b", "falcon")
    saved = {f"model.{name}": there[name][...] for name in there.specs}
    (tmp_path / "nemo").mkdir()
    torch.save(saved, tmp_path / "nemo" / "model_weights.ckpt")
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "tensor_model_parallel_size": 1}
    (tmp_path / "nemo" / "model_config.yaml").write_text(json.dumps({"name": "megatron_falcon_gpt", **sizes}))
    back = lazyckpt.open(tmp_path / "nemo").rename("hf")
    assert set(back) == set(tensors) and all(torch.equal(back[name][...], one) for name, one in tensors.items())


@pytest.mark.parametrize(
    ("model", "config", "groups"),
    [
        ("falcon", {}, 2),
        ("falcon", {"model_type": "RefinedWeb", "num_kv_heads": None, "n_head_kv": 2}, 2),
        ("falcon 7b", {}, 1),
        ("falcon 7b", {"multi_query": None}, 1),
        ("falcon 7b", {"model_type": "RefinedWebModel"}, 1),
        ("falcon rw", {}, 4),
        ("gpt_bigcode", {"multi_query": True, "num_key_value_heads": None}, 1),
        ("gpt_bigcode", {"num_key_value_heads": None}, 1),
    ],
)
def test_groups_of_heads_that_to_megatron_writes(
    tmp_path: Path, model: str, config: dict[str, object], groups: int
) -> None:
    tiny_models.write(tmp_path / "hf", model)
    found = {name: value for name, value in {**tiny_models.config_of(model), **config}.items() if value is not None}
    if model == "falcon" and config:
        del found["new_decoder_architecture"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(found))
    lazyckpt.open(tmp_path / "hf").rename("megatron").to_megatron(tmp_path / "megatron")
    args = lazyckpt.open(tmp_path / "megatron").meta["args"]
    assert (args.num_query_groups, args.group_query_attention) == (groups, groups != 4)


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
def test_ranks_of_latent_attention_that_to_megatron_writes(tmp_path: Path, model: str) -> None:
    """Its arguments tell how wide the down projections are, which Megatron's own layers cut."""
    view, there, _ = moved(tmp_path / "hf", model)
    there.to_megatron(tmp_path / "megatron", tp=2)
    back = lazyckpt.open(tmp_path / "megatron")
    assert not back.problems and all(torch.equal(back[name][...], there[name][...]) for name in there.specs)
    assert set(back.rename("hf").specs) == set(view.specs)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("qwen3_next", {}),
        ("qwen3_5_text", {}),
        ("nemotron_h", {}),
        ("mamba2", {"n_groups": 2, "state_size": 2}),  # (the same shapes)
    ],
)
def test_widths_of_mixers_are_those_of_the_configuration(tmp_path: Path, model: str, config: dict[str, int]) -> None:
    tiny_models.write(tmp_path / "hf", model)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(tiny_models.config_of(model) | config))
    there = lazyckpt.open(tmp_path / "hf").rename("megatron")
    there.to_megatron(tmp_path / "megatron", tp=2)
    back = lazyckpt.open(tmp_path / "megatron")
    assert back.mesh.tp == 2 and not back.problems
    for name in there.specs:
        same(back[name][...], there[name][...], name)
    for rank in range(2):
        shard, own = there.shard(tp=2, rank=rank), lazyckpt.open(tmp_path / f"megatron/release/mp_rank_{rank:02d}")
        for name in own.stored:
            same(shard[name.removeprefix("model.")][...], own.stored[name][...], name)
    there.to_megatron(tmp_path / "dist", ckpt_format="torch_dist")  # (which has the parts one by one)
    dist = lazyckpt.open(tmp_path / "dist")
    assert set(dist.specs) == set(there.specs)
    assert [line for line in there.problems if line.code == "unlike-values"] == [
        line for line in there.problems if model == "mamba2"
    ]


@pytest.mark.parametrize("model", ["mamba2", "falcon_h1"])
def test_groups_of_a_mixer_are_not_cut(tmp_path: Path, model: str) -> None:
    _, there, _ = moved(tmp_path, model)
    with pytest.raises(lazyckpt.MeshError, match="mamba_num_groups = 1"):
        there.shard(tp=2, rank=0)
    with pytest.raises(lazyckpt.MeshError, match="mamba_num_groups = 1"):
        there.to_megatron(tmp_path / "out", tp=2)


@pytest.mark.parametrize(("model", "words"), [("t5", "T5Model"), ("bert", "BertModel"), ("qwen3_vl", "towers")])
def test_models_of_which_no_checkpoint_of_megatron_is_written(tmp_path: Path, model: str, words: str) -> None:
    _, there, _ = moved(tmp_path, model)
    with pytest.raises(lazyckpt.DataError, match=words):
        there.to_megatron(tmp_path / "out")


def test_the_language_model_beside_a_tower(tmp_path: Path) -> None:
    _, there, _ = moved(tmp_path, "qwen3_vl")
    there.prefix("language_model").to_megatron(tmp_path / "out", tp=2)
    back = lazyckpt.open(tmp_path / "out")
    for name in back.specs:
        same(back[name][...], there[f"language_model.{name}"][...], name)


def test_the_norm_of_falcon_h1_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """There it has the name of a norm beside the matrix."""
    _, there, tensors = moved(tmp_path, "falcon_h1")
    there.to_megatron(tmp_path / "dist", ckpt_format="torch_dist")
    dist = lazyckpt.open(tmp_path / "dist")
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in dist
    assert set(dist.rename("falcon_h1").specs) == set(tensors)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("t5", ["shared.weight"]),
        ("bert", ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]),
        ("nemotron_h", ["backbone.embedding.weight", "lm_head.weight"]),
    ],
)
def test_vocabularies_of_these_families_are_padded(tmp_path: Path, model: str, names: list[str]) -> None:
    tiny_models.write(tmp_path, model)
    view = lazyckpt.open(tmp_path)
    shard = view.shard(vocab_multiple=7, rank=0)
    assert {name for name in view.specs if shard.specs[name].shape != view.specs[name].shape} == set(names)
    assert all(shard[name].shape[0] == 35 and bool((shard[name][32:] == 0).all()) for name in names)


def test_two_names_that_are_one_in_the_other_terms(tmp_path: Path) -> None:
    """The bias of BERT's head has two names, which megatron-core's has not."""
    tiny_models.write(tmp_path, "bert")
    config = tiny_models.config_of("bert") | {"architectures": ["BertForPreTraining"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    view = lazyckpt.open(tmp_path)
    assert view.aliases["cls.predictions.decoder.bias"] == "cls.predictions.bias"
    there = view.rename("megatron")
    assert dict(there.aliases) == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert list(there).count("output_layer.bias") == 1 and all(a != b for a, b in there.rename("hf").aliases.items())


def test_a_head_of_bert_that_is_not_tied(tmp_path: Path) -> None:
    """It has a bias of its own; the other one is not used, and stays."""
    tensors = tiny_models.write(tmp_path, "bert")
    head = {f"cls.predictions.decoder.{kind}": tensors[f"cls.predictions.{kind}"] + 1 for kind in ("bias",)}
    head["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors | head, tmp_path / "model.safetensors")
    config = tiny_models.config_of("bert") | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    there = lazyckpt.open(tmp_path).rename("megatron")
    for kind in ("weight", "bias"):
        same(there[f"output_layer.{kind}"][...], head[f"cls.predictions.decoder.{kind}"], kind)
    assert [line.path for line in there.problems if line.code == "not-renamed"] == ["cls.predictions.bias"]
    back = there.rename("hf")
    assert set(back.specs) == {*tensors, *head}
    for name, truth in (tensors | head).items():
        same(back[name][...], truth, name)


@pytest.mark.parametrize(
    ("model", "why"), [("phi", "side by side"), ("umt5", "relative positions"), ("gemma4", "k and v")]
)
def test_why_an_architecture_has_no_table(tmp_path: Path, model: str, why: str) -> None:
    tiny_models.write(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    with pytest.raises(FormatError, match=why):
        lazyckpt.open(tmp_path).rename("megatron")


def test_heads_that_are_not_known_leave_names_as_they_are(tmp_path: Path) -> None:
    for model, stays in (("qwen3_next", "in_proj_qkvz"), ("t5", "EncDecAttention.k"), ("qwen3_vl", "attn.qkv")):
        tensors = tiny_models.write(tmp_path / model, model)
        save_file(tensors, tmp_path / f"{model}.safetensors")
        view = lazyckpt.open(tmp_path / f"{model}.safetensors").rename(model, reverse=True)
        assert any(stays in name for name in view.specs), model
        assert [line for line in view.problems if line.code == "not-renamed"], model


def test_a_table_of_ones_own_with_other_beginnings(tmp_path: Path) -> None:
    """Several tables to extend; lines without the beginning are left out; `given`, `outer` and `less_one`."""
    tensors = {"tower.blocks.0.mlp.up_proj.weight": torch.ones(4, 4), "tower.scale": torch.full([1, 3], 2.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    table = {
        "extends": [{"table": "nemotron", "left": {"decoder.layers.{l}.": "tower.blocks.{l}."}, "right": "x."}],
        "tower.scale": {"outer": 1, "less_one": True, "into": "scale"},
        "tower.blocks.{l}.mlp.{any}": {"into": "never.{l}.{any}", "given": "tower.blocks.{l}.gate"},
    }
    view = lazyckpt.open(tmp_path / "x.safetensors").rename(table)
    assert set(view.specs) == {"tower.blocks.0.mlp.up_proj.weight", "scale"}
    same(view["scale"][...], torch.full([3], 3.0), "plus 1")
    same(view.rename(table, reverse=True)["tower.scale"][...], torch.full([1, 3], 2.0), "less 1")
    for wrong in ({"extends": 3}, {"extends": {"table": "llama", "left": {"a": 3}}}, {"a": {"into": "b", "outer": 99}}):
        with pytest.raises(FormatError):
            view.rename(wrong)
    for wrong in (
        {"a": {"into": "b", "heads": "x"}},
        {"a": {"into": "b", "given": "c.{l}"}},
        {"a": {"into": "b", "cut": "kv"}},
    ):
        with pytest.raises(FormatError):
            view.rename(wrong)


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
@pytest.mark.parametrize("model", tiny_models.CONFIGS)
def test_transformers_loads_what_came_back(tmp_path: Path, model: str) -> None:
    """From both namings of transformers to Megatron's names, and from these to a folder that it loads: same weights."""
    need("transformers")
    built = tiny_models.build(model)
    views = []
    for name, older in (("older", True), ("newer", False)):
        built.save_pretrained(tmp_path / name, save_original_format=older)
        views.append(lazyckpt.open(tmp_path / name).rename("megatron"))
        assert not [line for line in views[-1].problems if line.code == "not-renamed"]
    assert set(views[0].specs) == set(views[1].specs)
    for name in views[0].specs:
        same(views[1][name][...], views[0][name][...], name)
    views[1].rename("hf").to_safetensors(tmp_path / "back")
    shutil.copy(tmp_path / "older" / "config.json", tmp_path / "back")
    loaded, told = type(built).from_pretrained(tmp_path / "back", output_loading_info=True, dtype=torch.float32)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    found = loaded.state_dict()
    for name, truth in built.state_dict().items():
        if "linear_attn.norm" in name:  # (1 is taken away and added again)
            torch.testing.assert_close(found[name], truth, rtol=1e-6, atol=1e-7)
        else:
            same(found[name], truth, name)


@pytest.mark.full
def test_logits_of_megatrons_models_are_those_of_transformers() -> None:
    need("transformers", "megatron")
    found = printed_by("megatron_logits")
    assert all(far < 1e-4 for far in found.values()), found


@pytest.mark.full
def test_layers_of_towers_are_those_of_transformers() -> None:
    need("transformers", "megatron")
    found = printed_by("megatron_towers")
    assert found and all(far < 1e-5 for far in found.values()), found


@pytest.mark.full
def test_logits_of_megatrons_ranks_with_fused_matrices(tmp_path: Path) -> None:
    """Delta nets and Mamba layers on two ranks of megatron-core, each with its shard."""
    need("transformers", "megatron")
    folder = ranks.run_all("tests.writers.megatron_cut", tmp_path)
    said = [ranks.verdict(folder, name, 2) for name in ("qwen3_next", "qwen3_5_text", "nemotron_h")]
    assert not any(said), said


@pytest.mark.full
def test_megatrons_models_have_the_names_of_layers_that_predict_further_tokens() -> None:
    need("transformers", "megatron")
    found = printed_by("megatron_mtp")
    assert found and not any(found.values()), found


def printed_by(module: str) -> dict[str, Any]:
    """What a module of tests/writers prints last, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.writers.{module}"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=Path(__file__).resolve().parents[1], check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
