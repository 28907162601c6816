"""Whose states a rank's optimizer holds: torch numbers parameters in the order of its groups.

Sources: megatron/core/optimizer/__init__.py `_get_param_groups` (groups by weight decay, within a group in the order of
the model's parameters over its chunks), optimizer.py `Float16OptimizerWithFloat16Params.state_dict` (fp32 copies in a
list per group), `ChainedOptimizer.state_dict` (a list: dense parameters, experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.box import Shape
from ...io.rebuild import StoredTensor
from ..numbering import assign, possible_shapes

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


@dataclass(slots=True)
class Held:
    """One parameter's states, as tensors of the rank's file. ``main``: the fp32 copy (under "fp32" in ``states``,
    too)."""

    name: str
    states: dict[str, StoredTensor]
    main: StoredTensor | None


def parts_of(value: Any) -> list[dict[Any, Any]]:
    """The optimizers of a rank: one, or a chain of them."""
    chain = value if isinstance(value, list) else list(value.values()) if _is_chain(value) else [value]
    return [part for part in chain if isinstance(part, dict)]


def _is_chain(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(type(k) is int for k in value)


def groups_of(part: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    inner = part.get("optimizer", part)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def for_experts(part: Mapping[Any, Any]) -> bool | None:
    """Whether it is the optimizer of experts that expert parallelism spreads; None if nothing tells."""
    said = [g["is_expert_parallel"] for g in groups_of(part) if isinstance(g.get("is_expert_parallel"), bool)]
    return any(said) if said else None


def held(part: Mapping[Any, Any], shapes: Mapping[str, Shape]) -> list[Held] | None:
    """The states in one optimizer, by the parameters' names in the file. ``shapes``: the parameters that it may have,
    in the model's order. None if which is which cannot be told."""
    groups = groups_of(part)
    inner = part.get("optimizer", part)
    states = inner.get("state") if isinstance(inner, dict) else None
    states = states if isinstance(states, dict) else {}
    masters = next((part[k] for k in _MASTERS if isinstance(part.get(k), list)), None)
    if not states and masters is None:
        return []
    numbers: list[list[Any]] = [ids if isinstance(ids := g.get("params"), list) else [] for g in groups]
    found = _names(groups, numbers, states, masters, shapes)
    if found is None:
        return None
    result = []
    for g, (ids, names) in enumerate(zip(numbers, found, strict=True)):
        mains = masters[g] if masters is not None and g < len(masters) and isinstance(masters[g], list) else []
        # (parameters that are fp32 themselves have no copy: then the lists do not match)
        mains = mains if len(mains) == len(ids) else []
        for n, (i, name) in enumerate(zip(ids, names, strict=True)):
            own = states.get(i)
            tensors = {k: t for k, t in own.items() if isinstance(t, StoredTensor)} if isinstance(own, dict) else {}
            main = mains[n] if mains and isinstance(mains[n], StoredTensor) else None
            if main is not None:
                tensors["fp32"] = main
            result.append(Held(name, {k: t for k, t in tensors.items() if isinstance(k, str)}, main))
    return result


def _names(
    groups: list[dict[Any, Any]],
    numbers: list[Any],
    states: Mapping[Any, Any],
    masters: Any,
    shapes: Mapping[str, Shape],
) -> list[list[str]] | None:
    wanted = [
        [_shapes(states.get(i), masters, g, n, len(ids)) for n, i in enumerate(ids)] for g, ids in enumerate(numbers)
    ]
    planned = list(_planned(groups, shapes))
    if all(
        len(names) == len(shapes_)
        and all(w is None or shapes[name] in w for name, w in zip(names, shapes_, strict=True))
        for names, shapes_ in zip(planned, wanted, strict=True)
    ):
        return planned
    found = assign(list(shapes.items()), wanted)
    if found is None or not found.complete:
        return None
    return [[name for name in group if name is not None] for group in found.names]


def _shapes(own: Any, masters: Any, g: int, n: int, count: int) -> frozenset[Shape] | None:
    """The shapes that a parameter may have by its states and its fp32 copy; None: any."""
    known = {k: t.shape for k, t in own.items() if isinstance(t, StoredTensor)} if isinstance(own, dict) else {}
    group = masters[g] if masters is not None and g < len(masters) and isinstance(masters[g], list) else []
    if len(group) == count and isinstance(group[n], StoredTensor):
        known["fp32"] = group[n].shape
    return possible_shapes(known)


def _planned(groups: list[dict[Any, Any]], shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    """The names that each group has as Megatron makes groups: no weight decay for biases and 1-d parameters."""
    for group in groups:
        decays = group.get("wd_mult", 1.0) != 0.0
        decoupled = group.get("is_decoupled_lr", False) is True
        split = any(g.get("is_decoupled_lr") is True for g in groups)
        yield [
            name
            for name, shape in shapes.items()
            if (len(shape) > 1 and not name.endswith(".bias")) == decays
            and (not split or decoupled == ("word_embeddings" in name or "output_layer" in name))
        ]
