"""Operations on elements: conversions of dtype, conjugation, negation, means and linear combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..box import Selection, Shape
from ..dtypes import DType, converts, dtype_of
from ..expr import Kind, Op, op_of, same_shape, wide
from ..rounding import negated
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Elementwise(Op):
    """An operation whose element needs the same element of every operand, all of the same shape."""

    elementwise = True
    lets_go = True

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (want,) * len(e.inputs)

    def grain(self, e: Expr) -> Shape:
        grains = [op_of(one.op).grain(one) for one in e.inputs if isinstance(one, Expr)]
        return tuple(map(max, zip(*grains, strict=True))) if grains else super().grain(e)


class Same(Elementwise):
    """The operand itself: gives a tensor of another store a place among computed ones."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return inputs[0]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0]


class Cast(Elementwise):
    """``dtype``: convert as `torch.Tensor.to` does. NaN becomes a quiet NaN, in bfloat16 0x7fc0.

    Numbers that an integer dtype cannot hold (too large, infinite, NaN) have no defined result in torch either.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        dtype = dtype_of(params["dtype"])
        if not converts(inputs[0].dtype, dtype):
            raise DataError(f"torch does not convert {inputs[0].dtype} to {dtype}")
        return Kind(inputs[0].shape, dtype)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0]  # `Op.compute`: the reader converts


class Conj(Elementwise):
    """The complex conjugate: the sign bit of the imaginary part is inverted. Real elements are unchanged."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return inputs[0]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0].conj().resolve_conj() if e.dtype.is_complex else blocks[0]


class Neg(Elementwise):
    """The negative: the sign bits of floating-point and complex elements are inverted, integers are negated."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        dtype = inputs[0].dtype
        if not dtype.is_signed or not dtype.is_number:
            raise DataError(f"there is no negative of {dtype}")
        return inputs[0]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return negated(blocks[0])


class Linear(Elementwise):
    """``weights``: the sum of the operands, each times its weight, in the order of the operands.

    ``dtype`` is that of the result, by default the widest of the operands. Products and sums are in float32 (float64 if
    an operand is float64), each rounded once; the result is then converted.
    """

    in_turn = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape = same_shape("a linear combination", inputs)
        if len(params["weights"]) != len(inputs):
            raise DataError(f"a linear combination of {len(inputs)} tensors has {len(params['weights'])} weights")
        for one in inputs:
            if not one.dtype.is_floating_point or not one.dtype.is_number:
                raise DataError(f"a linear combination has floating-point operands, not {one.dtype}")
        return Kind(shape, dtype_of(params["dtype"]) if params.get("dtype") else widest(inputs))

    def wide(self, e: Expr) -> DType:
        return wide(*(one.dtype for one in e.inputs))

    def compute(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        total = None
        for weight, block in zip(e.params["weights"], blocks, strict=True):
            term = block if weight == 1 else block.mul_(weight)
            total = term if total is None else total.add_(term)  # no alpha: it may fuse the two roundings
        assert total is not None  # there is at least one operand
        return total


class Mean(Elementwise):
    """The mean of the operands: summed in order in float32 (float64 for float64), then divided by their number."""

    in_turn = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return Kind(same_shape("a mean", inputs), widest(inputs))

    def wide(self, e: Expr) -> DType:
        return wide(*(one.dtype for one in e.inputs))

    def compute(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        total = None
        for block in blocks:
            total = block if total is None else total.add_(block)
        assert total is not None  # there is at least one operand
        return total.div_(len(e.inputs))


def widest(kinds: Sequence[Kind]) -> DType:
    """Return the dtype that torch promotes the operands' dtypes to."""
    found = kinds[0].dtype.torch
    for kind in kinds[1:]:
        if kind.dtype.torch is not found:
            found = torch.promote_types(found, kind.dtype.torch)
    return dtype_of(found)


OPS: dict[str, Op] = {
    "same": Same(),
    "cast": Cast(),
    "conj": Conj(),
    "neg": Neg(),
    "linear": Linear(),
    "mean": Mean(),
}
