"""Weights in the layouts of the kernels Marlin and Marlin-24; the codes are those of core/ops/marlin.py.

GPTQ with ``checkpoint_format`` "marlin" (or ``is_marlin_format``) has ``B`` and ``s`` in each layer, four bits and no
zero points. ``s`` is [groups, out], of groups of 128 inputs or one for all. If there are several groups, each 64 scales
are transposed as a matrix of 8 x 8. If there is one, each 32 are a matrix [4, 4, 2] whose first two dimensions are
swapped.

Source: auto-gptq 0.7.1 nn_modules/qlinear/qlinear_marlin.py (`QuantLinear.pack`).

compressed-tensors' format marlin-24 has ``weight_packed``, ``scale_packed`` and ``meta``. ``scale_packed`` is [groups,
out], of groups of 128 inputs or one for all. If there are several groups of the inputs that have codes (so that 128 is
less than half the inputs), each eight scales are in the order 0, 4, 1, 5, 2, 6, 3, 7. compressed-tensors writes the
format and does not read it; vLLM's kernel does.

Source: compressed-tensors 0.10.2 compressors/sparse_quantized_compressors/marlin_24.py (`pack_scales_24`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.dtypes import DType
from ...core.expr import make
from ...core.specs import Expr, Input
from ...errors import DataError
from .conv1d import as_unquantized
from .model import Model, Weight
from .scales import Blocks, scaled

_GROUP = 128
_DENSE = ("B", "s")
_TENSORS = ("weight_packed", "scale_packed", "meta")


def dense_weight(model: Model, layer: str, settings: Mapping[str, Any], dtype: DType) -> Weight:
    """Return the weight of a layer of GPTQ in Marlin's layout. Raises DataError if its tensors or the configuration do
    not fit.

    Parameters
    ----------
    model
        The stored tensors.
    layer
        The layer, which has ``B`` and ``s``.
    settings
        The configuration.
    dtype
        The dtype of the result.
    """
    names = tuple(f"{layer}.{one}" for one in _DENSE)
    words, scales = (model.operand(name) for name in names)
    bits, said = settings.get("bits", 4), settings.get("group_size")
    if bits != 4:
        raise DataError(f"Marlin's layout has 4 bits, not {bits!r}, which the configuration says")
    codes = make("dequantize.marlin", words)
    outputs, inputs = codes.shape
    groups = scales.shape[0] if scales.shape else 0
    fits = scales.shape == (groups, outputs) and groups and groups in (1, inputs // _GROUP) and not inputs % groups
    if not fits:
        raise DataError(f"scales of {scales.shape} are not those of {codes.shape} codes")
    if said is not None and (inputs if said == -1 else said) != inputs // groups:
        raise DataError(f"{groups:,} groups of {inputs:,} inputs are not of {said!r} inputs, as the configuration says")
    if groups == 1:
        parts = make("reshape", scales, shape=(1, outputs // 32, 4, 4, 2))
        order = make("transpose", parts, axes=(1, 3, 2, 4, 0))
    else:
        parts = make("reshape", scales, shape=(groups, outputs // 64, 8, 8))
        order = make("transpose", parts, axes=(1, 3, 2, 0))
    by = make("reshape", order, shape=(outputs, groups))
    value = scaled(codes, by, Blocks(by.shape, (1, inputs // groups)), dtype)
    used = model.present((*names, f"{layer}.workspace"))
    return Weight(f"{layer}.weight", as_unquantized(model, layer, value), used)


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
