"""Conversions of dtype whose bits do not depend on the position of an element in its array.

torch converts most of an array with vector instructions, and the rest one by one. The two differ for NaN: float32 to
bfloat16 yields 0xffff or 0x7fc0; conversions from and to float16 keep the bits of a NaN or do not. Here every NaN of
computed 16-bit elements has the bits 0x7fc0 (bfloat16) or 0x7e00 (float16), and every NaN that was converted from
float16 is torch.nan. All other values have the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, nan
from typing import TYPE_CHECKING

from .dtypes import bits_of

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch


def exact_sum(parts: Sequence[float]) -> float:
    """Return the exact sum, rounded once; NaN if a part or the sum is not finite."""
    try:
        return fsum(parts) if all(map(isfinite, parts)) else nan
    except OverflowError:
        return nan


def convert(block: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a block in another dtype; the block itself if it has it and there is no ``out``.

    Parameters
    ----------
    block
        A CPU tensor. It is not changed.
    dtype
        The dtype of the result.
    out
        A tensor of the same shape and of this dtype that receives the result.
    """
    if out is None:
        if block.dtype == dtype:
            return block
        found = block.to(dtype)
    else:
        found = out.copy_(block)
    if block.dtype == torch.float16 and dtype in (torch.float32, torch.float64):
        if block.numel() and _has_nan(block):
            found[found != found] = torch.nan
    elif block.dtype != dtype:
        settle(found)
    return found


def negated(block: torch.Tensor) -> torch.Tensor:
    """Return the negative of signed elements: floating-point ones with the sign bits inverted, NaN too."""
    if not (block.dtype.is_floating_point or block.dtype.is_complex):
        return block.neg()
    block = block.resolve_conj().contiguous()
    bits = block.view(-1).view(bits_of(block.itemsize // (2 if block.dtype.is_complex else 1)))
    sign = torch.iinfo(bits.dtype).min if bits.dtype.is_signed else 0x80
    return bits.bitwise_xor(sign).view(block.dtype).view(block.shape)  # torch's neg changes some NaN of 16 bits


def _has_nan(block: torch.Tensor) -> bool:
    """Return whether elements of float16 have a NaN."""
    signed = block.view(torch.int16).numpy()
    return bool(signed.view("uint16").max() > 0xFC00 or signed.max() > 0x7C00)


def settle(block: torch.Tensor) -> torch.Tensor:
    """Give every NaN of computed 16-bit elements the same bits, in place. Returns the block."""
    if not block.numel() or block.dtype not in (torch.bfloat16, torch.float16):
        return block
    signed = block.view(torch.int16).numpy()
    unsigned = signed.view("uint16")  # numpy's maximum takes a tenth of the time of torch's comparisons
    if block.dtype == torch.bfloat16:
        if unsigned.max() == 0xFFFF:
            unsigned[unsigned == 0xFFFF] = 0x7FC0
    elif _has_nan(block):
        unsigned[(unsigned & 0x7FFF) > 0x7C00] = 0x7E00
    return block
