"""torchao's NF4Tensor: codes of four bits, with scales that are quantized themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import indices, shape_of
from ..box import Selection, Shape
from ..dtypes import I8, U8, dtype_of
from ..expr import Kind, Op, Scan
from ..specs import Expr
from .ravel import blocks_of, numbers_of, positions

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Nf4(Op):
    """``table[code] * (scaler / factor + mean)``, each step rounded to the dtype of the table, then converted to
    ``dtype``.

    Operands, all of one dimension but the mean, which has none: two codes in a byte, the first in its high bits; the
    int8 scaler of each ``block_size`` codes; the factor of each ``scaler_block_size`` scalers; the mean; the table of
    16 values. Blocks follow the C order of the result. Parameters: ``dtype`` and ``shape`` of the result and the sizes.

    As torchao 0.18, quantization/quantize_/workflows/nf4/nf4_tensor.py `NF4Tensor.get_original_weight`.
    """

    prepares = True  # the mean and the table

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        codes, scalers, factors, mean, table = inputs
        shape = tuple(params["shape"])
        blocks, rest = divmod(prod(shape), params["block_size"])
        fits = (
            rest == 0
            and codes == Kind((-(-prod(shape) // 2),), U8)
            and scalers == Kind((blocks,), I8)
            and factors.shape == (-(-blocks // params["scaler_block_size"]),)
            and prod(mean.shape) == 1
            and table.shape == (16,)
            and table.dtype.is_floating_point
        )
        if not fits:
            shown = ", ".join(f"{one.dtype} {one.shape}" for one in inputs)
            raise DataError(f"NF4 of shape {shape} in blocks of {params['block_size']} does not fit operands {shown}")
        return Kind(shape, dtype_of(params["dtype"]))

    def prepare(self, e: Expr, scan: Scan) -> Any:
        return tuple(torch.cat([block.reshape(-1) for _, (block,) in scan(n)]) for n in (3, 4))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        numbers = numbers_of(e.shape, want)
        blocks = blocks_of(numbers, e.params["block_size"])
        none = tuple(range(0) for _ in e.inputs[3].shape) or ()
        return (
            (blocks_of(numbers, 2),),
            (blocks,),
            (blocks_of(blocks, e.params["scaler_block_size"]),),
            none,
            (range(0),),
        )

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        numbers = numbers_of(e.shape, want)
        pulled = self.pull(e, want)
        mean, table = e.kept["prepared"]
        held, owners = pulled[1][0], pulled[2][0]
        factors = blocks[2].index_select(0, torch.from_numpy(positions(held, owners, e.params["scaler_block_size"])))
        scales = (blocks[1] / factors).to(table.dtype) + mean
        at = torch.from_numpy(positions(numbers, pulled[0][0], 2))
        high = torch.from_numpy(indices(numbers) % 2 == 0)
        data = blocks[0].index_select(0, at)
        codes = torch.where(high, data >> 4, data & 15)
        found = table.index_select(0, codes.to(torch.int32))
        found = found * scales.index_select(0, torch.from_numpy(positions(numbers, held, e.params["block_size"])))
        result: torch.Tensor = found.view(shape_of(want))
        return result

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), e.params["block_size"])


OPS: dict[str, Op] = {"dequantize.nf4": Nf4()}
