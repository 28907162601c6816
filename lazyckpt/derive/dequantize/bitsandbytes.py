"""bitsandbytes, as transformers saves it: nf4 and fp4 with a state for each tensor, and int8 with ``SCB``.

A 4-bit tensor says itself what it is: ``NAME.quant_state.bitsandbytes__nf4`` has its shape and block size as JSON.
These states, of 200 bytes, are read to describe the view.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.dtypes import DType
from ...core.expr import make
from ...errors import DataError, Problem
from .conv1d import as_unquantized
from .model import Model, Weight

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Bitsandbytes:
    """bitsandbytes' tensors of 4 and 8 bits."""

    name = "bitsandbytes"
    methods = ("bitsandbytes",)

    def detect(self, model: Model) -> bool:
        return model.evidence.method in self.methods or any(name.endswith((*_STATES, ".SCB")) for name in model.names)

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        states = {f"{name}{end}": name for end in _STATES for name in model.ending(end)}
        layers = [layer for layer in model.ending(".SCB") if f"{layer}.weight" in model]
        formats = model.present([f"{layer}.weight_format" for layer in layers])
        read = model.read_all((*states, *formats))
        for state, name in states.items():
            try:
                yield _four(model, name, state, bytes(read[state].numpy()), dtype)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{name!r}: {e}", name)
        for layer in layers:
            names = model.present([f"{layer}.{last}" for last in ("weight", "SCB", "weight_format")])
            layout = read.get(f"{layer}.weight_format")
            if layout is not None and (layout.numel() != 1 or int(layout) != 0):
                line = f"{layer!r}: the int8 layout {layout.tolist()} (weight_format) is not known, only 0, row-major"
                yield Problem("undecided-quantization", line, layer)
                continue
            try:
                value = make("dequantize.bnb_int8", *map(model.operand, names[:2]), dtype=dtype)
                yield Weight(names[0], as_unquantized(model, layer, value), names)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{layer!r}: {e}", layer)


def _four(model: Model, name: str, state: str, text: bytes, dtype: DType) -> Weight:
    known = _state(text)
    if not state.endswith(f"__{known.get('quant_type')}"):
        raise DataError(f"the state {state.rpartition('.')[2]!r} says that it is of {known.get('quant_type')!r}")
    parts = model.present([f"{name}.{part}" for part in _PARTS])
    nested = f"{name}.nested_absmax" in parts
    need = [name, f"{name}.absmax", *([f"{name}.nested_absmax", f"{name}.nested_quant_map"] if nested else [])]
    if missing := [one for one in need if one not in model]:
        raise DataError(f"there is no tensor {missing[0]!r}")
    params: dict[str, Any] = {"quant_type": known["quant_type"], "dtype": dtype}
    params |= {"shape": _shape(known), "blocksize": _positive(known, "blocksize")}
    if nested:
        offset = known.get("nested_offset")
        if not isinstance(offset, (int, float)):
            raise DataError(f"nested_offset is not a number: {offset!r}")
        params |= {"nested_blocksize": _positive(known, "nested_blocksize"), "nested_offset": float(offset)}
    value = make("dequantize.bnb_4bit", *map(model.operand, need), **params)
    if len(value.shape) == 2:
        value = as_unquantized(model, name.removesuffix(".weight"), value)
    return Weight(name, value, (name, *parts, state))


def _state(text: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"the quantization state is not valid JSON: {e}") from None
    if not isinstance(found, dict):
        raise DataError("the quantization state is not a JSON object")
    return found


def _positive(state: Mapping[str, Any], key: str) -> int:
    found = state.get(key)
    if type(found) is not int or found <= 0:
        raise DataError(f"{key} in the quantization state is not a positive number: {found!r}")
    return found


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    found = state.get("shape")
    if not isinstance(found, list) or not found or any(type(n) is not int or n < 0 for n in found):
        raise DataError(f"the shape in the quantization state is not a list of sizes: {found!r}")
    return tuple(found)


FAMILY = Bitsandbytes()
