"""Tensors that consist of several plain ones: what they are as a whole, from the records of their parts.

Layouts: torch/_utils.py `_rebuild_sparse_tensor`, `_rebuild_nested_tensor`; torch/nested/_internal/nested_tensor.py
`NestedTensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ....core.box import hull
from ....core.expr import Kind, op_of
from ....errors import DataError
from .rebuild import Composite, StoredTensor

_COMPRESSED = {
    "torch.sparse_csr": (True, False),
    "torch.sparse_csc": (False, False),
    "torch.sparse_bsr": (True, True),
    "torch.sparse_bsc": (False, True),
}  # layout -> whether rows are compressed, and whether values are blocks


class Whole(NamedTuple):
    """What a tensor of several parts is: the result of an operation (core/ops) on parts."""

    op: str
    params: Mapping[str, Any]
    parts: tuple[str, ...]
    """Keys of the parts that are the operands."""


def whole_of(value: Composite) -> Whole | None:
    """Return the dense tensor that a sparse one stands for; None for other tensors, and if the parts do not fit."""
    size = value.parts.get("size")
    if not isinstance(size, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in size):
        return None
    if value.kind == "torch.sparse_coo":
        found = Whole("dense.coo", {"shape": tuple(size)}, ("indices", "values"))
    elif value.kind in _COMPRESSED:
        rows, blocked = _COMPRESSED[value.kind]
        starts, values = value.parts.get("compressed"), value.parts.get("values")
        if not isinstance(starts, StoredTensor) or not isinstance(values, StoredTensor):
            return None
        at = len(starts.shape)  # behind the batches and the number of the value
        blocks = tuple(values.shape[at : at + 2]) if blocked else None
        params = {"shape": tuple(size), "rows": rows, "blocks": blocks}
        found = Whole("dense.compressed", params, ("compressed", "plain", "values"))
    else:
        return None
    held = [value.parts.get(key) for key in found.parts]
    parts = [part for part in held if isinstance(part, StoredTensor) and part.storage is not None and not part.note]
    if len(parts) < len(held):
        return None
    if not all(hull(part.shape, part.strides) >= prod(part.shape) for part in parts[:-1] if prod(part.shape)):
        return None  # a few bytes that claim to be many indices
    try:
        op_of(found.op).kind([Kind(part.shape, part.dtype) for part in parts], found.params)
    except DataError:
        return None
    return found
