"""Low-rank parts of tensors that are not in memory, by randomized singular value decomposition.

Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), algorithm 4.4: subspace iteration from random
directions, with an orthogonal basis after each pass. A pass reads the tensor once, in blocks of rows; in memory are a
block and the basis. A tensor of up to 256 MiB as float32 is kept, so that it is read and computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import DataError
from ...lazy import LazyArray

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_KEPT = 256 << 20  # bytes of a tensor that is kept in memory
_BLOCK = 32 << 20  # bytes of a block of rows
_MORE = 8  # directions beside those that are wanted
_PASSES = 2  # iterations: the error of a singular direction shrinks by (s_k / s_i) ** 4 in each


@dataclass(frozen=True)
class LowRank:
    """A low-rank part of a matrix: ``left @ right``.

    Attributes
    ----------
    left, right
        The factors in float32, of shapes (rows, rank) and (rank, columns); each has the root of the singular values.
    energy
        The share of the sum of squares of the matrix that is in the product.
    norm
        The Frobenius norm of the matrix.
    """

    left: torch.Tensor
    right: torch.Tensor
    energy: float
    norm: float


def low_rank(tensor: LazyArray, rank: int, energy: float | None, seed: int) -> LowRank | None:
    """Return the low-rank part of a tensor, as a matrix with a row for each index of the first dimension; None if all
    of its elements are zero.

    Parameters
    ----------
    tensor
        A floating-point tensor.
    rank
        The largest rank.
    energy
        The share of the sum of squares that is wanted: the smallest rank that has it is taken. None: ``rank``.
    seed
        Of the random directions.

    Raises
    ------
    DataError
        The tensor has NaN or infinities.
    """
    rows, columns = tensor.shape[0], tensor[:1].numel() if tensor.shape[0] else 0
    rank = min(rank, rows, columns)
    blocks = _blocks(tensor, rows, columns)
    width = min(rank + _MORE, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(columns, width, generator=generator))[0]
    total = 0.0
    for n in range(_PASSES):
        found = torch.zeros(columns, width)
        for _, block in blocks():
            found += block.T @ (block @ basis)
            if n == 0:
                total += float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2
        if total == 0:
            return None
        if not torch.isfinite(found).all():
            raise DataError(f"{tensor.name!r} has NaN or infinities, or differences too large for float32")
        basis = torch.linalg.qr(found)[0]
    image = torch.empty(rows, width)
    for at, block in blocks():
        image[at : at + len(block)] = block @ basis
    q, r = torch.linalg.qr(image)
    u, s, vh = torch.linalg.svd(r.double())
    shares = (s**2).cumsum(0) / total
    if energy is not None:
        rank = min(rank, int((shares < energy).sum()) + 1)
    root = s[:rank].sqrt()
    left = (q.double() @ u[:, :rank]) * root
    right = root[:, None] * (vh[:rank] @ basis.double().T)
    # of each pair, which may have either sign, the largest element of the left one is positive
    sign = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    captured = float(shares[rank - 1].clamp(max=1))
    return LowRank((left * sign).float(), (right * sign.T).float(), captured, total**0.5)


def _blocks(tensor: LazyArray, rows: int, columns: int) -> Callable[[], Iterator[tuple[int, torch.Tensor]]]:
    """Return a function that iterates over the blocks of rows, as float32 matrices with the number of the first row."""
    step = max(1, _BLOCK // (4 * max(1, columns)))
    if 4 * rows * columns <= _KEPT:
        whole = tensor[...].to(torch.float32).reshape(rows, columns)
        return lambda: iter([(0, whole)])

    def blocks() -> Iterator[tuple[int, torch.Tensor]]:
        for at in range(0, rows, step):
            yield at, tensor[at : at + step].to(torch.float32).reshape(-1, columns)

    return blocks
