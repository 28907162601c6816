"""GGUF's names in Hugging Face's terms: the state dict that transformers' own loader makes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import FormatError
from lazyckpt.testing import opened
from lazyckpt.testing.oracle import indexed, keys, same

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from .writers import gguf_files  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 55,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"head_dim": 16}),
    "llama_tied": ("llama", "Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", "Gemma3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("phi3", "Phi3", {"pad_token_id": 0}),
}


def model_of(name: str) -> Any:
    import transformers

    _, family, more = MODELS[name]
    config_of = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(**SIZES | more))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model.eval()


def write(path: Path, name: str, kind: str) -> Any:
    """Write a model as llama.cpp's converter does: names by the gguf package, its changes of values (as in
    convert_hf_to_gguf.py) by hand."""
    architecture, _, _ = MODELS[name]
    model = model_of(name)
    config = model.config
    arch = next(arch for arch, one in gguf.MODEL_ARCH_NAMES.items() if one == architecture)
    names = gguf.get_tensor_name_map(arch, 2)
    tensors: dict[str, gguf_files.Stored] = {}
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for key, value in state.items():
        new = names.get_name(key, (".weight", ".bias"))
        assert new is not None
        data = value.numpy()
        if architecture == "llama" and (heads := {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])):
            data = (
                data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            )
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            data = data + 1
        raw = gguf.GGMLQuantizationType[kind] if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        tensors[new] = (np.ascontiguousarray(gguf.quants.quantize(data, raw)), raw)

    def about(writer: Any) -> None:
        writer.add_block_count(2)
        writer.add_context_length(64)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(55)
        if "head_dim" in MODELS[name][2]:
            writer.add_key_length(16)
            writer.add_value_length(16)
            writer.add_rope_dimension_count(16)

    gguf_files.write(path, tensors, about=about, architecture=architecture)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_what_transformers_loads(tmp_path: Path, name: str, kind: str) -> None:
    own = write(tmp_path / "m.gguf", name, kind)
    loaded = (
        type(own).from_pretrained(tmp_path, gguf_file="m.gguf", config=own.config, dtype=torch.float32).state_dict()
    )
    view = lazyckpt.open(tmp_path / "m.gguf").dequantize(torch.float32).rename("hf")
    assert view.problems == ()
    assert set(view) == set(loaded)
    for key, value in loaded.items():
        same(view[key][...].float(), value, key)
        for part in keys(value.shape, key, 2):
            same(view[key][part].float(), indexed(value, part), (key, part))
    if kind == "F32" and not name.startswith("gemma"):
        for key, value in own.state_dict().items():
            same(view[key][...], value, key)


# Architecture -> the model, more of its config, how the gguf package calls the stacked experts.
EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Mixtral", {"num_local_experts": 3}, "layers.{}.feed_forward.experts.{}.weight"),
    "qwen2moe": (
        "Qwen2Moe",
        {"num_experts": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
        "model.layers.{}.mlp.experts.{}.weight",
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 3, "moe_intermediate_size": 32, "head_dim": 16},
        "model.layers.{}.mlp.experts.{}.weight",
    ),
    "phi2": ("Phi", {"pad_token_id": 0}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_equals_the_model_that_was_saved(tmp_path: Path, architecture: str, merged: bool) -> None:
    """transformers' loader of GGUF knows no Mixtral and no Phi 2: the names are those of the gguf package, and the
    values those that `modify_tensors` of llama.cpp's convert_hf_to_gguf.py makes."""
    import transformers

    family, more, stack = EXPERTS[architecture]
    if not merged and architecture != "llama":
        pytest.skip("only files of Mixtral were written with a tensor for each expert")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "hf")
    saved = lazyckpt.open(tmp_path / "hf")
    arch = next(arch for arch, one in gguf.MODEL_ARCH_NAMES.items() if one == architecture)
    names = gguf.get_tensor_name_map(arch, 2)
    tensors: dict[str, Any] = {}
    parts: dict[str, list[Any]] = {}
    for key, tensor in saved.items():
        data = tensor[...].float().numpy()
        if ".experts." in key:
            layer, (number, kind) = key.split(".")[2], key.split(".")[-3:-1]
            if merged:
                parts.setdefault(stack.format(layer, kind), []).append((int(number), data))
            else:
                word = {"w1": "gate", "w2": "down", "w3": "up"}[kind]
                tensors[f"blk.{layer}.ffn_{word}.{number}.weight"] = data, None
            continue
        if architecture == "llama" and (heads := {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])):
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        new = names.get_name(key, (".weight", ".bias"))
        assert new is not None, key
        tensors[new] = np.ascontiguousarray(data.squeeze()), None
    for key, experts in parts.items():
        new = names.get_name(key, (".weight",))
        assert new is not None, key
        tensors[new] = np.stack([data for _, data in sorted(experts, key=lambda one: one[0])]), None

    def about(writer: Any) -> None:
        writer.add_head_count(4)
        writer.add_head_count_kv(2)

    gguf_files.write(tmp_path / "m.gguf", tensors, about=about, architecture=architecture)
    view, counts = opened(tmp_path / "m.gguf")
    view = view.rename("hf")
    assert view.problems == () and set(view) == set(saved)
    for key, tensor in saved.items():
        same(view[key][...], tensor[...].float(), key)
    assert set(view.rename("hf")) == set(view) and view.rename("hf").problems == ()
    if stack:
        one = next(t for name, t in view.items() if ".experts.2." in name)
        counts.clear()
        _ = one[1, 3:5]
        assert counts.bytes == 8


@pytest.mark.slow
def test_experts_of_blocks_are_cut_before_and_after_dequantizing(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    gguf_files.write(tmp_path / "m.gguf", {"blk.1.ffn_up_exps.weight": (gguf.quants.quantize(values, kind), kind)})
    view = lazyckpt.open(tmp_path / "m.gguf")
    whole = view.dequantize(torch.float32)["blk.1.ffn_up_exps.weight"][...]
    for one in (view.dequantize(torch.float32).rename("hf"), view.rename("hf").dequantize(torch.float32)):
        assert len(one) == 3 and one.problems == ()
        for n in range(3):
            same(one[f"model.layers.1.block_sparse_moe.experts.{n}.w3.weight"][...], whole[n], str(n))


@pytest.mark.slow
def test_renaming_first_and_dequantizing_then_is_the_same(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "Q8_0")
    view = lazyckpt.open(tmp_path / "m.gguf")
    one, other = view.dequantize(torch.float32).rename("hf"), view.rename("hf").dequantize(torch.float32)
    assert set(one) == set(other)
    for name, t in one.items():
        same(other[name][...], t[...], name)
    assert set(one.rename("hf")) == set(one) and one.rename("hf").problems == ()
    same(
        one.rename("hf")["model.layers.0.self_attn.q_proj.weight"][...],
        one["model.layers.0.self_attn.q_proj.weight"][...],
        "",
    )


@pytest.mark.slow
def test_a_row_of_a_head_reads_a_row(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "F32")
    view, counts = opened(tmp_path / "m.gguf")
    q = view.rename("hf")["model.layers.0.self_attn.q_proj.weight"]
    counts.clear()
    _ = q[5]
    assert counts.bytes == 64 * 4
    counts.clear()
    _ = q[3, 10:20]
    assert counts.bytes == 10 * 4


@pytest.mark.slow
def test_without_heads_q_and_k_keep_their_names(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (np.zeros((4, 4), np.float32), None)})
    view = lazyckpt.open(tmp_path / "m.gguf").rename("hf")
    assert list(view) == ["blk.0.attn_q.weight"] and [p.code for p in view.problems] == ["not-renamed"]


@pytest.mark.slow
def test_an_architecture_without_a_table(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", {"x": (np.zeros(4, np.float32), None)}, architecture="rwkv6")
    with pytest.raises(FormatError, match="rwkv6"):
        lazyckpt.open(tmp_path / "m.gguf").rename("hf")
