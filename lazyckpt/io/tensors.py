"""Memory as tensors, and tensors as memory: fresh ones, those over mapped files, their bytes, numpy's view of them."""

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
