"""Matrices of which only the elements that are not zero are stored, with a bit for each element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError, DataError
from ..axes import as_axis, grouped, indices, shape_of
from ..box import Selection
from ..dtypes import U8, bits_of
from ..expr import Kind, Op
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


def _mask(block: torch.Tensor) -> NDArray[np.uint8]:
    """Return a bit for each element of whole bytes."""
    return np.unpackbits(block.numpy(), axis=-1, bitorder="little")


def _result(e: Expr, want: Selection, values: torch.Tensor, at: NDArray[np.int64], mask: NDArray[Any]) -> torch.Tensor:
    """Return zeros with values, by their numbers, where the mask says so."""
    kind = bits_of(values.itemsize)
    found = values.reshape(-1).view(kind).numpy()
    if found.size:
        picked = np.where(mask, found[np.clip(at, 0, found.size - 1)], found.dtype.type(0))
    else:
        picked = np.zeros(at.shape, found.dtype)
    return torch.from_numpy(picked).view(e.dtype.torch).view(shape_of(want))


class Sparse24(Op):
    """(values, bits): two of four neighbours in a row of ``shape`` have a value, in order (compressed-tensors)."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        values, mask = inputs
        rows, columns = params["shape"]
        if values.shape != (rows, columns // 2) or columns % 4 or mask != Kind((rows, -(-columns // 8)), U8):
            raise DataError(
                f"values of {values.shape} and bits of {mask.shape} make no 2:4 matrix of {(rows, columns)}"
            )
        return Kind((rows, columns), values.dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        fours = indices(grouped(want[1], 4)[0])
        pairs = as_axis((fours[:, None] * 2 + np.arange(2)).ravel())
        return (want[0], pairs), (want[0], grouped(want[1], 8)[0])

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        columns = indices(want[1])
        _, four = grouped(want[1], 4)
        _, byte = grouped(want[1], 8)
        bits = _mask(blocks[1])
        nibbles = bits.reshape(len(bits), -1, 4).astype(np.int64)
        number = byte * 2 + columns % 8 // 4  # the nibble of each column
        if (nibbles[:, number].sum(-1) != 2).any():
            raise CorruptError("a 2:4 sparse matrix has four neighbours of which not two have values")
        before = np.cumsum(nibbles, axis=-1) - nibbles  # values before an element among its four
        within = before[:, number, columns % 4]
        at = np.arange(len(bits))[:, None] * blocks[0].shape[1] + four * 2 + within
        return _result(e, want, blocks[0], at, nibbles[:, number, columns % 4] != 0)

    def grain(self, e: Expr) -> tuple[int, ...]:
        return (1, 8)


class Bitmask(Op):
    """(values, bits): the values of row ``r`` of ``shape`` begin at ``starts[r]`` (compressed-tensors).

    Reads the bits and the values of the whole rows that are wanted."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        values, mask = inputs
        rows, columns = params["shape"]
        starts = params["starts"]
        if len(values.shape) != 1 or mask != Kind((rows, -(-columns // 8)), U8) or len(starts) != rows:
            raise DataError(f"values of {values.shape} and bits of {mask.shape} make no matrix of {(rows, columns)}")
        ends = [*starts[1:], values.shape[0]]
        if (
            any(not 0 <= end - start <= columns for start, end in zip(starts, ends, strict=True))
            or starts[:1] != (0,)[:rows]
        ):
            raise DataError(f"the rows of a sparse matrix do not divide its {values.shape[0]:,} values")
        return Kind((rows, columns), values.dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        spans = self._spans(e, want)
        values = as_axis(np.concatenate([np.arange(a, b) for a, b in spans]))
        return (values,), (want[0], range(e.inputs[1].shape[1]))

    def _spans(self, e: Expr, want: Selection) -> list[tuple[int, int]]:
        ends = (*e.params["starts"], e.inputs[0].shape[0])
        return [(ends[r], ends[r + 1]) for r in indices(want[0])]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        bits = _mask(blocks[1])[:, : e.shape[1]].astype(np.int64)
        lengths = np.array([b - a for a, b in self._spans(e, want)])
        if (bits.sum(1) != lengths).any():
            raise CorruptError("the bits of a row of a sparse matrix do not count its values")
        first = np.cumsum(lengths) - lengths
        at = first[:, None] + np.cumsum(bits, axis=1) - bits
        columns = indices(want[1])
        return _result(e, want, blocks[0], at[:, columns], bits[:, columns] != 0)


OPS: dict[str, Op] = {"dequantize.sparse24": Sparse24(), "dequantize.bitmask": Bitmask()}
