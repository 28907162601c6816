"""compressed-tensors (LLM Compressor): formats by groups of modules, which ``config_groups`` of config.json lists.

A module has these tensors, by the group's ``format``:

- naive-quantized, float-quantized, int-quantized: ``weight`` (float8 or int8), ``weight_scale``, perhaps
  ``weight_zero_point``; mxfp8-quantized: the scales are powers of two, as bytes;
- pack-quantized: ``weight_packed`` (int32, 1 to 8 bits), ``weight_scale``, ``weight_shape``, perhaps
  ``weight_zero_point`` (packed along the rows), perhaps ``weight_g_idx`` (the group of each column);
- nvfp4-pack-quantized: ``weight_packed`` (bytes), ``weight_scale`` (float8), ``weight_global_scale``, which the scales
  are divided by; mxfp4-pack-quantized, mxfp6-pack-quantized: the scales are powers of two, as bytes;
- sparse-24-bitmask, sparse-bitmask: ``compressed``, ``bitmask``, ``shape``, perhaps ``row_offsets`` (sparse.py);
- marlin-24: ``weight_packed``, ``scale_packed``, ``meta`` (marlin.py).

Source: compressed-tensors 0.20 compressors/*/base.py `decompress`, quantization/lifecycle/forward_helpers.py
`_dequantize`, and 0.10.2 for ``weight_g_idx`` and sparse formats. `_dequantize` computes in the dtype of the scales.
Here products are computed in float32, where they are exact for scales of 16 bits, and rounded once to the wanted dtype:
the same bits where that is the dtype of the scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.dtypes import F8_E4M3FN, F8_E8M0FNU, F32, I8, I32, U8, DType
from ...core.expr import make
from ...core.ops.packed import words_of
from ...core.specs import Expr, Input
from ...errors import DataError, Problem, only_one, some
from . import marlin, sparse
from .model import Model, Weight
from .scales import FLOAT8, Blocks, blocks_of, scaled, shaped, texts

_TENSORS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape", "weight_g_idx")
_LONG = 500  # characters of a regular expression
_DENSE_SINCE = (0, 15)  # the version that packs codes whose bits do not divide 32 without gaps


class Group(NamedTuple):
    """How a group of modules is quantized: the arguments of its weights, and its format."""

    targets: tuple[str, ...]
    bits: int
    kind: str
    strategy: str
    size: int | None
    block: tuple[int, ...] | None
    symmetric: bool
    format: str


class Compressed:
    """compressed-tensors."""

    name = "compressed-tensors"
    methods = ("compressed-tensors", "compressed_tensors", "sparseml")

    def detect(self, model: Model) -> bool:
        """Return whether config.json says so, or there is none and tensors have the names of its NVFP4."""
        method = model.evidence.method
        if method:
            return method in self.methods
        if model.evidence.quantization:
            return "config_groups" in model.evidence.quantization or "sparsity_config" in model.evidence.quantization
        return not model.evidence.says and any(name.endswith(".weight_global_scale") for name in model.names)

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the weights of modules whose group is known."""
        settings = model.evidence.quantization
        groups = groups_in(settings)
        ignored = texts(settings.get("ignore"))
        patterns = [one for one in (*ignored, *(t for g in groups for t in g.targets)) if _is_costly(one)]
        if patterns:
            line = f"config.json has regular expressions that could take forever, and are not used: {some(patterns)}"
            yield Problem("undecided-quantization", line)
            return
        wrong: dict[str, list[str]] = {}
        sparse_codes = {one.module: one for one in sparse.found(model)}
        modules = dict.fromkeys(
            [
                *sparse_codes,
                *model.ending(".weight_packed", ".weight_scale"),
                *model.ending(".weight_packed", ".scale_packed", ".meta"),
                *(stem for stem in model.ending(".weight", ".weight_scale") if _is_codes(model, f"{stem}.weight")),
            ]
        )
        for module in modules:
            if any(_matches(module, one) for one in ignored):
                wrong.setdefault("config.json ignores modules that are quantized", []).append(module)
                continue
            below = sparse_codes.get(module)
            if below is not None and f"{module}.weight_scale" not in model.names:
                yield Weight(f"{module}.weight", below.value, below.names)
                continue
            fits: list[Weight] = []
            reasons: list[str] = []
            for group in _candidates(module, groups) if groups else _obvious(model, module):
                try:
                    found = _weight(model, module, group, dtype, below, settings)
                except DataError as e:
                    reasons.append(str(e))
                    continue
                if all(found.value != other.value for other in fits):
                    fits.append(found)
            if len(fits) == 1:
                yield fits[0]
            elif fits:
                wrong.setdefault("several config_groups fit modules and would mean different weights", []).append(
                    module
                )
            else:
                why = reasons[0] if reasons else "no config_group targets it"
                wrong.setdefault("the config_groups do not fit modules", []).append(f"{module} ({why})")
        for what, names in wrong.items():
            yield Problem("contradicting-quantization", f"{what}: {some(names)}", only_one(names))


def groups_in(settings: Mapping[str, Any]) -> list[Group]:
    """Return the groups of a quantization_config whose weights are quantized."""
    found = []
    overall = settings.get("format")
    groups = settings.get("config_groups")
    for one in groups.values() if isinstance(groups, Mapping) else ():
        weights = one.get("weights") if isinstance(one, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        targets = tuple(texts(one.get("targets")))
        bits, size, block = weights.get("num_bits", 8), weights.get("group_size"), weights.get("block_structure")
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):
            block = [int(n) for n in block.split("x")]
        strategy = weights.get("strategy")
        if strategy is None:  # as QuantizationArgs completes it
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if type(bits) is not int or not 1 <= bits <= 8 or not isinstance(strategy, str):
            continue
        own = one.get("format") or overall
        found.append(
            Group(
                targets,
                bits,
                str(weights.get("type", "int")).lower(),
                strategy.lower(),
                size if type(size) is int and size > 0 else None,
                tuple(block) if isinstance(block, list) and all(type(n) is int for n in block) else None,
                weights.get("symmetric", True) is not False,
                own if isinstance(own, str) else "",
            )
        )
    return found


def _matches(module: str, target: str) -> bool:
    """Return whether a target names a module: its name, or "re:" and a regular expression for its beginning."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


def _is_costly(target: str) -> bool:
    """Return whether a regular expression repeats groups, which may take exponential time, or is very long."""
    return target.startswith("re:") and (len(target) > _LONG or re.search(r"\)[*+{]", target) is not None)


def _candidates(module: str, groups: Sequence[Group]) -> list[Group]:
    """Return the groups that a module may be of: those that name it or, if none does, those with classes as targets."""
    named = [group for group in groups if any(t == module for t in group.targets)]
    matched = named or [g for g in groups if any(t.startswith("re:") and _matches(module, t) for t in g.targets)]
    return matched or [g for g in groups if any(t.isidentifier() for t in g.targets)]


def _obvious(model: Model, module: str) -> list[Group]:
    """Return the group of a module of NVFP4, whose names and dtypes say everything."""
    if f"{module}.weight_global_scale" not in model.names:
        return []
    return [Group((), 4, "float", "tensor_group", 16, None, True, "nvfp4-pack-quantized")]


def _is_codes(model: Model, name: str) -> bool:
    dtype = model.kind(name).dtype
    return dtype in FLOAT8 or dtype is I8


def _weight(
    model: Model,
    module: str,
    group: Group,
    dtype: DType,
    below: sparse.Sparse | None,
    settings: Mapping[str, Any],
) -> Weight:
    """Return a module's weight as a group describes it. Raises DataError if its tensors do not fit."""
    if marlin.is_marlin(model, module):
        if group.kind != "int" or not group.symmetric or group.strategy not in ("group", "channel"):
            raise DataError("marlin-24 has symmetric integers, by groups or channels")
        return marlin.weight(model, module, group.bits, group.size if group.strategy == "group" else None, dtype)
    there = {one: f"{module}.{one}" for one in _TENSORS if f"{module}.{one}" in model.names}
    scales: Expr | Input = model.operand(there["weight_scale"])
    zeros: Expr | Input | None = None
    used: tuple[str, ...]
    codes: Expr | Input
    if "weight_packed" in there:
        codes = _unpacked(model, there, group, settings)
        used = tuple(there.values())
    elif below is not None:
        codes = below.value
        used = (*below.names, *there.values())
    else:
        codes = model.operand(f"{module}.weight")
        used = (f"{module}.weight", *there.values())
        if group.kind == "float" and (group.bits != 8 or codes.dtype not in FLOAT8):
            raise DataError(f"floats of {group.bits} bits are not in {codes.dtype}")
        if group.kind == "int" and codes.dtype is not I8:
            raise DataError(f"integers of {group.bits} bits are not in {codes.dtype}")
    if "mx" in group.format or scales.dtype in (U8, F8_E8M0FNU):
        if scales.dtype not in (U8, F8_E8M0FNU):
            raise DataError(f"scales of {group.format} are bytes, not {scales.dtype}")
        scales = make("dequantize.e8m0", scales)
    if "weight_global_scale" in there:
        whole = blocks_of(scales.shape, model.kind(there["weight_global_scale"]).shape, None)
        if whole is None:
            raise DataError(f"the global scale has the shape {model.kind(there['weight_global_scale']).shape}")
        by = shaped(model.operand(there["weight_global_scale"]), whole.shape)
        scales = make("dequantize.scaled", scales, by, block=whole.block, dtype=F32, divide=True)
    elif scales.dtype is F8_E4M3FN:
        raise DataError("scales of float8 need a global scale")
    if not group.symmetric:
        if "weight_zero_point" not in there:
            raise DataError("asymmetric codes need zero points")
        zeros = model.operand(there["weight_zero_point"])
        if zeros.dtype is I32 and "weight_packed" in there and group.strategy in ("group", "channel"):
            dense = _is_dense(zeros.shape[-2], codes.shape[-2], group.bits, settings)
            axis = len(zeros.shape) - 2
            zeros = make("dequantize.bits", zeros, axis=axis, bits=group.bits, size=codes.shape[-2], dense=dense)
    blocks = _blocks(group, codes, scales)
    if "weight_g_idx" in there and group.strategy == "group":
        index = model.operand(there["weight_g_idx"])
        scales = make("dequantize.by_index", shaped(scales, blocks.shape), index, size=group.size)
        if zeros is not None:
            zeros = make("dequantize.by_index", shaped(zeros, blocks.shape), index, size=group.size)
        blocks = Blocks(codes.shape, (1,) * len(codes.shape))
    return Weight(f"{module}.weight", scaled(codes, scales, blocks, dtype, zeros), used)


def _blocks(group: Group, codes: Expr | Input, scales: Expr | Input) -> Blocks:
    """Return how a group's scales lie over codes. Raises DataError if they do not fit."""
    shape = codes.shape
    if group.strategy in ("group", "tensor_group") and group.size:
        wanted = (*shape[:-1], shape[-1] // group.size)
        if scales.shape == wanted and not shape[-1] % group.size:
            return Blocks(wanted, (*(1,) * (len(shape) - 1), group.size))
        raise DataError(f"groups of {group.size} of {shape} have scales of {wanted}, not {scales.shape}")
    found = blocks_of(shape, scales.shape, group.block if group.strategy == "block" else None)
    if found is not None:
        rows = found.shape[:-1]
        if group.strategy == "tensor" and (set(found.shape) == {1} or (len(shape) == 3 and found.shape[1:] == (1, 1))):
            return found
        if group.strategy == "channel" and found.shape[-1] == 1 and rows == shape[:-1]:
            return found
        if group.strategy == "block" and group.block is not None:
            return found
    raise DataError(f"scales of {scales.shape} are none of strategy {group.strategy!r} for {shape}")


def _unpacked(model: Model, there: Mapping[str, str], group: Group, settings: Mapping[str, Any]) -> Expr:
    """Return the codes of packed weights. Raises DataError if they do not fit the group."""
    packed = model.operand(there["weight_packed"])
    if group.kind == "float":
        if group.bits == 4:
            return make("dequantize.fp4", packed)
        if group.bits == 6:
            return make("dequantize.fp6", packed)
        raise DataError(f"floats of {group.bits} bits are not packed")
    if packed.dtype is not I32:
        raise DataError(f"integers of {group.bits} bits are packed in int32, not in {packed.dtype}")
    size = model.kind(there["weight_scale"]).shape[-1] * group.size if group.strategy == "group" and group.size else 0
    if not size:
        if "weight_shape" not in there:
            raise DataError("packed codes need weight_shape")
        size = int(model.read(there["weight_shape"]).reshape(-1)[-1])
    dense = _is_dense(packed.shape[-1], size, group.bits, settings)
    return make("dequantize.bits", packed, axis=len(packed.shape) - 1, bits=group.bits, size=size, dense=dense)


def _is_dense(words: int, size: int, bits: int, settings: Mapping[str, Any]) -> bool:
    """Return whether codes are packed without gaps, by the number of words or, if that fits both, by the version that
    wrote them. Raises DataError if nothing says it."""
    if 32 % bits == 0 or size * bits <= 32:
        return True
    with_gaps, dense = words_of(size, bits, False), words_of(size, bits, True)
    if with_gaps != dense or words != dense:
        return words == dense
    version = re.match(r"(\d+)\.(\d+)", str(settings.get("version", "")))
    if version is None:
        raise DataError(
            f"{size:,} codes of {bits} bits in {words:,} words may have gaps or not: config.json has no version"
        )
    return (int(version[1]), int(version[2])) >= _DENSE_SINCE


FAMILY = Compressed()
