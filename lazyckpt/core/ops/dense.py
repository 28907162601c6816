"""Dense tensors of torch's sparse ones: of coordinates and values (COO), of compressed rows or columns (CSR, CSC, ...).

The layouts: torch's documentation of torch.sparse; `torch.Tensor.to_dense` has the same bits. The places of the values
are not known without the index tensors, so they are read once (`prepare`): of COO all, of the compressed layouts the
tensor of the starts. What is kept takes at most twice the bytes that the file has for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError, DataError
from ..axes import as_axis, everything, groups_of, indices, shape_of
from ..box import Axis, Selection, Shape, c_strides
from ..dtypes import BF16, BOOL, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8, DType, bits_of
from ..expr import Kind, Op, Scan
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

Ints = NDArray[np.int64]
_SUMMED = frozenset({F32, F64, F16, BF16, I64, I32, I16, I8, U8, BOOL, C64, C128})  # that torch adds
_TALL = 1 << 20  # rows of compressed columns that are computed at a time
_MOST = 1 << 62  # elements of the dense tensor whose places int64 can number


def _found(axis: Axis, coordinates: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the positions of coordinates among those of an axis, and which ones are there."""
    if isinstance(axis, range):
        at, rest = np.divmod(coordinates - axis.start, axis.step)
        return at, (rest == 0) & (at >= 0) & (at < len(axis))
    at = np.minimum(np.searchsorted(axis, coordinates), len(axis) - 1)
    return at, axis[at] == coordinates


def _spans(starts: Ints, ends: Ints) -> Ints:
    """Return the numbers of all spans, one after the other.

    >>> _spans(np.array([2, 7]), np.array([4, 8]))
    array([2, 3, 7])
    """
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


class Coordinates(Op):
    """(indices, values): value ``n`` is at ``indices[:, n]`` of the first dimensions of ``shape``; values at the same
    place are added in their order, in their own dtype; all other elements are zero (COO).

    Reads all indices once, and then the values that are wanted."""

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        places, values = inputs
        shape = tuple(params["shape"])
        rank = places.shape[0] if len(places.shape) == 2 else 0
        if not rank or places.dtype is not I64 or values.shape != (places.shape[1], *shape[rank:]) or rank > len(shape):
            raise DataError(
                f"indices of {places.shape} and {places.dtype}, and values of {values.shape}, make no sparse tensor of "
                f"shape {shape}"
            )
        _numbered(shape, values.dtype)
        return Kind(shape, values.dtype)

    def prepare(self, e: Expr, scan: Scan) -> Any:
        rank, count = e.inputs[0].shape
        keys = np.zeros(count, np.int64)  # the number of each place in C order
        for box, (block,) in scan(0):
            here = slice(box.start[1], box.stop[1])
            for d, row in zip(range(box.start[0], box.stop[0]), block.numpy(), strict=True):
                if row.min() < 0 or row.max() >= e.shape[d]:
                    raise CorruptError(
                        f"an index of a sparse tensor is outside of its shape {e.shape}, in dimension {d}: the file is "
                        "damaged; its parts can be read from view.stored"
                    )
                keys[here] += row * c_strides(e.shape[:rank])[d]
        if (keys[1:] >= keys[:-1]).all():
            return keys, None
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _chosen(self, e: Expr, want: Selection) -> tuple[Ints, Ints]:
        """Return the numbers of the wanted values, ascending, and the place of each in the selection."""
        keys, order = e.kept["prepared"]
        rank = e.inputs[0].shape[0]
        strides = c_strides(e.shape[:rank])
        lo, hi = int(want[0][0]) * strides[0], (int(want[0][-1]) + 1) * strides[0]
        begin, end = np.searchsorted(keys, [lo, hi])
        rest = keys[begin:end]
        numbers = np.arange(begin, end) if order is None else order[begin:end]
        at = np.zeros(len(rest), np.int64)
        there = np.ones(len(rest), np.bool_)
        for axis, stride, step in zip(want[:rank], strides, c_strides(shape_of(want[:rank])), strict=True):
            position, one = _found(axis, rest // stride)
            rest = rest % stride
            at += position * step
            there &= one
        numbers, at = numbers[there], at[there]
        if order is not None:
            turned = np.argsort(numbers)
            numbers, at = numbers[turned], at[turned]
        return numbers, at

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        rank, count = e.inputs[0].shape
        if "prepared" not in e.kept:
            return everything((rank, count)), (range(count), *want[rank:])
        return (range(0), range(0)), (as_axis(self._chosen(e, want)[0]), *want[rank:])

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        _, at = self._chosen(e, want)
        rank = e.inputs[0].shape[0]
        width = prod(shape_of(want[rank:]))
        found = torch.zeros(prod(shape_of(want)), dtype=e.dtype.torch)
        places = at if width == 1 else (at[:, None] * width + np.arange(width)).ravel()
        # of one dimension, index_add_ adds one element after the other
        found.index_add_(0, torch.from_numpy(places), blocks[1].reshape(-1))
        return found.view(shape_of(want))


class Compressed(Op):
    """(starts, numbers, values): the values of row ``r`` are those from ``starts[r]`` to ``starts[r + 1]``, in the
    columns ``numbers`` (CSR); with ``rows`` False, of columns in rows (CSC). ``blocks``: a value is a block of so many
    rows and columns (BSR, BSC), else None. Further dimensions of ``starts`` are in front of the rows (batches), further
    ones of the values behind the columns.

    Reads all starts once, and then the numbers and values of the rows (or columns) that are wanted."""

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        starts, numbers, values = inputs
        shape, block = tuple(params["shape"]), params["blocks"]
        batches = starts.shape[:-1]
        lead = len(batches)
        size = tuple(block or (1, 1))
        matrix, rest = shape[lead : lead + 2], shape[lead + 2 :]
        fits = (
            len(starts.shape) > 0
            and len(matrix) == 2 == len(size)
            and min(size) > 0
            and shape[:lead] == batches == numbers.shape[:-1]
            and matrix[0] % size[0] == matrix[1] % size[1] == 0
            and len(numbers.shape) == lead + 1
            and values.shape == (*numbers.shape, *(block or ()), *rest)
            and starts.shape[-1] == (matrix[0] // size[0] if params["rows"] else matrix[1] // size[1]) + 1
            and starts.dtype is numbers.dtype
            and starts.dtype in (I32, I64)
        )
        if not fits:
            raise DataError(
                f"starts of {starts.shape}, numbers of {numbers.shape} and values of {values.shape} make no compressed "
                f"sparse tensor of shape {shape}"
            )
        _numbered(shape, values.dtype)
        return Kind(shape, values.dtype)

    def _sizes(self, e: Expr) -> tuple[int, int, int, int]:
        """Return the number of the first matrix dimension, which one is compressed (0 or 1), and the size of a block
        along it and along the other."""
        block = e.params["blocks"] or (1, 1)
        major = 0 if e.params["rows"] else 1
        return len(e.inputs[0].shape) - 1, major, block[major], block[1 - major]

    def prepare(self, e: Expr, scan: Scan) -> Any:
        lead, major, _, minor = self._sizes(e)
        shape, count = e.inputs[0].shape, e.inputs[1].shape[-1]
        starts = np.zeros(shape, np.int64)
        for box, (block,) in scan(0):
            starts[box.slices] = block.numpy()
        lengths = np.diff(starts, axis=-1)
        most = e.shape[lead + 1 - major] // minor
        if (
            (starts[..., 0] != 0).any() or (starts[..., -1] != count).any()
            or (lengths < 0).any() or (lengths > most).any()
        ):  # fmt: skip
            raise CorruptError(
                f"the starts of a compressed sparse tensor of shape {e.shape} do not divide its {count:,} values: the "
                "file is damaged; its parts can be read from view.stored"
            )
        return starts

    def _wanted(self, e: Expr, want: Selection) -> tuple[list[tuple[Ints, Ints]], Ints]:
        """Return the starts and ends of the wanted rows of blocks in each wanted matrix, and the numbers of all their
        values, ascending."""
        lead, major, size, _ = self._sizes(e)
        rows = indices(groups_of(want[lead + major], size))
        starts = e.kept["prepared"][np.ix_(*map(indices, want[:lead]))].reshape(-1, e.inputs[0].shape[-1])
        spans = [(one[rows], one[rows + 1]) for one in starts]
        numbers = [_spans(*one) for one in spans]
        return spans, numbers[0] if len(numbers) == 1 else np.unique(np.concatenate(numbers))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        lead, _, _, _ = self._sizes(e)
        batches, rest = want[:lead], want[lead + 2 :]
        inner = tuple(map(range, e.params["blocks"] or ()))
        if "prepared" not in e.kept:
            count = range(e.inputs[1].shape[-1])
            return everything(e.inputs[0].shape), (*batches, count), (*batches, count, *inner, *rest)
        numbers = as_axis(self._wanted(e, want)[1])
        return (range(0),) * (lead + 1), (*batches, numbers), (*batches, numbers, *inner, *rest)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        lead, major, size, minor = self._sizes(e)
        spans, numbers = self._wanted(e, want)
        rows = indices(groups_of(want[lead + major], size))
        lines, columns = want[lead + major], want[lead + 1 - major]
        width = prod(shape_of(want[lead + 2 :]))
        steps = (len(columns), 1) if major == 0 else (1, len(lines))  # of a line and of a column in the result
        inner = (size, minor) if major == 0 else (minor, size)
        kind = bits_of(e.dtype.itemsize)
        found = torch.zeros((len(spans), len(lines) * len(columns), width), dtype=kind)
        others = blocks[1].numpy().reshape(len(spans), len(numbers))
        values = blocks[2].reshape(len(spans), len(numbers) * prod(inner), width).view(kind)
        for n, (starts, ends) in enumerate(spans):
            position = np.searchsorted(numbers, _spans(starts, ends))
            row = np.repeat(rows, ends - starts)
            column = others[n, position].astype(np.int64)
            self._check(e, row, column)
            at, there = _places(lines, row, size, columns, column, minor, steps)
            if major:
                at, there = at.swapaxes(1, 2), there.swapaxes(1, 2)
            held = (position[:, None, None] * prod(inner) + np.arange(prod(inner)).reshape(inner))[there]
            found[n].index_copy_(0, torch.from_numpy(at[there]), values[n].index_select(0, torch.from_numpy(held)))
        dense = found.view(e.dtype.torch).view(shape_of(want))
        # torch adds the values to zeros, so that there is no -0.0
        return dense.add_(0) if e.dtype.is_floating_point or e.dtype.is_complex else dense

    def _check(self, e: Expr, row: Ints, column: Ints) -> None:
        """Raise CorruptError unless each value of the rows has a place of its own."""
        lead, major, _, minor = self._sizes(e)
        most = e.shape[lead + 1 - major] // minor
        inside = not len(column) or (column.min() >= 0 and column.max() < most)
        keys = row * most + column
        if not inside or ((keys[1:] <= keys[:-1]).any() and len(np.unique(keys)) < len(keys)):
            what = "two values at the same place" if inside else f"a value outside of its shape {e.shape}"
            raise CorruptError(
                f"a compressed sparse tensor has {what}: the file is damaged; its parts can be read from view.stored"
            )

    def grain(self, e: Expr) -> Shape:
        lead, major, size, minor = self._sizes(e)
        matrix = (size, minor) if major == 0 else (min(e.shape[lead], _TALL), size)
        return (*(1,) * lead, *matrix, *(1,) * (len(e.shape) - lead - 2))


def _places(
    lines: Axis, row: Ints, size: int, columns: Axis, column: Ints, minor: int, steps: tuple[int, int]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return for each block its elements' places in the result, [blocks, size, minor], and which are wanted."""
    down, has = _found(lines, row[:, None] * size + np.arange(size))
    along, have = _found(columns, column[:, None] * minor + np.arange(minor))
    at = down[:, :, None] * steps[0] + along[:, None, :] * steps[1]
    return at, has[:, :, None] & have[:, None, :]


def _numbered(shape: Shape, dtype: DType) -> None:
    """Raise DataError if torch has no such dense tensor."""
    if dtype not in _SUMMED:
        raise DataError(f"torch adds no values of {dtype}, as a sparse tensor needs")
    if prod(shape) >= _MOST:
        raise DataError(f"a sparse tensor of shape {shape} has more elements than can be numbered")


OPS: dict[str, Op] = {"dense.coo": Coordinates(), "dense.compressed": Compressed()}
