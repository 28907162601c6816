"""torchao: tensors of its classes, pickled by torch.save or flattened into safetensors.

The class and its attributes say what the codes and scales mean; config.json is not needed. Each value is computed in
float32 and rounded once, as ``dequantize()`` of the class does, but for NF4Tensor, which rounds each step.

Sources: torchao 0.18, quantization/quantize_/workflows, prototype/mx_formats and prototype/safetensors; for
AffineQuantizedTensor, which later versions do not have, torchao 0.12, dtypes. Int4Tensor has no ``dequantize``: its
codes and zero points are those of fbgemm_gpu.experimental.gen_ai.quantize `int4_row_quantize_zp` and `pack_int4`, by
which it quantizes. Layouts that belong to one kind of processor (tiles, int32 words) are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from ...core.box import Box, Shape
from ...core.dtypes import F32, U8, DType
from ...core.expr import make
from ...core.placement import Placement
from ...core.specs import Expr, Input
from ...errors import DataError, Problem, only_one, some
from .model import Model, Weight
from .scales import Blocks, scaled, shaped
from .subclasses import Composed, composed, weights_of

_WRAPPERS = {
    "LinearActivationQuantizedTensor": "original_weight_tensor",
    "WeightTensorWithLinearActivationQuantizationMetadata": "original_weight_tensor",
    "AffineQuantizedTensor": "tensor_impl",
}
_INTEGER, _NONE = (1, "INT"), (3, None, "NONE")  # how a zero point is meant: before scaling, or there is none


class Torchao:
    """torchao's tensors."""

    name = "torchao"
    methods = ("torchao",)

    def detect(self, model: Model) -> bool:
        return model.evidence.method in self.methods or any(one.package == "torchao" for one in composed(model))

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        yield from weights_of(model, "torchao", lambda one: _value(model, one, dtype), "torchao", _CODES)
        lost = [name for name in model.names if name.endswith(("_qdata", ":qdata", ".qdata"))]
        if lost and not any(one.package == "torchao" for one in composed(model)):
            line = f"{len(lost):,} tensors have names of torchao's, but no metadata says what they are: {some(lost)}"
            yield Problem("undecided-quantization", line, only_one(lost))


_CODES = ("qdata", "int_data", "float8_data", "quantized_data")


def _value(model: Model, one: Composed, dtype: DType) -> Expr | str:
    """Return a tensor's value, or what it is, if that is not known. Raises DataError if it contradicts itself."""
    lost = [name for name in one.names() if name not in model]
    if lost or not one.names():
        raise DataError(f"a {one.kind} whose tensors are not all there: {some(lost) if lost else 'there are none'}")
    inner = one.said.get(_WRAPPERS.get(one.kind, ""))
    if isinstance(inner, Composed) and one.kind == "AffineQuantizedTensor":
        return _affine_v1(model, one, inner, dtype)
    if isinstance(inner, Composed):
        return _value(model, inner, dtype)
    compute = _KINDS.get(one.kind)
    if compute is None:
        return f"{one.kind}, whose layout is not known"
    if "act_pre_scale" in one.parts:
        return f"{one.kind} with act_pre_scale, by which activations are multiplied first"
    return compute(model, one, dtype)


def _part(model: Model, one: Composed, key: str) -> Expr | Input:
    if key not in one.parts:
        raise DataError(f"a {one.kind} without {key}")
    return model.operand(one.parts[key])


def _sizes(value: Any, count: int) -> Shape:
    """Return the sizes of blocks. Raises DataError if they are none."""
    if not isinstance(value, list | tuple) or len(value) != count or any(type(n) is not int for n in value):
        raise DataError(f"its block_size is {value!r}")
    return tuple(value)


def _blocks(codes: Shape, block: Shape) -> Blocks:
    """Return how scales lie over codes, for torchao's block_size, where -1 is the whole dimension."""
    sizes = tuple(n if b == -1 else b for n, b in zip(codes, block, strict=True))
    if any(b < 1 or n % b for n, b in zip(codes, sizes, strict=True)):
        raise DataError(f"{codes} codes are no whole blocks of {block}")
    return Blocks(tuple(n // b for n, b in zip(codes, sizes, strict=True)), sizes)


def _affine(codes: Expr | Input, scales: Expr | Input, zeros: Expr | Input | None, block: Any, dtype: DType) -> Expr:
    blocks = _blocks(codes.shape, _sizes(block, len(codes.shape)))
    for part in (scales, zeros):
        if part is not None and prod(part.shape) != prod(blocks.shape):
            raise DataError(f"{part.shape} scales or zero points for {blocks.shape} blocks")
    return scaled(codes, scales, blocks, dtype, zeros)


def _int8(model: Model, one: Composed, dtype: DType) -> Expr:
    zeros = _part(model, one, "zero_point") if "zero_point" in one.parts else None
    codes = _part(model, one, "qdata")
    return _affine(codes, _part(model, one, "scale"), zeros, one.said.get("block_size"), dtype)


def _float8(model: Model, one: Composed, dtype: DType) -> Expr:
    return _broadcast(_part(model, one, "qdata"), _part(model, one, "scale"), dtype)


def _broadcast(codes: Expr | Input, scales: Expr | Input, dtype: DType) -> Expr:
    """Return float8 codes times scales, whose shape says how many share one (`_maybe_expand_scale_to_tensor_shape`)."""
    shape = (1,) * len(codes.shape) if prod(scales.shape) == 1 else scales.shape
    if len(shape) != len(codes.shape) or any(c < 1 or n % c for n, c in zip(codes.shape, shape, strict=True)):
        raise DataError(f"{scales.shape} scales do not fit {codes.shape} codes")
    block = tuple(n // c for n, c in zip(codes.shape, shape, strict=True))
    return scaled(codes, scales, Blocks(shape, block), dtype)


def _int4(model: Model, one: Composed, dtype: DType) -> Expr:
    """Return ``code * scale + zero``, for scales and zeros [groups, out]."""
    operands = [_part(model, one, key) for key in ("qdata", "scale", "zero_point")]
    size = _sizes(one.said.get("block_size"), len(operands[0].shape))[-1]
    turned = [make("transpose", part, axes=_turned(len(part.shape))) for part in operands[1:]]
    params = {"bits": 4, "group_size": size, "signed": True, "within": F32, "dtype": dtype}
    return make("dequantize.affine", operands[0], *turned, **params)


def _turned(n: int) -> tuple[int, ...]:
    return (*range(n - 2), n - 1, n - 2)


def _mx(model: Model, one: Composed, dtype: DType) -> Expr | str:
    codes, size = _part(model, one, "qdata"), one.said.get("block_size")
    kind = one.said.get("elem_dtype")
    if codes.dtype is U8:
        if getattr(kind, "name", kind) not in ("float4_e2m1fn_x2", "torch.float4_e2m1fn_x2"):
            return f"MXTensor of {kind}, whose layout is not known"
        codes = make("dequantize.fp4", codes)
    scales = _unswizzled(model, one, codes.shape, size)
    return scaled(codes, make("dequantize.e8m0", scales), _row_blocks(codes.shape, scales, size), dtype)


def _nvfp4(model: Model, one: Composed, dtype: DType) -> Expr:
    codes, size = make("dequantize.fp4", _part(model, one, "qdata")), one.said.get("block_size")
    scales = _unswizzled(model, one, codes.shape, size)
    blocks = _row_blocks(codes.shape, scales, size)
    if "per_tensor_scale" in one.parts:
        whole = _part(model, one, "per_tensor_scale")
        lead = codes.shape[0] if prod(whole.shape) > 1 else 1
        shape = (lead, *(1,) * (len(codes.shape) - 1))
        if prod(whole.shape) != lead:
            raise DataError(f"{whole.shape} per_tensor_scale for {codes.shape} codes")
        block = (blocks.shape[0] // lead, *blocks.shape[1:])
        scales = make("dequantize.scaled", shaped(scales, blocks.shape), shaped(whole, shape), block=block, dtype=F32)
    return scaled(codes, scales, blocks, dtype)


def _row_blocks(codes: Shape, scales: Expr | Input, size: Any) -> Blocks:
    if type(size) is not int or size < 1 or codes[-1] % size:
        raise DataError(f"rows of {codes[-1]:,} are no whole blocks of {size!r}")
    shape = (*codes[:-1], codes[-1] // size)
    if prod(scales.shape) != prod(shape):
        raise DataError(f"{scales.shape} scales for {shape} blocks")
    return Blocks(shape, (*(1,) * (len(codes) - 1), size))


def _unswizzled(model: Model, one: Composed, codes: Shape, size: Any) -> Expr | Input:
    """Return scales row by row. If they are swizzled, tiles of 128 x 4 are stored one after the other, in the order
    that NVIDIA's tensor cores read (torchao's `from_blocked`)."""
    scales = _part(model, one, "scale")
    if not one.said.get("is_swizzled_scales"):
        return scales
    if type(size) is not int or size < 1:
        raise DataError(f"its block_size is {size!r}")
    rows, columns = prod(codes[:-1]), codes[-1] // size
    high, wide = -(-rows // 128), -(-columns // 4)
    if prod(scales.shape) != high * wide * 512:
        raise DataError(f"{scales.shape} swizzled scales for {rows:,} x {columns:,}")
    tiles = make("reshape", scales, shape=(high, wide, 32, 4, 4))
    padded = make("reshape", make("transpose", tiles, axes=(0, 3, 2, 1, 4)), shape=(high * 128, wide * 4))
    if padded.shape == (rows, columns):
        return padded
    cut = Placement.of(padded.shape, Box((0, 0), (rows, columns)), (0, 0))
    return make("place", padded, shape=(rows, columns), placements=(cut,))


def _nf4(model: Model, one: Composed, dtype: DType) -> Expr:
    if one.shape is None:
        raise DataError("its shape is not known")
    keys = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
    sizes = {key: one.said.get(key) for key in ("block_size", "scaler_block_size")}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise DataError(f"its sizes of blocks are {sizes}")
    return make("dequantize.nf4", *(_part(model, one, key) for key in keys), shape=one.shape, dtype=dtype, **sizes)


def _affine_v1(model: Model, one: Composed, inner: Composed, dtype: DType) -> Expr | str:
    domain = one.said.get("zero_point_domain")
    args = getattr(domain, "args", None)
    meant = args[0] if args else domain
    if inner.kind == "Float8AQTTensorImpl" and not inner.said.get("transposed"):
        return _broadcast(_part(model, inner, "float8_data"), _part(model, inner, "scale"), dtype)
    if inner.kind not in ("PlainAQTTensorImpl", "QDQTensorImpl") or meant not in (*_INTEGER, *_NONE):
        return f"AffineQuantizedTensor with {inner.kind}, whose layout is not known"
    zeros = _part(model, inner, "zero_point") if "zero_point" in inner.parts and meant in _INTEGER else None
    codes = _part(model, inner, "int_data")
    if one.shape != codes.shape:
        return f"AffineQuantizedTensor of {one.shape} with codes of {codes.shape}"
    return _affine(codes, _part(model, inner, "scale"), zeros, one.said.get("block_size"), dtype)


_KINDS: dict[str, Callable[[Model, Composed, DType], Expr | str]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _int8,
    "Float8Tensor": _float8,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
    "NF4Tensor": _nf4,
}

FAMILY = Torchao()
