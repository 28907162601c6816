"""Which tensor goes into which file, and what the files and their index are called: as Hugging Face's tools do it.

Source: huggingface_hub/serialization/_base.py `split_state_dict_into_shards_factory`: tensors stay in order, a shard is
closed when the next tensor would make it larger than wanted, and a tensor larger than that has a shard to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


def split(tensors: Mapping[str, T], limit: int | None) -> list[dict[str, T]]:
    """The tensors of each file, in order; at least one file."""
    shards: list[dict[str, T]] = []
    current: dict[str, T] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if limit is not None and nbytes > limit:
            shards.append({name: tensor})
            continue
        if limit is not None and current and size + nbytes > limit:
            shards.append(current)
            current, size = {}, 0
        current[name] = tensor
        size += nbytes
    if current or not shards:
        shards.append(current)
    return shards


def file_names(stem: str, suffix: str, count: int) -> list[str]:
    """
    >>> file_names("model", ".safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{n:05d}-of-{count:05d}{suffix}" for n in range(1, count + 1)]


def is_of_family(name: str, stem: str, suffix: str) -> bool:
    """Whether a file name is one that `file_names` gives for some count, or the index beside them."""
    pattern = rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?"
    return re.fullmatch(pattern, name) is not None


def index_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """The JSON that says which tensor is in which file. ``total_size``: bytes of all tensors."""
    table = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return json.dumps(table, indent=2, sort_keys=True) + "\n"
