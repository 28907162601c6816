"""Pickles that a checkpoint has inside, as bytes: of `torch.save`, or of `pickle.dumps`. Nothing is executed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.box import c_strides
from ...errors import CorruptError, DataError
from ...io.containers.pickle.machine import Pickle
from ...io.containers.pickle.rebuild import REBUILD, StoredTensor, persistent_storage
from ...io.containers.torch_file import INNER, TorchFile, is_torch_file, read_torch_file
from ...io.storage.in_memory import Memory

_NAME = "inner pickle"


class _Nowhere:
    root = "a checkpoint"


_NOWHERE: Any = _Nowhere()


def inner_pickle(data: bytes, where: str) -> tuple[Any, TorchFile | None]:
    """Return the content of a pickle, with records in place of objects, and the file of `torch.save` if it is one.

    Raises CorruptError, FormatError."""
    if is_torch_file(data[:512]):
        file = read_torch_file(Memory(_NOWHERE, _NAME, data), _NAME)
        return file.root, file
    return Pickle(data, where, {**REBUILD, **INNER}, persistent_storage).value, None


def array_in(tensor: StoredTensor, file: TorchFile | None, data: bytes) -> NDArray[Any]:
    """Return the elements of a contiguous tensor in such a pickle. Raises DataError, CorruptError."""
    if tensor.strides != c_strides(tensor.shape) or tensor.storage is None:
        raise DataError(f"it has a tensor of {tensor.dtype} with strides {tensor.strides}")
    size = tensor.dtype.itemsize
    if tensor.storage.data is not None:
        raw, at = tensor.storage.data, tensor.offset * size
    elif file is not None:
        raw, at = data, file.extent(tensor, _NAME).offset
    else:
        raise DataError("it has a tensor without its data")
    count = int(np.prod(tensor.shape, dtype=object))
    if at + count * size > len(raw):
        raise CorruptError("a tensor is longer than its data")
    return np.frombuffer(raw, tensor.dtype.numpy.newbyteorder("<"), count, at).reshape(tensor.shape)
