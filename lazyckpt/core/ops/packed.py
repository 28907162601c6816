"""Codes of less than a byte, unpacked: floats of four and six bits, integers of one to eight bits, powers of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import as_axis, grouped, indices
from ..box import Axis, Selection, Shape
from ..dtypes import BF16, F8_E8M0FNU, F32, I8, I32, U8, bits_of, dtype_of
from ..expr import Kind, Op
from ..specs import Expr
from .small_floats import E2M1, E2M3

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class AsBits(Op):
    """``dtype``: the bits of the operand as numbers of another dtype. The last dimension is longer or shorter if the
    numbers are smaller or larger, as with `torch.Tensor.view`."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        other = dtype_of(params["dtype"])
        nbytes = (shape[-1] if shape else 1) * dtype.itemsize
        if nbytes % other.itemsize or (not shape and dtype.itemsize != other.itemsize):
            raise DataError(f"{dtype} of shape {shape} is no whole number of {other}")
        return Kind((*shape[:-1], nbytes // other.itemsize) if shape else (), other)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        old, new = e.inputs[0].dtype.itemsize, e.dtype.itemsize
        if old == new:
            return (want,)
        if old > new:
            return ((*want[:-1], grouped(want[-1], old // new)[0]),)
        return ((*want[:-1], members(want[-1], new // old)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        old, new = e.inputs[0].dtype.itemsize, e.dtype.itemsize
        found = blocks[0].contiguous().view(e.dtype.torch)
        return chosen(found, want[-1], old // new).contiguous() if old > new else found

    def grain(self, e: Expr) -> Shape:
        size = max(1, e.inputs[0].dtype.itemsize // e.dtype.itemsize)
        return (*(1,) * (len(e.shape) - 1), size) if e.shape else ()


class Fp4(Op):
    """Floats of four bits (E2M1), two in a byte, the first in the lower half: the last dimension is twice as long.

    ``negative_zero``: whether the code 8 is -0.0 (most writers), or 0.0 (modelopt). bfloat16 holds all values.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if not shape or dtype not in (U8, I8):
            raise DataError(f"two codes of four bits are in a byte, not in {dtype} of shape {shape}")
        return Kind((*shape[:-1], shape[-1] * 2), BF16)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((*want[:-1], grouped(want[-1], 2)[0]),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        codes = blocks[0].view(torch.uint8)
        pairs = _pairs(bool(e.params.get("negative_zero", True))).index_select(0, codes.reshape(-1).to(torch.int32))
        return chosen(pairs.view(torch.bfloat16).view(*codes.shape[:-1], codes.shape[-1] * 2), want[-1], 2)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), 2)


@cache
def _pairs(negative_zero: bool) -> torch.Tensor:
    """Return the two values of each byte, as bfloat16, in one int32."""
    values = torch.tensor([*E2M1, *(-one for one in E2M1)], dtype=torch.bfloat16)
    if not negative_zero:
        values[8] = 0.0
    codes = torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], 1).contiguous().view(torch.int32).view(-1)


class Fp6(Op):
    """Floats of six bits (E2M3), four in three bytes, the first in the lowest bits (compressed-tensors)."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if not shape or shape[-1] % 3 or dtype is not U8:
            raise DataError(f"four codes of six bits are in three bytes, not in {dtype} of shape {shape}")
        return Kind((*shape[:-1], shape[-1] // 3 * 4), BF16)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((*want[:-1], members(grouped(want[-1], 4)[0], 3)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = blocks[0].reshape(*blocks[0].shape[:-1], -1, 3).to(torch.int32)
        words = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
        codes = torch.stack([words >> shift & 0x3F for shift in (0, 6, 12, 18)], -1).flatten(-2)
        values = torch.tensor([*E2M3, *(-one for one in E2M3)], dtype=torch.bfloat16)
        found = values.index_select(0, codes.reshape(-1)).view(codes.shape)
        return chosen(found, want[-1], 4)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), 4)


class PowerOfTwo(Op):
    """Exponents of E8M0 as float32: 2 ** (code - 127). As bytes, the code 255 is infinity, as writers compute it; as
    float8_e8m0fnu it is NaN."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if dtype not in (U8, F8_E8M0FNU):
            raise DataError(f"exponents of E8M0 are bytes, not {dtype}")
        return Kind(shape, F32)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (want,)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        codes = blocks[0].view(torch.uint8)
        powers = _powers(e.inputs[0].dtype is F8_E8M0FNU)
        return powers.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _powers(nan: bool) -> torch.Tensor:
    """Return the value of each code of E8M0; the last one is NaN, or infinity."""
    found = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).to(torch.float32)
    if nan:
        found[255] = torch.nan
    return found


class Bits(Op):
    """Integers of ``bits`` bits in 32-bit words, the first in the lowest bits, as int8: a code less 2 ** (bits - 1).

    ``size``: the length of ``axis``, along which they are packed. ``dense``: 32 codes are in exactly ``bits`` words and
    may straddle two of them (compressed-tensors since 0.15); else a word has 32 // ``bits`` codes and a rest.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        axis, bits, size = params["axis"], params["bits"], params["size"]
        if dtype is not I32 or not 1 <= bits <= 8 or axis >= len(shape):
            raise DataError(f"codes of {bits} bits are packed in int32, not in {dtype} of shape {shape}")
        needed = words_of(size, bits, params["dense"])
        if shape[axis] != needed:
            raise DataError(f"{size:,} codes of {bits} bits are in {needed:,} words, not {shape[axis]:,}")
        return Kind((*shape[:axis], size, *shape[axis + 1 :]), I8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        axis = e.params["axis"]
        first, last, _ = self._where(e, want[axis])
        return ((*want[:axis], as_axis(np.union1d(first, last)), *want[axis + 1 :]),)

    def _where(self, e: Expr, axis: Axis) -> tuple[Any, Any, Any]:
        """Return for each code the first and the last word that has bits of it, and the position in the first."""
        bits, at = e.params["bits"], indices(axis)
        if not e.params["dense"]:
            per = 32 // bits
            return at // per, at // per, at % per * bits
        start = at * bits
        return start // 32, (start + bits - 1) // 32, start % 32

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        axis, bits = e.params["axis"], e.params["bits"]
        first, last, shift = self._where(e, want[axis])
        words = blocks[0].movedim(axis, -1)
        there = np.union1d(first, last)
        mask = (1 << bits) - 1
        if (
            bits in (4, 8)
            and isinstance(want[axis], range)
            and len(there) * 32 // bits == len(shift)
            and axis == len(e.shape) - 1
        ):
            bytes_ = words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)
            if bits == 8:
                return bytes_.view(torch.int8) ^ -128
            return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2).view(torch.int8) - 8
        low = words.index_select(-1, torch.from_numpy(np.searchsorted(there, first)))
        moved = torch.from_numpy(shift.astype(np.int32))
        found = (low >> moved) & ((1 << torch.clamp(32 - moved, max=bits)) - 1)
        if (first != last).any():
            high = words.index_select(-1, torch.from_numpy(np.searchsorted(there, last)))
            straddles = torch.from_numpy(first != last)
            rest = torch.where(straddles, 32 - moved, 0)
            found |= torch.where(straddles, (high << rest) & mask, 0)
        found -= 1 << (bits - 1)
        return found.to(torch.int8).movedim(-1, axis).contiguous()

    def grain(self, e: Expr) -> Shape:
        bits, axis = e.params["bits"], e.params["axis"]
        per = 32 if e.params["dense"] else 32 // bits
        return tuple(per if d == axis else 1 for d in range(len(e.shape)))


def words_of(size: int, bits: int, dense: bool) -> int:
    """Return how many 32-bit words hold so many codes.

    >>> words_of(20, 3, True), words_of(20, 3, False), words_of(21, 3, False)
    (2, 2, 3)
    """
    return -(-size * bits // 32) if dense else -(-size // (32 // bits))


def members(groups: Axis, size: int) -> Axis:
    """Return the indices of all members of groups.

    >>> members(range(2, 4), 3)
    range(6, 12)
    """
    if isinstance(groups, range) and groups.step == 1:
        return range(groups.start * size, groups.stop * size)
    return as_axis((indices(groups)[:, None] * size + np.arange(size)).ravel())


def chosen(found: torch.Tensor, axis: Axis, size: int) -> torch.Tensor:
    """Return the wanted elements of the last dimension, of whole groups of ``size``."""
    if len(axis) == found.shape[-1]:
        return found
    _, at = grouped(axis, size)
    numbers = at * size + indices(axis) % size
    if isinstance(axis, range) and axis.step == 1:
        return found[..., int(numbers[0]) : int(numbers[-1]) + 1]
    return found.view(bits_of(found.itemsize)).index_select(-1, torch.from_numpy(numbers)).view(found.dtype)


OPS: dict[str, Op] = {
    "as_bits": AsBits(),
    "dequantize.fp4": Fp4(),
    "dequantize.fp6": Fp6(),
    "dequantize.e8m0": PowerOfTwo(),
    "dequantize.bits": Bits(),
}
