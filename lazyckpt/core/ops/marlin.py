"""Codes in the layouts of the kernels Marlin and Marlin-24, in the order of tensor cores' registers.

Marlin has codes of four bits. They are transposed to ``[in, out]`` and cut into tiles of 16 x 64, whose 1,024 codes are
permuted and packed into int32, the first in the lowest bits. Source: auto-gptq 0.7.1, nn_modules/qlinear/
qlinear_marlin.py (`_get_perms`, `QuantLinear.pack`), which is that of IST-DASLab/marlin.

Marlin-24 is 2:4 sparse. Of four neighbours in a row of ``[out, in]`` two have a code. The codes, of 4 or 8 bits, are
transposed to ``[in / 2, out]`` and cut into tiles of 16 x 64, whose 1,024 codes are permuted and packed into int32, the
first in the lowest bits. ``meta`` has two bits for each code: where it lies among its four. It is in the order of
CUTLASS's column-major interleaved layout.

Source: compressed-tensors 0.10.2, compressors/sparse_quantized_compressors/marlin_24.py, utils/permutations_24.py
(`get_permutations_24`) and utils/semi_structured_conversions.py (`_calculate_meta_reordering_scatter_offsets`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError, DataError
from ..axes import as_axis, grouped, indices
from ..box import Selection, Shape
from ..dtypes import I8, I16, I32
from ..expr import Kind, Op
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_DENSE = 16  # inputs of a tile of Marlin
_IN, _OUT = 32, 64  # inputs and outputs of a tile of Marlin-24: 16 x 64 codes
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


class Marlin(Op):
    """Words [in / 16, 2 * out] -> codes of four bits, [out, in], less 8.

    A row reads four words of each tile: those that hold its codes. The words hold codes of one more row."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        (words,) = inputs
        if words.dtype is not I32 or len(words.shape) != 2 or words.shape[1] % (_OUT * 2):
            raise DataError(f"Marlin has an int32 matrix with {_OUT * 2} words for {_OUT} rows, not {words}")
        return Kind((words.shape[1] // 2, words.shape[0] * _DENSE), I8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        words = np.unique(_dense(indices(want[0]))[0])
        return ((grouped(want[1], _DENSE)[0], as_axis(words)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, columns = indices(want[0]), indices(want[1])
        at, shift = _dense(rows)
        words = blocks[0].numpy()[:, np.searchsorted(np.unique(at), at)]  # tile, row, code
        codes = ((words >> shift & 15) - 8).astype(np.int8)
        _, tile = grouped(want[1], _DENSE)
        return torch.from_numpy(
            np.ascontiguousarray(codes[tile[None, :], np.arange(len(rows))[:, None], columns % _DENSE])
        )

    def grain(self, e: Expr) -> Shape:
        return (_OUT, _DENSE)


class Marlin24(Op):
    """(words, meta): codes of ``bits`` (4 or 8), [out, in], less the half of their range; 0 where there is none.

    A row reads the words that its codes share with other rows, and a column the words of its tile of 32 columns."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        words, meta = inputs
        bits = params["bits"]
        if bits not in _INTERLEAVED:
            raise DataError(f"marlin-24 has codes of 4 or 8 bits, not {bits!r}")
        if words.dtype is not I32 or meta.dtype is not I16 or len(words.shape) != 2 or len(meta.shape) != 2:
            raise DataError(f"marlin-24 has int32 and int16 matrices, not {words} and {meta}")
        tiles, count = words.shape
        outputs = count * 32 // bits // 16
        if count % (_OUT * 16 * bits // 32) or meta.shape != (tiles, 2 * outputs):
            raise DataError(f"words of {words.shape} and meta of {meta.shape} are no marlin-24 matrix of {bits} bits")
        return Kind((outputs, tiles * _IN), I8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        tiles = grouped(want[1], _IN)[0]
        rows = indices(want[0])
        words = np.unique(_words(rows, e.params["bits"])[0])
        return (tiles, as_axis(words)), (tiles, as_axis(np.unique(_meta(rows, e.shape[0]))))

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        bits = e.params["bits"]
        rows, columns = indices(want[0]), indices(want[1])
        at, shift = _words(rows, bits)
        words = blocks[0].numpy()[:, np.searchsorted(np.unique(at), at)]  # tile, row, code
        codes = (words >> shift & ((1 << bits) - 1)) - (1 << bits - 1)
        at = _meta(rows, e.shape[0])
        meta = blocks[1].numpy()[:, np.searchsorted(np.unique(at), at)].astype(np.int64)
        places = meta[..., None, None] >> np.arange(16, dtype=np.int64).reshape(4, 4)[:, ::2] & 3  # tile, row, 2, 4, 2
        if (places[..., 0] >= places[..., 1]).any():
            raise CorruptError("the meta of a marlin-24 matrix puts the codes of four neighbours into no order")
        found = np.zeros((*codes.shape[:2], 8, 4), np.int8)
        np.put_along_axis(
            found,
            places.reshape(*codes.shape[:2], 8, 2),
            codes.astype(np.int8).reshape(*codes.shape[:2], 8, 2),
            axis=-1,
        )
        found = found.reshape(*codes.shape[:2], _IN)
        _, tile = grouped(want[1], _IN)
        return torch.from_numpy(
            np.ascontiguousarray(found[tile[None, :], np.arange(len(rows))[:, None], columns % _IN])
        )

    def grain(self, e: Expr) -> Shape:
        return (_OUT, _IN)


@cache
def _dense_places() -> NDArray[np.int64]:
    """Return where the codes of a tile of Marlin are: [row of 64, code of 16] -> their numbers among 1,024."""
    order = []
    for thread in range(32):
        first = [
            16 * row + thread // 4 + 8 * block
            for block in (0, 1)
            for row in (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)
        ]
        order += [one + 256 * j for j in range(4) for one in first]
    mixed = np.array(order).reshape(-1, 8)[:, _INTERLEAVED[4]].ravel()
    back = np.argsort(mixed).reshape(4, 16, 16)  # 16 rows of a quarter, code, row in it
    found: NDArray[np.int64] = back.transpose(0, 2, 1).reshape(_OUT, _DENSE)
    return found


def _dense(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the columns of the words of a row's codes in a tile of Marlin, and the bits below the codes."""
    number = _dense_places()[rows % _OUT]
    return rows[:, None] // _OUT * (_OUT * 2) + number // 8, (number % 8 * 4).astype(np.int32)


@cache
def _places(bits: int) -> NDArray[np.int64]:
    """Return where the codes of a tile are: [row of 64, code of 16] -> their numbers among 1,024."""
    order = []
    for thread in range(32):
        column = thread // 4
        first = [
            16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block
            for block in (0, 1)
            for row in (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)
        ]
        order += [one + j for j in range(4) for one in first]
    interleaved = _INTERLEAVED[bits]
    mixed = np.array(order).reshape(-1, len(interleaved))[:, interleaved].ravel()
    back = np.argsort(mixed).reshape(4, 16, 16)  # 16 rows of a quarter, code, row in it
    found: NDArray[np.int64] = back.transpose(0, 2, 1).reshape(_OUT, 16)
    return found


def _words(rows: NDArray[np.int64], bits: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the columns of the words of a row's codes in a tile of inputs, and the bits below the codes."""
    packed = 32 // bits
    number = _places(bits)[rows % _OUT]
    return rows[:, None] // _OUT * (_OUT * 16 // packed) + number // packed, (number % packed * bits).astype(np.int32)


def _meta(rows: NDArray[np.int64], outputs: int) -> NDArray[np.int64]:
    """Return the columns of both words of meta of a row, in a tile of inputs."""
    at = rows // 64 * 64 + rows % 2 * 2 + rows % 8 // 4 + rows % 4 // 2 * 32 + rows % 64 // 8 * 4
    half = np.arange(2)
    row, column = np.broadcast_arrays(at[:, None], half)
    swap = ((row % 2 == 0) & (column == 1)).astype(np.int64) - ((row % 2 == 1) & (column == 0))
    found: NDArray[np.int64] = (row + swap) * 2 + column - swap
    return found


OPS: dict[str, Op] = {"dequantize.marlin": Marlin(), "dequantize.marlin24": Marlin24()}
