"""Safetensors files: a header and the data. (The safetensors library's writer needs all bytes in memory at once.)

Source: safetensors/src/tensor.rs `prepare`, and bindings/python/py_src/safetensors/torch.py `save_model`: a tied tensor
is stored once, and the header's metadata maps its other names to that one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.dtypes import dtype_of
from ..errors import DataError
from ..jobs.plan import Layout, Placed
from .files import Aliases, FileFormat, Tensors, file_writer

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_LONGEST = 100_000_000  # maximum bytes of a header (safetensors/src/tensor.rs MAX_HEADER_SIZE)


def _order(tensors: Tensors) -> list[str]:
    """Sort by item size, largest first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].itemsize)


def _header(tensors: Tensors, aliases: Aliases) -> bytes:
    if "format" in aliases:
        raise DataError(
            "safetensors cannot name a tied tensor 'format': the header uses this key for the file's format"
        )
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(aliases)}
    at = 0
    for name in _order(tensors):
        tensor = tensors[name]
        kind = dtype_of(tensor.dtype).safetensors
        if kind is None:
            raise DataError(f"safetensors has no {tensor.dtype}, which {name!r} is: convert it, or write a torch file")
        if name == "__metadata__":
            raise DataError("safetensors cannot name a tensor '__metadata__'")
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST:
        raise DataError(
            f"{len(tensors):,} tensors in one file of safetensors make its header {len(text):,} bytes long, and "
            f"{_LONGEST:,} are allowed: write shards (max_shard_size)"
        )
    return len(text).to_bytes(8, "little") + text


def _size(tensors: Tensors, aliases: Aliases) -> int:
    return len(_header(tensors, aliases)) + sum(t.nbytes for t in tensors.values())


def _layout(tensors: Tensors, aliases: Aliases) -> Layout:
    header = _header(tensors, aliases)
    placed, at = [], len(header)
    for name in _order(tensors):
        placed.append(Placed(at, tensors[name]))
        at += tensors[name].nbytes
    return Layout(at, [(0, header)], placed)


def contents(tensors: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the content of a file of tensors that are in memory."""
    yield _header(tensors, {})
    for name in _order(tensors):
        yield tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SAFETENSORS = FileFormat("model", ".safetensors", (".safetensors",), False, _size, _layout)
WRITER = file_writer("safetensors", "the layout of Hugging Face", SAFETENSORS)
