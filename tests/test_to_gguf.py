"""GGUF files that `to_gguf` writes: the gguf package, transformers and llama.cpp read them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import DataError, MissingFileError
from lazyckpt.core.expr import computed, make, operand
from lazyckpt.core.ops.ggml_quantizing import TYPES
from lazyckpt.lazy import LazyArray
from lazyckpt.testing.oracle import same

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "ein größerer Satz, mit Zahlen: 12345",
    "def f(x):\n    return x",
]


def saved(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, and the tokenizer of byte pairs that tokenizers trains."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    family, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (1.0 if "norm" in key else 0.0))
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator(TEXTS * 5, trainer)
    words.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": "{{ x }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def sentencepiece(words: list[tuple[str, float, int]]) -> bytes:
    """tokenizer.model as sentencepiece writes it (sentencepiece_model.proto)."""
    found = b""
    for word, score, kind in words:
        text = word.encode()
        piece = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        found += b"\x0a" + bytes([len(piece)]) + piece
    return found + b"\x12\x02\x18\x02" + b"\x1a\x02\x18\x01"


def pieces() -> list[tuple[str, float, int]]:
    found = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{n:02X}>", 0.0, 6) for n in range(256))]
    more = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "he", "\u2581the"]
    return [*found, *((word, -float(n), 1) for n, word in enumerate(more))]


def expected(model: Any, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """The bytes that llama.cpp's converter and the gguf package make of a model."""
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__.removesuffix("ForCausalLM")]
    arch = next(arch for arch, one in gguf.MODEL_ARCH_NAMES.items() if one == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if architecture == "llama" and heads:
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        raw = gguf.GGMLQuantizationType[kind.upper() if data.ndim > 1 else "F32"]
        found[names.get_name(key, (".weight", ".bias"))] = gguf.quants.quantize(np.ascontiguousarray(data), raw)
    return found


def field(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_what_the_gguf_package_quantizes(tmp_path: Path, name: str, kind: str) -> None:
    model = saved(tmp_path / "hf", name)
    result = lazyckpt.open(tmp_path / "hf").to_gguf(tmp_path / "m.gguf", dtype=kind)
    assert result.left_out == {}
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    wanted = expected(model, kind)
    assert set(found) - {"rope_freqs.weight"} == set(wanted)
    assert ("rope_freqs.weight" in found) is (name == "llama3")
    for key, data in wanted.items():
        assert found[key].data.tobytes() == data.tobytes(), key
        assert found[key].data_offset % 32 == 0
    architecture = field(reader, "general.architecture")
    assert architecture == ARCHITECTURES[MODELS[name][0]] and field(reader, f"{architecture}.block_count") == 2
    assert field(reader, "general.file_type") == {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}[kind]
    assert field(reader, "tokenizer.ggml.model") == "gpt2" and field(reader, "tokenizer.ggml.pre") == "gpt-2"
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == 320 and tokens[:2] == ["<s>", "</s>"] and tokens[319] == "[PAD319]"
    assert field(reader, "tokenizer.ggml.bos_token_id") == 0 and field(reader, "tokenizer.ggml.add_bos_token") is True
    assert field(reader, "tokenizer.chat_template") == "{{ x }}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "hf", name)
    view = lazyckpt.open(tmp_path / "hf")
    view.to_gguf(tmp_path / "m.gguf", dtype="f32")
    back = lazyckpt.open(tmp_path / "m.gguf").rename("hf")
    assert set(back) == set(view) and back.problems == ()
    for key, tensor in view.items():
        same(back[key][...], tensor[...], key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_blocks_of_special_numbers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(12, 96)
    x[0], x[1, :32], x[2] = 0, 1e-30, torch.arange(96).float() - 48
    x[3, 5], x[3, 9] = 3.0, -3.0  # equal magnitudes
    x[4] = torch.tensor([0.5, 1.5, 127.0, -127.0]).repeat(24)
    x[5] *= 1e4
    x = x.to(dtype)
    torch.save({"x": x}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    found = LazyArray(view._store, computed("x", make("quantize.gguf", operand(view.specs["x"]), type=kind)))
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.quants.quantize(x.float().numpy(), gguf.GGMLQuantizationType[kind]).copy())
    same(found[...], wanted, kind)
    for key in ((3,), (slice(2, 5), slice(7, 40)), (slice(None), 35), (slice(None, None, 2), slice(0, None, 5))):
        same(found[key], wanted[key], (kind, key))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from lazyckpt.cli.program import app

    model = saved(tmp_path / "hf", "qwen2", torch.bfloat16)
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--dtype", "q8_0"])
    assert run.exit_code == 0, run.output
    found = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert found == {key: data.tobytes() for key, data in expected(model, "q8_0").items()}
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "hf"), str(tmp_path / "n.gguf"), "--dtype", "q9"])
    assert run.exit_code == 2


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "llama")
    view = lazyckpt.open(tmp_path / "hf")
    with pytest.raises(DataError, match="q9"):
        view.to_gguf(tmp_path / "m.gguf", dtype="q9")
    with pytest.raises(DataError, match="no name in GGUF"):
        view.rename("megatron").to_gguf(tmp_path / "m.gguf")
    with pytest.raises(MissingFileError, match=r"config\.json"):
        view.to_gguf(tmp_path / "m.gguf", config=tmp_path)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for change in ({"model_type": "gpt2"}, {"rope_parameters": {"rope_type": "yarn"}}, {"hidden_act": "gelu"}):
        (tmp_path / "hf/config.json").write_text(json.dumps(config | change))
        with pytest.raises(DataError):
            lazyckpt.open(tmp_path / "hf").to_gguf(tmp_path / "m.gguf")
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    words = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    words["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DataError, match="cuts text"):
        view.to_gguf(tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    (tmp_path / "hf/tokenizer.json").unlink()
    assert set(view.to_gguf(tmp_path / "m.gguf").left_out) == {"tokenizer"}


# -- llama.cpp

_RUN = """
import json, sys
import numpy as np
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
text = model.tokenize(sys.argv[2].encode(), add_bos=False)
tokens = json.loads(sys.argv[3])
model.eval(tokens)
logits = np.array(model.scores[: len(tokens)]).tolist()
model.reset()
new = []
for token in model.generate(tokens, temp=0.0, repeat_penalty=1.0):
    new.append(int(token))
    if len(new) == 5:
        break
print(json.dumps({"text": text, "logits": logits, "new": new}))
"""


def llama_cpp(path: Path, text: str, tokens: list[int]) -> Any:
    """What llama-cpp-python computes, in the Python that LAZYCKPT_LLAMA_CPP_PYTHON names."""
    python = os.environ.get("LAZYCKPT_LLAMA_CPP_PYTHON")
    if not python:
        pytest.skip("LAZYCKPT_LLAMA_CPP_PYTHON names no Python that has llama-cpp-python")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-c", _RUN, str(path), text, json.dumps(tokens)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(tmp_path: Path, name: str, kind: str) -> None:
    from tokenizers import Tokenizer

    model = saved(tmp_path / "hf", name)
    lazyckpt.open(tmp_path / "hf").to_gguf(tmp_path / "m.gguf", dtype=kind)
    # the values that the file holds, in float32
    lazyckpt.open(tmp_path / "m.gguf").dequantize(torch.float32).rename("hf").astype(torch.float32).load_into(model)
    tokens = [0, 17, 200, 255, 3, 99, 42, 130]
    found = llama_cpp(tmp_path / "m.gguf", TEXTS[1], tokens)
    assert found["text"] == Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json")).encode(TEXTS[1]).ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    difference = (torch.tensor(found["logits"]) - logits).abs().max() / logits.abs().max()
    # (it rounds the activations to the type of the weights, for blocks to 8 bits)
    assert difference < {"f32": 1e-4, "f16": 5e-3, "bf16": 2e-2}.get(kind, 6e-2), difference
    assert len(found["new"]) == 5
    if kind == "f32":
        with torch.no_grad():
            new = model.generate(torch.tensor([tokens]), max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert found["new"] == new[0, len(tokens) :].tolist()


@pytest.mark.slow
def test_a_vocabulary_of_sentencepiece(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "llama")
    (tmp_path / "hf/tokenizer.json").unlink()
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "hf/tokenizer.model").write_bytes(sentencepiece(pieces()))
    lazyckpt.open(tmp_path / "hf").to_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert field(reader, "tokenizer.ggml.model") == "llama"
    words = pieces()
    assert field(reader, "tokenizer.ggml.tokens")[: len(words)] == [word for word, _, _ in words]
    assert field(reader, "tokenizer.ggml.scores")[: len(words)] == [score for _, score, _ in words]
    assert field(reader, "tokenizer.ggml.token_type")[: len(words)] == [kind for _, _, kind in words]
    assert (
        field(reader, "tokenizer.ggml.bos_token_id") == 1 and field(reader, "tokenizer.ggml.add_space_prefix") is True
    )
    found = llama_cpp(tmp_path / "m.gguf", "the x", [1, 260])
    ids = {word: n for n, (word, _, _) in enumerate(words)}
    assert found["text"] == [ids["\u2581the"], ids["\u2581"], ids["x"]]
