"""Compare a checkpoint of torch.distributed.checkpoint with this rank's shards. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .compare import Wrong, same
from .truth import is_plain

Shard = tuple[tuple[int, ...], Tensor]  # offsets in the whole, elements


def same_folder(view: Any, metadata: Metadata, state: dict[str, Any], record: dict[str, Any]) -> None:
    """Every tensor that the writer's own metadata lists is listed alike, and equals what this rank holds of it.

    Parameters
    ----------
    metadata : what the writer returned.
    state : the flat state dict that the planner wrote from.
    """
    stored = view.stored
    listed = set(stored)
    written = {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    for name, meta in written.items():
        if name not in listed:
            raise Wrong(f"{name!r} is not listed; {sorted(listed)[:8]} are")
        lazy = stored[name]
        if tuple(lazy.shape) != tuple(meta.size) or lazy.dtype != meta.properties.dtype:
            saved = f"{meta.properties.dtype}{list(meta.size)}"
            raise Wrong(f"{name!r}: listed as {lazy.dtype}{list(lazy.shape)}, saved as {saved}")
    if more := sorted(listed - set(written)):
        inner = [name for name in more if not any(name.startswith(k) for k in metadata.state_dict_metadata)]
        if inner:
            raise Wrong(f"{inner[:8]} are listed, and were not saved")
    tensors = nbytes = 0
    for name in written:
        if name not in state:
            record["elsewhere"] = record.get("elsewhere", 0) + 1  # another rank's, or a planner's own name
            lazy = stored[name][...]
            continue
        lazy = stored[name]
        for offsets, true in shards_of(state[name]):
            if not true.numel():
                continue
            box = tuple(slice(o, o + n) for o, n in zip(offsets, true.shape, strict=True))
            try:
                same(f"{name}{list(offsets)}", lazy[box] if box else lazy[...], true)
            except Wrong:
                if not _as_torch_reads(record["path"], name, metadata, lazy):
                    raise
                record["as_torch"] = [*record.get("as_torch", []), name]  # ranks differ, or a planner changed it
            nbytes += true.numel() * true.element_size()
        tensors += 1
    record.update(tensors=tensors, bytes=nbytes)


def shards_of(value: Any) -> Iterator[Shard]:
    """What this process holds of a tensor. A kind of tensor that is not known here gives nothing."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(value, DTensor):
        if not any(placement.is_partial() for placement in value.placements):
            shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            local = value.to_local()
            if value.device_mesh.get_coordinate() is not None and tuple(local.shape) == tuple(shape):
                yield tuple(offsets), local
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
    elif isinstance(value, Tensor) and is_plain(value) and not value.is_meta:
        yield (0,) * value.ndim, value


def _as_torch_reads(path: str, name: str, metadata: Metadata, lazy: Any) -> bool:
    """Whether torch reads the same from the files."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    meta = metadata.state_dict_metadata[name]
    into = {name: torch.empty(meta.size, dtype=meta.properties.dtype)}
    _load_state_dict(into, FileSystemReader(path), no_dist=True)
    try:
        same(name, lazy[...], into[name])
    except Wrong:
        return False
    return True
