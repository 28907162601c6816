"""Which tensor goes into which file, and what the files and their index are called: as Hugging Face's tools do it.

Source: huggingface_hub/serialization/_base.py `split_state_dict_into_shards_factory`: tensors stay in order, a shard is
closed when the next tensor would make it larger than wanted, and a tensor larger than that has a shard to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol, TypeVar

from ..errors import DataError


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


def size_in_bytes(size: int | str) -> int:
    """A size as people write it. Raises DataError.

    >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB")
    (5000000000, 1572864)
    """
    if isinstance(size, int):
        count = size
    else:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?i?B?)\s*", str(size), re.IGNORECASE)
        unit = match[2].upper().replace("I", "i") if match else ""
        if match is None or unit not in _UNITS:
            raise DataError(
                f"the size {size!r} is not understood: a number of bytes, or one with a unit ('5GB', '512MiB')"
            )
        count = int(Fraction(match[1]) * _UNITS[unit])
    if count <= 0:
        raise DataError(f"a size of {size!r} holds nothing: say a size above 0, or None for no limit")
    return count


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
