"""Views that `to_gguf` can write, of files whose matrices have any names: for tests of writing as such."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import lazyckpt

_LAYER = "model.layers.{l}.self_attn.q_norm.weight"  # the only one for which config.json says no shape


def config_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Qwen 3 of these matrices."""
    shapes = {name: tuple(t.shape) for name, t in named.items()}
    words, hidden = shapes.pop("model.embed_tokens.weight")
    return {
        "model_type": "qwen3",
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": next(iter(shapes.values()))[0],
        "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in shapes),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }


@functools.cache
def _folder(config: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="config-"))
    (folder / "config.json").write_text(config)
    return folder


def to_gguf(view: Any, dest: Any, **options: Any) -> Any:
    """Write the matrices of a view, with the names of a Qwen 3."""
    named = view.select("*.w*").rename({first_of(view): "model.embed_tokens.weight", "layers.{l}.w": _LAYER})
    return named.to_gguf(dest, config=_folder(json.dumps(config_of(named))), **options)


def first_of(names: Iterable[str]) -> str:
    """The matrix that is the embedding."""
    return next(name for name in names if ".w" in name)


def compared(view: lazyckpt.CheckpointView, truth: Mapping[str, torch.Tensor]) -> None:
    """Compare a file with the matrices that it was written from, those of Q8_0 by their scales."""
    names = {name: f"blk.{name.split('.')[1]}.attn_q_norm.weight" for name in truth if ".w" in name}
    names[first_of(truth)] = "token_embd.weight"
    assert set(view) == set(names.values()) and view.problems == ()
    values = view.dequantize(torch.float32)
    for name, new in names.items():
        wanted = truth[name].float()
        step = wanted.abs().max() / 127 if view[new].dtype == torch.uint8 else 2e-3
        torch.testing.assert_close(values[new][...].float(), wanted, rtol=0, atol=float(step))
