"""ZeRO-0 with FP16_Optimizer: the fp32 copies and the states of a group in one flat buffer each, without names.

DeepSpeed wraps FusedAdam, apex's and, up to 0.18, the compressed optimizers so (runtime/fp16/fused_optimizer.py
`state_dict`): ``fp32_groups_flat`` has a buffer for each param group, its parameters one after the other as the client
gave them, and the optimizer's state dict has one "parameter" for each group. Names are known where the groups list
``param_names``. Otherwise one way to cut the buffers is tried: the module's order, in one group, or in one of matrices
and one of the rest. It counts only if the fp32 copies round to the weights, which the first use of the names compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.extents import Extent
from ...core.placement import Rank
from ...core.specs import Fragment
from ...errors import Problem
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import TorchFile
from ..shared.rank_shards import Shard, Shards
from .building import ALONE, Building, Shapes, Unnamed
from .plainopt import ids_of, state_name, torch_state


def flat_masters(optimizer: Any) -> list[StoredTensor] | None:
    """Return the flat fp32 copies of every group; None if the optimizer is of another kind."""
    copies = optimizer.get("fp32_groups_flat") if isinstance(optimizer, Mapping) else None
    if not isinstance(copies, list):
        return None
    return [t for t in copies if isinstance(t, StoredTensor) and len(t.shape) == 1]


def fused_shards(
    b: Building, file: TorchFile, optimizer: Any, names: Mapping[str, Shape], rank: Rank, where: str
) -> Shards:
    """Return the states of every parameter. ``names``: every tensor that may be one, in the module's order."""
    masters = flat_masters(optimizer) or []
    by_id, groups = torch_state(optimizer)
    sizes = [t.shape[0] for t in masters]
    listed = [_listed(group, names) for group in groups]
    ways = [listed] if listed and all(listed) else []
    known = _fits(ways, sizes)
    if not known:
        ways = list(_usual(names, len(sizes)))
    fitting = [way for way in ways if _fits([way], sizes)]
    values: list[dict[str, Any]] = [{"fp32": master} for master in masters]
    for group, of_group in zip(groups, values, strict=False):
        own = by_id.get(ids[0]) if (ids := ids_of(group)) else None
        of_group.update({state_name(k): v for k, v in own.items()} if isinstance(own, dict) else {})
    other = _not_by_element(b, values, sizes)
    if len(fitting) != 1 or len(groups) != len(masters) or (not known and b.tp > 1):
        line = (
            f"{where}: the optimizer has {len(sizes)} flat groups of {sizes} elements, and nothing says how the "
            "parameters lie in them: they are in view.stored"
        )
        b.report(Problem("undecided-name", line, where))
        return {}
    shards: Shards = {}
    numbers: dict[str, str] = {}
    for g, (way, of_group) in enumerate(zip(fitting[0], values, strict=True)):
        at = 0
        for n, (name, shape) in enumerate(way.items()):
            key = name if known else f"{where}.{g}.{n}"
            numbers[key] = name
            if known:
                b.named.setdefault(name, f"number {n} of group {g} of the {where}; named by param_names")
            for state, value in of_group.items():
                if isinstance(value, StoredTensor) and state not in other:
                    extent = file.extent(value, f"{state} of group {g}")
                    shard = _piece(extent, shape, at if value.shape else None, rank)
                    shards.setdefault(state, {}).setdefault(key, {})[rank.tp if known else ALONE] = shard
            at += prod(shape)
    if not known:
        b.unnamed.append(Unnamed(where, len(numbers), list(numbers), list(names), [numbers]))
    return shards


def _listed(group: Mapping[Any, Any], names: Mapping[str, Shape]) -> Shapes:
    """Return the parameters that a group lists; {} if it does not list parameters of the module."""
    found = group.get("param_names")
    if not isinstance(found, list | tuple) or not all(isinstance(n, str) and n in names for n in found):
        return {}
    return {n: names[n] for n in found}


def _usual(names: Mapping[str, Shape], count: int) -> Iterator[list[Shapes]]:
    """Yield the ways to distribute the parameters over groups that are tried."""
    if count == 1:
        yield [dict(names)]
    elif count == 2:
        matrices = {n: s for n, s in names.items() if len(s) > 1}
        rest = {n: s for n, s in names.items() if len(s) <= 1}
        yield from ([matrices, rest], [rest, matrices])


def _fits(ways: list[list[Shapes]], sizes: list[int]) -> bool:
    return any([sum(map(prod, group.values())) for group in way] == sizes for way in ways)


def _not_by_element(b: Building, values: list[dict[str, Any]], sizes: list[int]) -> set[str]:
    """Return, and report, the states that do not have one value per element, such as compression errors."""
    other: dict[str, StoredTensor] = {}
    for of_group, size in zip(values, sizes, strict=True):
        for state, value in of_group.items():
            if isinstance(value, StoredTensor) and value.shape not in ((), (size,)):
                other.setdefault(state, value)
    for state, value in other.items():
        line = (
            f"the optimizer's state {state!r} does not have one value per element (a tensor of shape {value.shape}): "
            "it is in view.stored only"
        )
        b.report(Problem("undecided-layout", line))
    return set(other)


def _piece(extent: Extent, shape: tuple[int, ...], at: int | None, rank: Rank) -> Shard:
    """Return a parameter's part of a flat buffer from element ``at`` on; None: a scalar, which the group shares."""
    if at is None:
        return Shard((), extent.dtype, (Fragment(extent, (), rank=rank),))
    count = prod(shape)
    begin = extent.offset + at * extent.strides[0] * extent.dtype.itemsize
    own = replace(extent, offset=begin, shape=(count,))
    return Shard(shape, extent.dtype, (Fragment(own, shape, None, (0, count), rank),))
