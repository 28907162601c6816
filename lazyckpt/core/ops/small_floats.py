"""Floats of four, six and eight bits as float32, faster than torch converts them, and with the same values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from ..rounding import convert

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

# The values of the codes of four bits without their signs, E2M1, and of six bits, E2M3 (OCP Microscaling Formats 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M3 = tuple(m / 8 for m in range(8)) + tuple((1 + m / 8) * 2**e for e in range(3) for m in range(8))

TILE = 1 << 17  # elements: few calls of torch, and as float32 they stay in a core's cache
_own = threading.local()


def scratch(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return memory of this thread, valid until the next call with the dtype. Allocating it anew would take as long as
    computing with it."""
    kept: dict[Any, torch.Tensor] = _own.__dict__
    found = kept.get(dtype)
    if found is None or found.numel() < count:
        found = kept[dtype] = torch.empty(max(count, TILE), dtype=dtype)
    return found[:count]


def float32_of(codes: torch.Tensor) -> torch.Tensor:
    """Return a block of float8 as float32. Other dtypes are converted as torch does."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return convert(codes, torch.float32)
    found = torch.empty(codes.shape, dtype=torch.float32)
    if codes.numel():
        for part, out in zip(Decoder(codes.reshape(-1)).tiles(TILE), torch.split(found.view(-1), TILE), strict=True):
            out.copy_(part)
    return found.mul_(256.0) if codes.dtype is torch.float8_e4m3fn else found


class Decoder:
    """Parts of a block of codes as float32, in memory of this thread; of float8_e4m3fn a 256th of them.

    torch converts float8 one element at a time, with branches. float8_e5m2 is the upper half of a float16; and
    float8_e4m3fn, moved by a bit, is the float16 of a 256th of the value.

    Parameters
    ----------
    codes
        The whole block.
    """

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes, dtype = codes, codes.dtype
        self._shift = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 8}.get(dtype)
        # the codes above it are NaN or infinite; of e4m3fn, one that would be 480 is NaN
        self._largest = {7: 0x7E, 8: 0x7C}.get(self._shift or 0, 0xFF)
        self._nan = self._shift is not None and _has_above(codes, self._largest)

    def tiles(self, length: int) -> Iterator[torch.Tensor]:
        """Yield the block, ``length`` indices of the first dimension at a time, in memory that is valid until the next
        item."""
        codes = self._codes
        most = min(length, codes.shape[0])
        shape = (most, *codes.shape[1:])
        whole = scratch(torch.float32, prod(shape)).view(shape)
        if self._shift is None:
            for part in torch.split(codes, length):
                yield convert(part, torch.float32, whole[: part.shape[0]])
            return
        bits = scratch(torch.int16, prod(shape)).view(shape)
        halves = bits.view(torch.float16)
        for part in torch.split(codes.view(torch.int8), length):  # a tile has few calls, and most have the same shape
            n = part.shape[0]
            if n != most:
                bits, halves, whole = bits[:n], halves[:n], whole[:n]
            bits.copy_(part)
            bits *= 1 << self._shift  # torch shifts take twice as long
            if self._shift == 7:
                bits &= -0x4080  # without bit 14, a copy of the sign
            whole.copy_(halves)
            if self._nan:  # the bits of NaN would depend on how torch converts it
                whole.masked_fill_((part.view(torch.uint8) & 0x7F) > self._largest, torch.nan)
            yield whole


def _has_above(codes: torch.Tensor, largest: int) -> bool:
    """Return whether codes of float8 without their signs exceed a number."""
    flat = codes.reshape(-1).view(torch.uint8).numpy()
    # as unsigned numbers, the negative codes are the large ones; as signed numbers, the positive codes
    return bool(len(flat)) and bool(flat.max() > 0x80 | largest or flat.view("int8").max() > largest)
