"""Conversion between memory and tensors: allocation, tensors over mapped files, bytes of tensors, numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ..core.box import Shape
from ..errors import DataError
from .storage.mapping import Mapped
from .system import HUGE, advise_huge_pages

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch


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
