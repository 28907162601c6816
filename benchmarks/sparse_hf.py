"""Folders of safetensors of any number of names and shards: real headers and index, and holes in place of the data."""

from __future__ import annotations

import json
from pathlib import Path

SHAPE = (64, 64)  # of each tensor; 16 KiB of float32
_SIZE = SHAPE[0] * SHAPE[1] * 4


def write(folder: Path, shards: int, names: int) -> None:
    """``names`` tensors in ``shards`` files, as huggingface_hub names files and index."""
    folder.mkdir(parents=True)
    each, index = names // shards, {}
    for shard in range(shards):
        path = folder / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        here = [name_of(n) for n in range(shard * each, (shard + 1) * each)]
        index.update(dict.fromkeys(here, path.name))
        _write_shard(path, here)
    total = {"total_size": names * _SIZE}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}))


def write_one(path: Path, names: int) -> None:
    """One file."""
    _write_shard(path, [name_of(n) for n in range(names)])


def name_of(n: int) -> str:
    return f"model.layers.{n // 1000}.mlp.experts.{n // 10 % 100}.part_{n % 10}.weight"


def _write_shard(path: Path, names: list[str]) -> None:
    header = {
        name: {"dtype": "F32", "shape": SHAPE, "data_offsets": [n * _SIZE, (n + 1) * _SIZE]}
        for n, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(names) * _SIZE)
