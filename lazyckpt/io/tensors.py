"""Conversion between memory and tensors: allocation, tensors over mapped files, bytes of tensors, numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.box import Shape
from ..core.dtypes import C128, I16, I32, I64, U8, dtype_of
from ..errors import DataError
from .storage.mapping import Mapped
from .system import HUGE, advise_huge_pages

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_BITS = {1: U8, 2: I16, 4: I32, 8: I64, 16: C128}


def bits_of(itemsize: int) -> torch.dtype:
    """Return a dtype of this item size for moving raw bits: torch cannot do strided copies or flips of every dtype."""
    return _BITS[itemsize].torch


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a CPU tensor, in huge pages if it is large. Raises DataError if there is not enough memory.

    The first touch of new memory is most of the cost of a large read (measured: 64 MiB in 4 KiB pages 8.6 ms, in huge
    pages 2.4 ms, the copy itself 2 ms), so large tensors request huge pages. The kernel may refuse.
    """
    try:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except RuntimeError as e:  # torch raises this if there is not enough memory
        nbytes = prod(shape) * dtype.itemsize
        raise DataError(
            f"{nbytes:,} bytes for a tensor of shape {tuple(shape)} cannot be allocated: read it in slices"
        ) from e
    if tensor.nbytes >= HUGE:
        advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a writable memoryview."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def array_over(mapped: Mapped, offset: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Return a non-empty C-order tensor over a mapped file from ``offset`` on (bytes, a multiple of the item size).
    The mapping caches the tensor."""
    key = (offset, dtype, shape)
    array: torch.Tensor | None = mapped.arrays.get(key)
    if array is None:
        flat = torch.frombuffer(mapped.buffer, dtype=dtype, count=prod(shape), offset=offset)
        array = mapped.arrays[key] = flat.view(shape)
    return array


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a numpy array over the memory of a CPU tensor; bf16 and fp8 use the dtypes of ml_dtypes.

    Raises DataError if numpy has no such dtype or cannot represent the shape.
    """
    dtype = dtype_of(tensor.dtype).numpy
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        if dtype.isbuiltin == 1:  # a dtype of numpy, not of ml_dtypes
            return tensor.numpy()
        raw: np.ndarray[Any, Any] = tensor.contiguous().view(bits_of(tensor.itemsize)).numpy()
        named: np.ndarray[Any, Any] = raw.view(dtype)
        return named.reshape(tuple(tensor.shape))
    except ValueError as e:  # an empty tensor with dimensions too long for numpy
        raise DataError(f"numpy has no array of shape {tuple(tensor.shape)}: {e}") from None
