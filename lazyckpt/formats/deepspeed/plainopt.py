"""ZeRO-0: states per parameter, from a torch optimizer's state_dict, which numbers the parameters.

Sources: runtime/engine.py (``optimizer`` in the model states; ``expp_rank_*`` with experts), runtime/fp16/
unfused_optimizer.py `state_dict`, torch/optim/optimizer.py `state_dict`: an optimizer created with named parameters
lists ``param_names`` in its groups; otherwise the names follow from shapes and the usual orders (`numbering`), if only
one assignment fits. moe/utils.py marks the groups of experts with ``moe``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.placement import Rank
from ...errors import Problem
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import short
from ...io.containers.torch_file import TorchFile
from ...layouts.tables import pattern
from ..shared.numbering import (
    CONVENTIONS,
    Assignment,
    Convention,
    Effort,
    Named,
    Wanted,
    assign,
    assign_by_shape,
    common,
    fitting,
    possible_shapes,
)
from ..shared.rank_shards import Shards
from .building import ALONE, Building, Unnamed, local


@dataclass(frozen=True, slots=True)
class Group:
    """A param group: the numbers of its parameters, the shapes that each may have (None: any), and the names that it
    lists, if any. The parameters are among these names, in this order: FP16_UnfusedOptimizer drops frozen parameters,
    but not their names. ``experts``: number of ranks over which the experts in the group are distributed (1 if it is
    not recorded); 0 if the group holds none."""

    numbers: list[int]
    shapes: list[frozenset[Shape] | None]
    names: list[str] | None
    experts: int


def numbered_groups(optimizer: Any) -> list[Group]:
    """Return the param groups of a plain optimizer's state_dict; [] if it is not one."""
    if not isinstance(optimizer, Mapping):
        return []
    by_id, groups = torch_state(optimizer)
    masters = _masters(optimizer, groups)
    found = []
    for group in groups:
        ids = ids_of(group)
        names = group.get("param_names")
        shapes = [_shapes(by_id.get(i), masters.get(i)) for i in ids]
        listed = [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []
        known = listed if len(listed) >= len(ids) and len(listed) == len(set(listed)) else None
        found.append(Group(ids, shapes, known, _spread(group) if group.get("moe") is True else 0))
    return found


def _spread(group: Mapping[Any, Any]) -> int:
    """Return the number of ranks in the name of a group of experts: moe/utils.py names it ``ep_size_N``."""
    match = re.fullmatch(r"ep_size_([1-9]\d{0,5})", str(group.get("name")))
    return int(match[1]) if match else 1


def named_shapes(groups: list[Group]) -> dict[str, Shape]:
    """Return the parameters that the groups name and whose states determine the shape."""
    return {
        n: next(iter(shapes))
        for group in groups
        if group.names is not None and len(group.names) == len(group.shapes)
        for n, shapes in zip(group.names, group.shapes, strict=True)
        if shapes is not None and len(shapes) == 1
    }


def match(
    names: Mapping[str, Shape],
    groups: list[Group],
    spread: Mapping[str, int] | None = None,
    effort: Effort | None = None,
    conventions: Sequence[Convention] = CONVENTIONS,
) -> Assignment | None:
    """Return the names for the parameters of all groups on which all `matches` agree; None if nothing matches."""
    found = matches(names, groups, spread, effort, conventions)
    return common(found, [group.shapes for group in groups]) if found else None


def matches(
    names: Mapping[str, Shape],
    groups: list[Group],
    spread: Mapping[str, int] | None = None,
    effort: Effort | None = None,
    conventions: Sequence[Convention] = CONVENTIONS,
) -> list[Assignment]:
    """Return the possible names for the parameters of all groups: those listed, else one assignment for each usual
    order that fits the shapes. If any group is marked as one of experts, experts are in such groups only. ``spread``:
    expert -> number of ranks over which its layer's experts are distributed; if given, groups have to agree with it."""
    listed = [_listed(group, names) for group in groups]
    if None not in listed:
        return [Assignment([found for found in listed if found is not None], "param_names")]
    marked = any(group.experts for group in groups)
    of_group = [(group.experts if spread else bool(group.experts)) if marked else 0 for group in groups]
    given = _as_on_the_rank(names)  # the rank may have sorted by these names
    of_name = {
        g: (spread or {}).get(n, 1) if marked and pattern("deepspeed.experts").fullmatch(n) else 0
        for g, n in given.items()
    }

    def deal(ordered: Sequence[Named], wanted: Sequence[Sequence[Wanted]], left: Effort) -> Assignment | None:
        found: list[list[str | None]] = [[] for _ in wanted]
        for kind in dict.fromkeys(of_group):
            chosen = [g for g, k in enumerate(of_group) if k == kind]
            eligible = [item for item in ordered if of_name[item[0]] == kind]
            assigned = assign(eligible, [wanted[g] for g in chosen], left)
            if assigned is None:
                return None
            for g, members in zip(chosen, assigned.names, strict=True):
                found[g] = members
        return Assignment(found)

    own = [(g, names[n]) for g, n in given.items()]
    return [
        one._replace(names=[[n and given[n] for n in members] for members in one.names])
        for one in fitting(own, [group.shapes for group in groups], conventions, effort, deal)
    ]


def _as_on_the_rank(names: Mapping[str, Shape]) -> dict[str, str]:
    """Map the names on the rank, where each layer's experts count from 0, to the names in the model.

    >>> _as_on_the_rank({"m.deepspeed_experts.6.w": (2,), "m.deepspeed_experts.7.w": (2,)})
    {'m.deepspeed_experts.0.w': 'm.deepspeed_experts.6.w', 'm.deepspeed_experts.1.w': 'm.deepspeed_experts.7.w'}
    """
    numbers: dict[str, dict[str, None]] = {}
    parts = {name: match for name in names if (match := pattern("deepspeed.expert").fullmatch(name))}
    for match in parts.values():
        numbers.setdefault(match[1], {})[match[2]] = None
    local = {layer: {i: n for n, i in enumerate(sorted(ids, key=int))} for layer, ids in numbers.items()}
    return {(f"{m[1]}{local[m[1]][m[2]]}{m[3]}" if (m := parts.get(name)) else name): name for name in names}


def _listed(group: Group, names: Mapping[str, Shape]) -> list[str | None] | None:
    """Return the names of a group's parameters, from those that it lists; None if these do not fit."""
    known = [(n, names[n]) for n in group.names or () if n in names]
    if len(known) > len(group.numbers):
        known = [(n, shape) for n, shape in known if prod(shape)]  # empty parameters are dropped, too
    assigned = assign(known, [group.shapes]) if group.names is not None else None
    return assigned.names[0] if assigned else None


def optimizer_shards(
    b: Building,
    file: TorchFile,
    optimizer: Any,
    names: Mapping[str, Shape],
    rank: Rank,
    where: str,
    spread: Mapping[str, int] | None = None,
) -> Shards:
    """Return the states of a plain optimizer by the parameter's name, or by its number if the name is not determined.

    ``names``: every tensor that may be a parameter, in the module's order. ``spread``: see `matches`.
    """
    groups = numbered_groups(optimizer)
    if not groups:
        return {}
    shapes = [group.shapes for group in groups]
    ways = matches(names, groups, spread)
    found = common(ways, shapes) if ways else assign_by_shape(list(names.items()), shapes)
    by_id, param_groups = torch_state(optimizer)
    masters = _masters(optimizer, param_groups)
    shards: Shards = {}
    unnamed: dict[str, tuple[int, int]] = {}
    count = 0
    for g, group in enumerate(groups):
        for n, i in enumerate(group.numbers):
            known = found.names[g][n]
            state = by_id.get(i)
            values: dict[Any, Any] = dict(state) if isinstance(state, dict) else {}
            if i in masters:
                values["fp32"] = masters[i]
            name = known or f"{where}.{i}"
            count += bool(values)
            if known is not None:
                b.named.setdefault(known, f"number {i} of the {where}; named by {found.by}")
            if values and known is None:
                unnamed[name] = g, n
            for key, value in values.items():
                if isinstance(value, StoredTensor):
                    tensor = local(file, f"{name}: {key}", value, rank)
                    shards.setdefault(state_name(key), {}).setdefault(name, {})[rank.tp if known else ALONE] = tensor
    if unnamed and masters and b.tp == 1:
        taken = {name for members in found.names for name in members}
        left = [name for name in names if name not in taken]
        proposed = [{i: way.names[g][n] for i, (g, n) in unnamed.items()} for way in ways]
        named = [{i: name for i, name in way.items() if name is not None} for way in proposed]
        b.unnamed.append(Unnamed(where, count, list(unnamed), left, named))
    elif unnamed:
        line = (
            f"{where}: the optimizer numbers its parameters; for {len(unnamed)} of {count} order and shapes leave more "
            "than one way to name them, or none: their states stay under their numbers"
        )
        b.report(Problem("undecided-name", line, where))
    return shards


def state_name(key: Any) -> str:
    """Return the name of an optimizer's state as text."""
    return key if isinstance(key, str) else short(key)


def torch_state(optimizer: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
    """Return (number -> state, the param groups), also from inside FP16_UnfusedOptimizer's state_dict."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    by_id = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(by_id, dict) or not isinstance(groups, list):
        return {}, []
    return by_id, [g for g in groups if isinstance(g, dict)]


def ids_of(group: Mapping[Any, Any]) -> list[int]:
    params = group.get("params")
    return [i for i in params if isinstance(i, int) and abs(i) < 1 << 62] if isinstance(params, list | tuple) else []


def _masters(optimizer: Mapping[Any, Any], groups: list[dict[Any, Any]]) -> dict[int, StoredTensor]:
    """Return the fp32 copies by number. FP16_UnfusedOptimizer has a list per group, in the order of its parameters."""
    copies = optimizer.get("fp32_groups")
    if not isinstance(copies, list) or len(copies) != len(groups):
        return {}
    return {
        i: t
        for copy, numbers in zip(copies, map(ids_of, groups), strict=True)
        if isinstance(copy, list) and len(copy) == len(numbers)
        for i, t in zip(numbers, copy, strict=True)
        if isinstance(t, StoredTensor)
    }


def _shapes(state: Any, master: StoredTensor | None) -> frozenset[Shape] | None:
    """Return the shapes that a parameter may have: its fp32 copy's, else those that its states allow; None for any."""
    if master is not None:
        return frozenset({master.shape})
    tensors = {k: t.shape for k, t in state.items() if isinstance(t, StoredTensor)} if isinstance(state, dict) else {}
    return possible_shapes(tensors)
