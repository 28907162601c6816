"""Memory as tensors, and tensors as memory: fresh ones, those over mapped files, their bytes, numpy's view of them."""

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
    """A dtype of this size that moves bits, whatever they mean: torch cannot copy every dtype with strides, or flip
    it."""
    return _BITS[itemsize].torch


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty` on the CPU, in huge pages where it is large. Raises DataError if there is not so much memory.

    First touch of fresh memory is most of the cost of a large read (measured: 64 MiB in 4 KiB pages 8.6 ms, in huge
    pages 2.4 ms, the copy itself 2 ms), so the kernel is asked for huge pages. It is free to say no.
    """
    try:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except RuntimeError as e:  # torch's way to say that there is not so much memory
        nbytes = prod(shape) * dtype.itemsize
        raise DataError(
            f"{nbytes:,} bytes for a tensor of shape {tuple(shape)} cannot be had: read it in slices"
        ) from e
    if tensor.nbytes >= HUGE:
        advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def array_over(mapped: Mapped, offset: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """The bytes of a mapped file from ``offset`` on (a multiple of the item size) as a C-order tensor that is not
    empty. The mapping keeps it."""
    key = (offset, dtype, shape)
    array: torch.Tensor | None = mapped.arrays.get(key)
    if array is None:
        flat = torch.frombuffer(mapped.buffer, dtype=dtype, count=prod(shape), offset=offset)
        array = mapped.arrays[key] = flat.view(shape)
    return array


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as a numpy array over the same memory; bf16 and fp8 with the dtypes of ml_dtypes.

    Raises DataError if numpy has no such dtype, or no array of that shape.
    """
    dtype = dtype_of(tensor.dtype).numpy
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        if dtype.isbuiltin == 1:  # numpy's own, not ml_dtypes'
            return tensor.numpy()
        raw: np.ndarray[Any, Any] = tensor.contiguous().view(bits_of(tensor.itemsize)).numpy()
        named: np.ndarray[Any, Any] = raw.view(dtype)
        return named.reshape(tuple(tensor.shape))
    except ValueError as e:  # an empty tensor with dimensions that are too long
        raise DataError(f"numpy has no array of shape {tuple(tensor.shape)}: {e}") from None
