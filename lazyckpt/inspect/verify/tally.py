"""Counts of the elements of a block that tell whether they are sane: NaN, infinities, zeros, the extremes, the sum of
squares. They are cheaper than statistics (moments.py) and can be merged in any order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import DType
from ..moments import BLOCK

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

Array = np.ndarray[Any, Any]

# A tally: counts, the extremes of the finite elements (inf and -inf if there are none) and their sum of squares.
# "edge" counts the elements with the largest finite value of the dtype, of either sign.
TALLY = np.dtype(
    [
        ("count", "i8"), ("nan", "i8"), ("inf", "i8"), ("zeros", "i8"), ("edge", "i8"),
        ("low", "f8"), ("high", "f8"), ("squares", "f8"),
    ]
)  # fmt: skip
COUNTS = ("count", "nan", "inf", "zeros", "edge", "squares")


def tallies(count: int) -> Array:
    """Return empty tallies."""
    found = np.zeros(count, TALLY)
    found["low"], found["high"] = math.inf, -math.inf
    return found


def is_judged(dtype: DType) -> bool:
    """Return whether elements of a dtype are judged: floating-point and complex numbers, no packed bits."""
    return dtype.is_number and (dtype.is_floating_point or dtype.torch.is_complex)


def add(to: Array, numbers: Array, found: Array) -> None:
    """Add tallies to those with these numbers."""
    for field in COUNTS:
        np.add.at(to[field], numbers, found[field])
    np.minimum.at(to["low"], numbers, found["low"])
    np.maximum.at(to["high"], numbers, found["high"])


def tally(flat: torch.Tensor) -> Array:
    """Return the tally of a 1-d CPU tensor, as an array with one element."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    found = tallies(1)
    limit = torch.finfo(flat.dtype).max
    parts = [_of_block(flat[at : at + BLOCK], limit) for at in range(0, flat.numel(), BLOCK)]
    rows = np.array(parts, TALLY) if parts else tallies(0)
    add(found, np.zeros(len(rows), np.int64), rows)
    return found


def tally_runs(buffer: torch.Tensor, begins: Array, ends: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return the tallies of many small runs of bytes at once, and which of them are done.

    Those that have NaN, infinities or elements at the edge of the dtype are not done, nor those of complex numbers
    and of unaligned elements: they need `tally`.

    Parameters
    ----------
    buffer
        Bytes, as a 1-d tensor of uint8.
    begins, ends
        The places of the runs in it, in bytes, by ascending begin.
    dtype
        The dtype of the elements.
    """
    found, size = tallies(len(begins)), dtype.itemsize
    lead = int(begins[0]) % size
    whole = (begins % size == lead) & (not dtype.is_complex)
    if not whole.any():
        return found, whole
    low = int(begins[0])
    data = buffer[low : int(ends[whole].max())]
    elements = (data.clone() if lead else data).view(dtype)
    x = elements.to(dtype if dtype in (torch.float32, torch.float64) else torch.float32).numpy()
    x = np.append(x, x.dtype.type(0))  # an element behind the last run: the end of a run has to be an index
    first, last = (begins[whole] - low) // size, (ends[whole] - low) // size
    cuts = np.stack([first, last], 1).reshape(-1)
    with np.errstate(all="ignore"):
        rows = found[whole]
        rows["count"] = last - first
        rows["low"], rows["high"] = np.minimum.reduceat(x, cuts)[::2], np.maximum.reduceat(x, cuts)[::2]
        rows["squares"] = np.add.reduceat(x * x, cuts)[::2]
        if (zero := x == 0).any():
            rows["zeros"] = np.add.reduceat(zero, cuts, dtype=np.int64)[::2]
        inner = (rows["high"] < torch.finfo(dtype).max) & (rows["low"] > torch.finfo(dtype).min)
        inner &= np.isfinite(rows["squares"])
    found[whole] = rows
    whole[whole] = inner
    return found, whole


def _of_block(block: torch.Tensor, limit: float) -> tuple[int, int, int, int, int, float, float, float]:
    count = block.numel()
    x = block if block.dtype in (torch.float32, torch.float64) else block.to(torch.float32)
    ends = torch.aminmax(x)
    low, high = float(ends.min), float(ends.max)  # NaN if the block has one
    nan = inf = edge = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        nan = int(torch.isnan(x).sum())
        inf = int(torch.isinf(x).sum())
        x = x[torch.isfinite(x)]
        if not x.numel():
            return count, nan, inf, 0, 0, math.inf, -math.inf, 0.0
        low, high = float(x.min()), float(x.max())
    if high >= limit or low <= -limit:
        edge = int((x.abs() >= limit).sum())
    zeros = x.numel() - int(torch.count_nonzero(x)) if low <= 0 <= high else 0
    squares = float(torch.dot(x, x))
    if not math.isfinite(squares):
        norm = float(torch.linalg.vector_norm(x.to(torch.float64)))
        squares = norm * norm  # infinite if it is too large: ``**`` raises OverflowError
    return count, nan, inf, zeros, edge, low, high, squares
