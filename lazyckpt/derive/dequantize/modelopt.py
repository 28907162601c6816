"""NVIDIA's modelopt: FP8, NVFP4, MXFP8, MXFP4 and INT8, by config.json or hf_quant_config.json.

A module's ``weight`` has codes and its ``weight_scale`` their scales:

- FP8 (float8, float32 scales): one for all, for each row, or for each block of ``group_size``, 128 by default;
- NVFP4 (bytes, float8 scales): a scale for 16 neighbours in a row, times the float32 ``weight_scale_2`` of the tensor;
- MXFP8 (float8, bytes) and MXFP4 (bytes, bytes): a power of two for 32 neighbours in a row;
- INT8 (int8, float32 scales): one for each row.

Fused experts ``W`` have no module of their own: their scales are ``W_weight_scale`` and ``W_weight_scale_2``. Those of
NVFP4 are [experts, in / 2, out] with scales [experts, in / 16, out] where the model has [experts, in, out] (Llama 4).

A module with ``pre_quant_scale`` (AWQ, SVDQuant) multiplies its inputs by it. The weight that does the same is ``weight
* pre_quant_scale``, column by column; with SVDQuant's low-rank part, ``(weight + svdquant_lora_b @ svdquant_lora_a) *
pre_quant_scale``. Each step is rounded in float32.

Source: nvidia-modelopt 0.47 torch/quantization/qtensor (`NVFP4QTensor.dequantize`, `FP8QTensor`, `MXFP8QTensor`,
`MXFP4QTensor`), torch/quantization/nn/modules/quant_linear.py (`SVDQuantLinear.forward`) and
torch/export/quant_utils.py (`maybe_transpose_expert_weight_dimensions`). In NVFP4 the code of -0.0 is 0.0 there.
Products are in float32, as in these functions with ``dtype=torch.float32``, and rounded once; for another dtype
`FP8QTensor.dequantize` rounds the scale to it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.box import Shape
from ...core.dtypes import F8_E4M3FN, F8_E8M0FNU, F32, I8, U8, DType
from ...core.expr import as_expr, make
from ...core.specs import Expr, Input
from ...errors import Problem, only_one, some
from .model import Model, Weight
from .scales import FLOAT8, Blocks, blocks_of, excluded, scaled, shaped, texts

_CONFIG = "hf_quant_config.json"
# What the algorithms of the configuration store, as `_kind` calls it. MIXED_PRECISION may have all.
_ALGORITHMS = {
    "FP8": ("fp8",), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8",), "FP8_PB_WO": ("fp8",), "FP8_PB_REAL": ("fp8",),
    "NVFP4": ("nvfp4",), "W4A16_NVFP4": ("nvfp4",), "NVFP4_AWQ": ("nvfp4",), "NVFP4_SVD": ("nvfp4",),
    "W4A8_NVFP4_FP8": ("nvfp4",),
    "MXFP8": ("mxfp8",), "MXFP4": ("mxfp4",), "W4A8_MXFP4_FP8": ("mxfp4",),
    "W8A16": ("int8",), "W8A8_SQ_PER_CHANNEL": ("int8",), "INT8_SQ": ("int8",),
}  # fmt: skip


class Modelopt:
    """NVIDIA's modelopt."""

    name = "modelopt"
    methods = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")

    def detect(self, model: Model) -> bool:
        """Return whether a configuration says so, or there is none and tensors have the names of NVFP4."""
        method = model.evidence.method
        if method:
            return method in self.methods
        if _CONFIG in model.evidence.others:
            return True
        return not model.evidence.says and any(name.endswith(".weight_scale_2") for name in model.names)

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the weights whose codes and scales fit each other and the configuration."""
        told = _settings(model)
        yield from told.problems
        wrong: list[str] = []
        barred: list[str] = []
        for name in model.names:
            scales = next((name + end for end in ("_scale", "_weight_scale") if name + end in model.names), None)
            if scales is None or not _may_be_codes(model.kind(name).dtype):
                continue
            module = name.rpartition(".")[0]
            if excluded(module, told.ignored):
                barred.append(name)
                continue
            found = _smoothed(model, name, scales, dtype, told)
            if isinstance(found, Weight):
                yield found
            else:
                wrong.append(found)
        if wrong:
            line = f"{len(wrong):,} tensors do not fit their scales, or the configuration: {some(wrong)}"
            yield Problem("contradicting-quantization", line)
        if barred:
            line = f"the configuration excludes {len(barred):,} tensors that have codes and scales: {some(barred)}"
            yield Problem("contradicting-quantization", line, only_one(barred))


class _Told:
    """What the configuration says."""

    def __init__(self) -> None:
        self.algorithm = ""
        self.layers: Mapping[str, Any] = {}
        self.ignored: list[str] = []
        self.group: int | None = None
        self.problems: list[Problem] = []

    def kinds(self, module: str) -> tuple[str, ...]:
        """Return what a module may store; empty if the configuration does not say it."""
        own = self.layers.get(module)
        algorithm = own.get("quant_algo") if isinstance(own, Mapping) else self.algorithm
        return _ALGORITHMS.get(str(algorithm).upper(), ())


def _settings(model: Model) -> _Told:
    told = _Told()
    file = model.evidence.others.get(_CONFIG, {}).get("quantization")
    sources = [one for one in (model.evidence.quantization, file) if isinstance(one, Mapping)]
    algorithms = []
    for one in sources:
        inner = one.get("quantization")
        one = inner if isinstance(inner, Mapping) else one
        found = one.get("quant_algo")
        algorithms += [found.upper()] if isinstance(found, str) else []
        for key in ("ignore", "exclude_modules"):
            told.ignored += texts(one.get(key))
        layers = one.get("quantized_layers")
        told.layers = layers if isinstance(layers, Mapping) else told.layers
        group = one.get("group_size")
        told.group = group if type(group) is int and group > 0 else told.group
    if len(set(algorithms)) > 1:
        line = f"config.json and {_CONFIG} name different algorithms: {', '.join(algorithms)}; tensors decide"
        told.problems.append(Problem("contradicting-quantization", line, _CONFIG))
    elif algorithms:
        told.algorithm = algorithms[0]
    return told


def _may_be_codes(dtype: DType) -> bool:
    return dtype in FLOAT8 or dtype in (U8, I8)


def _kind(codes: DType, scales: DType, global_scale: bool) -> str:
    """Return what codes and scales of these dtypes are; empty if nothing known."""
    if codes in FLOAT8:
        return "mxfp8" if scales in (U8, F8_E8M0FNU) else "fp8" if _is_wide(scales) else ""
    if codes is U8 and scales is F8_E4M3FN:
        return "nvfp4" if global_scale else ""
    if codes is U8 and scales in (U8, F8_E8M0FNU):
        return "mxfp4"
    return "int8" if codes is I8 and _is_wide(scales) else ""


def _is_wide(dtype: DType) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _smoothed(model: Model, name: str, scales: str, dtype: DType, told: _Told) -> Weight | str:
    """Return a weight, times what its inputs are multiplied by, and with its low-rank part; or why it is none."""
    module = name.rpartition(".")[0]
    smooth, down, up = (f"{module}.{one}" for one in ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b"))
    used = model.present((smooth, down, up))
    found = _weight(model, name, scales, F32 if used else dtype, told)
    if not used or isinstance(found, str):
        return found
    value: Expr = as_expr(found.value)
    shape = value.shape
    if (down in used) is not (up in used):
        return f"{name} with one half of a low-rank part"
    if down in used:
        a, b = model.kind(down).shape, model.kind(up).shape
        if len(shape) != 2 or len(a) != 2 or len(b) != 2 or (b[0], a[1]) != shape or a[0] != b[1]:
            return f"{name} {shape} with a low-rank part of {b} and {a}"
        value = make(
            "linear", value, make("product", model.operand(up), model.operand(down)), weights=(1, 1), dtype=F32
        )
    if smooth not in used:
        return found._replace(value=make("cast", value, dtype=dtype), consumed=(*found.consumed, *used))
    columns = model.kind(smooth).shape
    by = {(shape[-1],): (*(1,) * (len(shape) - 1), shape[-1]), (shape[0], shape[-1]): (shape[0], 1, shape[-1])}
    lying = columns if len(columns) == len(shape) else by.get(columns)
    if (
        lying is None
        or len(lying) != len(shape)
        or lying[-1] != shape[-1]
        or lying[-2] != 1
        or not _is_wide(model.kind(smooth).dtype)
    ):
        return f"{name} {shape} with pre_quant_scale {columns}"
    blocks = Blocks(lying, tuple(1 if n == m else m for n, m in zip(lying, shape, strict=True)))
    return found._replace(value=scaled(value, model.operand(smooth), blocks, dtype), consumed=(*found.consumed, *used))


def _weight(model: Model, name: str, scales: str, dtype: DType, told: _Told) -> Weight | str:
    """Return a weight, or why it is none."""
    codes, scale = model.kind(name), model.kind(scales)
    second = f"{scales}_2"
    kind = _kind(codes.dtype, scale.dtype, second in model.names)
    wanted = told.kinds(name.rpartition(".")[0])
    what = f"{name} ({codes.dtype.short} {codes.shape}, scales {scale.dtype.short} {scale.shape})"
    if not kind or (wanted and kind not in wanted):
        return what
    operand: Expr | Input = model.operand(name)
    by: Expr | Input = model.operand(scales)
    turned = kind == "nvfp4" and _is_turned(codes.shape, scale.shape, told.group or 16)
    if turned:
        operand, by = (make("transpose", one, axes=(0, 2, 1)) for one in (operand, by))
    used: tuple[str, ...] = (name, scales)
    if kind in ("nvfp4", "mxfp4"):
        operand = make("dequantize.fp4", operand, negative_zero=kind != "nvfp4")
    group = {"nvfp4": told.group or 16, "mxfp4": 32, "mxfp8": 32}.get(kind)
    if group is not None:
        shape = operand.shape
        if by.shape != (*shape[:-1], -(-shape[-1] // group)):
            return what
        blocks: Blocks | None = Blocks(by.shape, (*(1,) * (len(shape) - 1), group))
    else:
        side = told.group or 128
        blocks = blocks_of(codes.shape, scale.shape, (side, side) if kind == "fp8" else None)
    if blocks is None:
        return what
    if kind in ("mxfp4", "mxfp8"):
        by = make("dequantize.e8m0", by)
    if kind == "nvfp4":
        whole = blocks_of(by.shape, model.kind(second).shape, None)
        if whole is None:
            return f"{what} with {second} {model.kind(second).shape}"
        by = scaled(by, model.operand(second), whole, F32)
        used = (*used, second)
    value = scaled(operand, shaped(by, blocks.shape), blocks, dtype)
    return Weight(name, make("transpose", value, axes=(0, 2, 1)) if turned else value, used)


def _is_turned(codes: Shape, scales: Shape, group: int) -> bool:
    """Return whether fused experts are [experts, in / 2, out], by their scales' shape, [experts, in / 16, out]."""
    if len(codes) != 3 or len(scales) != 3 or scales == (*codes[:-1], -(-codes[-1] * 2 // group)):
        return False
    return scales == (codes[0], -(-codes[1] * 2 // group), codes[2])


FAMILY = Modelopt()
