"""bitsandbytes: nf4 and fp4, whose codes and scales follow the ravel of the tensor, also across rows, and int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import shape_of
from ..box import Axis, Selection, Shape
from ..dtypes import I8, dtype_of
from ..expr import Kind, Op, Scan
from ..rounding import convert
from ..specs import Expr
from .ravel import blocks_of, numbers_of, positions

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

# The values of the codes, as bitsandbytes 0.50.2's functional.get_4bit_type. Its kernels have them built in and do not
# read the `quant_map` of a checkpoint.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TABLES = {
    "nf4": NF4,
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip


@cache
def dynamic_map() -> tuple[float, ...]:
    """Return the float32 values, ascending, of the bytes that nested scales are stored as: bitsandbytes 0.50.2
    functional.create_dynamic_map."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        for factor in (10 ** (i - 6), -(10 ** (i - 6))):
            found += (factor * means).tolist()
    return tuple(sorted(found))


class Bnb4(Op):
    """bitsandbytes' nf4 and fp4: two codes in a byte, the first in its high bits, times the largest value of a block.

    Operands: the bytes, in words of any dtype, and ``absmax``, one float for each block. With double quantization
    ``absmax`` has bytes, and two more operands are the ``nested_absmax`` of each block of them and the
    ``nested_quant_map`` of 256 values.

    Parameters: ``dtype`` and ``shape``, of the result; ``quant_type``; ``blocksize``; and ``nested_blocksize``,
    ``nested_offset``. The product is in float32, then rounded to ``dtype``.
    """

    prepares = True  # nested_quant_map

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        data, absmax = inputs[:2]
        shape, size = tuple(params["shape"]), params["blocksize"]
        count = prod(shape)
        blocks = -(-count // size)
        if params["quant_type"] not in _TABLES:
            raise DataError(f"there is no 4-bit type {params['quant_type']!r} in this version of lazyckpt")
        fits = prod(data.shape) * data.dtype.itemsize == -(-count // (2 * data.dtype.itemsize)) * data.dtype.itemsize
        fits = fits and bool(data.shape) and sum(n > 1 for n in data.shape) <= 1 and absmax.shape == (blocks,)
        if len(inputs) == 2:
            fits = fits and absmax.dtype.is_floating_point
        else:
            fits = fits and inputs[2].shape == (-(-blocks // params["nested_blocksize"]),) and inputs[3].shape == (256,)
            fits = fits and absmax.dtype.itemsize == 1
        if not fits:
            raise DataError(
                f"{params['quant_type']} in blocks of {size} and shape {shape} does not fit operands of shapes "
                f"{', '.join(str(one.shape) for one in inputs)}"
            )
        return Kind(shape, dtype_of(params["dtype"]))

    def prepare(self, e: Expr, scan: Scan) -> Any:
        if len(e.inputs) < 4:
            return None
        return torch.cat([block for _, (block,) in scan(3)]).to(torch.float32)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        numbers = numbers_of(e.shape, want)
        data = e.inputs[0]
        words = blocks_of(numbers, 2 * data.dtype.itemsize)
        blocks = blocks_of(numbers, e.params["blocksize"])
        pulled: list[Selection] = [
            tuple(words if d == _long(data.shape) else range(1) for d in range(len(data.shape))),
            (blocks,),
        ]
        if len(e.inputs) > 2:
            pulled += [(blocks_of(blocks, e.params["nested_blocksize"]),), (range(0),)]
        return pulled

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        numbers = numbers_of(e.shape, want)
        pulled = self.pull(e, want)
        words = pulled[0][_long(e.inputs[0].shape)]
        data = blocks[0].reshape(-1).view(torch.uint8)
        # both values of each byte, as one number of 64 bits
        values = _pairs(e.params["quant_type"]).index_select(0, data.to(torch.int32)).view(torch.float32)
        codes = 2 * e.inputs[0].dtype.itemsize  # of a word
        if isinstance(numbers, range):
            first = numbers.start - words[0] * codes
            values = values[first : first + len(numbers)]
        else:
            at = positions(numbers, words, codes) * codes + numbers % codes
            values = values.index_select(0, torch.from_numpy(at))
        found = _times(values, self._scales(e, pulled, blocks), pulled[1][0], numbers, e.params["blocksize"])
        return convert(found.view(shape_of(want)), e.dtype.torch)

    def _scales(self, e: Expr, pulled: Sequence[Selection], blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(e.inputs) < 4:
            return blocks[1].to(torch.float32)
        found = e.kept["prepared"][blocks[1].view(torch.uint8).to(torch.int64)]
        inner = e.params["nested_blocksize"]
        found = _times(found, blocks[2].to(torch.float32), pulled[2][0], pulled[1][0], inner)
        return found.add_(torch.tensor(e.params["nested_offset"], dtype=torch.float32))

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), e.params["blocksize"])


class BnbInt8(Op):
    """bitsandbytes' int8: codes ``[out, in]`` times ``SCB [out]``, the largest value of each row, times 1 / 127 as it
    is in bitsandbytes; products in float32, then rounded to the parameter ``dtype``."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        codes, scales = inputs
        if not codes.shape or scales.shape != codes.shape[:-1] or codes.dtype is not I8:
            raise DataError(f"int8 codes {codes.shape} do not fit the scales SCB {scales.shape} of their rows")
        return Kind(codes.shape, dtype_of(params["dtype"]))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return want, want[:-1]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        scales = blocks[1].to(torch.float32).unsqueeze(-1)
        return convert(blocks[0].to(torch.float32).mul_(scales).mul_(7.874015718698502e-3), e.dtype.torch)


def _long(shape: Shape) -> int:
    """Return the dimension that is not 1, of a tensor with at most one."""
    return max(range(len(shape)), key=lambda d: shape[d])


def _times(values: torch.Tensor, scales: torch.Tensor, have: Axis, numbers: Axis, size: int) -> torch.Tensor:
    """Multiply numbered values by the scales of their blocks of ``size``, in place.

    Parameters
    ----------
    values, scales
        Both 1-d.
    have
        The numbers of the blocks that the scales are of.
    numbers
        The numbers of the values.
    size
        The values of a block.
    """
    if not isinstance(numbers, range) or (numbers.step != 1 and len(numbers) > 1):
        return values.mul_(scales.index_select(0, torch.from_numpy(positions(numbers, have, size))))
    first = min(len(values), -numbers.start % size)  # the end of a block that begins before
    whole = (len(values) - first) // size
    if first:
        values[:first].mul_(scales[0])
    rest = scales[1:] if first else scales
    if whole:
        values[first : first + whole * size].view(whole, size).mul_(rest[:whole].unsqueeze(1))
    if first + whole * size < len(values):
        values[first + whole * size :].mul_(rest[whole])
    return values


@cache
def _pairs(kind: str) -> torch.Tensor:
    """Return the two values of each byte, the one of the high bits first."""
    values = torch.tensor(_TABLES[kind], dtype=torch.float32)
    codes = torch.arange(256)
    return torch.stack([values[codes >> 4], values[codes & 15]], 1).contiguous().view(torch.int64).view(-1)


OPS: dict[str, Op] = {"dequantize.bnb_4bit": Bnb4(), "dequantize.bnb_int8": BnbInt8()}
