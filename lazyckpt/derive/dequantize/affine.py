"""Quantized tensors of torch: torch.quantize_per_tensor and torch.quantize_per_channel, and modules with such weights.

A pickle has the codes, and beside them the quantizer: (scheme, scale, zero point), or (scheme, scales, zero points,
axis) with tensors (torch/_tensor.py `_reduce_ex_internal`). lazyckpt keeps it as an attribute of the codes. A value is
(code - zero point) * scale, rounded to float32: per tensor with the scale rounded before, per channel with the scales
in float64, as they are stored (aten/src/ATen/native/quantized/AffineQuantizerBase.cpp `dequantize_val`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.dtypes import F32, DType
from ...core.expr import make, operand
from ...core.specs import Expr, Input
from ...errors import DataError, Problem, only_one, some
from ...io.containers.pickle.plain import ATTRIBUTES, TensorRef
from ...io.containers.pickle.records import Opaque
from .model import Model, Weight
from .scales import Blocks, scaled

_QUANTIZER = "quantizer"
_TENSOR, _CHANNEL = "per_tensor_affine", "per_channel_affine"
_INNER = "attributes"  # the entry of the metadata of TorchScript that has those of its tensors


class Affine:
    """Quantized tensors of torch."""

    name = "torch"
    methods = ()

    def detect(self, model: Model) -> bool:
        return not model.evidence.method and bool(_quantizers(model))

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        found = _quantizers(model)
        unknown = []
        for name in model.names:
            quantizer = found.get(model.spec(name).stored_as or name) or found.get(name)
            if quantizer is None:
                continue
            try:
                value = _value(model, name, quantizer, dtype)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{name!r}: {e}", name)
                continue
            if value is None:
                unknown.append(name)
            else:
                yield Weight(name, value, (name,))
        if unknown:
            line = f"{len(unknown):,} tensors of torch have a quantizer whose values are not known: {some(unknown)}"
            yield Problem("undecided-quantization", line, only_one(unknown))


def _quantizers(model: Model) -> dict[str, tuple[Any, ...]]:
    """Return the quantizers by the names of the tensors in the file."""
    found: dict[str, tuple[Any, ...]] = {}
    meta = model.view._index.meta
    for table in (meta, meta.get(_INNER)):
        attributes = table.get(ATTRIBUTES) if isinstance(table, Mapping) else None
        for name, said in attributes.items() if isinstance(attributes, Mapping) else ():
            quantizer = said.get(_QUANTIZER) if isinstance(said, Mapping) else None
            if isinstance(quantizer, tuple) and quantizer and isinstance(name, str):
                found[name] = quantizer
    return found


def _value(model: Model, name: str, quantizer: tuple[Any, ...], dtype: DType) -> Expr | None:
    """Return the value of a tensor; None if its scheme is not known. Raises DataError if it contradicts itself."""
    scheme = quantizer[0].name if isinstance(quantizer[0], Opaque) else quantizer[0]
    codes = model.operand(name)
    shape = codes.shape
    if scheme == _TENSOR and len(quantizer) == 3:
        scale, zero = quantizer[1:]
        if not isinstance(scale, float) or type(zero) is not int or abs(zero) >= 1 << 31:
            raise DataError(f"its scale is {scale!r:.40}, its zero point {zero!r:.40}")
        blocks = Blocks((1,) * len(shape), tuple(max(1, n) for n in shape))
        return _rounded(codes, _constant(scale), blocks, dtype, _constant(zero))
    if scheme == _CHANNEL and len(quantizer) == 4:
        scales, zeros, axis = _inner(model, quantizer[1]), _inner(model, quantizer[2]), quantizer[3]
        if type(axis) is not int or not 0 <= axis < len(shape) or not (scales.shape == zeros.shape == (shape[axis],)):
            raise DataError(
                f"{scales.shape} scales and {zeros.shape} zero points along the axis {axis!r:.20} of {shape}"
            )
        block = tuple(1 if d == axis else max(1, n) for d, n in enumerate(shape))
        blocks = Blocks(tuple(n if d == axis else 1 for d, n in enumerate(shape)), block)
        return _rounded(codes, scales, blocks, dtype, zeros)
    return None


def _rounded(codes: Expr | Input, scales: Expr | Input, blocks: Blocks, dtype: DType, zeros: Expr | Input) -> Expr:
    """Return the values in float32, as torch has them, and converted from there."""
    value = scaled(codes, scales, blocks, F32, zeros)
    return value if dtype is F32 else make("cast", value, dtype=dtype)


def _constant(number: float) -> Expr:
    try:
        data = struct.pack("<f", number)
    except OverflowError:
        raise DataError(f"the number {number!r:.40}, which float32 cannot hold") from None
    return make("constant", data=data.hex(), shape=(), dtype=F32)


def _inner(model: Model, ref: Any) -> Expr | Input:
    """Return a tensor that is an attribute of another one; it is in no state of the view."""
    stored = model.view._index.stored
    if not isinstance(ref, TensorRef) or stored is None or ref.name not in stored:
        raise DataError("its scales or zero points are not in the file")
    return operand(stored[ref.name])


FAMILY = Affine()
