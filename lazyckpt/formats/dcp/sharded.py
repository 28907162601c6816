"""Safetensors files that hold chunks of tensors, and say which.

Writer: torch/distributed/checkpoint/filesystem.py `_write_files_from_queue` (SerializationFormat.SAFETENSORS): the
header's ``DCP_SHARDING_INFO`` gives where each tensor of the file begins in the whole one. The whole's shape is not
stored.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.index import Extent, FileInfo
from ...errors import CorruptError
from ...io.safetensors import read_safetensors
from ...io.store import Store

INFO = "DCP_SHARDING_INFO"


class ShardFile(NamedTuple):
    """``chunks``: name -> (where the chunk starts in the tensor, its bytes). ``metadata``: the rest of the header's."""

    path: str
    info: FileInfo
    chunks: dict[str, tuple[Shape, Extent]]
    metadata: dict[str, str]
    notes: list[str]


def read_shard_file(store: Store, path: str, start: int = 0) -> ShardFile:
    """Index such a file, or what of a file begins at byte ``start``. Raises CorruptError, MissingFileError."""
    file = read_safetensors(store, path, start)
    where = f"{store.root}/{path}"
    table: Any = {}
    if INFO in file.metadata:
        try:
            table = json.loads(file.metadata[INFO])
        except (ValueError, RecursionError) as e:
            raise CorruptError(f"{where}: its {INFO} is not valid JSON ({str(e)[:80]}): damaged") from None
        if not isinstance(table, dict):
            raise CorruptError(f"{where}: its {INFO} is no table: damaged")
    chunks = {}
    for name, extent in file.extents.items():
        entry = table.get(name) if INFO in file.metadata else {"saved_offsets": [0] * len(extent.shape)}
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        counted = isinstance(offsets, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in offsets)
        if not isinstance(offsets, list) or not counted or len(offsets) != len(extent.shape):
            raise CorruptError(f"{where}: its {INFO} puts {name!r} of shape {extent.shape} at {str(offsets)[:80]}")
        chunks[name] = tuple(offsets), extent
    rest = {key: value for key, value in file.metadata.items() if key != INFO}
    return ShardFile(path, file.info, chunks, rest, [f"{path}: {note}" for note in file.notes])
