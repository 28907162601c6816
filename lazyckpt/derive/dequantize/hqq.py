"""HQQ: the state of each ``HQQLinear``, as hqq writes it to qmodel.pt and hqq and transformers to safetensors.

In qmodel.pt numbers and names are Python objects, which are in the view's metadata. In safetensors they are tensors
of a few bytes (``nbits``, ``shape``, ``packing`` as characters, ...), which are read to describe the view. Older
versions of hqq quantized the zero points and scales, too: ``zero_q`` and ``scale_q``, with a ``meta_zero`` and a
``meta_scale``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...core.dtypes import DType, dtype_of
from ...core.expr import make
from ...core.specs import Expr, Input
from ...errors import DataError, Problem
from .model import Model, Weight

if TYPE_CHECKING:
    import torch

# What decides the value of a weight: how to decode its tensor of a safetensors file (hqq 0.2.8, core/utils.py).
_NEEDED = {
    "shape": "sizes", "axis": "int", "group_size": "int", "packing": "text", "compute_dtype": "text",
    "quant_zero": "int", "quant_scale": "int",
}  # fmt: skip
# What else a state has. It is consumed with the weight.
_OTHERS = (
    "nbits", "unpack_view_dtype", "view_as_float", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero", "scale_quant_params", "zero_quant_params",
)  # fmt: skip
_LONG = 64  # characters of a name


class Hqq:
    """HQQ's matrices."""

    name = "hqq"
    methods = ("hqq",)

    def detect(self, model: Model) -> bool:
        return model.evidence.method in self.methods or any(name.endswith(".W_q") for name in model.names)

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        layers = list(model.ending(".W_q"))
        stored = [f"{layer}.{field}" for layer in layers for field in _NEEDED]
        read = model.read_all(model.present(stored))
        for layer in layers:
            try:
                yield _weight(model, layer, _said(model, layer, read), dtype)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{layer!r}: {e}", layer)


def _said(model: Model, layer: str, read: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the numbers and names of a layer's state. Raises DataError for a tensor that holds none."""
    found: dict[str, Any] = {}
    meta: Any = model.view._index.meta
    held = meta.get(layer) if isinstance(meta, Mapping) else None
    if isinstance(held, Mapping):
        inner = held.get("meta")  # until hqq 0.1.7
        found |= inner if isinstance(inner, Mapping) else held
    for field, kind in _NEEDED.items():
        tensor = read.get(f"{layer}.{field}")
        if tensor is None:
            continue
        numbers = tensor.reshape(-1).tolist()
        if any(type(n) is not int for n in numbers) or len(numbers) > _LONG or (kind == "int" and len(numbers) != 1):
            raise DataError(f"{field!r} has no {kind}")
        found[field] = _decoded(numbers, kind)
    return found


def _decoded(numbers: list[int], kind: str) -> Any:
    if kind == "text":
        return "".join(map(chr, numbers)) if all(32 <= n < 127 for n in numbers) else repr(numbers)
    return tuple(numbers) if kind == "sizes" else numbers[0]


def _weight(model: Model, layer: str, said: Mapping[str, Any], dtype: DType) -> Weight:
    consumed = [f"{layer}.W_q"]
    compute = _dtype(said.get("compute_dtype"))
    values = []
    for field in ("zero", "scale"):
        name, values_of = _meta_values(model, layer, field, said, compute)
        consumed.append(name)
        values.append(values_of)
    value = _dequantized(model.operand(consumed[0]), values, said, compute, dtype)
    others = model.present([f"{layer}.{field}" for field in (*_NEEDED, *_OTHERS)])
    others += tuple(name for name in model.names if name.startswith((f"{layer}.meta_zero.", f"{layer}.meta_scale.")))
    if f"{layer}.meta.scale" in consumed or f"{layer}.meta.scale_q" in consumed:
        others += tuple(name for name in model.names if name.startswith(f"{layer}.meta."))
    return Weight(f"{layer}.weight", value, tuple(dict.fromkeys((*consumed, *others))))


def _meta_values(
    model: Model, layer: str, field: str, said: Mapping[str, Any], compute: DType
) -> tuple[str, Expr | Input]:
    """Return the zero points or the scales of a layer, with the name of the tensor of their codes or values."""
    for prefix in (f"{layer}.", f"{layer}.meta."):
        if said.get(f"quant_{field}"):
            name = f"{prefix}{field}_q"
            inner = said.get(f"meta_{field}")
            if name not in model or not isinstance(inner, Mapping):
                continue
            beside = [f"{prefix}meta_{field}.{one}" for one in ("zero", "scale")]
            if any(one not in model for one in beside):
                continue
            operands: list[Expr | Input] = [model.operand(one) for one in beside]
            return name, _dequantized(model.operand(name), operands, inner, compute, compute)
        if f"{prefix}{field}" in model:
            return f"{prefix}{field}", model.operand(f"{prefix}{field}")
    raise DataError(f"there are no {field}s")


def _dequantized(
    codes: Expr | Input, values: list[Expr | Input], said: Mapping[str, Any], compute: DType, dtype: DType
) -> Expr:
    shape, axis, group, packing = (said.get(field) for field in ("shape", "axis", "group_size", "packing"))
    if not isinstance(shape, tuple | list) or not shape or any(type(n) is not int or n < 0 for n in shape):
        raise DataError(f"its shape is not known: {shape!r}")
    if axis not in (0, 1) or not (group is None or (type(group) is int and group > 0)):
        raise DataError(f"its groups are not known: {group!r} along axis {axis!r}")
    if said.get("channel_wise") is False:
        group = None
    params: dict[str, Any] = {"shape": tuple(shape), "axis": int(axis), "group_size": group, "packing": packing}
    return make("dequantize.hqq", codes, *values, **params, compute_dtype=compute, dtype=dtype)


def _dtype(said: Any) -> DType:
    """Return the dtype that hqq computes in: float16 unless the state says another one."""
    try:
        found = dtype_of("float16" if said is None else said)
    except DataError:
        raise DataError(f"its compute dtype is not known: {said!r}") from None
    if not found.is_floating_point or found.itemsize < 2:
        raise DataError(f"its compute dtype is {found}")
    return found


FAMILY = Hqq()
