"""A model with its matrices quantized by rounding to nearest: `CheckpointView.quantize`.

Each kind is stored as transformers loads it, with the ``quantization_config`` of config.json that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from ..core.dtypes import F32, I32, I64, U8, DType
from ..core.expr import computed, make, operand
from ..core.index import Index
from ..core.ops.bitsandbytes import NF4, dynamic_map
from ..core.specs import Expr, Input, TensorSpec, kind_of
from ..errors import DataError, Problem, only_one, some
from ..lookup import STORED, Step
from ..namespace import Namespace
from .dequantize.conv1d import is_turned
from .dequantize.evidence import KEYS, evidence_of

# Modules that stay as they are, by globs of their names: heads, embeddings, norms, routers of experts, gates of shared
# ones.
SKIPPED = (
    "lm_head", "*.lm_head", "output", "embed_out", "*embed*", "wte", "*.wte", "wpe", "*.wpe", "*norm*", "*.ln_*",
    "ln_f", "*router*", "*.gate", "*_gate", "*.wg",
)  # fmt: skip

Parts = Iterator[tuple[str, Expr]]


def quantized(
    view: Namespace[Any], kind: str, skip: Sequence[str] | None = None
) -> tuple[Index, tuple[Step, ...], dict[str, Any]]:
    """Return the index of the quantized view, of the same store, the steps to its part that ``view`` shows, and the
    ``quantization_config``.

    See `lazyckpt.CheckpointView.quantize`.
    """
    if kind not in KINDS:
        raise DataError(f"there is no quantization {kind!r}: name one of {', '.join(KINDS)}")
    if view._state == STORED:
        raise DataError("view.stored shows tensors as they are stored: quantize the view itself")
    evidence = evidence_of(view, None)
    specs = view.specs
    if evidence.says and not any(is_dequantized(specs[name]) for name in specs):
        raise DataError(
            f"{view.root} is quantized already ({evidence.method or 'its files say so'}): "
            f"call dequantize() first, then quantize({kind!r})"
        )
    patterns = SKIPPED if skip is None else tuple(skip)
    tensors: dict[str, TensorSpec] = {}
    parts_of: dict[str, list[str]] = {}
    left: list[str] = []
    refused: dict[str, list[str]] = {}
    for name in _shown(view):
        shape, dtype = kind_of(specs, name)
        if kind == "fp8-block" and _is_stack(name, shape, dtype) and not _skips(name, patterns):
            for part, value in _fp8_experts(name, operand(specs[name])):
                tensors[part] = computed(part, value, rule="quantized")
                parts_of.setdefault(name, []).append(part)
            continue
        if not _is_matrix(name, shape, dtype):
            tensors[name] = specs[name]
            if len(shape) > 2 and dtype.is_floating_point and not _skips(_module(name), patterns):
                refused.setdefault("with more than two dimensions", []).append(name)
            continue
        module = _module(name)
        turned = is_turned(evidence.model, module) and not _skips(module, patterns)
        why = "" if _skips(module, patterns) else _unfit(kind, shape)
        if turned and not kind.startswith("nf4"):
            why = f"stored as [in, out] (Conv1D), which transformers does not load as {kind},"
        if why or _skips(module, patterns):
            if why:
                refused.setdefault(why, []).append(name)
            left.append(module)
            tensors[name] = specs[name]
            continue
        weight = operand(specs[name])
        if turned:  # bitsandbytes quantizes the matrix of a linear layer
            weight = make("transpose", weight, axes=(1, 0))
        for part, value in KINDS[kind](module, weight, dtype):
            tensors[part] = computed(part, value, rule="quantized")
            parts_of.setdefault(name, []).append(part)
    if not parts_of:
        raise DataError(f"no matrix of {view.root} can be quantized: all are skipped, or have no suitable shape")
    kept = set(left)
    tied = view._index.aliases.items()
    left += [_module(alias) for alias, owner in tied if alias.endswith(".weight") and _module(owner) in kept]
    aliases = _aliases(view, parts_of, tensors)
    problems = [
        Problem("not-quantized", f"{len(names):,} weights {why} are not quantized: {some(names)}", only_one(names))
        for why, names in refused.items()
    ]
    settings = _SETTINGS[kind](sorted(left))
    model = {key: value for key, value in evidence.model.items() if key not in KEYS}
    model["quantization_config"] = settings
    index = view._index
    told = (*index.problems, *(one for one in problems if one not in index.problems))
    states: dict[str, Mapping[str, TensorSpec]] = {**index.states, view._state: tensors}
    index = replace(index, states=states, aliases=aliases, problems=told, meta={**index.meta, "config": model})
    return index, tuple(step for step in view._steps if step[0] == "below"), settings


def _shown(view: Namespace[Any]) -> Iterator[str]:
    """Yield the full names of the tensors of the result: all, or those that `select` has left."""
    specs = view.specs
    if not any(kind == "select" for kind, _ in view._steps):
        yield from specs
        return
    owners = view._index.aliases
    listed = {owners.get(full, full) for full in view._listed.values()}
    yield from (name for name in specs if name in listed)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def is_dequantized(spec: TensorSpec) -> bool:
    """Return whether a tensor is computed from codes, also as a mean or a merge of such tensors."""
    stack: list[Expr | Input] = [] if spec.expr is None else [spec.expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Expr):
            if node.op.startswith("dequantize."):
                return True
            stack += node.inputs
    return spec.rule == "dequantized"


def _is_matrix(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    return name.endswith(".weight") and len(shape) == 2 and prod(shape) > 0 and dtype.name in _FLOATS


def _is_stack(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    """Return whether a tensor has the matrices of all experts of a layer, as transformers 5 names them."""
    last = name.rpartition(".")[2]
    return last in _STACKS and len(shape) == 3 and prod(shape) > 0 and dtype.name in _FLOATS


_STACKS = ("gate_up_proj", "down_proj")
_FLOATS = ("float32", "bfloat16", "float16")


def _skips(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(module, one) for one in patterns)


def _unfit(kind: str, shape: tuple[int, ...]) -> str:
    """Return why a matrix of this shape has no such form; empty if it has."""
    size = {"int8": 4, "mxfp4": 32}.get(kind, 1)
    return f"whose rows are no multiple of {size}" if shape[1] % size else ""


def _aliases(view: Namespace[Any], parts_of: Mapping[str, list[str]], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the tied names: of a quantized weight, one for each of its tensors."""
    found = {}
    for alias, owner in view._index.aliases.items():
        if owner not in parts_of:
            if owner in tensors:
                found[alias] = owner
            continue
        for part in parts_of[owner]:
            tied = _module(alias) + part.removeprefix(_module(owner))
            if tied not in tensors:
                found[tied] = part
    return found


# -- Kinds: the tensors of a module ``[out, in]``, by their names.


def _fp8_block(module: str, weight: Expr | Input, dtype: DType) -> Parts:
    how = {"scheme": "fp8", "block": (128, 128)}
    yield f"{module}.weight", make("quantize.codes", weight, **how)
    yield f"{module}.weight_scale_inv", make("quantize.scales", weight, **how)


def _fp8_experts(name: str, weights: Expr | Input) -> Parts:
    """The matrices of experts, [experts, out, in], as transformers 5.3 `FP8Experts` has them."""
    how = {"scheme": "fp8", "block": (1, 128, 128)}
    yield name, make("quantize.codes", weights, **how)
    yield f"{name}_scale_inv", make("quantize.scales", weights, **how)


def _int8(module: str, weight: Expr | Input, dtype: DType) -> Parts:
    how = {"scheme": "int8", "block": (1, weight.shape[1]), "scale_dtype": dtype}
    yield f"{module}.weight_packed", make("as_bits", make("quantize.codes", weight, **how), dtype=I32)
    yield f"{module}.weight_scale", make("quantize.scales", weight, **how)
    yield f"{module}.weight_shape", _constant(np.asarray(weight.shape, np.int64), I64)


def _nf4(module: str, weight: Expr | Input, dtype: DType, double: bool = False) -> Parts:
    name = f"{module}.weight"
    flat = make("reshape", weight, shape=(prod(weight.shape),))
    how = {"scheme": "nf4", "block": (64,)}
    pairs = make("quantize.pairs", make("quantize.codes", flat, **how), high=True, pad=7)  # 7 is 0.0
    yield name, make("reshape", pairs, shape=(*pairs.shape, 1))
    yield f"{name}.quant_map", _constant(np.asarray(NF4, np.float32), F32)
    scales = make("quantize.scales", flat, **how)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype.name, "shape": list(weight.shape)}
    if not double:
        yield f"{name}.absmax", scales
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        yield f"{name}.quant_state.bitsandbytes__nf4", _constant(text, U8)
        return
    mean = make("quantize.mean", scales)
    centered = make("quantize.centered", scales, mean)
    how = {"scheme": "dynamic8", "block": (256,)}
    yield f"{name}.absmax", make("quantize.codes", centered, **how)
    yield f"{name}.nested_absmax", make("quantize.scales", centered, **how)
    yield f"{name}.nested_quant_map", _constant(np.asarray(dynamic_map(), np.float32), F32)
    said = json.dumps({**state, "nested_blocksize": 256, "nested_dtype": "float32"})
    yield f"{name}.quant_state.bitsandbytes__nf4", make("quantize.nested_state", mean, text=said)


def _nf4_double(module: str, weight: Expr | Input, dtype: DType) -> Parts:
    return _nf4(module, weight, dtype, double=True)


def _mxfp4(module: str, weight: Expr | Input, dtype: DType) -> Parts:
    how = {"scheme": "mxfp4", "block": (1, 32)}
    yield f"{module}.weight_packed", make("quantize.pairs", make("quantize.codes", weight, **how), high=False, pad=0)
    yield f"{module}.weight_scale", make("quantize.scales", weight, **how)


def _constant(values: np.ndarray[Any, Any], dtype: DType) -> Expr:
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes().hex()
    return make("constant", data=data, shape=values.shape, dtype=dtype)


KINDS: dict[str, Callable[[str, Expr | Input, DType], Parts]] = {
    "fp8-block": _fp8_block,
    "int8": _int8,
    "nf4": _nf4,
    "nf4-double": _nf4_double,
    "mxfp4": _mxfp4,
}


# -- The configurations.


def _of_fp8(left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": left,
    }


def _of_compressed(format: str, weights: dict[str, Any], left: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left,
        "kv_cache_scheme": None,
    }


def _of_int8(left: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return _of_compressed("pack-quantized", weights, left)


def _of_mxfp4(left: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights |= {"dynamic": False, "scale_dtype": "torch.uint8"}
    return _of_compressed("mxfp4-pack-quantized", weights, left)


def _of_nf4(left: list[str], double: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": left,
    }


def _of_nf4_double(left: list[str]) -> dict[str, Any]:
    return _of_nf4(left, double=True)


_SETTINGS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "fp8-block": _of_fp8,
    "int8": _of_int8,
    "nf4": _of_nf4,
    "nf4-double": _of_nf4_double,
    "mxfp4": _of_mxfp4,
}
