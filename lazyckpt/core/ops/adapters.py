"""Operations of adapters (LoRA and its relatives) that sums and products of matrices do not express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import as_axis, indices
from ..box import Selection
from ..dtypes import dtype_of
from ..expr import Kind, Op, Scan, same_shape, wide
from ..specs import Expr
from .elementwise import Elementwise

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Multiply(Elementwise):
    """The product of the operands, element by element, in their order; in float32 (float64 if one is float64)."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return Kind(same_shape("a product of elements", inputs), wide(*(one.dtype for one in inputs)))

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        total = blocks[0].to(e.dtype.torch)
        for block in blocks[1:]:
            total = total.mul_(block.to(e.dtype.torch))
        return total


class Kronecker(Op):
    """The Kronecker product of two operands with the same number of dimensions, as `torch.kron`.

    Computed in float32 (float64 if an operand is float64). A selection needs of the first operand the elements whose
    blocks it meets, and of the second those within the blocks.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        (a, kind_a), (b, kind_b) = inputs
        if len(a) != len(b):
            raise DataError(f"there is no Kronecker product of shapes {a} and {b}")
        return Kind(tuple(m * n for m, n in zip(a, b, strict=True)), wide(kind_a, kind_b))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        sizes = e.inputs[1].shape
        outer = tuple(as_axis(np.unique(indices(axis) // n)) for axis, n in zip(want, sizes, strict=True))
        inner = tuple(as_axis(np.unique(indices(axis) % n)) for axis, n in zip(want, sizes, strict=True))
        return outer, inner

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = e.dtype.torch
        left, right = (block.to(dtype) for block in blocks)
        outer, inner = self.pull(e, want)
        for d, (axis, n) in enumerate(zip(want, e.inputs[1].shape, strict=True)):
            left = left.index_select(d, _positions(indices(axis) // n, indices(outer[d])))
            right = right.index_select(d, _positions(indices(axis) % n, indices(inner[d])))
        return left.mul_(right)


def _positions(wanted: np.ndarray[Any, Any], among: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.searchsorted(among, wanted))


class Dora(Op):
    """``axis``, ``dtype``: ``v * (m / norm)`` with the norms of all that has the same index along ``axis`` (DoRA).

    Operands: v, the magnitudes m (1-d), and the tensor of v's shape whose norms are meant, if it is not v. The norms
    are summed in float64 and rounded to the dtype that is computed in: float32, or float64 if v is float64.
    """

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape = inputs[0].shape
        if inputs[1].shape != (shape[params["axis"]],) or any(one.shape != shape for one in inputs[2:]):
            raise DataError(f"magnitudes of shape {inputs[1].shape} do not fit a weight of {shape}")
        return Kind(shape, dtype_of(params["dtype"]))

    def prepare(self, e: Expr, scan: Scan) -> Any:
        axis, shape = e.params["axis"], e.shape
        squares = np.zeros(shape[axis], np.float64)
        others = tuple(d for d in range(len(shape)) if d != axis)
        for box, (block,) in scan(2 if len(e.inputs) > 2 else 0):
            squares[box.slices[axis]] += np.square(block.to(torch.float64).numpy()).sum(axis=others)
        return torch.from_numpy(np.sqrt(squares)).to(wide(e.inputs[0].dtype).torch)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        nothing = (range(0),) * len(e.shape)
        return (want, (want[e.params["axis"]],), *(nothing for _ in e.inputs[2:]))

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        axis, norms = e.params["axis"], e.kept["prepared"]
        factor = blocks[1].to(norms.dtype) / norms[torch.from_numpy(indices(want[axis]))]
        shape = [1] * len(e.shape)
        shape[axis] = prod(factor.shape)
        return blocks[0].to(norms.dtype).mul_(factor.view(shape))


OPS: dict[str, Op] = {"multiply": Multiply(), "kron": Kronecker(), "lora.dora": Dora()}
