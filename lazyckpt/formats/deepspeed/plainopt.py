"""ZeRO-0: a torch optimizer's state_dict, whose parameters are numbers, as states per parameter.

Sources: runtime/engine.py (``optimizer`` in the model states; ``expp_rank_*`` with experts), runtime/fp16/
unfused_optimizer.py `state_dict`, torch/optim/optimizer.py `state_dict`: an optimizer that was given named parameters
lists ``param_names`` in its groups; otherwise the names follow from shapes and the usual orders (`numbering`), as far
as these leave no choice. moe/utils.py marks the groups of experts with ``moe``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.index import Rank
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
    """A param group: the numbers of its parameters, what shapes they may have (None: any), the names that it lists, if
    any. The parameters are among these, in this order: FP16_UnfusedOptimizer drops frozen ones, but not their names.
    ``experts``: over how many ranks the experts that it holds are spread (1 if it does not say); 0 if it holds none."""

    numbers: list[int]
    shapes: list[frozenset[Shape] | None]
    names: list[str] | None
    experts: int


def numbered_groups(optimizer: Any) -> list[Group]:
    """The param groups of a plain optimizer's state_dict; [] if it is none."""
    if not isinstance(optimizer, Mapping):
        return []
    by_id, groups = _torch_state(optimizer)
    masters = _masters(optimizer, groups)
    found = []
    for group in groups:
        ids = _ids(group)
        names = group.get("param_names")
        shapes = [_shapes(by_id.get(i), masters.get(i)) for i in ids]
        listed = [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []
        known = listed if len(listed) >= len(ids) and len(listed) == len(set(listed)) else None
        found.append(Group(ids, shapes, known, _spread(group) if group.get("moe") is True else 0))
    return found


def _spread(group: Mapping[Any, Any]) -> int:
    """moe/utils.py calls the groups of experts ``ep_size_N``."""
    said = re.fullmatch(r"ep_size_([1-9]\d{0,5})", str(group.get("name")))
    return int(said[1]) if said else 1


def named_shapes(groups: list[Group]) -> dict[str, Shape]:
    """The parameters that the groups name, as far as their states show a shape."""
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
    """Names for the parameters of all groups, as all `matches` give them; None if there are none."""
    found = matches(names, groups, spread, effort, conventions)
    return common(found, [group.shapes for group in groups]) if found else None


def matches(
    names: Mapping[str, Shape],
    groups: list[Group],
    spread: Mapping[str, int] | None = None,
    effort: Effort | None = None,
    conventions: Sequence[Convention] = CONVENTIONS,
) -> list[Assignment]:
    """Names for the parameters of all groups: those listed, else what shapes and each usual order tell. Experts are in
    groups of their own, and nowhere else, if any group is marked so; in the groups of their ``spread`` if given
    (expert -> over how many ranks it and its like are spread)."""
    listed = [_listed(group, names) for group in groups]
    if None not in listed:
        return [Assignment([found for found in listed if found is not None], "param_names")]
    marked = any(group.experts for group in groups)
    of_group = [(group.experts if spread else bool(group.experts)) if marked else 0 for group in groups]
    given = _as_on_the_rank(names)  # by which the rank may have sorted them
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
    """The names that the rank had -> those of the model: there each layer's experts count from 0.

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
    """The names of a group's parameters, from those that it lists."""
    known = [(n, names[n]) for n in group.names or () if n in names]
    if len(known) > len(group.numbers):
        known = [(n, shape) for n, shape in known if prod(shape)]  # these are dropped too
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
    """The states of a plain optimizer per parameter, or under its number where the name is not determined.

    ``names``: every tensor that may be a parameter, in the module's order. ``spread``: see `match`.
    """
    groups = numbered_groups(optimizer)
    if not groups:
        return {}
    shapes = [group.shapes for group in groups]
    ways = matches(names, groups, spread)
    found = common(ways, shapes) if ways else assign_by_shape(list(names.items()), shapes)
    by_id, param_groups = _torch_state(optimizer)
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
        said = [{i: way.names[g][n] for i, (g, n) in unnamed.items()} for way in ways]
        given = [{i: name for i, name in way.items() if name is not None} for way in said]
        b.unnamed.append(Unnamed(where, count, list(unnamed), left, given))
    elif unnamed:
        line = (
            f"{where}: the optimizer numbers its parameters; for {len(unnamed)} of {count} order and shapes leave more "
            "than one way to name them, or none: their states stay under their numbers"
        )
        b.tell(Problem("undecided-name", line, where))
    return shards


def state_name(key: Any) -> str:
    """What an optimizer calls one of its states, as text."""
    return key if isinstance(key, str) else short(key)


def _torch_state(optimizer: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
    """-> (number -> state, the param groups), also from within FP16_UnfusedOptimizer's."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    by_id = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(by_id, dict) or not isinstance(groups, list):
        return {}, []
    return by_id, [g for g in groups if isinstance(g, dict)]


def _ids(group: Mapping[Any, Any]) -> list[int]:
    params = group.get("params")
    return [i for i in params if isinstance(i, int) and abs(i) < 1 << 62] if isinstance(params, list | tuple) else []


def _masters(optimizer: Mapping[Any, Any], groups: list[dict[Any, Any]]) -> dict[int, StoredTensor]:
    """The fp32 copies of FP16_UnfusedOptimizer: a list per group, in the order of its parameters."""
    copies = optimizer.get("fp32_groups")
    if not isinstance(copies, list) or len(copies) != len(groups):
        return {}
    return {
        i: t
        for copy, numbers in zip(copies, map(_ids, groups), strict=True)
        if isinstance(copy, list) and len(copy) == len(numbers)
        for i, t in zip(numbers, copy, strict=True)
        if isinstance(t, StoredTensor)
    }


def _shapes(state: Any, master: StoredTensor | None) -> frozenset[Shape] | None:
    """The shapes that a parameter may have: its fp32 copy's, else one that its states show; None if there are none."""
    if master is not None:
        return frozenset({master.shape})
    tensors = {k: t.shape for k, t in state.items() if isinstance(t, StoredTensor)} if isinstance(state, dict) else {}
    return possible_shapes(tensors)
