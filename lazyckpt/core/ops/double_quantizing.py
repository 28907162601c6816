"""bitsandbytes' double quantization: the scales of blocks, less their mean, quantized to bytes themselves.

`bitsandbytes.functional.quantize_4bit(compress_statistics=True)` of 0.50.2. The mean of all scales of a matrix is in
the state of the matrix, a JSON object that is stored as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import indices, shape_of
from ..box import Selection
from ..dtypes import F32, U8
from ..expr import Kind, Op, Scan
from ..rounding import exact_sum
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_NUMBER = 24  # characters of the longest float64


class Mean(Op):
    """The mean of all elements of an operand, of shape [1]: sums in float64, the quotient rounded to float32. NaN if an
    element is not finite."""

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        (one,) = inputs
        if one.dtype is not F32 or len(one.shape) != 1 or not one.shape[0]:
            raise DataError(f"quantize.mean takes scales, one float32 for each block, not {one.dtype} of {one.shape}")
        return Kind((1,), F32)

    def prepare(self, e: Expr, scan: Scan) -> Any:
        parts, count = [], 0
        for _, (block,) in scan(0):
            parts.append(float(block.numpy().sum(dtype=np.float64)))
            count += block.numel()
        return torch.tensor([exact_sum(parts) / count], dtype=torch.float32)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((range(0),),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = e.kept["prepared"]
        return found.clone()


class Centered(Op):
    """Scales less their mean, an operand of shape [1]; in float32."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        scales, mean = inputs
        if scales.dtype is not F32 or mean != Kind((1,), F32):
            raise DataError(f"quantize.centered takes float32 scales and their mean, not {scales} and {mean}")
        return scales

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return want, (range(1),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0].sub_(blocks[1])


class NestedState(Op):
    """The bytes of a JSON object: that of the parameter ``text``, and ``nested_offset``, the operand of shape [1].

    The number is followed by spaces, so that the size does not depend on it.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        if inputs[0] != Kind((1,), F32) or not params["text"].endswith("}"):
            raise DataError(f"quantize.nested_state takes a JSON object and a float32 of shape (1,), not {inputs[0]}")
        return Kind((len(_text(params["text"], 0.0)),), U8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((range(1),),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        data = np.frombuffer(_text(e.params["text"], float(blocks[0])), np.uint8)
        return torch.from_numpy(data[indices(want[0])]).view(shape_of(want))


def _text(text: str, offset: float) -> bytes:
    return f'{text[:-1]}, "nested_offset": {json.dumps(offset):<{_NUMBER}}}}'.encode()


OPS: dict[str, Op] = {
    "quantize.mean": Mean(),
    "quantize.centered": Centered(),
    "quantize.nested_state": NestedState(),
}
