"""Codes times scales: a scale for each block of codes, whatever the shape of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import grouped, groups_of, indices
from ..box import Axis, Selection
from ..dtypes import DType, dtype_of
from ..expr import Kind, Op
from ..rounding import settle
from ..specs import Expr
from .small_floats import TILE, Decoder, float32_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


_LARGE = 2.0**100  # a scale below it can be multiplied by 256


class Scaled(Op):
    """(code - zero point) * scale, for (codes, scales) or (codes, scales, zero points).

    ``block``: for each dimension, how many neighbours share a scale; the last block may be shorter. ``dtype``: that of
    the result, by default that of the scales. ``divide``: divide by the scales instead.

    Computed in float32 (float64 if the scales are float64), in which codes of up to eight bits are exact; the
    difference, the product and the conversion to ``dtype`` are rounded once each.
    """

    lets_go = True
    in_tiles = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        codes, scales, *zeros = inputs
        block = params["block"]
        if len(block) != len(codes.shape):
            raise DataError(f"codes of shape {codes.shape} have no blocks of shape {block}")
        wanted = tuple(-(-n // max(1, b)) for n, b in zip(codes.shape, block, strict=True))
        for one in (scales, *zeros):
            if one.shape != wanted:
                raise DataError(f"{codes.shape} codes in blocks of {block} have {wanted} scales, not {one.shape}")
        if not scales.dtype.is_floating_point:
            raise DataError(f"scales are floating-point numbers, not {scales.dtype}")
        return Kind(codes.shape, dtype_of(params["dtype"]) if params.get("dtype") else scales.dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        scales = tuple(groups_of(axis, size) for axis, size in zip(want, e.params["block"], strict=True))
        return (want, *(scales,) * (len(e.inputs) - 1))

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._computed(e, want, blocks, None)

    def fill(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        found = self._computed(e, want, blocks, out if out.is_contiguous() else None)
        return settle(out) if found is out else found

    def _computed(
        self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor], out: torch.Tensor | None
    ) -> torch.Tensor:
        codes, scales, *zeros = blocks
        block, divide = e.params["block"], bool(e.params.get("divide"))
        if _is_double(e.inputs[1].dtype):
            found = codes.to(torch.float64)
            for zero in zeros:
                _with(torch.Tensor.sub_, found, zero.to(torch.float64), want, block)
            _with(torch.Tensor.div_ if divide else torch.Tensor.mul_, found, scales, want, block)
            return found
        operands = [float32_of(one) for one in (*zeros, scales)]
        by = 1.0
        if codes.dtype is torch.float8_e4m3fn:  # `Decoder` yields a 256th
            if divide or zeros or not bool(operands[-1].abs().max() < _LARGE):
                by = 256.0
            else:
                operands[-1] = operands[-1] * 256.0  # exact, and a pass less over the codes
        for d, (axis, size) in enumerate(zip(want[:-1], block[:-1], strict=True)):
            operands = [_spread(one, d, axis, size) for one in operands]
        if out is None:
            out = torch.empty(codes.shape, dtype=e.dtype.torch)
        return _in_tiles(codes, operands, divide, by, want[-1:], block[-1:], out)


def _in_tiles(
    codes: torch.Tensor,
    operands: Sequence[torch.Tensor],
    divide: bool,
    by: float,
    last: Selection,
    block: Sequence[int],
    out: torch.Tensor,
) -> torch.Tensor:
    """Write codes less zero points, if any, times scales, rounded, into contiguous memory, and return it: some
    rows at a time, in memory that the thread keeps. ``operands``: zero points and scales for each row, or for all rows.
    ``by``: what `Decoder` divided the codes by."""
    width = codes.shape[-1] if codes.ndim else 1
    lead = codes.shape[:-1]
    rows, results = codes.reshape(-1, width), out.view(-1, width)
    spread = [one.expand(*lead, *one.shape[-1:]).reshape(len(rows), -1) for one in operands]
    step = max(1, TILE // max(1, width))
    axis, size = (last[0], block[0]) if last else (range(1), 1)
    if isinstance(axis, range) and axis.step == 1 and not axis.start % size and not len(axis) % size:
        whole = (len(axis) // size, size)
    else:
        whole = (1, width) if spread[-1].shape[-1] == 1 else (0, 0)
    plain = whole[0] and not divide and len(spread) == 1
    if plain:
        spread = [spread[0][:, :, None]]
    others = (torch.split(one, step) for one in (results, *spread))
    parts = zip(Decoder(rows).tiles(step), *others, strict=True)
    for found, result, *own in parts:
        if by != 1:
            found *= by
        if plain:
            found.view(len(own[0]), *whole).mul_(own[0])
        else:
            want = (range(len(found)), axis)
            for one in own[:-1]:
                _with(torch.Tensor.sub_, found, one, want, (1, size))
            _with(torch.Tensor.div_ if divide else torch.Tensor.mul_, found, own[-1], want, (1, size))
        result.copy_(found)  # NaN is settled later
    return out


def _is_double(dtype: DType) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 8


def _with(
    operation: Callable[[torch.Tensor, torch.Tensor], Any],
    found: torch.Tensor,
    scales: torch.Tensor,
    want: Selection,
    block: Sequence[int],
) -> None:
    """Combine each element with its block's scale, in place."""
    for d, (axis, size) in enumerate(zip(want[:-1], block[:-1], strict=True)):
        scales = _spread(scales, d, axis, size)
    if not want:
        operation(found, scales)
        return
    axis, size = want[-1], block[-1]
    if scales.shape[-1] == 1 or size == 1 or not isinstance(axis, range) or axis.step != 1:
        operation(found, _spread(scales, len(want) - 1, axis, size))
        return
    # whole blocks as a dimension of their own; the first and the last one may be cut
    head = min(-axis.start % size, len(axis))
    whole = (len(axis) - head) // size
    at = 0
    if head:
        operation(found[..., :head], scales[..., :1])
        at = 1
    if whole:
        middle = found[..., head : head + whole * size].view(*found.shape[:-1], whole, size)
        operation(middle, scales[..., at : at + whole, None])
    if head + whole * size < len(axis):
        operation(found[..., head + whole * size :], scales[..., -1:])


def _spread(scales: torch.Tensor, d: int, axis: Axis, size: int) -> torch.Tensor:
    """Return the scales with one for each index of an axis, or with one for all."""
    if size == 1 or scales.shape[d] == 1:
        return scales
    return scales.index_select(d, torch.from_numpy(grouped(axis, size)[1]))


class ByIndex(Op):
    """Columns of the first operand by the numbers in the second: ``values[..., index[j]]`` for each ``j``.

    Where the index is -1 and ``size`` is given, it is ``j // size``: groups in order. Reads the whole rows of the
    values that are wanted, and the wanted indices.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        values, index = inputs
        if not values.shape or len(index.shape) != 1 or index.dtype.is_floating_point:
            raise DataError(f"columns of {values.shape} are not chosen by {index.dtype} of shape {index.shape}")
        return Kind((*values.shape[:-1], *index.shape), values.dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (*want[:-1], range(e.inputs[0].shape[-1])), want[-1:]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        values, index = blocks[0], blocks[1].to(torch.int64)
        if e.params.get("size"):
            index = torch.where(index == -1, torch.from_numpy(indices(want[-1]) // e.params["size"]), index)
        if int(index.min()) < 0 or int(index.max()) >= values.shape[-1]:
            raise DataError(f"an index of groups names one that is not among the {values.shape[-1]:,}")
        return values.index_select(-1, index)


OPS: dict[str, Op] = {"dequantize.scaled": Scaled(), "dequantize.by_index": ByIndex()}
