"""AWQ of 4 bits: ``qweight``, ``qzeros`` and ``scales`` of each layer, in the layouts of AutoAWQ and llm-awq.

config.json (or quant_config.json) must say that it is AWQ: GPTQ has the same names. Shapes and dtypes tell the layout;
a ``version`` that says another one is a contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.dtypes import DType
from ...core.expr import Kind, make
from ...errors import DataError, Problem
from .model import Model, Weight

_FILE = "quant_config.json"
# What configurations call the layouts: AutoAWQ's and GPTQModel's names.
_CALLED = {
    "gemm": ("gemm", "awq"),
    "gemv": ("gemv", "llm-awq"),
    "gemv_fast": ("gemv_fast", "gemv-fast", "llm-awq"),
}


class Awq:
    """AWQ's matrices."""

    name = "awq"
    methods = ("awq",)

    def detect(self, model: Model) -> bool:
        said = model.evidence.method
        return said in self.methods or (not said and bool({"w_bit", "q_group_size"} & _beside(model).keys()))

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        settings = {**_beside(model), **model.evidence.quantization}
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            yield Problem("undecided-quantization", f"AWQ of {bits!r} bits is not known, only of 4")
            return
        for layer in model.ending(".qweight", ".scales"):
            try:
                yield _weight(model, layer, settings, dtype)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{layer!r}: {e}", layer)


def _beside(model: Model) -> Mapping[str, Any]:
    found = model.evidence.others.get(_FILE, {})
    inner = found.get("quant_config")
    return dict(inner) if isinstance(inner, Mapping) else dict(found)


def _weight(model: Model, layer: str, settings: Mapping[str, Any], dtype: DType) -> Weight:
    last = "qzeros" if f"{layer}.qzeros" in model else "scaled_zeros"
    names = [f"{layer}.qweight", f"{layer}.{last}", f"{layer}.scales"]
    if names[1] not in model:
        raise DataError("there are no zero points (qzeros)")
    codes, zeros, scales = map(model.kind, names)
    version = settings.get("version") or settings.get("checkpoint_format") or settings.get("format")
    layout, size, outputs = _layout(codes, zeros, scales, version)
    said = settings.get("group_size", settings.get("q_group_size"))
    if said is None and layout == "gemm" and size % scales.shape[-2] == 0:
        said = size // scales.shape[-2]
    group = size if said == -1 else said
    if type(group) is not int or group <= 0:
        raise DataError(f"the number of inputs with the same scale is not known: the configuration says {said!r}")
    operands = [model.operand(name) for name in names]
    value = make(
        "dequantize.awq", *operands, layout=layout, inputs=size, outputs=outputs, group_size=group, dtype=dtype
    )
    return Weight(f"{layer}.weight", value, tuple(names))


def _layout(codes: Kind, zeros: Kind, scales: Kind, version: Any) -> tuple[str, int, int]:
    """Return the layout of a layer, its inputs and its outputs. Raises DataError if the shapes do not decide."""
    a, b, c = (one.shape for one in (codes, zeros, scales))
    found = []
    if min(map(len, (a, b, c))) >= 2:
        if codes.dtype.itemsize == 4 and a[-1] * 8 == c[-1] and b[-2:] == (c[-2], a[-1]):
            found.append(("gemm", a[-2], c[-1]))
        if codes.dtype.itemsize == 4 and a[-2] == c[-2] == b[-2] and b[-1] * 8 == c[-1]:
            found.append(("gemv", a[-1] * 8, a[-2]))
        if codes.dtype.itemsize == 2 and a[-2] * 4 == c[-1] and b == c:
            found.append(("gemv_fast", a[-1], c[-1]))
    if not found:
        raise DataError(f"qweight, qzeros and scales have shapes {a}, {b} and {c}, which are of no layout of AWQ")
    meant = [one for one in found if version is None or str(version).lower() in _CALLED[one[0]]]
    if len(meant) != 1:
        layouts = " or ".join(one[0] for one in found)
        raise DataError(f"shapes are those of the layout {layouts}, but the configuration says {version!r}")
    return meant[0]


FAMILY = Awq()
