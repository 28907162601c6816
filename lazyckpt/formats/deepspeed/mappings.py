"""Names and order of the parameters in flat groups where the model states have no ``param_shapes``.

A pipeline engine at ZeRO-0 does not treat BF16_Optimizer as a ZeRO optimizer and does not save ``param_shapes``
(runtime/engine.py `_get_zero_param_shapes`). ``param_slice_mappings`` replace them (runtime/base_optimizer.py
`_create_param_mapping`): every rank lists the parameters that touch its partition, in the order of the buffer, with the
number of their elements in the partition and the position of the first. The mappings are wrong only under
round_robin_gradients, which BF16_Optimizer does not have. The shapes come from the layer files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.extents import Hole
from ...errors import Problem
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import Opaque
from ..shared.rank_shards import Shards
from .building import Building, Shapes
from .partitions import Optim, OptimFiles

_GAP = "\0gap "  # prefix of placeholders for parameters that only a lost rank's file names


class RankSpan(NamedTuple):
    """The part of a parameter on one rank: ``start`` and ``numel`` in elements, within the rank's partition."""

    dp: int
    start: int
    numel: int


def spans_by_name(optim: OptimFiles) -> list[dict[str, list[RankSpan]]]:
    """Return, for each flat group, name -> its spans in the order of the ranks. Empty if no file has mappings."""
    groups: list[dict[str, list[RankSpan]]] = []
    for dp, rank in optim.items():
        mappings = rank.state.get("param_slice_mappings") if isinstance(rank, Optim) else None
        for g, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
            if g == len(groups):
                groups.append({})
            for name, start, numel in _addresses(mapping):
                groups[g].setdefault(name, []).append(RankSpan(dp, start, numel))
    return groups


def _addresses(mapping: Any) -> Iterator[tuple[str, int, int]]:
    for name, address in mapping.items() if isinstance(mapping, dict) else ():
        found = address.attributes if isinstance(address, Opaque) else {}
        numel, start = found.get("numel"), found.get("start")
        if isinstance(name, str) and type(numel) is int and type(start) is int and numel > 0 and start >= 0:
            yield name, start, numel


def sizes(groups: list[dict[str, list[RankSpan]]]) -> dict[str, int]:
    """Return name -> the number of its elements in the mappings: all elements, if no rank's file is missing."""
    return {name: sum(p.numel for p in pieces) for group in groups for name, pieces in group.items()}


def mapped_groups(b: Building, optim: OptimFiles, shapes: Mapping[str, Shape], where: str) -> list[Shapes]:
    """Return the parameters of every flat group, in its order, as ``param_shapes`` would list them. ``shapes``: shapes
    of all tensors of the stage's layers. Gaps replace parameters that only a lost rank names: see `without_gaps`."""
    found = []
    for g, group in enumerate(spans_by_name(optim)):
        try:
            found.append(_in_order(group, optim, _width(optim, g), shapes))
        except ValueError as e:
            line = f"{where}: group {g} of the optimizer states cannot be split into parameters: {e}"
            b.report(Problem("undecided-layout", line, where))
            found.append({})
    return found


def without_gaps(shards: Shards) -> Shards:
    """Return the shards without the gaps of `mapped_groups`."""
    return {s: {n: r for n, r in names.items() if not n.startswith(_GAP)} for s, names in shards.items()}


def _width(optim: OptimFiles, g: int) -> int:
    """Return the number of elements of a group on each rank: BF16_Optimizer saves its partitions with their padding."""
    for rank in optim.values():
        masters = rank.state.get("single_partition_of_fp32_groups") if isinstance(rank, Optim) else None
        master = masters[g] if isinstance(masters, list) and g < len(masters) else None
        if isinstance(master, StoredTensor) and len(master.shape) == 1:
            return master.shape[0]
    raise ValueError("no file has its fp32 partition")


def _in_order(
    group: Mapping[str, list[RankSpan]], optim: OptimFiles, width: int, shapes: Mapping[str, Shape]
) -> Shapes:
    begins: dict[str, int] = {}
    for name, pieces in group.items():
        if name not in shapes:
            raise ValueError(f"no layer file holds {name!r}, which the mappings list")
        first, last, total = pieces[0], pieces[-1], prod(shapes[name])
        seen = sum(p.numel for p in pieces)
        before = first.start == 0 and isinstance(optim.get(first.dp - 1), Hole)
        after = last.start + last.numel == width and isinstance(optim.get(last.dp + 1), Hole)
        if seen == total or not before:
            begins[name] = first.dp * width + first.start
        elif not after:
            begins[name] = last.dp * width + last.start + last.numel - total
        # else lost ranks on both sides hold pieces of it, in unknown proportions
        if seen > total or (seen < total and not (before or after or _lost_between(pieces, optim))):
            raise ValueError(f"{name!r} has {total:,} elements in its layer file, {seen:,} in the mappings")
    ordered: Shapes = {}
    end = 0
    for name, begin in sorted(begins.items(), key=lambda item: item[1]):
        if begin < end:
            raise ValueError(f"{name!r} begins at {begin:,}, before the parameter in front of it ends")
        if begin > end:
            ordered[f"{_GAP}{end}"] = (begin - end,)
        ordered[name] = shapes[name]
        end = begin + prod(shapes[name])
    return ordered


def _lost_between(pieces: list[RankSpan], optim: OptimFiles) -> bool:
    return any(isinstance(optim[dp], Hole) for dp in range(pieces[0].dp, pieces[-1].dp))
