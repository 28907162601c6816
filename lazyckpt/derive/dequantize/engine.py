"""Transformer Engine: its tensor classes for FP8 weights, as torch.save pickles them, and codes with `_extra_state`.

A class pickles the arguments of its ``_make_in_reduce_ex``: codes as bytes, the number of their dtype, scales. Each
value is the product of code and scale in float32, rounded once.

Codes are of E4M3: DelayedScaling, the recipe of Float8Tensor, has E4M3 for weights in all of its formats (HYBRID has
E5M2 for gradients, and pure E5M2 is refused). The number of E4M3 is 6 in TE 1, and 7 since TE 2.2 has a 16-bit integer
(transformer_engine.h, `enum class DType`). In TE 1, 7 is E5M2, which no recipe has for weights. Other numbers are not
known. Copies of the codes by columns are left out.

Float8Tensor has its own scale. Codes alone, in a tensor of float8 or bytes, have it in the ``_extra_state`` of their
module (extra_state.py), also in DCP and safetensors.

Sources: NVIDIA/TransformerEngine, transformer_engine/pytorch/tensor: float8_tensor.py, mxfp8_tensor.py
(`MXFP8Quantizer.make_empty`: scales padded to multiples of 128 and 4), float8_blockwise_tensor.py
(`Float8BlockQuantizer.get_scale_shape`); common/recipe/__init__.py (`DelayedScaling.__post_init__`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from typing import Any

from ...core.box import Box, Shape
from ...core.dtypes import F8_E4M3FN, F32, U8, DType
from ...core.expr import make
from ...core.placement import Placement
from ...core.specs import Expr, Input
from ...errors import DataError, Problem
from . import extra_state
from .model import Model, Weight
from .scales import FLOAT8, Blocks, scaled
from .subclasses import Composed, composed, weights_of

_PACKAGE = "transformer_engine"
_E4M3 = (6, 7)
# Class -> the numbers of the arguments that are the codes, the scales, and the dtype of the codes.
_ARGUMENTS = {"Float8Tensor": (0, 2, 1), "MXFP8Tensor": (0, 1, 4), "Float8BlockwiseQTensor": (1, 2, 5)}
_TWO_DIMENSIONS = "8"  # the argument of Float8BlockwiseQTensor that says whether blocks are squares


class Engine:
    """Transformer Engine's tensors."""

    name = "transformer engine"
    methods = ()

    def detect(self, model: Model) -> bool:
        if model.evidence.method:
            return False
        return any(one.package == _PACKAGE for one in composed(model)) or any(True for _ in _bare(model))

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        yield from self._with_extra_state(model, dtype)
        yield from weights_of(model, _PACKAGE, lambda one: _value(model, one, dtype), "Transformer Engine")

    def _with_extra_state(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        for name in _bare(model):
            try:
                scale, used = extra_state.scale_of(model, name)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{name!r}: {e}", name)
                continue
            codes = model.operand(name)
            if codes.dtype is U8:
                codes = make("as_bits", codes, dtype=F8_E4M3FN)
            by = make("constant", data=struct.pack("<f", scale).hex(), shape=(), dtype=F32)
            yield Weight(name, scaled(codes, by, Blocks((1, 1), codes.shape), dtype), (name, *used))


def _bare(model: Model) -> Iterator[str]:
    """Yield the codes of matrices whose module has an ``_extra_state``, and no scales beside them."""
    for name in model.names:
        shape, kind = model.kind(name)
        scaled_beside = any(f"{name}{end}" in model for end in ("_scale", "_scale_inv"))
        if len(shape) == 2 and kind in (F8_E4M3FN, U8) and not scaled_beside and extra_state.has_scales(model, name):
            yield name


def _value(model: Model, one: Composed, dtype: DType) -> Expr | str:
    """Return a tensor's value, or what it is, if that is not known. Raises DataError if it contradicts itself."""
    if one.kind not in _ARGUMENTS:
        return f"{one.kind}, whose layout is not known"
    at, of_scales, of_dtype = map(str, _ARGUMENTS[one.kind])
    if at not in one.parts or of_scales not in one.parts:
        return f"{one.kind} without codes by rows"
    codes, scales = model.operand(one.parts[at]), model.operand(one.parts[of_scales])
    if codes.dtype not in FLOAT8:
        kind = _number(one.said.get(of_dtype))
        if codes.dtype is not U8 or kind not in _E4M3:
            return f"{one.kind} with codes {codes.dtype} of the dtype number {kind}, which is not known"
        codes = make("as_bits", codes, dtype=F8_E4M3FN)
    if one.kind == "Float8Tensor":
        if prod(scales.shape) != 1:
            raise DataError(f"{scales.shape} scales for a tensor that has one")
        return scaled(codes, scales, Blocks((1,) * len(codes.shape), codes.shape), dtype)
    rows, columns = prod(codes.shape[:-1]), codes.shape[-1]
    matrix: Expr | Input = make("reshape", codes, shape=(rows, columns)) if len(codes.shape) != 2 else codes
    if one.kind == "MXFP8Tensor":
        blocks = Blocks((rows, -(-columns // 32)), (1, 32))
        scales = make("dequantize.e8m0", _cut(scales, blocks.shape))
    else:
        if one.said.get(_TWO_DIMENSIONS) is not True:
            return f"{one.kind} with blocks of one dimension, whose layout is not known"
        blocks = Blocks((-(-rows // 128), -(-columns // 128)), (128, 128))
        scales = _cut(scales, blocks.shape)
    found = scaled(matrix, scales, blocks, dtype)
    return found if found.shape == codes.shape else make("reshape", found, shape=codes.shape)


def _cut(scales: Expr | Input, shape: Shape) -> Expr | Input:
    """Return scales without their padding. Raises DataError if there are too few."""
    if len(scales.shape) != 2 or any(have < need for have, need in zip(scales.shape, shape, strict=True)):
        raise DataError(f"{scales.shape} scales for {shape} blocks")
    if scales.shape == shape:
        return scales
    placement = Placement.of(scales.shape, Box((0, 0), shape), (0, 0))
    return make("place", scales, shape=shape, placements=(placement,))


def _number(dtype: Any) -> Any:
    """Return the number of a dtype of Transformer Engine, an enumeration of C++."""
    args = getattr(dtype, "args", None)
    return args[0] if args else dtype


FAMILY = Engine()
