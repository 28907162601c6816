"""Sparse and nested tensors of torch.save files: dense tensors that are computed from their parts, and the tensors of
a nested one.

A nested tensor is the list of its tensors, as `torch.Tensor.unbind` returns it. Only its index tensors know their
shapes, so these are read on opening, if they are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.box import fits, hull, is_run
from ...core.dtypes import I32, I64
from ...core.expr import computed, make, operand
from ...core.specs import TensorSpec
from ...io.containers.pickle.composites import Whole, whole_of
from ...io.containers.pickle.plain import Plain
from ...io.containers.pickle.rebuild import Composite, StoredTensor
from ...io.containers.torch_file import TorchFile
from ...io.storage.base import Store

_MOST = 1024  # tensors in a nested one that get names; of more, there are the parts only


def composed(store: Store, file: TorchFile, value: Composite) -> Whole | Sequence[StoredTensor] | None:
    """Return what a tensor of several parts is as a whole; None if its parts do not tell, or contradict each other.

    Reads the index tensors of a nested tensor. Raises CorruptError if the file cannot hold them, and what reading
    raises.
    """
    if value.kind != "nested":
        return whole_of(value)
    return _strided(store, file, value) if "buffer" in value.parts else _jagged(store, file, value)


def wholes_of(plain: Plain, specs: Mapping[str, TensorSpec], prefix: str) -> dict[str, TensorSpec]:
    """Return the dense tensors of the sparse ones of a file. All names but those of ``plain`` have the prefix."""
    found = {}
    for name, (whole, parts) in plain.wholes.items():
        inputs = [operand(specs[prefix + parts[key]]) for key in whole.parts]
        found[prefix + name] = computed(prefix + name, make(whole.op, *inputs, **whole.params))
    return found


def tied_wholes(plain: Plain, ties: Mapping[str, str]) -> dict[str, str]:
    """Return the names of sparse tensors whose parts are those of an earlier one: later name -> first name. ``ties``
    are those of the parts."""
    first: dict[Any, str] = {}
    found = {}
    for name, (whole, parts) in plain.wholes.items():
        held = tuple(ties.get(parts[key], parts[key]) for key in whole.parts)
        owner = first.setdefault((whole.op, tuple(whole.params.items()), held), name)
        if owner != name:
            found[name] = owner
    return found


def _integers(store: Store, file: TorchFile, tensor: Any, rank: int) -> NDArray[np.int64] | None:
    """Read a small index tensor; None if it is none."""
    if not isinstance(tensor, StoredTensor) or tensor.storage is None or tensor.dtype not in (I32, I64):
        return None
    if len(tensor.shape) != rank or tensor.shape[0] > _MOST + 1 or prod(tensor.shape[1:]) > 64:
        return None
    if not is_run(tensor.shape, tensor.strides):
        return None
    extent = file.extent(tensor, "an index tensor")
    if extent.within is not None:
        return None
    count = prod(tensor.shape)
    data = store.read(extent.path, extent.offset, count * tensor.dtype.itemsize)
    kind = np.dtype(f"{'>' if extent.swapped else '<'}i{tensor.dtype.itemsize}")
    return np.frombuffer(data, kind).astype(np.int64).reshape(tensor.shape)


def _strided(store: Store, file: TorchFile, value: Composite) -> Sequence[StoredTensor] | None:
    """Return the tensors of the strided layout, which are in one buffer."""
    buffer = value.parts["buffer"]
    sizes = _integers(store, file, value.parts.get("sizes"), 2)
    strides = _integers(store, file, value.parts.get("strides"), 2)
    offsets = _integers(store, file, value.parts.get("offsets"), 1)
    if not isinstance(buffer, StoredTensor) or buffer.storage is None or sizes is None or strides is None:
        return None
    if offsets is None or sizes.shape != strides.shape or len(sizes) != len(offsets) or not len(sizes) <= _MOST:
        return None
    if buffer.offset or buffer.strides != (1,) or min(sizes.min(initial=0), strides.min(initial=0)) < 0:
        return None
    found = []
    for shape, steps, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        reach = 0 if 0 in shape else offset + hull(shape, steps)
        if offset < 0 or reach > buffer.shape[0] or not fits(shape, buffer.dtype.itemsize):
            return None
        found.append(_piece(buffer, offset, shape, steps))
    return found


def _jagged(store: Store, file: TorchFile, value: Composite) -> Sequence[StoredTensor] | None:
    """Return the tensors of the jagged layout: intervals of a dimension of one tensor."""
    values, given, ragged = (value.parts.get(key) for key in ("values", "lengths", "_ragged_idx"))
    offsets = _integers(store, file, value.parts.get("offsets"), 1)
    if not isinstance(values, StoredTensor) or values.storage is None or offsets is None or not len(offsets):
        return None
    if type(ragged) is not int or not 1 <= ragged <= len(values.shape):
        return None
    axis = ragged - 1
    lengths = np.diff(offsets) if given is None else _integers(store, file, given, 1)
    size = values.shape[axis]
    if lengths is None or len(lengths) > _MOST or len(lengths) > len(offsets):
        return None
    if given is None and (offsets[0] != 0 or offsets[-1] != size):
        return None
    starts = offsets[: len(lengths)]
    ends = starts + lengths
    if min(starts.min(initial=0), lengths.min(initial=0)) < 0 or max(starts.max(initial=0), ends.max(initial=0)) > size:
        return None
    found = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        shape = (*values.shape[:axis], length, *values.shape[axis + 1 :])
        found.append(_piece(values, values.offset + start * values.strides[axis], shape, values.strides))
    return found


def _piece(tensor: StoredTensor, offset: int, shape: Sequence[int], strides: Sequence[int]) -> StoredTensor:
    """Return a view of a tensor, of which the caller has checked that it is inside."""
    return tensor.having(offset=offset, shape=tuple(shape), strides=tuple(strides), state=None)
