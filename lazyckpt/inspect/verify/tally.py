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
        squares = float(torch.linalg.vector_norm(x.to(torch.float64))) ** 2
    return count, nan, inf, zeros, edge, low, high, squares
