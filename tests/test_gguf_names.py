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
need_transformers = pytest.importorskip("transformers")

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
