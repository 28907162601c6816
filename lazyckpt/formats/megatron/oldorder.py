"""Query, key and value rows of checkpoints of version 0 and 1, in the order that Megatron gives them today.

Source: Megatron-LM megatron/training/checkpointing.py `fix_query_key_value_ordering`, `_transpose_first_dim`. A rank's
rows were [3, heads, size] (version 0) or [heads, size, 3] (version 1); since version 2 they are [heads, 3, size].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...core.box import Box
from ...core.index import Extent, Fragment, Part, TensorSpec
from .gather import Shard

_FUSED = re.compile(r"(^|\.)(query_key_value|key_value)\.(weight|bias)$")
_BLOCKS = 4096


def splits_of(name: str, version: float) -> int:
    """How many matrices are fused in a tensor of that name in an old order; 0 if it is not one."""
    match = _FUSED.search(name)
    if match is None or version >= 2:
        return 0
    return 3 if match[2] == "query_key_value" else 2


def in_todays_order(name: str, shards: Sequence[Shard], splits: int, version: float, size: int) -> TensorSpec:
    """The whole tensor, in blocks of one head of one matrix. ``size``: of a head. Raises ValueError if the shards are
    not whole heads."""
    first = shards[0]
    fragments: list[Fragment] = []
    at = 0
    for shard in shards:
        heads, rest = divmod(shard.shape[0], splits * size)
        if rest or not heads or heads * splits > _BLOCKS:
            raise ValueError(f"{shard.shape[0]} rows are not {splits} x heads x {size}")
        for copy in shard.copies:
            for head in range(heads):
                for k in range(splits):
                    start = at + (head * splits + k) * size
                    fragments.append(_block(copy, version, heads, head, k, splits, size, start))
        at += shard.shape[0]
    order = f"[{splits}, heads, {size}]" if version < 1 else f"[heads, {size}, {splits}]"
    rule = (
        f"concatenated along dimension 0 over {len(shards)} ranks, each rank's rows {order} put into the order [heads, "
        f"{splits}, {size}]; known from checkpoint_version = {version:g}"
    )
    return TensorSpec(name, (at, *first.shape[1:]), first.dtype, tuple(fragments), rule=rule)


def _block(
    copy: Fragment, version: float, heads: int, head: int, k: int, splits: int, size: int, start: int
) -> Fragment:
    extent = copy.extent
    shape = (size, *copy.local_shape[1:])
    if isinstance(extent, Extent):
        row = extent.strides[0]
        ahead, step = ((k * heads + head) * size, 1) if version < 1 else (head * size * splits + k, splits)
        offset = extent.offset + ahead * row * extent.dtype.itemsize
        extent = replace(extent, offset=offset, shape=shape, strides=(row * step, *extent.strides[1:]))
    part = Part(Box.of(shape), (start, *(0,) * (len(shape) - 1)))
    return Fragment(extent, shape, (part,), rank=copy.rank)
