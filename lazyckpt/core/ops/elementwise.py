"""Operations on elements: conversions of dtype, conjugation, negation, means and linear combinations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..box import Selection, Shape
from ..dtypes import BF16, DType, converts, dtype_of
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


class Sum(Elementwise):
    """An operation that adds its operands, in order, in float32 (float64 if an operand is float64)."""

    in_turn = True

    def is_midpoint(self, e: Expr) -> bool:
        """Return whether the result is the mean of two operands, as `midpoint` computes it."""
        return e.dtype is BF16 and len(e.inputs) == 2 and all(one.dtype is BF16 for one in e.inputs) and _is_exact()

    def wide(self, e: Expr) -> DType | None:
        return None if self.is_midpoint(e) else wide(*(one.dtype for one in e.inputs))

    def fill(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        if self.is_midpoint(e):
            blocks = first, second = tuple(blocks)
            if midpoint(first, second, out):
                return out
        return self.compute(e, want, blocks)

    def compute(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        if self.is_midpoint(e):
            blocks = [one.to(torch.float32) for one in blocks]
        return self.added(e, blocks)

    @abstractmethod
    def added(self, e: Expr, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the result, before it is converted, from blocks that are converted."""


class Linear(Sum):
    """``weights``: the sum of the operands, each times its weight, in the order of the operands.

    ``dtype`` is that of the result, by default the widest of the operands. Products and sums are in float32 (float64 if
    an operand is float64), each rounded once; the result is then converted.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape = same_shape("a linear combination", inputs)
        if len(params["weights"]) != len(inputs):
            raise DataError(f"a linear combination of {len(inputs)} tensors has {len(params['weights'])} weights")
        for one in inputs:
            if not one.dtype.is_floating_point or not one.dtype.is_number:
                raise DataError(f"a linear combination has floating-point operands, not {one.dtype}")
        return Kind(shape, dtype_of(params["dtype"]) if params.get("dtype") else widest(inputs))

    def is_midpoint(self, e: Expr) -> bool:
        return e.params["weights"] == (0.5, 0.5) and super().is_midpoint(e)

    def added(self, e: Expr, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        total = None
        for weight, block in zip(e.params["weights"], blocks, strict=True):
            term = block if weight == 1 else block.mul_(weight)
            total = term if total is None else total.add_(term)  # no alpha: it may fuse the two roundings
        assert total is not None  # there is at least one operand
        return total


class Mean(Sum):
    """The mean of the operands: summed in order in float32 (float64 for float64), then divided by their number."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return Kind(same_shape("a mean", inputs), widest(inputs))

    def added(self, e: Expr, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        total = None
        for block in blocks:
            total = block if total is None else total.add_(block)
        assert total is not None  # there is at least one operand
        return total.div_(len(e.inputs))


def midpoint(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> bool:
    """Write the mean of two blocks of bfloat16 into ``out``, with the bits of their halves' sum in float32, rounded.
    Returns False if the bits may differ, and ``out`` is not valid.

    `torch.lerp` is one kernel in place of six. It adds half of the difference to an operand. Halving is exact, so the
    bits can only differ if the difference is inexact. But then one operand is less than a 2**15th of the other, and
    the result is half of the larger one either way. The function returns False for results from 2**127 on, infinities
    and NaN: the difference may overflow where the sum does not. All 2**32 pairs were compared.
    """
    torch.lerp(first, second, 0.5, out=out)
    signed = out.view(torch.int16).numpy()
    return bool(signed.max() < _LARGE and signed.view("uint16").max() < _LARGE | 0x8000)


_LARGE = 0x7F00  # the bits of 2**127


@cache
def _is_exact() -> bool:
    """Return whether torch's kernel computes in float32, as `midpoint` relies on, in vectors and in what is left."""
    codes = torch.arange(0, 1 << 16, 5, dtype=torch.int32)
    first, second = (one.to(torch.int16).view(torch.bfloat16) for one in (codes, codes * 5 + 0x3000))
    found = torch.lerp(first, second, 0.5)
    wanted = first.to(torch.float32).mul_(0.5).add_(second.to(torch.float32).mul_(0.5)).to(torch.bfloat16)
    small = (found.view(torch.int16) & 0x7FFF) < _LARGE
    return torch.equal(found.view(torch.int16)[small], wanted.view(torch.int16)[small])


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
