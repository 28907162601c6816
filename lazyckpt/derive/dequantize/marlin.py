"""Weights of compressed-tensors in its format marlin-24: ``weight_packed``, ``scale_packed`` and ``meta``.

Codes are those of core/ops/marlin.py. ``scale_packed`` is [groups, out], of groups of 128 inputs or one for all. If
there are several groups of the inputs that have codes (so that 128 is less than half the inputs), each eight scales are
in the order 0, 4, 1, 5, 2, 6, 3, 7. compressed-tensors writes the format and does not read it; vLLM's kernel does.

Source: compressed-tensors 0.10.2 compressors/sparse_quantized_compressors/marlin_24.py (`pack_scales_24`).
"""

from __future__ import annotations

from ...core.dtypes import DType
from ...core.expr import make
from ...core.specs import Expr, Input
from ...errors import DataError
from .model import Model, Weight
from .scales import Blocks, scaled

_GROUP = 128
_TENSORS = ("weight_packed", "scale_packed", "meta")


def is_marlin(model: Model, module: str) -> bool:
    """Return whether a module has the tensors of marlin-24."""
    return all(f"{module}.{one}" in model.names for one in _TENSORS)


def weight(model: Model, module: str, bits: int, size: int | None, dtype: DType) -> Weight:
    """Return a module's weight. Raises DataError if its tensors do not fit.

    Parameters
    ----------
    model
        The stored tensors.
    module
        The module.
    bits
        The bits of a code.
    size
        The inputs of a group; None if all inputs share a scale.
    dtype
        The dtype of the result.
    """
    names = tuple(f"{module}.{one}" for one in _TENSORS)
    words, scales, meta = (model.operand(name) for name in names)
    codes = make("dequantize.marlin24", words, meta, bits=bits)
    outputs, inputs = codes.shape
    if size not in (None, _GROUP):
        raise DataError(f"marlin-24 has groups of {_GROUP} inputs, not of {size}")
    groups = inputs // size if size is not None and not inputs % size else 1
    if scales.shape != (groups, outputs) or (size is not None and inputs % size):
        raise DataError(f"scales of {scales.shape} are not those of {codes.shape} codes in groups of {size}")
    by: Expr | Input = make("transpose", scales, axes=(1, 0))
    if size is not None and size < inputs // 2:
        eights = make("reshape", scales, shape=(groups, outputs // 8, 4, 2))
        by = make("reshape", make("transpose", eights, axes=(1, 3, 2, 0)), shape=(outputs, groups))
    return Weight(f"{module}.weight", scaled(codes, by, Blocks(by.shape, (1, inputs // groups)), dtype), names)
