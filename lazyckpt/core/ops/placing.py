"""Operations that move elements: blocks of operands at their places, flat intervals, other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..axes import as_axis, indices, shape_of
from ..box import Axis, Box, Selection, Shape, c_strides
from ..dtypes import bits_of
from ..expr import Kind, Op, op_of
from ..placement import Part, Placement
from ..plan import earlier_overlaps
from ..specs import Expr, Input

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Place(Op):
    """``shape``, ``placements``: each operand's blocks at their places. Of blocks that overlap the first operand's
    counts, as for fragments. Every element must be in a block."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        dtypes = dict.fromkeys(one.dtype for one in inputs)
        if len(dtypes) != 1:
            raise DataError(f"blocks of different dtypes make no tensor: {', '.join(map(str, dtypes))}")
        shape = tuple(params["shape"])
        for one, placement in zip(inputs, params["placements"], strict=True):
            if one.shape != placement.shape:
                raise DataError(f"an operand of shape {one.shape} has the placement of one of {placement.shape}")
            for part in placement.blocks:
                box = placement.target(part)
                if part.local and (Box.of(shape) & box != box or Box.of(one.shape) & part.local != part.local):
                    raise DataError(f"a block of an operand of shape {one.shape} does not fit into {shape}")
        return Kind(shape, inputs[0].dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        found: list[Selection] = []
        for operand, placement in zip(e.inputs, e.params["placements"], strict=True):
            chosen = [_local(placement, part, hits, want) for part, hits in _hits(placement, want)]
            if len(chosen) > 1:
                found.append(tuple(_union(axes) for axes in zip(*chosen, strict=True)))
            else:
                found.append(tuple(chosen[0]) if chosen else (range(0),) * len(operand.shape))
        return found

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = shape_of(want)
        placements = e.params["placements"]
        hit = [(n, part, hits) for n, one in enumerate(placements) for part, hits in _hits(one, want)]
        whole = [(0, length) for length in shape]
        if hit and hit[0][2] == whole:  # in one block, as most are
            n, part, hits = hit[0]
            return _turned(_found(blocks[n], self._pulled(e, want, n), placements[n], part, hits, want), placements[n])
        out = torch.empty(shape, dtype=e.dtype.torch)
        target = out.view(bits_of(e.dtype.itemsize))
        boxes = [Box(tuple(lo for lo, _ in hits), tuple(hi for _, hi in hits)) for _, _, hits in hit]
        left = out.numel() - sum(box.numel for box in boxes)
        if any(earlier_overlaps(boxes)):
            covered = torch.zeros(shape, dtype=torch.bool)
            for box in boxes:
                covered[box.slices] = True
            left = out.numel() - int(covered.sum())
        if left:
            raise DataError(f"{left:,} of the wanted elements are in no block of the {len(blocks)} operands")
        for (n, part, hits), box in zip(reversed(hit), reversed(boxes), strict=True):  # the first one is written last
            source = _found(blocks[n], self._pulled(e, want, n), placements[n], part, hits, want)
            target[box.slices] = _turned(source, placements[n]).view(target.dtype)
        return out

    def _pulled(self, e: Expr, want: Selection, n: int) -> Selection:
        return self.pull(e, want)[n]

    def grain(self, e: Expr) -> Shape:
        grains = [op_of(one.op).grain(one) for one in e.inputs if isinstance(one, Expr)]
        if not grains or any(len(one) != len(e.shape) for one in grains):
            return super().grain(e)
        return tuple(map(max, zip(*grains, strict=True)))


Hits = list[tuple[int, int]]


def _hits(placement: Placement, want: Selection) -> Iterator[tuple[Part, Hits]]:
    """Yield the blocks that have wanted elements, with the interval of positions in ``want`` of each dimension."""
    for part in placement.blocks:
        box = placement.target(part)
        hits = []
        for axis, lo, hi in zip(want, box.start, box.stop, strict=True):
            if isinstance(axis, range):
                first = max(0, -(-(lo - axis.start) // axis.step))
                last = min(len(axis), -(-(hi - axis.start) // axis.step))
            else:
                first, last = map(int, np.searchsorted(axis, (lo, hi)))
            if first >= last:
                break
            hits.append((first, last))
        else:
            if part.local:
                yield part, hits


def _local(placement: Placement, part: Part, hits: Hits, want: Selection) -> list[Axis]:
    """Return the wanted indices of a block, in each dimension of the operand."""
    found: list[Axis] = [range(lo, lo + 1) for lo in part.local.start]
    for d, axis in enumerate(range(len(found)) if placement.axes is None else placement.axes):
        if axis is not None:
            first, last = hits[d]
            chosen, ahead = want[d][first:last], part.local.start[axis] - part.start[d]
            if isinstance(chosen, range):
                found[axis] = range(chosen.start + ahead, chosen.stop + ahead, chosen.step)
            else:
                found[axis] = chosen + ahead
    return found


def _union(axes: Sequence[Axis]) -> Axis:
    """Return all indices of several axes."""
    if all(axis == axes[0] if isinstance(axis, range) else False for axis in axes):
        return axes[0]
    return as_axis(np.unique(np.concatenate([indices(axis) for axis in axes])))


def _found(
    block: torch.Tensor, pulled: Selection, placement: Placement, part: Part, hits: Hits, want: Selection
) -> torch.Tensor:
    """Return the wanted elements of a part, from all that was pulled of its operand."""
    for d, axis in enumerate(_local(placement, part, hits, want)):
        if len(axis) != block.shape[d]:
            at = np.searchsorted(indices(pulled[d]), indices(axis))
            bits = block.view(bits_of(block.itemsize))
            block = bits.index_select(d, torch.from_numpy(at)).view(block.dtype)
    return block


def _turned(source: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return a block of an operand in the dimensions of the result."""
    if placement.axes is None:
        return source
    kept = [axis for axis in placement.axes if axis is not None]
    dropped = [d for d in range(source.ndim) if d not in kept]  # of length 1
    moved = source.permute((*kept, *dropped)).reshape([source.shape[d] for d in kept])
    for d, axis in enumerate(placement.axes):
        moved = moved.unsqueeze(d) if axis is None else moved
    return moved


class Flat(Op):
    """``start``, ``stop``: an interval of the operand's C-order ravel, as a 1-d tensor."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        if not 0 <= params["start"] <= params["stop"] <= prod(inputs[0].shape):
            raise DataError(f"elements {params['start']:,} to {params['stop']:,} are not in {inputs[0].shape}")
        return Kind((params["stop"] - params["start"],), inputs[0].dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (_Group(e.inputs[0].shape, (e.shape[0],), want, e.params["start"]).pulled,)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return _picked(blocks[0], [_Group(e.inputs[0].shape, (e.shape[0],), want, e.params["start"])])


class Reshape(Op):
    """``shape``: the operand's elements in C order in another shape.

    Dimensions that are joined or split are looked at apart from the others: of ``(a, b, c)`` as ``(a * b, c)``, columns
    need columns.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        if prod(params["shape"]) != prod(inputs[0].shape):
            raise DataError(f"{inputs[0].shape} cannot be reshaped to {params['shape']}")
        return Kind(tuple(params["shape"]), inputs[0].dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (tuple(axis for group in _groups(e, want) for axis in group.pulled),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return _picked(blocks[0], _groups(e, want)).view(shape_of(want))


def _groups(e: Expr, want: Selection) -> list[_Group]:
    """Return the least groups of neighbouring dimensions with the same number of elements before and after."""
    old, new = e.inputs[0].shape, e.shape
    found = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b, before, after = i, j, 1, 1
        while (i == a and j == b) or before != after:
            if before <= after and i < len(old):
                before *= old[i]
                i += 1
            else:
                after *= new[j]
                j += 1
        found.append(_Group(old[a:i], new[b:j], want[b:j]))
    return found


_MANY = 1 << 22  # numbers of elements that are looked at one by one; of more, all between the first and the last count


class _Group:
    """Dimensions ``old`` of an operand that become dimensions ``new``, of which some elements are wanted.

    ``pulled`` is the block of the operand that has them.
    """

    def __init__(self, old: Shape, new: Shape, want: Selection, ahead: int = 0) -> None:
        self.old, self.want, self.ahead = old, want, ahead
        self._strides = c_strides(new)
        self.first = ahead + sum(int(axis[0]) * s for axis, s in zip(want, self._strides, strict=True))
        self.last = ahead + sum(int(axis[-1]) * s for axis, s in zip(want, self._strides, strict=True))
        self.count = prod(map(len, want))
        self.is_run = self.last - self.first + 1 == self.count
        if self.is_run or self.count > _MANY:
            self.pulled = self._between()
        elif len(old) == 1:
            only = want[0] if len(want) == 1 else None
            shifted = None
            if isinstance(only, range):
                shifted = range(only.start + ahead, only.stop + ahead, only.step)
            self.pulled = (as_axis(self.numbers) if shifted is None else shifted,)
        else:
            self.pulled = tuple(as_axis(np.unique(axis)) for axis in np.unravel_index(self.numbers, old))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The C-order numbers of the wanted elements, in order."""
        total = np.full(1, self.ahead, np.int64)
        for axis, stride in zip(self.want, self._strides, strict=True):
            total = (total[:, None] + indices(axis) * stride).ravel()
        return total

    def _between(self) -> Selection:
        """Return the smallest block that has the elements from the first to the last."""
        if not self.old:
            return ()
        lo, hi = np.unravel_index(self.first, self.old), np.unravel_index(self.last, self.old)
        found: list[Axis] = []
        for d in range(len(self.old)):
            same = lo[:d] == hi[:d]  # behind the first dimension in which the elements differ the block is whole
            found.append(range(int(lo[d]), int(hi[d]) + 1) if same else range(self.old[d]))
        return tuple(found)

    @property
    def positions(self) -> NDArray[np.int64] | slice | None:
        """Where the wanted elements are in the C order of the block; None if it has no others."""
        size = prod(map(len, self.pulled))
        if size == self.count:
            return None
        strides = c_strides(tuple(map(len, self.pulled)))
        if self.is_run:
            at = self._position(np.array([self.first]), strides)
            return slice(int(at[0]), int(at[0]) + self.count)
        return self._position(self.numbers, strides)

    def _position(self, numbers: NDArray[np.int64], strides: Shape) -> NDArray[np.int64]:
        total = np.zeros(len(numbers), np.int64)
        for axis, chosen, stride in zip(np.unravel_index(numbers, self.old), self.pulled, strides, strict=True):
            if isinstance(chosen, range):
                total += (axis - chosen.start) // chosen.step * stride
            else:
                total += np.searchsorted(chosen, axis) * stride
        return total


def _picked(block: torch.Tensor, groups: Sequence[_Group]) -> torch.Tensor:
    """Return the wanted elements of a block, with a dimension for each group."""
    found = block.reshape([prod(map(len, group.pulled)) for group in groups])
    for d, group in enumerate(groups):
        positions = group.positions
        if isinstance(positions, slice):
            found = found.narrow(d, positions.start, group.count)
        elif positions is not None:
            bits = found.view(bits_of(found.itemsize))
            found = bits.index_select(d, torch.from_numpy(positions)).view(found.dtype)
    return found.contiguous()


class Transpose(Op):
    """``axes``: for each dimension of the result the dimension of the operand."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        axes = tuple(params["axes"])
        if sorted(axes) != list(range(len(inputs[0].shape))):
            raise DataError(f"axes {axes} do not permute the dimensions of {inputs[0].shape}")
        return Kind(tuple(inputs[0].shape[a] for a in axes), inputs[0].dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        axes = e.params["axes"]
        return (tuple(want[axes.index(d)] for d in range(len(axes))),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0].permute(tuple(e.params["axes"])).contiguous()

    def grain(self, e: Expr) -> Shape:
        one = e.inputs[0]
        least = max(1, 1024 // one.dtype.itemsize) if isinstance(one, Input) else 1  # rows of the result are columns
        return (*(1,) * (len(e.shape) - 2), *((least, 1) if len(e.shape) > 1 else (1,)))[: len(e.shape)]


OPS: dict[str, Op] = {"place": Place(), "flat": Flat(), "reshape": Reshape(), "transpose": Transpose()}
