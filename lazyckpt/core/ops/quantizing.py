"""Round-to-nearest quantization: codes, and the scales of blocks of neighbours, from the blocks themselves.

Computed in float32. The largest magnitude of a block is exact, so that the result does not depend on how a tensor is
cut: a part of a block reads the whole block.

Schemes, each with the rounding of the library that reads the result:

- ``fp8``: float8_e4m3fn. ``x * (448 / largest)``; the scale is ``1 / (448 / largest)`` (transformers 5.3,
  integrations/finegrained_fp8.py `Fp8Quantize`).
- ``int8``: bytes, 128 more than the code. ``x / scale``, rounded to even, from -128 to 127; the scale is ``largest /
  127.5``, rounded to its dtype first (compressed-tensors 0.20, `calculate_qparams` and `quantize`).
- ``nf4``: bytes with the number of the nearest of 16 values to ``x * (1 / largest)``; the scale is ``largest``
  (bitsandbytes 0.50.2, backends/default/ops.py ``quantize_4bit``).
- ``dynamic8``: the same with 256 values (``quantize_blockwise``), for nested scales.
- ``mxfp4``: bytes with the code of the nearest float of four bits (E2M1) to ``x / 2 ** scale``, halves to even; the
  scale is the exponent of ``largest``, one more if that is 1.75 times its power of two or larger, less 2, in E8M0
  (compressed-tensors 0.20, `generate_mx_scales`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import as_axis, grouped, indices, shape_of
from ..box import Axis, Selection, Shape
from ..dtypes import F8_E4M3FN, F32, I8, U8, dtype_of
from ..expr import Kind, Op
from ..specs import Expr
from .bitsandbytes import NF4, dynamic_map
from .packed import members

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_CODES = {"fp8": F8_E4M3FN, "int8": U8, "nf4": U8, "dynamic8": U8, "mxfp4": U8}
_SCALES = {"fp8": F32, "nf4": F32, "dynamic8": F32, "mxfp4": U8}  # of int8: the parameter `scale_dtype`
_LARGEST = 448.0  # of float8_e4m3fn
_TINY = 1e-38


class _Quantize(Op):
    """What codes and scales have in common. Parameters: ``scheme``; ``block``, the size of blocks in each dimension;
    for int8 ``scale_dtype``."""

    def _check(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if params["scheme"] not in _CODES:
            raise DataError(f"there is no scheme {params['scheme']!r} in this version of lazyckpt")
        if len(params["block"]) != len(shape) or any(size < 1 for size in params["block"]):
            raise DataError(f"{shape} has no blocks of shape {params['block']}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise DataError(f"{dtype} is not quantized: floats of 16 bits or more are")
        return inputs[0]

    def _blocks(self, e: Expr, groups: Selection) -> Selection:
        """Return the elements of blocks."""
        source = e.inputs[0].shape
        return tuple(
            _within(members(axis, size), n) for axis, size, n in zip(groups, e.params["block"], source, strict=True)
        )

    def _largest(self, e: Expr, groups: Selection, block: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each block, as float32."""
        found = block.to(torch.float32).abs()
        have = self._blocks(e, groups)
        for d, (axis, size) in enumerate(zip(groups, e.params["block"], strict=True)):
            starts = np.searchsorted(indices(have[d]) // size, indices(axis))
            lengths = np.diff([*starts, found.shape[d]])
            if (lengths == lengths[0]).all():
                shape = (*found.shape[:d], len(starts), int(lengths[0]), *found.shape[d + 1 :])
                found = found.reshape(shape).amax(d + 1)
            else:
                parts = torch.split(found, lengths.tolist(), d)
                found = torch.stack([part.amax(d) for part in parts], d)
        return found


class Scales(_Quantize):
    """The scales of blocks."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape, _ = self._check(inputs, params)
        dtype = _SCALES.get(params["scheme"]) or dtype_of(params["scale_dtype"])
        return Kind(tuple(-(-n // size) for n, size in zip(shape, params["block"], strict=True)), dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (self._blocks(e, want),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        largest = self._largest(e, want, blocks[0])
        if e.params["scheme"] == "fp8":
            return 1.0 / _multiplier(largest)
        if e.params["scheme"] == "int8":
            return _int8_scale(largest, dtype_of(e.params["scale_dtype"]).torch)
        if e.params["scheme"] == "mxfp4":
            return _exponent(largest).to(torch.uint8)
        return torch.where(_cut_short(e, want), largest.clamp(min=_TINY), largest)


class Codes(_Quantize):
    """The codes of elements, not packed."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape, _ = self._check(inputs, params)
        return Kind(shape, _CODES[params["scheme"]])

    def _groups(self, e: Expr, want: Selection) -> Selection:
        return tuple(grouped(axis, size)[0] for axis, size in zip(want, e.params["block"], strict=True))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (self._blocks(e, self._groups(e, want)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        groups = self._groups(e, want)
        have = self._blocks(e, groups)
        largest = self._largest(e, groups, blocks[0])
        x = blocks[0]
        for d, (axis, all_) in enumerate(zip(want, have, strict=True)):
            if len(axis) != len(all_):
                x = x.index_select(d, torch.from_numpy(np.searchsorted(indices(all_), indices(axis))))
        x = x.to(torch.float32)
        if e.params["scheme"] == "fp8":
            x = x * _over(_multiplier(largest), want, e)
            return x.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        if e.params["scheme"] == "int8":
            scale = _int8_scale(largest, dtype_of(e.params["scale_dtype"]).torch).to(torch.float32)
            return (x / _over(scale, want, e)).round_().clamp_(-128, 127).add_(128).to(torch.uint8)
        if e.params["scheme"] == "mxfp4":
            power = torch.ldexp(torch.ones_like(largest), _exponent(largest) - 127)
            return _fp4(x / _over(power, want, e))
        inverse = 1.0 / largest.clamp(min=_TINY)
        scaled = x * _over(inverse, want, e)
        short = _over(_cut_short(e, groups).expand(largest.shape), want, e)
        if short.any():
            scaled = torch.where(short, x / _over(largest.clamp(min=_TINY), want, e), scaled)
        return torch.bucketize(scaled.clamp_(-1, 1), _bounds(e.params["scheme"]), out_int32=True).to(torch.uint8)

    def grain(self, e: Expr) -> Shape:
        return tuple(e.params["block"])


def _within(axis: Axis, size: int) -> Axis:
    """Return the indices that are smaller than a size: the last block may be shorter."""
    if isinstance(axis, range):
        return range(axis.start, min(axis.stop, size), axis.step)
    return as_axis(axis[axis < size])


def _over(values: torch.Tensor, want: Selection, e: Expr) -> torch.Tensor:
    """Return the values of blocks for each wanted element, or in dimensions with one block only that."""
    for d, (axis, size) in enumerate(zip(want, e.params["block"], strict=True)):
        if values.shape[d] > 1:
            values = values.index_select(d, torch.from_numpy(grouped(axis, size)[1]))
    return values


def _cut_short(e: Expr, groups: Selection) -> torch.Tensor:
    """Return which blocks are shorter than the others; of one dimension, the last can be."""
    found = torch.zeros(shape_of(groups), dtype=torch.bool)
    for d, (axis, size) in enumerate(zip(groups, e.params["block"], strict=True)):
        n = e.inputs[0].shape[d]
        last = torch.from_numpy((indices(axis) + 1) * size > n)
        found |= last.view([-1 if d == k else 1 for k in range(len(groups))])
    return found


def _multiplier(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, _LARGEST / torch.where(largest > 0, largest, 1.0), 1.0)


def _int8_scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = (largest / 127.5).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def _exponent(largest: torch.Tensor) -> torch.Tensor:
    """Return the exponents of E8M0 for E2M1."""
    power = ((largest.contiguous().view(torch.int32) + (1 << 21)) >> 23) & 0xFF
    return (power - 2).clamp_(0, 254)


def _fp4(x: torch.Tensor) -> torch.Tensor:
    codes = torch.bucketize(x.abs(), _halves(), out_int32=True).to(torch.uint8)
    return torch.where(x.signbit(), codes | 8, codes)


@cache
def _halves() -> torch.Tensor:
    """Return the largest magnitudes that are rounded down to each code of E2M1: of values half way, that with an even
    code counts."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.nextafter(middle, torch.zeros(()))
    return torch.where(torch.arange(7) % 2 == 1, below, middle)


@cache
def _bounds(scheme: str) -> torch.Tensor:
    values = torch.tensor(NF4 if scheme == "nf4" else dynamic_map(), dtype=torch.float32)
    return (values[:-1] + values[1:]) / 2


class Pairs(Op):
    """Two codes of four bits in a byte, along the last dimension. ``high``: the first one is in the high bits.
    ``pad``: the code after an odd number of codes."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        if not shape or dtype not in (U8, I8):
            raise DataError(f"codes of four bits are bytes, not {dtype} of shape {shape}")
        return Kind((*shape[:-1], -(-shape[-1] // 2)), U8)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ((*want[:-1], _within(members(want[-1], 2), e.inputs[0].shape[-1])),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        codes = blocks[0].view(torch.uint8)
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1), value=e.params["pad"])
        first, second = codes[..., ::2], codes[..., 1::2]
        return first << 4 | second if e.params["high"] else second << 4 | first


class Constant(Op):
    """Values that the expression holds itself. Parameters: ``data``, their bytes in hexadecimal digits, ``shape`` and
    ``dtype``."""

    moves = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        kind = Kind(tuple(params["shape"]), dtype_of(params["dtype"]))
        if len(params["data"]) != 2 * int(np.prod(kind.shape)) * kind.dtype.itemsize:
            raise DataError(f"{len(params['data']) // 2:,} bytes are no {kind.dtype} of shape {kind.shape}")
        return kind

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ()

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        data = torch.frombuffer(bytearray.fromhex(e.params["data"]), dtype=e.dtype.torch).view(e.shape)
        for d, axis in enumerate(want):
            data = data.index_select(d, torch.from_numpy(indices(axis)))
        return data

    def about(self, e: Expr) -> str:
        return f"{len(e.params['data']) // 2:,} bytes"


OPS: dict[str, Op] = {
    "quantize.scales": Scales(),
    "quantize.codes": Codes(),
    "quantize.pairs": Pairs(),
    "constant": Constant(),
}
