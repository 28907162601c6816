"""Operations of delta checkpoints: a tensor from that of a base checkpoint, and from what has changed.

All of them move bits: NaN payloads, negative zeros and every dtype are kept as they are.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import as_axis, indices, shape_of
from ..box import Axis, Selection
from ..dtypes import DType, bits_of, dtype_of
from ..expr import Kind, Op, Scan, op_of, same_shape
from ..merkle import Form, Hasher
from ..specs import Expr
from .elementwise import Elementwise

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Bits(Elementwise):
    """``dtype``: the bits of the operand as another dtype of the same size; by default the dtype that moves bits."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape, dtype = inputs[0]
        to = bits(dtype) if params.get("dtype") is None else dtype_of(params["dtype"])
        if to.itemsize != dtype.itemsize:
            raise DataError(f"the bits of {dtype} are not those of {to}: they have different sizes")
        return Kind(shape, to)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return _as(blocks[0], e.dtype)


class Xor(Elementwise):
    """``dtype``: the bits of two operands of the same size combined by exclusive or, as this dtype.

    ``whole``: the second operand is packed as one piece, so it is better unpacked once for a read.

    The operation is its own inverse: of a tensor and its base it gives the difference, of the base and the difference
    the tensor.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape = same_shape("delta.xor", inputs)
        to = dtype_of(params["dtype"])
        if len(inputs) != 2 or any(one.dtype.itemsize != to.itemsize for one in inputs):
            raise DataError(f"delta.xor takes two operands with elements of {to.itemsize} bytes, as {to} has them")
        return Kind(shape, to)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        words = bits_of(min(8, e.dtype.itemsize))  # complex128 as two numbers
        one, other = (block.contiguous().reshape(-1).view(words) for block in blocks)
        return one.bitwise_xor_(other).view(e.dtype.torch).view(shape_of(want))

    def grain(self, e: Expr) -> tuple[int, ...]:
        return e.shape if e.params.get("whole") else tuple(super().grain(e))


class Overwrite(Op):
    """``runs``: the first operand with the rows of the second one in the places of these intervals of rows.

    Rows are indices of dimension 0. The intervals are ascending and disjoint, and the second operand has their rows one
    after the other. Of the base only rows outside of the intervals are read.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        base, values = inputs
        if not base.shape or base.dtype != values.dtype:
            raise DataError(f"delta.overwrite: {values.dtype} cannot overwrite rows of {base.dtype} {base.shape}")
        last = rows = 0
        for start, stop in params["runs"]:
            if not last <= start < stop <= base.shape[0]:
                raise DataError(f"delta.overwrite: {start:,} to {stop:,} are no rows after row {last:,}")
            last, rows = stop, rows + stop - start
        if values.shape != (rows, *base.shape[1:]):
            raise DataError(f"delta.overwrite: {rows:,} rows are to be overwritten, the values are {values.shape}")
        return base

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        inside, rows = _rows(e.params["runs"], want[0])
        kept, new = indices(want[0])[~inside], rows[inside]
        nothing: Selection = (range(0),) * len(want)
        return (
            (as_axis(kept), *want[1:]) if len(kept) else nothing,
            (as_axis(new), *want[1:]) if len(new) else nothing,
        )

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        inside, _ = _rows(e.params["runs"], want[0])
        if inside.all():
            return blocks[1]
        if not inside.any():
            return blocks[0]
        out = torch.empty(shape_of(want), dtype=bits_of(e.dtype.itemsize))
        out[torch.from_numpy(~inside)] = blocks[0].view(out.dtype)
        out[torch.from_numpy(inside)] = blocks[1].view(out.dtype)
        return out.view(e.dtype.torch)


def _rows(runs: Sequence[Sequence[int]], axis: Axis) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return which rows are in one of the intervals, and for those the number of the row among all of the intervals."""
    starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(stops - starts)])
    at = indices(axis)
    which = np.searchsorted(starts, at, "right") - 1
    inside = (which >= 0) & (at < stops[which]) if len(starts) else np.zeros(len(at), bool)
    return inside, at - starts[which] + before[which] if len(starts) else at


class Checked(Op):
    """``digest``, ``where``: the operand, if this is its digest: SHA-256 of docs/formats/digest.md, or by the function
    ``algorithm`` ("xxh3-128", "blake3", "adler32", "sha256") that of its bytes.

    The first read of a tensor reads all of it once, for the digest. DataError says that it is another tensor.
    """

    moves = True
    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return inputs[0]

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (want,)

    def prepare(self, e: Expr, scan: Scan) -> Any:
        one, algorithm = e.inputs[0], e.params.get("algorithm")
        whole = Form(one.dtype.name, one.shape, prod(one.shape) * one.dtype.itemsize)
        hasher = Hasher(whole, 0, hashlib.sha256) if algorithm is None else _hasher(algorithm, e.params["where"])
        for _, (block,) in scan(0):
            hasher.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if isinstance(hasher, Hasher):
            found = whole.digest(hasher.leaves().hashes, hashlib.sha256).hex()
        else:
            found = hasher.hexdigest()
        if found != e.params["digest"]:
            raise DataError(
                f"{e.params['where']}: this is not the tensor that was recorded: the base is another checkpoint, or a "
                "file is damaged. Open it with base=, the checkpoint that it was made from"
            )
        return True

    def about(self, e: Expr) -> str:
        return f"{super().about(e)} (the first read computes the digest of the whole tensor)"

    def grain(self, e: Expr) -> tuple[int, ...]:
        one = e.inputs[0]
        return tuple(op_of(one.op).grain(one)) if isinstance(one, Expr) else tuple(super().grain(e))

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0]


class _Adler32:
    """adler32 with the methods of hashlib's objects."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _hasher(algorithm: str, where: str) -> Any:
    """Return a new hasher of bytes. Raises DataError if there is none of this name, or its package is missing."""
    if algorithm == "adler32":
        return _Adler32()
    if algorithm == "sha256":
        return hashlib.sha256()
    package = {"xxh3-128": "xxhash", "blake3": "blake3"}.get(algorithm)
    if package is None:
        raise DataError(f"{where}: its checksum is by {algorithm!r:.40}, which lazyckpt cannot compute")
    try:
        module = import_module(package)
    except ImportError:
        raise DataError(f"{where}: comparing it with its checksum needs a package: pip install {package}") from None
    return module.xxh3_128() if package == "xxhash" else module.blake3()


class Scatter(Op):
    """The first operand with single bytes overwritten, as the second one lists them: their number (4 bytes, lowest
    first), the position of each (4 bytes), and the new bytes.

    Source: slime/utils/disk_delta.py `overwrite_encode` (THUDM/slime, commit 624b824).
    A selection needs the whole list.
    """

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        base, changes = inputs
        if changes.dtype.itemsize != 1 or len(changes.shape) != 1 or (changes.shape[0] - 4) % 5:
            raise DataError(f"delta.scatter: {changes.shape} of {changes.dtype} is no list of bytes and positions")
        return base

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return want, (range(e.inputs[1].shape[0]),)

    def grain(self, e: Expr) -> tuple[int, ...]:
        return e.shape  # the list is unpacked once for a read

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        out = blocks[0].contiguous()
        changes = blocks[1].contiguous().view(torch.uint8).numpy()
        count = (len(changes) - 4) // 5
        positions = np.frombuffer(changes[4 : 4 + 4 * count].tobytes(), "<u4").astype(np.int64)
        nbytes = prod(e.shape) * e.dtype.itemsize
        if int.from_bytes(changes[:4].tobytes(), "little") != count or (len(positions) and positions.max() >= nbytes):
            raise DataError(f"a list of {count:,} changed bytes does not fit a tensor of {nbytes:,} bytes: damaged")
        size = e.dtype.itemsize
        at, new = positions // size, changes[4 + 4 * count :]
        target = np.zeros(len(at), np.int64)
        hit = np.ones(len(at), bool)
        for axis, length, stride in zip(want, e.shape, _strides(e.shape), strict=True):
            index = at // stride % length
            chosen = indices(axis)
            place = np.minimum(np.searchsorted(chosen, index), len(chosen) - 1)
            hit &= chosen[place] == index
            target = target * len(chosen) + place
        memory = out.reshape(-1).view(torch.uint8).numpy()
        memory[(target * size + positions % size)[hit]] = new[hit]
        return out


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[d + 1 :]) for d in range(len(shape))]


def bits(dtype: DType) -> DType:
    """Return the dtype that holds the bits of another one in a delta."""
    return dtype_of(bits_of(dtype.itemsize))


def _as(block: torch.Tensor, dtype: DType) -> torch.Tensor:
    return block.contiguous().view(dtype.torch)


OPS: dict[str, Op] = {
    "delta.bits": Bits(),
    "delta.xor": Xor(),
    "delta.overwrite": Overwrite(),
    "delta.checked": Checked(),
    "delta.scatter": Scatter(),
}
