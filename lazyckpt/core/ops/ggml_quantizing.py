"""Quantization to GGUF's blocks, bit for bit as gguf 0.19.0, quants.py `quantize` (and ggml-quants.c
`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`) computes it, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import grouped
from ..box import Selection, Shape
from ..dtypes import U8
from ..expr import Kind, Op
from ..specs import Expr
from .packed import chosen, members

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_SIZE = 32  # elements of a block of every type here


class Quantize(Op):
    """The blocks of rows, ``[..., bytes of a row]``. ``type``: the GGUF type, one of `TYPES`. Blocks with numbers that
    are not finite are not defined in GGUF; here their codes are those of 0."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if params["type"] not in TYPES:
            raise DataError(f"there is no quantization to {params['type']!r} in this version of lazyckpt")
        if not dtype.is_floating_point or dtype.itemsize < 2 or not shape or shape[-1] % _SIZE:
            raise DataError(f"blocks of {params['type']} are made of rows of {_SIZE} floats, not {dtype} of {shape}")
        return Kind((*shape[:-1], shape[-1] // _SIZE * TYPES[params["type"]][0]), U8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((*want[:-1], members(grouped(want[-1], TYPES[e.params["type"]][0])[0], _SIZE)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        nbytes, codes_of = TYPES[e.params["type"]]
        values = blocks[0].to(torch.float32)
        found = codes_of(values.reshape(-1, _SIZE))
        return chosen(found.reshape(*values.shape[:-1], -1), want[-1], nbytes)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), TYPES[e.params["type"]][0])


def _inverse(factors: torch.Tensor) -> torch.Tensor:
    return torch.where(factors == 0, 0.0, 1.0 / factors)


def _bytes(factors: torch.Tensor) -> torch.Tensor:
    return factors.to(torch.float16).view(torch.uint8)


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    factors = x.abs().amax(1, keepdim=True) / 127
    scaled = (x * _inverse(factors)).nan_to_num(0.0, 0.0, 0.0)
    size = scaled.abs()
    whole = size.floor()
    codes = scaled.sign() * (whole + ((size - whole) * 2).floor())  # halves away from zero
    return torch.cat([_bytes(factors), codes.to(torch.int8).view(torch.uint8)], 1)


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))  # of equal magnitudes, the first one
    factors = largest / -8
    scaled = (x * _inverse(factors)).nan_to_num(0.0, 0.0, 0.0)
    codes = (scaled + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([_bytes(factors), codes[:, :16] | codes[:, 16:] << 4], 1)


# Type -> bytes of a block, and the blocks of float32 ``[blocks, 32]``.
TYPES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {"Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0)}

OPS: dict[str, Op] = {"quantize.gguf": Quantize()}
