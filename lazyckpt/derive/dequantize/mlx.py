"""MLX, as mlx-lm writes it: matrices of words with ``scales`` and ``biases``, and config.json's ``quantization``.

``quantization`` has ``group_size``, ``bits`` and ``mode`` (affine, mxfp4, mxfp8, nvfp4) for all modules, and under the
name of a module its own ones, or false. Shapes do not tell bits from groups, so that config.json is needed.

The modes but affine are floats of four or eight bits with a power of two (mx) or a float8 (nv) for each group. Their
values are exact in bfloat16, the dtype that MLX computes them in. Stacked experts (``switch_mlp``) stay stacked.

Sources: mlx 0.32.4, mlx/nn/layers/quantized.py (`_defaults_for_mode`); mlx-lm utils.py `load_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.dtypes import F8_E4M3FN, U8, U32, DType
from ...core.expr import make
from ...core.specs import Expr, Input
from ...errors import DataError, Problem, only_one, some
from .model import Model, Weight
from .scales import Blocks, scaled

_KEY = "quantization"
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


class Mlx:
    """MLX's matrices."""

    name = "mlx"
    methods = ("mlx",)

    def detect(self, model: Model) -> bool:
        """Return whether config.json has MLX's ``quantization``, or names no method and matrices are words."""
        if _settings(model):
            return True
        return not model.evidence.method and any(
            model.kind(f"{stem}.weight").dtype is U32 for stem in model.ending(".weight", ".scales")
        )

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the matrices of words."""
        settings = _settings(model)
        unknown = []
        for module in model.ending(".weight", ".scales"):
            names = model.present([f"{module}.{last}" for last in ("weight", "scales", "biases")])
            if model.kind(names[0]).dtype is not U32:
                continue
            if not settings:
                unknown.append(module)
                continue
            try:
                yield Weight(names[0], _value(model, names, _of_module(settings, module), dtype), names)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{module!r}: {e}", module)
        if unknown:
            line = (
                f"{len(unknown):,} matrices of words look like MLX's, but config.json has no 'quantization' with their "
                f"bits and group_size: {some(unknown)}"
            )
            yield Problem("undecided-quantization", line, only_one(unknown))


def _settings(model: Model) -> Mapping[str, Any]:
    """Return MLX's settings; empty if there are none."""
    for place in (model.evidence.model, model.evidence.model.get("text_config")):
        found = place.get(_KEY) if isinstance(place, Mapping) else None
        if isinstance(found, Mapping) and ("bits" in found or "group_size" in found or "mode" in found):
            return found
    found = model.evidence.quantization
    return found if not model.evidence.method and {"bits", "group_size"} <= found.keys() else {}


def _of_module(settings: Mapping[str, Any], module: str) -> tuple[str, int, int]:
    """Return the mode, group size and bits of a module. Raises DataError if they are not certain."""
    own = settings.get(module, settings)
    if own is True:
        own = settings
    if not isinstance(own, Mapping):
        raise DataError(f"config.json says that it is not quantized ({own!r}), but its weight is words with scales")
    mode = own.get("mode", "affine")
    if mode not in _DEFAULTS:
        raise DataError(f"its mode {mode!r} is not known")
    size, bits = (own.get(key) or usual for key, usual in zip(("group_size", "bits"), _DEFAULTS[mode], strict=True))
    if type(size) is not int or type(bits) is not int or size < 1:
        raise DataError(f"its group_size {size!r} and bits {bits!r} are not numbers")
    return mode, size, bits


def _value(model: Model, names: tuple[str, ...], how: tuple[str, int, int], dtype: DType) -> Expr:
    mode, size, bits = how
    operands = [model.operand(name) for name in names]
    if mode == "affine":
        if len(operands) != 3:
            raise DataError("there are no biases, which the mode affine needs")
        return make("dequantize.affine", *operands, bits=bits, group_size=size, dtype=dtype)
    if len(operands) != 2:
        raise DataError(f"there are biases, which the mode {mode} does not have")
    if (size, bits) != _DEFAULTS[mode]:
        raise DataError(f"the mode {mode} has no groups of {size} with {bits} bits")
    codes: Expr | Input = make("as_bits", operands[0], dtype=U8 if bits == 4 else F8_E4M3FN)
    codes = make("dequantize.fp4", codes) if bits == 4 else codes
    if operands[1].dtype is not U8 or codes.shape != (*operands[1].shape[:-1], operands[1].shape[-1] * size):
        raise DataError(f"scales {operands[1].dtype} {operands[1].shape} do not fit {codes.shape} in groups of {size}")
    if mode == "nvfp4":
        scales = make("as_bits", operands[1], dtype=F8_E4M3FN)
    else:
        scales = make("dequantize.e8m0", operands[1])
    return scaled(codes, scales, Blocks(scales.shape, (*(1,) * (len(scales.shape) - 1), size)), dtype)


FAMILY = Mlx()
