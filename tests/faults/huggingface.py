"""Faults of checkpoints of Hugging Face, and of single safetensors files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from .fault import (
    FAILS,
    Fault,
    both,
    cut,
    edit_header,
    edit_json,
    edit_tensors,
    flip,
    remove,
    rename,
    storage,
    write,
)

_LLAMA, _SINGLE = "huggingface/llama_sharded/ckpt", "huggingface/llama_single/ckpt"
_MIXTRAL, _BIN = "huggingface/mixtral/ckpt", "huggingface/bin_sharded/ckpt"
_SHARD, _INDEX = "model-00003-of-00006.safetensors", "model.safetensors.index.json"
_LAST = "model-00006-of-00006.safetensors"
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"


def _config(**values: Any) -> Any:
    return edit_json("config.json", lambda about: about.update(values))


def _last(header: dict[str, Any]) -> str:
    return max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def _first(header: dict[str, Any]) -> str:
    return min((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def _gap(header: dict[str, Any]) -> None:
    del header[_first(header)]


def _overlap(header: dict[str, Any]) -> None:
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def _size(header: dict[str, Any]) -> None:
    header[_first(header)]["shape"][0] += 1


def _longer(header: dict[str, Any]) -> None:
    header[_last(header)]["data_offsets"][1] += 64
    header[_last(header)]["shape"] = [1]


def _download(change: Any) -> Any:
    """Write the record that huggingface_hub leaves beside a download, then make the fault."""

    def make(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            record = folder / f".cache/huggingface/download/{path.name}.metadata"
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(f"0123456789abcdef\n{digest}\n1700000000.0\n")
        change(folder)

    return make


def _cache(folder: Path) -> Path:
    """The cache of huggingface_hub, in which one blob was damaged."""
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots/0a1b"
    snapshot.mkdir(parents=True)
    for path in [p for p in sorted(folder.iterdir()) if p.is_file()]:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(folder / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    flip(_SHARD, lambda path: path.stat().st_size - 9)(folder)
    return snapshot


def _tokens(last: int) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": last}]})


def _words(count: int) -> Any:
    def make(folder: Path) -> None:
        about = json.loads((folder / "config.json").read_text())
        _config(vocab_size=about["vocab_size"] + count)(folder)

    return make


def _edited(name: str, change: Any) -> Any:
    def make(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                held = set(file.keys())
            if name in held:
                edit_tensors(path.name, lambda state: change(state, name))(folder)
                return
        raise LookupError(name)

    return make


def _dead(state: dict[str, torch.Tensor], name: str) -> None:
    state[name].zero_()


def _strange(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.mystery.weight"] = torch.ones(4, 4)


def _layer(state: dict[str, torch.Tensor]) -> None:
    name = next(name for name in state if ".layers." in name)
    state["model.layers.7." + name.split(".", 3)[3]] = state[name].clone()


def _untied(folder: Path) -> None:
    """Store the head, although the configuration ties it to the embedding, with other values."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + 0.5

    _config(tie_word_embeddings=True)(folder)
    edit_tensors("model.safetensors", change)(folder)


HUGGINGFACE = (
    Fault("a shard is missing", "Hugging Face", _LLAMA, remove(_SHARD), "quick", "missing-file", file=_SHARD),
    Fault("a shard is cut off", "Hugging Face", _LLAMA, cut(_SHARD, 0.9), "quick", "unreadable-file", file=_SHARD),
    Fault("a shard is longer than its header says", "Hugging Face", _LLAMA,
          lambda f: (f / _SHARD).write_bytes((f / _SHARD).read_bytes() + bytes(64)) and None, "quick",
          "unreadable-file", file=_SHARD),
    Fault("a shard is a Git LFS pointer", "Hugging Face", _LLAMA, write(_SHARD, _POINTER), "quick",
          "unreadable-file", file=_SHARD, text="LFS"),
    Fault("the download of a shard was not finished", "Hugging Face", _LLAMA,
          both(rename(_SHARD, _SHARD + ".incomplete")), "quick", "missing-file", file=_SHARD),
    Fault("the index lists a tensor that no shard has", "Hugging Face", _LLAMA,
          edit_json(_INDEX, lambda a: a["weight_map"].update({"model.lost.weight": _SHARD})), "quick",
          "index-mismatch", text="model.lost.weight"),
    Fault("a shard has a tensor that the index lacks", "Hugging Face", _LLAMA,
          edit_json(_INDEX, lambda a: a["weight_map"].pop("model.layers.0.mlp.down_proj.weight")), "quick",
          "index-mismatch", text="down_proj"),
    Fault("the index names another shard than the one with the tensor", "Hugging Face", _LLAMA,
          edit_json(_INDEX, lambda a: a["weight_map"].update({"model.embed_tokens.weight": _LAST})), "quick",
          "index-mismatch", text="embed_tokens"),
    Fault("the index says another total size", "Hugging Face", _LLAMA,
          edit_json(_INDEX, lambda a: a["metadata"].update(total_size=5)), "quick", "index-mismatch",
          text="total_size"),
    Fault("the index is missing", "Hugging Face", _LLAMA, remove(_INDEX), "quick", "missing-index"),
    Fault("the index cannot be parsed", "Hugging Face", _LLAMA, write(_INDEX, "{"), FAILS),
    Fault("the shards have a gap between tensors", "Hugging Face", _LLAMA, edit_header(_SHARD, _gap), "quick",
          "unreadable-file", file=_SHARD, text="begins at byte"),
    Fault("two tensors of a shard overlap", "Hugging Face", _LLAMA, edit_header("model-00002-*", _overlap), "quick",
          "unreadable-file", file="model-00002"),
    Fault("a tensor's shape does not fit its bytes", "Hugging Face", _LLAMA, edit_header(_SHARD, _size), "quick",
          "unreadable-file", file=_SHARD),
    Fault("a gap between tensors", "safetensors", _SINGLE,
          both(remove("config.json"), edit_header("model.safetensors", _gap)), FAILS),
    Fault("a tensor ends behind the end of the file", "safetensors", _SINGLE,
          edit_header("model.safetensors", _longer), FAILS),
    Fault("the header cannot be parsed", "safetensors", _SINGLE, flip("model.safetensors", lambda p: 9), FAILS),
    Fault("a file differs from the record of its download", "Hugging Face", _LLAMA,
          _download(flip(_SHARD, lambda p: p.stat().st_size - 9)), "default", "wrong-checksum", file=_SHARD),
    Fault("a file differs from its name in the cache of the Hub", "Hugging Face", _LLAMA, _cache, "default",
          "wrong-checksum", file=_SHARD),
    Fault("a flipped bit in a shard of torch.save", "Hugging Face", _BIN, flip("*-00002-*.bin", storage), "default",
          "wrong-checksum", file="00002"),
    Fault("the hidden size is not that of `config.json`", "Hugging Face", _LLAMA, _config(hidden_size=32), "quick",
          "config-mismatch", tensor="embed_tokens"),
    Fault("the embedding has fewer rows than `config.json` has words", "Hugging Face", _LLAMA, _words(9), "quick",
          "config-mismatch", tensor="embed_tokens"),
    Fault("the embedding has more rows than `config.json` has words", "Hugging Face", _LLAMA, _words(-9), "quick",
          "padded-vocabulary", tensor="embed_tokens"),
    Fault("`config.json` has more layers", "Hugging Face", _LLAMA, _config(num_hidden_layers=9), "quick",
          "config-mismatch", text="layers"),
    Fault("`config.json` has another number of heads", "Hugging Face", _LLAMA, _config(num_attention_heads=3),
          "quick", "config-mismatch", tensor="q_proj"),
    Fault("`config.json` has another number of key and value heads", "Hugging Face", _LLAMA,
          _config(num_key_value_heads=1), "quick", "config-mismatch", tensor="k_proj"),
    Fault("`config.json` has another intermediate size", "Hugging Face", _LLAMA, _config(intermediate_size=99),
          "quick", "config-mismatch", tensor="mlp"),
    Fault("`config.json` has another number of experts", "Hugging Face", _MIXTRAL, _config(num_local_experts=9),
          "quick", "config-mismatch", text="experts"),
    Fault("a layer that `config.json` does not have", "Hugging Face", _SINGLE,
          edit_tensors("model.safetensors", _layer), "quick", "config-mismatch", text="layer"),
    Fault("a name that no layer of the model explains", "Hugging Face", _SINGLE,
          edit_tensors("model.safetensors", _strange), "quick", "unexplained-name", tensor="mystery"),
    Fault("the head differs from the embedding that it is tied to", "Hugging Face", _SINGLE, _untied, "full",
          "differing-replicas", tensor="lm_head"),
    Fault("the tokenizer has a token without a row", "Hugging Face", _LLAMA, write("tokenizer.json", _tokens(5000)),
          "quick", "tokenizer-mismatch", file="tokenizer.json"),
    Fault("`added_tokens.json` has a token without a row", "Hugging Face", _LLAMA,
          write("added_tokens.json", '{"<extra>": 5000}'), "quick", "tokenizer-mismatch", file="added_tokens.json"),
    Fault("an expert is all zero", "Hugging Face", _MIXTRAL,
          _edited("model.layers.0.block_sparse_moe.experts.1.w1.weight", _dead), "default", "all-zero",
          tensor="experts.1.w1"),
)  # fmt: skip
