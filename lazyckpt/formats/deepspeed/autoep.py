"""AutoEP: the experts of a transformers model, stacked in one parameter per layer and distributed over ranks.

Sources: deepspeed/module_inject/auto_ep_layer.py, runtime/engine.py (``ds_autoep_layers`` in the model states; each
expert file holds one expert, as ``PREFIX.w1.ID``), runtime/zero/stage3.py (``ds_zero_partition_groups``),
module_inject/auto_ep_folding.py `expected_folding_group_tables` (with AutoTP). Every expert-parallel rank has a stack
of shape [local experts, ...] under the same name; the whole is [experts, ...]. With AutoTP, experts are not cut over
tensor-parallel ranks, but distributed over them as over others: expert-parallel ranks are consecutive global ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.box import Box
from ...core.compose import Composed
from ...core.extents import Extent, Hole
from ...core.placement import Part, Placement
from ...core.specs import Fragment
from ...errors import Problem
from ..shared.rank_shards import Shard, Shards
from .building import ALONE, Building

_MOST = 4096  # limit on the experts of a layer
# the prefix of a layer's expert parameters -> for each expert-parallel rank the global ids of its experts, in order
Placements = dict[str, list[list[int]]]
# (state, name) -> expert-parallel rank -> its experts
Stacks = dict[tuple[str, str], dict[int, Shard]]


def placements(model: Mapping[Any, Any]) -> Placements:
    """Return the expert placement of each AutoEP layer that the model states describe; {} if there is none."""
    found: Placements = {}
    for layer in _layers(model):
        prefix = layer["expert_key_prefix"]
        if prefix not in found and (ids := _ids(layer)) is not None:
            found[prefix] = ids
    return found


def router_aliases(model: Mapping[Any, Any], names: Sequence[str]) -> dict[str, str]:
    """Map a router's name in the original model to its name in the AutoEP layer: ``module`` holds it under both."""
    owners = set(names)
    found = {}
    for layer in _layers(model):
        path = f"{layer.get('module_path')}."
        for name in names:
            _, _, rest = name.removeprefix(path).partition(".")
            owner = f"{path}router.{rest}"
            if name.startswith(path) and rest.startswith("gate.") and owner in owners and owner != name:
                found[name] = owner
    return found


def _layers(model: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    layers = model.get("ds_autoep_layers")
    listed = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    return [layer for layer in listed if isinstance(layer.get("expert_key_prefix"), str)]


def _ids(layer: Mapping[Any, Any]) -> list[list[int]] | None:
    """Return the expert ids of each expert-parallel rank; None if the description does not cover all experts."""
    placement, total = layer.get("expert_placement"), layer.get("num_experts")
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if isinstance(ranks, list) and all(isinstance(r, dict) and type(r.get("rank")) is int for r in ranks):
        by_rank: dict[int, Any] = {r["rank"]: r.get("experts") for r in ranks}
        ids = [by_rank.get(n) for n in range(len(ranks))]
    else:
        count, local = layer.get("ep_size"), layer.get("num_local_experts")
        if type(count) is not int or type(local) is not int or not (0 < count <= _MOST and 0 < count * local <= _MOST):
            return None
        ids = [list(range(n * local, (n + 1) * local)) for n in range(count)]
    if sum(len(own) for own in ids if isinstance(own, list)) > _MOST:
        return None
    known = [[i for i in own if type(i) is int] for own in ids if isinstance(own, list)]
    every = sorted(i for own in known for i in own)
    complete = len(known) == len(ids) and len(every) == total and every == list(range(len(every)))
    return known if complete else None


def layer_of(name: str, known: Placements) -> list[list[int]] | None:
    """Return the placement of the experts that a parameter stacks; None if it is not a stack of experts."""
    return known.get(name.rpartition(".")[0])


def stacked(ids: list[list[int]], ranks: Mapping[int, Shard], lost: Mapping[int, Hole]) -> Shard:
    """Return the stack of all experts, from the stacks of the expert-parallel ranks. ``lost``: holes of lost ranks."""
    first = ranks[min(ranks)]
    rest = first.shape[1:]
    fragments: list[Sequence[Fragment]] = []
    for ep, own in enumerate(ids):
        shape = (len(own), *rest)
        local = ranks.get(ep)
        if local is not None and local.shape == shape:
            fragments.append(local.fragments)
        else:
            hole = lost.get(ep) or Hole("", f"expert-parallel rank {ep} has no stack of shape {shape}")
            fragments.append((Fragment(hole, shape),))
    placements = (
        Placement((len(own), *rest), tuple(_one(n, expert, rest) for n, expert in enumerate(own))) for own in ids
    )
    merged = Composed(tuple(fragments), tuple(placements), merged=True)
    return Shard((sum(map(len, ids)), *rest), first.dtype, merged)


def add_stacks(b: Building, shards: Shards, stacks: Stacks, lost: Mapping[int, Hole]) -> None:
    """Add the stacks of all experts to the shards. Tensor-parallel ranks do not cut experts."""
    for (state, name), stack in stacks.items():
        whole = stacked(layer_of(name, b.placements) or [], stack, lost)
        shards.setdefault(state, {})[name] = {ALONE: whole}


def stacked_files(b: Building, names: dict[str, dict[int, Shard]], known: Placements) -> dict[str, dict[int, Shard]]:
    """Stack the tensors of expert files, which hold one expert each under the name ``PREFIX.w1.ID``."""
    found: dict[str, dict[int, Shard]] = {}
    stacks: dict[str, dict[int, Shard]] = {}
    for name, by_rank in names.items():
        stack, _, number = name.rpartition(".")
        if layer_of(stack, known) is None or not number.isdecimal():
            found[name] = by_rank
            continue
        stacks.setdefault(stack, {})[int(number)] = by_rank[min(by_rank)]  # with tensor parallelism: any rank's copy
    for name, experts in stacks.items():
        ids = layer_of(name, known) or []
        rest = next(iter(experts.values())).shape
        blocks = []
        for expert in range(sum(map(len, ids))):
            part = (_one(0, expert, rest),)
            extent: Extent | Hole = Hole("", f"the file of expert {expert} of {name!r} is missing")
            one = experts.get(expert)
            if one is not None and one.shape == rest and isinstance(one.fragments[0].extent, Extent):
                own = one.fragments[0].extent
                extent = replace(own, shape=(1, *own.shape), strides=(0, *own.strides))
            else:
                b.report(
                    Problem("missing-file", f"the file of expert {expert} of {name!r} is missing: it cannot be read")
                )
            blocks.append(Fragment(extent, (1, *rest), part))
        dtype = next(iter(experts.values())).dtype
        found[name] = {ALONE: Shard((len(blocks), *rest), dtype, tuple(blocks))}
    return found


def _one(local: int, expert: int, rest: tuple[int, ...]) -> Part:
    zeros = (0,) * len(rest)
    return Part(Box((local, *zeros), (local + 1, *rest)), (expert, *zeros))
