"""The checkpoints of the demo: one was recorded from DeepSpeed, the others are written by the demo."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

RECORDED = Path(__file__).with_name("zero3.zip")
_LAYERS, _HIDDEN, _INNER, _VOCAB = 4, 128, 512, 1000


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write the demo's checkpoints into a folder.

    - ``zero3/``: rank files of DeepSpeed ZeRO-3, recorded on four ranks (``tools/make_demo.py``)
    - ``model/``: a Hugging Face folder with three safetensors shards
    - ``training.pt``: a training checkpoint of ``torch.save``
    - ``bomb.pt``: a file whose pickle runs a command when the usual tools load it

    Parameters
    ----------
    folder
        Where to write. It is created if it does not exist.

    Returns
    -------
    dict[str, torch.Tensor]
        The tensors of ``model/``.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("zero3/")])
    weights = _write_model(folder / "model")
    _write_training(folder / "training.pt")
    torch.save({"weight": torch.ones(2, 3), "surprise": _Bomb(folder / "it_ran")}, folder / "bomb.pt")
    return weights


def digests() -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every tensor in the training processes of ``zero3/``: by state, then by parameter."""
    with zipfile.ZipFile(RECORDED) as archive:
        recorded: dict[str, dict[str, str]] = json.loads(archive.read("truth.json"))
    return recorded


def _write_model(folder: Path) -> dict[str, torch.Tensor]:
    """Write the weights of a Llama model in bf16 and three shards. The output layer is tied to the embedding, so no
    file stores it."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN)}
    for n in range(_LAYERS):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (_HIDDEN, _HIDDEN) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (_INNER, _HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INNER)}
        shapes |= {f"{layer}.{p}_layernorm.weight": (_HIDDEN,) for p in ("input", "post_attention")}
    shapes["model.norm.weight"] = (_HIDDEN,)
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}

    folder.mkdir(parents=True)
    total = sum(t.nbytes for t in weights.values())
    weight_map: dict[str, str] = {}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if size >= len(shards) * total / 3:
            shards.append({})
        shards[-1][name] = tensor
        size += tensor.nbytes
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    return weights


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": 4,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": 4,
    "vocab_size": _VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _write_training(path: Path) -> None:
    """Write a small model after five steps of Adam, with everything that a training run saves to resume."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({k: v.state_dict() for k, v in parts.items()} | {"epoch": 1, "loss": loss.item()}, path)


class _Bomb:
    """An object whose pickle calls os.system: `pickle.load` runs the command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)
