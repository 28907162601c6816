"""HQQ: codes, zero points and scales of a matrix that the ravel of the tensor is cut into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import DataError
from ..axes import as_axis, indices, shape_of
from ..box import Axis, Selection, Shape
from ..dtypes import dtype_of
from ..expr import Kind, Op
from ..rounding import convert
from ..specs import Expr
from .ravel import Numbers, blocks_of, distinct, numbers_of, positions, rows_of, slice_of, union

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class _Packing(NamedTuple):
    codes: int  # in a word
    word: int  # bytes of a word
    bits: int  # from one code to the next
    top: int  # position of the first code


# As hqq 0.2.8's core/bitpack.py: the rows are in as many equal runs as a word has codes; a word has one of each run.
_PACKINGS = {
    "8bit_u8": _Packing(1, 1, 8, 0),
    "4bit_u8": _Packing(2, 1, 4, 4),
    "3bit_32": _Packing(10, 4, 3, 27),
    "2bit_u8": _Packing(4, 1, 2, 6),
    "1bit_u8": _Packing(8, 1, 1, 7),
}


class Hqq(Op):
    """HQQ's tensors, ``(code - zero) * scale``, each step rounded to the compute dtype, then converted to ``dtype``.

    The ravel of the result is cut into rows of ``group_size`` (axis 1), or into ``group_size`` rows (axis 0): that is
    the grouped matrix. ``zero`` and ``scale`` have one value for each row (axis 1) or column (axis 0), or a single one.

    Operands: ``W_q``, the packed grouped matrix, ``zero`` and ``scale``. Parameters: ``shape`` and ``dtype`` of the
    result, ``packing`` (None: codes are not packed), ``axis``, ``group_size`` (None: the matrix as it is) and
    ``compute_dtype``.
    """

    def _grid(self, params: Mapping[str, Any]) -> tuple[int, int]:
        shape, size = tuple(params["shape"]), params["group_size"]
        count = prod(shape)
        if size is None:
            return count // shape[-1] if shape[-1] else 0, shape[-1]
        return (count // size, size) if params["axis"] == 1 else (size, count // size)

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape, packing = tuple(params["shape"]), params["packing"]
        if packing is not None and packing not in _PACKINGS:
            raise DataError(f"there is no HQQ packing {packing!r} in this version of lazyckpt")
        if not shape or params["axis"] not in (0, 1):
            raise DataError(f"HQQ has axis 0 or 1 of a matrix, not {params['axis']!r} of {shape}")
        rows, columns = self._grid(params)
        found = inputs[0]
        width = found.dtype.itemsize
        if packing is not None:
            known = _PACKINGS[packing]
            need = -(-rows // known.codes) * columns * known.word
            fits = prod(found.shape) * width == need and len(found.shape) == 2 and rows * columns == prod(shape)
            # words in another dtype: a row of them still has whole columns
            fits = fits and found.shape[1] * width == columns * known.word
        else:
            fits = found.shape == (rows, columns)
        per = rows if params["axis"] == 1 else columns
        if not fits or any(prod(one.shape) not in (1, per) for one in inputs[1:]):
            raise DataError(
                f"HQQ of shape {shape} in groups of {params['group_size']} along axis {params['axis']} "
                f"({packing or 'not packed'}) does not fit operands of shapes {[one.shape for one in inputs]}"
            )
        return Kind(shape, dtype_of(params["dtype"]))

    def _step(self, e: Expr) -> int:
        """Return the rows of the packed matrix."""
        rows = self._grid(e.params)[0]
        packing = e.params["packing"]
        return max(1, -(-rows // _PACKINGS[packing].codes) if packing else rows)

    def _boxes(self, e: Expr, numbers: range) -> Iterator[tuple[range, range, int]]:
        """Yield what blocks of the packed matrix have an interval of the ravel, in order: rows, columns, and the run
        that the codes are of."""
        columns = self._grid(e.params)[1]
        step = self._step(e)
        for rows, inside in rows_of(numbers, columns):
            for run in range(rows.start // step, (rows.stop - 1) // step + 1):
                first, last = max(rows.start, run * step), min(rows.stop, (run + 1) * step)
                yield range(first - run * step, last - run * step), inside, run

    def _cells(self, e: Expr, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return for each number of the ravel its row and column of the packed matrix, its run, and its scale."""
        row, column = np.divmod(numbers, self._grid(e.params)[1])
        step = self._step(e)
        return row % step, column, row // step, row if e.params["axis"] == 1 else column

    def _needed(self, e: Expr, want: Selection) -> tuple[Axis, Axis, Axis]:
        """Return the rows and columns of the packed matrix, and the scales, that a selection needs."""
        numbers = numbers_of(e.shape, want)
        if not isinstance(numbers, range):
            row, column, _, scale = self._cells(e, numbers)
            return distinct(row), distinct(column), distinct(scale)
        boxes = list(self._boxes(e, numbers))
        rows, columns = (union([box[d] for box in boxes]) for d in (0, 1))  # type: ignore[misc]
        return rows, columns, blocks_of(numbers, self._grid(e.params)[1]) if e.params["axis"] == 1 else columns

    def _per(self, e: Expr) -> int:
        """Return the packed words in an element of the operand, which may have another dtype."""
        packing = e.params["packing"]
        return max(1, e.inputs[0].dtype.itemsize // _PACKINGS[packing].word) if packing else 1

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        rows, columns, scales = self._needed(e, want)
        return (rows, blocks_of(columns, self._per(e))), *(_of(one.shape, scales) for one in e.inputs[1:])

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = dtype_of(e.params["compute_dtype"]).torch
        numbers = numbers_of(e.shape, want)
        rows, columns, scales = self._needed(e, want)
        known = _PACKINGS[e.params["packing"]] if e.params["packing"] else None
        block = blocks[0].contiguous()
        held: Axis = columns
        if known is not None:
            block = block.view(torch.uint8 if known.word == 1 else torch.int32)
            words = indices(blocks_of(columns, self._per(e)))
            held = as_axis((words[:, None] * self._per(e) + np.arange(self._per(e))).ravel())
        values = [one.reshape(-1).to(dtype) for one in blocks[1:]]
        out = torch.empty(shape_of(want), dtype=dtype)
        flat = out.view(-1)
        if not isinstance(numbers, range):
            row, column, runs, scale = self._cells(e, numbers)
            at = positions(row, rows, 1) * len(held) + positions(column, held, 1)
            codes = block.view(-1).index_select(0, torch.from_numpy(at))
            if known is not None:
                shift = torch.from_numpy(known.top - runs * known.bits).to(block.dtype)
                codes = codes.bitwise_right_shift_(shift).bitwise_and_((1 << known.bits) - 1)
            position = torch.from_numpy(positions(scale, scales, 1))
            flat.copy_(codes)
            for one, op in zip(values, (flat.sub_, flat.mul_), strict=True):
                op(one if one.numel() == 1 else one.index_select(0, position))
            return convert(out, e.dtype.torch)
        done = 0
        step = self._step(e)
        for row_range, column_range, run in self._boxes(e, numbers):
            count = len(row_range) * len(column_range)
            box = flat[done : done + count].view(len(row_range), len(column_range))
            done += count
            codes = block[slice_of(row_range, rows), slice_of(column_range, held)]
            if known is not None:
                codes = (codes >> (known.top - run * known.bits)).bitwise_and_((1 << known.bits) - 1)
            box.copy_(codes)
            along = range(row_range.start + run * step, row_range.stop + run * step)
            for one, op in zip(values, (box.sub_, box.mul_), strict=True):
                if one.numel() == 1:
                    op(one)
                elif e.params["axis"] == 1:
                    op(one[slice_of(along, scales)].unsqueeze(1))
                else:
                    op(one[slice_of(column_range, scales)])
        return convert(out, e.dtype.torch)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), e.params["group_size"] or 1)


def _of(shape: Shape, axis: Axis) -> Selection:
    """Return the selection of numbered values from a tensor of one long dimension, or of its only value."""
    return tuple(axis if n > 1 else range(1) for n in shape)


OPS: dict[str, Op] = {"dequantize.hqq": Hqq()}
