"""The product of two matrices, with a rounding that does not depend on how it is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import shape_of
from ..box import Selection
from ..dtypes import DType, dtype_of
from ..expr import Kind, Op, wide
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_TILE = 1 << 16  # elements of the result that stay in a core's cache while the products are summed


class Product(Op):
    """The matrix product of two operands, for a small inner dimension (a LoRA's rank).

    ``dtype`` is that of the result, by default float32 (float64 if an operand is float64), in which products and sums
    are computed. Each product and each sum is rounded once, in the order of the inner dimension. (A BLAS sums in an
    order that depends on the shapes.) Leading dimensions are batches, as in `torch.matmul`.
    """

    lets_go = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        (a, kind_a), (b, kind_b) = inputs
        if len(a) < 2 or len(a) != len(b) or a[:-2] != b[:-2] or a[-1] != b[-2]:
            raise DataError(f"there is no product of matrices of shapes {a} and {b}")
        return Kind((*a[:-1], b[-1]), dtype_of(params["dtype"]) if params.get("dtype") else wide(kind_a, kind_b))

    def wide(self, e: Expr) -> DType:
        return wide(*(one.dtype for one in e.inputs))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        inner = range(e.inputs[0].shape[-1])
        return (*want[:-1], inner), (*want[:-2], inner, want[-1])

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        left, right = blocks
        dtype = left.dtype
        out = torch.zeros(shape_of(want), dtype=dtype)
        rows = max(1, _TILE // max(1, out.shape[-1]))
        for at in range(0, out.shape[-2], rows):
            tile = out[..., at : at + rows, :]
            term = torch.empty(tile.shape, dtype=dtype)
            for k in range(left.shape[-1]):
                torch.mul(left[..., at : at + rows, k, None], right[..., None, k, :], out=term)
                tile += term
        return out


OPS: dict[str, Op] = {"product": Product()}
