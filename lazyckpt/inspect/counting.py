"""How often each bit pattern of 8 or 16 bits occurs: all that there is to know of bf16, fp16, fp8, small integers and
bools, exactly, in one pass, which costs what computing moments would."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ..core.dtypes import converts
from ..errors import DataError
from .moments import Array

_BLOCK = 1 << 17  # elements that numpy makes a megabyte of indices of


class Patterns(NamedTuple):
    """``patterns``: those that occur, ascending; ``counts``: how often each does."""

    patterns: Array
    counts: Array


def count(numbers: torch.Tensor) -> Array:
    """How often each of the bit patterns occurs in a contiguous CPU tensor of 1 or 2 bytes an element (int64)."""
    raw = numbers.view(-1).view(torch.uint8).numpy()
    if numbers.itemsize == 2:
        return _counted(raw.view(np.uint16))
    # two bytes at a time, which takes half as long
    even = raw.size // 2 * 2
    pairs = _counted(raw[:even].view(np.uint16)).reshape(256, 256)
    found: Array = pairs.sum(0) + pairs.sum(1) + np.bincount(raw[even:], minlength=256)
    return found


def sparse(counts: Array) -> Patterns:
    """Only those that occur."""
    patterns = np.flatnonzero(counts)
    return Patterns(patterns, counts[patterns])


@cache
def values(dtype: torch.dtype) -> Array:
    """What each bit pattern of a dtype is, as float64. Raises DataError for what is no number."""
    size = 1 << 8 * dtype.itemsize
    plain = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    patterns = torch.arange(size, dtype=torch.int32, device="cpu").to(plain)
    if not converts(dtype, torch.float64):
        raise DataError(f"elements of {dtype} are packed bits, no numbers: there are no statistics of them")
    found: Array = patterns.view(dtype).to(torch.float64).numpy()
    return found


def _counted(raw: Array) -> Array:
    counts = np.zeros(1 << 16, np.int64)
    for at in range(0, raw.size, _BLOCK):
        counts += np.bincount(raw[at : at + _BLOCK], minlength=1 << 16)
    return counts
