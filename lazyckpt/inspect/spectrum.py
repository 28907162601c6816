"""Singular values of a matrix that is not in memory."""

from __future__ import annotations

import torch

from ..core.dtypes import converts
from ..errors import DataError
from ..lazy import LazyArray

LIMIT = 8192  # rows or columns, whichever are fewer: their Gram matrix takes 512 MiB, its eigenvalues minutes
ACCURACY = 1.5e-8  # of the largest value: the root of float64's rounding error
_PIECE = 32 << 20  # bytes of a block of rows, as float64


def singular_values(tensor: LazyArray) -> torch.Tensor:
    """The singular values of a matrix, largest first: float64, as many as its smaller side is long.

    They are the roots of the eigenvalues of the smaller side's Gram matrix, which is added up in float64 from blocks of
    the larger side; every element is read once. So memory is that of the Gram matrix (8 bytes times the smaller side
    squared, twice again for its eigenvalues) and some 100 MiB. What is squared loses half the digits: a value is right
    to about 1.5e-8 of the largest one (`ACCURACY`), and those below that are noise.

    Raises DataError if it is no matrix, if its smaller side is above 8,192 (`LIMIT`), or if there is a NaN or an
    infinity in it; and what reading raises.
    """
    if tensor.ndim != 2:
        raise DataError(
            f"{tensor.name!r} has {tensor.ndim} dimensions: singular values are of matrices; take one, as in t.lazy[0]"
        )
    rows, columns = tensor.shape
    side, other = min(rows, columns), max(rows, columns)
    if side > LIMIT:
        raise DataError(
            f"{tensor.name!r} is {rows:,} x {columns:,}: of its smaller side at most {LIMIT:,} are taken. Take a part, "
            f"as in t.lazy[:, :{LIMIT}], or read it: torch.linalg.svdvals(t[...].float())"
        )
    dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
    if not converts(tensor.dtype, dtype):
        raise DataError(f"{tensor.name!r}: elements of {tensor.dtype} are no numbers")
    gram = torch.zeros(side, side, dtype=dtype, device="cpu")
    step = max(1, _PIECE // (max(1, side) * dtype.itemsize))
    for at in range(0, other, step):
        key = slice(at, at + step)
        block = (tensor.lazy[key] if rows >= columns else tensor.lazy[:, key])[...]
        numbers = block.to(dtype)
        gram += numbers.mH @ numbers if rows >= columns else numbers @ numbers.mH
    if not bool(torch.isfinite(gram.diagonal().real).all()):
        raise DataError(f"{tensor.name!r} has NaN or infinities, or is too large for float64: t.stats() counts them")
    squares: torch.Tensor = torch.linalg.eigvalsh(gram)  # ascending; rounding may leave some below zero
    return squares.clamp_(min=0).sqrt_().flip(0)
