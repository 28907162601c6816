"""The numbers in a block of elements of any dtype, as float32 where that is exact, else as float64.

Complex numbers are represented by their absolute values. A byte of `torch.float4_e2m1fn_x2` has two numbers, the first
in the lower four bits (`torch/headeronly/util/Float4_e2m1fn_x2.h`): the last dimension of such a tensor has twice as
many numbers as bytes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.box import Shape
from ..core.dtypes import F4_E2M1FN_X2, DType
from ..errors import DataError
from ..lazy import LazyArray, shape_of

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

Array = np.ndarray[Any, Any]

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of the 16 codes of E2M1, by "OCP Microscaling Formats (MX) Specification", version 1.0, table 5."""

_PAIRS = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], axis=1)
_TABLES: dict[str, Array] = {}  # values of 8-bit floats, by dtype
_GRAIN = 32_704  # elements that torch converts at a time: it distributes 32,768 and more over threads of its own


def packing(dtype: DType) -> int:
    """Return how many numbers an element of the last dimension has: 2 for pairs of 4-bit floats, else 1."""
    return 2 if dtype is F4_E2M1FN_X2 else 1


def number_shape(t: LazyArray) -> Shape:
    """Return the shape of a tensor in numbers.

    Raises
    ------
    DataError
        The elements are no numbers.
    """
    dtype, shape = t.spec.dtype, shape_of(t)
    if packing(dtype) == 2 and shape:
        return (*shape[:-1], 2 * shape[-1])
    if not dtype.is_number:
        raise DataError(f"{t.name!r}: elements of {dtype} are packed bits, no numbers: t[...] reads them")
    return shape


def is_narrow(dtype: DType) -> bool:
    """Return whether float32 represents all values of a dtype exactly."""
    return dtype.itemsize <= 2 or dtype.name in ("float32", "complex32")


def numbers(block: torch.Tensor, room: Array | None = None) -> Array:
    """Return the numbers of a contiguous CPU tensor as float32 or float64, perhaps over the same memory.

    Parameters
    ----------
    block
        Elements of any dtype of numbers, or `torch.float4_e2m1fn_x2`.
    room
        Memory for the result as uint8, at least 8 bytes for each element, or 4 if the dtype is narrow; it is used if
        that saves allocating some.

    Returns
    -------
    numpy.ndarray
        An array of the same shape; of 4-bit floats the last dimension is twice as long.
    """
    dtype = block.dtype
    if dtype in (torch.float32, torch.float64):
        found: Array = block.numpy()
        return found
    if dtype.is_complex:
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(block.to(torch.complex128).resolve_conj().numpy())
            return np.asarray(sizes)  # of one number without dimensions numpy makes a scalar
    if dtype.itemsize == 1 and dtype.is_floating_point:
        codes = block.view(torch.uint8).numpy()
        if dtype == torch.float4_e2m1fn_x2:
            pairs: Array = _PAIRS[codes].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
            return pairs
        return np.asarray(_table(dtype)[codes])
    wide = dtype.itemsize > 2
    kind = np.dtype(np.float64 if wide else np.float32)
    if room is None:
        out = np.empty(tuple(block.shape), kind)
    else:
        out = room[: block.numel() * kind.itemsize].view(kind).reshape(tuple(block.shape))
    if prod(out.shape) == 0:
        return out
    if dtype == torch.bfloat16:  # the upper half of float32
        np.left_shift(block.view(torch.int16).numpy().view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
        return out
    if dtype in (torch.float16,):
        flat, to = block.reshape(-1), torch.from_numpy(out).reshape(-1)
        for at in range(0, flat.numel(), _GRAIN):
            to[at : at + _GRAIN].copy_(flat[at : at + _GRAIN])
        return out
    out[...] = block.numpy()
    return out


def _table(dtype: torch.dtype) -> Array:
    found = _TABLES.get(str(dtype))
    if found is None:
        codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
        found = _TABLES[str(dtype)] = codes.view(dtype).to(torch.float32).numpy()
    return found
