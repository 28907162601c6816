"""The unquantized model as a view: `CheckpointView.dequantize`.

A family (model.py `Family`) finds the weights of one writer's formats and says how each is computed: an expression
whose operations are in core/ops. This module asks all families, settles what they say, and puts the weights in the
place of what they are computed from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.dtypes import DType, dtype_of
from ...core.expr import of_one_store
from ...core.index import Index
from ...core.specs import TensorSpec
from ...errors import DataError, Problem, only_one, some
from ...formats.huggingface import load_json
from ...io.storage.local import split
from ...lookup import STORED, Step
from ...namespace import Namespace
from .evidence import Evidence, without_quantization
from .model import Family, Model, Weight
from .registry import families

if TYPE_CHECKING:
    import torch

__all__ = ["Evidence", "Family", "Model", "Weight", "dequantized"]

# Endings of names that only quantized formats have: what is left of them is told.
_MARKS = (
    "_scale", "_scale_inv", "_scale_2", "_scales", "_blocks", "_packed", "_zero_point", "_global_scale", "_bitmask",
    "qweight", "qzeros", "g_idx", "absmax", "quant_map", ".SCB", ".bitmask", ".compressed",
    ".scales", ".biases", "_extra_state",
)  # fmt: skip
# Tensors of a module that belong to its activations, or to the cache of keys and values.
_OF_OTHERS = (
    "input_scale", "input_global_scale", "input_zero_point", "input_scale_ub", "activation_scale", "act_scale",
    "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point",
    "q_zero_point", "k_global_scale", "v_global_scale", "q_global_scale", "prob_output_scale", "qkv_output_scale",
)  # fmt: skip
_STAYS = ("undecided-quantization", "contradicting-quantization")  # problems of tensors that stay as they are stored
_COMPUTED = ("float64", "float32", "bfloat16", "float16")


def dequantized(
    view: Namespace[Any], dtype: torch.dtype | DType, config: Mapping[str, Any] | str | os.PathLike[str] | None = None
) -> tuple[Index, tuple[Step, ...]]:
    """Return the index of the dequantized view, of the same store, and the steps to its part that ``view`` shows.

    See `lazyckpt.CheckpointView.dequantize`.
    """
    wanted = dtype_of(dtype)
    if wanted.name not in _COMPUTED:
        raise DataError(f"weights are not dequantized to {wanted}: name one of {', '.join(_COMPUTED)}")
    if isinstance(config, (str, os.PathLike)):
        config = _read(config)
    elif not (config is None or isinstance(config, Mapping)):
        raise DataError(f"config={config!r:.60}: give the contents of config.json, or its path")
    model = Model(view, config)
    weights, problems = _settled(model, _asked(model, wanted))
    others = _of_others(model, weights)
    if others:
        line = f"{len(others):,} scales of activations or of the KV cache are only in view.stored: {some(others)}"
        problems.append(Problem("left-out-scale", line, only_one(others)))
    tensors, aliases = _placed(model, weights, others)
    problems += _left(model, weights, tensors)
    index, steps = view._index, view._steps
    shown = {view._index.aliases.get(full, full) for full in view._listed.values()} | set(view._listed.values())
    if any(kind == "select" for kind, _ in steps):  # a pattern of stored names: what they became is shown
        became = {one: weight.name for weight in weights for one in weight.consumed[:1]}
        names = {became.get(full, full) for full in shown}
        tensors = {name: spec for name, spec in tensors.items() if name in names}
        aliases = {alias: owner for alias, owner in aliases.items() if alias in names and owner in tensors}
        steps = tuple(step for step in steps if step[0] == "below")
    told = (*index.problems, *(problem for problem in problems if problem not in index.problems))
    about = index.meta.get("config")
    if weights and isinstance(about, Mapping) and not any(one.code in _STAYS for one in problems):
        index = replace(index, meta={**index.meta, "config": without_quantization(about)})  # for what is written
    if view._state == STORED:
        states: dict[str, Mapping[str, TensorSpec]] = {STORED: tensors}
        return replace(index, states=states, stored=tensors, aliases=aliases, problems=told), steps
    states = {**index.states, view._state: tensors}
    return replace(index, states=states, aliases=aliases, problems=told), steps


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    text = os.fspath(path)
    if not text.endswith(".json"):
        text = f"{text.rstrip('/')}/config.json"
    return load_json(*split(text))


def _asked(model: Model, dtype: DType) -> list[tuple[str, Weight | Problem]]:
    """Return what the families say, each with its name."""
    return [(one.name, said) for one in families() if one.detect(model) for said in one.weights(model, dtype)]


def _settled(model: Model, said: Iterable[tuple[str, Weight | Problem]]) -> tuple[list[Weight], list[Problem]]:
    """Return the weights that nothing contradicts, and the problems."""
    weights: list[tuple[str, Weight]] = []
    problems = list(model.evidence.problems)
    users: dict[str, dict[str, str]] = {}  # what is consumed, or named -> family -> weight
    for family, one in said:
        if isinstance(one, Problem):
            problems.append(one)
            continue
        weights.append((family, one))
        for name in {*one.consumed, one.name}:
            users.setdefault(name, {})[family] = one.name
    twice = {name: by for name, by in users.items() if len(by) > 1}
    kept: list[Weight] = []
    refused: list[Weight] = []
    for _, one in weights:
        (refused if {*one.consumed, one.name} & twice.keys() else kept).append(one)
    if refused:
        who = sorted({family for by in twice.values() for family in by})
        line = (
            f"{len(refused):,} tensors could be of several quantized formats ({', '.join(who)}): "
            f"{some(dict.fromkeys(one.name for one in refused))}. They stay as they are stored"
        )
        problems.append(Problem("contradicting-quantization", line, only_one([one.name for one in refused])))
    names_of: dict[str, Weight] = {}
    done = []
    for one in kept:
        there = one.name in model.names and one.name not in one.consumed
        if one.name in names_of or there:
            line = f"{one.name!r} would be computed from {some(one.consumed)}, but there is another tensor of this name"
            problems.append(Problem("contradicting-quantization", line, one.name))
            continue
        names_of[one.name] = one
        done.append(one)
    return done, problems


def _of_others(model: Model, weights: list[Weight]) -> list[str]:
    """Return the names of what belongs to activations or to the cache, of modules whose weights are quantized."""
    fused = {f"{weight.consumed[0]}_input_scale" for weight in weights}  # of experts without modules
    found = [name for name in model.names if name.rpartition(".")[2] in _OF_OTHERS or name in fused]
    if not found:
        return []
    modules = set()
    for weight in weights:
        above = weight.consumed[0].rpartition(".")[0]
        while above and above not in modules:
            modules.add(above)
            above = above.rpartition(".")[0]
    used = {name for weight in weights for name in weight.consumed}
    return [name for name in found if name not in used and not modules.isdisjoint(_above(name))]


def _above(name: str) -> tuple[str, str]:
    """Return the module of a name and the module above it: scales of the cache are in k_proj, or beside it."""
    module = name.rpartition(".")[0]
    return module, module.rpartition(".")[0] or module


def _placed(model: Model, weights: list[Weight], others: list[str]) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the tensors of the view, in the order of the checkpoint, and its tied names."""
    consumed = {name for weight in weights for name in weight.consumed} | set(others)
    at: dict[str, list[Weight]] = {}
    for weight in weights:
        at.setdefault(weight.consumed[0], []).append(weight)
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    firsts: dict[tuple[str, ...], list[Weight]] = {}
    for name, owner in model.names.items():
        for weight in at.get(name, ()):
            stored = tuple(model.names[one] for one in weight.consumed)
            equal = next((w for w in firsts.get(stored, ()) if w.value == weight.value), None)
            if equal is not None:
                aliases[weight.name] = equal.name
                continue
            firsts.setdefault(stored, []).append(weight)
            tensors[weight.name] = of_one_store(weight.name, weight.value, rule="dequantized")
        if name in consumed:
            continue
        if name == owner:
            tensors[name] = model.spec(name)
        elif owner not in consumed:
            aliases[name] = owner
        elif owner in at and (tied := _tied(model, name, at[owner])) is not None:
            aliases[tied] = at[owner][0].name
        else:
            tensors[name] = replace(model.spec(name), name=name)
    return tensors, aliases


def _tied(model: Model, alias: str, weights: list[Weight]) -> str | None:
    """Return the name of the weight that a tied name becomes which has no scales of its own. Return None if it has
    some, or if its module has other names."""
    stem, dot, last = alias.rpartition(".")
    owner, _, same = model.names[alias].rpartition(".")
    above, _, new = weights[0].name.rpartition(".")
    alone = not any(name.startswith((f"{alias}_", f"{stem}{dot}{last}.")) for name in model.names)
    return f"{stem}{dot}{new}" if len(weights) == 1 and last == same and above == owner and alone else None


def _left(model: Model, weights: list[Weight], tensors: Mapping[str, TensorSpec]) -> list[Problem]:
    """Return a problem for quantized tensors that nobody took."""
    left = [name for name in tensors if name in model and _is_quantized(name, model.kind(name).dtype)]
    done = {weight.name for weight in weights}
    left = [name for name in left if name not in done]
    method = model.evidence.method
    if not left:
        known = {said for one in families() for said in one.methods}
        if not method or method in known:
            return []
        line = f"config.json says {method!r}, which is not read: all tensors stay as they are stored. Known are "
        return [Problem("undecided-quantization", line + ", ".join(sorted(known)))]
    why = f"config.json says {method!r}" if method else "no file beside them says what they mean"
    line = f"{len(left):,} tensors look quantized, and stay as they are stored ({why}): {some(left)}"
    return [Problem("undecided-quantization", line, only_one(left))]


def _is_quantized(name: str, dtype: DType) -> bool:
    return name.endswith(_MARKS) or (dtype.is_floating_point and dtype.itemsize == 1)
