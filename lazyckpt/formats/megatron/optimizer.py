"""The parameters of the states in a rank's optimizer: torch numbers parameters in the order of its groups.

Sources: megatron/core/optimizer/__init__.py `_get_param_groups` (groups by weight decay, within a group in the order of
the model's parameters over its chunks), optimizer.py `Float16OptimizerWithFloat16Params.state_dict` (fp32 copies in a
list per group), `ChainedOptimizer.state_dict` (a list: dense parameters, experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape
from ...io.containers.pickle.rebuild import StoredTensor
from ...layouts.megatron import data_parallel, flag, is_head, number
from ..shared.numbering import assign, possible_shapes
from .ranks import Grid

# -- The distributed optimizer's file: the position of each parameter's state in its flat buffers.

_STATES = {"param": "fp32"}  # name in the file -> name of the state
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's position in a buffer, in elements. ``bucket``, ``start``: for files with a tensor per bucket."""

    name: str
    at: int
    bucket: int
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of all parameters in a buffer, and the lengths of the buffer and its buckets, in elements."""

    slots: list[Slot]
    total: int
    buckets: list[int]


def layout(
    shapes: Mapping[str, Shape], bucket: int | None, alone: frozenset[str] = frozenset(), alignment: int = _ALIGNMENT
) -> Layout:
    """Lay out a buffer for parameters in the model's order. ``bucket``: the size at which a bucket is closed
    (None: there is one bucket); ``alone``: parameters that have a bucket of their own.

    >>> [(s.name, s.at) for s in layout({"a": (3,), "b": (2, 2)}, None).slots]
    [('b', 0), ('a', 64)]
    """
    slots: list[Slot] = []
    buckets: list[int] = []
    at = size = 0  # in the bucket: where the next parameter may start, and where the last one ends
    ahead = 0
    for name in reversed(list(shapes)):
        at = -(-at // alignment) * alignment
        if name in alone and size:
            buckets.append(at)
            ahead += at
            at = size = 0
        slots.append(Slot(name, ahead + at, len(buckets), at))
        at = size = at + prod(shapes[name])
        if name in alone or (bucket is not None and size >= bucket):
            buckets.append(size)
            ahead += size
            at = size = 0
    if size:
        buckets.append(size)
        ahead += size
    return Layout(slots, ahead, buckets)


def layouts(
    shapes: Mapping[str, Shape], grid: Grid, stage: int, chunk: int, shared: bool
) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts that a buffer may have, with a description of each: first the one that the arguments imply,
    then those of other versions and options."""
    args, d = grid.args, grid.degrees
    alone = frozenset(
        name for name in shapes if shared and d.pp > 1 and (is_head(name) or name.endswith("word_embeddings.weight"))
    )
    first = stage == 0 and chunk == 0
    size = number(args, "ddp_bucket_size")
    parameters = sum(map(prod, shapes.values()))
    count = number(args, "ddp_num_buckets")
    if size is None and count is not None:
        size = parameters // count
    if size is None:
        size = max(40_000_000, 1_000_000 * data_parallel(args, d))
    overlap = flag(args, "overlap_grad_reduce") is True
    implied = size if overlap and first else None
    yield "as the arguments imply", layout(shapes, implied, alone)
    yield "one bucket", layout(shapes, None, alone)
    yield f"buckets of {size:,}", layout(shapes, size, alone)
    yield "one bucket, also for shared embeddings", layout(shapes, None)
    yield "without alignment", layout(shapes, None, alignment=1)


def states_in(buffer: Mapping[Any, Any]) -> dict[str, StoredTensor | list[StoredTensor]]:
    """Return state -> its flat tensor, or (in old files) one tensor per bucket."""
    found: dict[str, StoredTensor | list[StoredTensor]] = {}
    for key, value in buffer.items():
        if not isinstance(key, str):
            continue
        name = _STATES.get(key, key)
        flat = value if isinstance(value, list) else [value]
        if flat and all(isinstance(v, StoredTensor) and len(v.shape) == 1 for v in flat):
            found[name] = value
    return found


def fits(plan: Layout, states: Mapping[str, StoredTensor | list[StoredTensor]]) -> bool:
    """Return whether the tensors have the lengths of the layout (a tensor per bucket has padding at its end)."""
    for value in states.values():
        if isinstance(value, list):
            if len(value) != len(plan.buckets):
                return False
            if any(not n <= v.shape[0] < n + (1 << 17) for n, v in zip(plan.buckets, value, strict=True)):
                return False
        elif value.shape[0] != plan.total:
            return False
    return bool(states)


# -- The parameters of the states in a rank's optimizer: torch numbers parameters in the order of its groups.

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


@dataclass(slots=True)
class Held:
    """One parameter's states, as tensors of the rank's file. ``main``: the fp32 copy, also in ``states`` as "fp32"."""

    name: str
    states: dict[str, StoredTensor]
    main: StoredTensor | None


def parts_of(value: Any) -> list[dict[Any, Any]]:
    """Return the optimizers of a rank: one, or those of a chain."""
    chain = value if isinstance(value, list) else list(value.values()) if _is_chain(value) else [value]
    return [part for part in chain if isinstance(part, dict)]


def _is_chain(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(type(k) is int for k in value)


def groups_of(part: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    inner = part.get("optimizer", part)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def for_experts(part: Mapping[Any, Any]) -> bool | None:
    """Return whether this is the optimizer of experts that expert parallelism distributes; None if not recorded."""
    flags = [g["is_expert_parallel"] for g in groups_of(part) if isinstance(g.get("is_expert_parallel"), bool)]
    return any(flags) if flags else None


def held(part: Mapping[Any, Any], shapes: Mapping[str, Shape]) -> list[Held] | None:
    """Return the states in one optimizer, by the parameters' names in the file. ``shapes``: the parameters that it may
    have, in the model's order. None if the numbers cannot be matched with names."""
    groups = groups_of(part)
    inner = part.get("optimizer", part)
    states = inner.get("state") if isinstance(inner, dict) else None
    states = states if isinstance(states, dict) else {}
    masters = masters_of(part)
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


def masters_of(part: Mapping[Any, Any]) -> list[Any] | None:
    """Return the fp32 copies of an optimizer, a list for each group; None if it has none."""
    return next((part[k] for k in _MASTERS if isinstance(part.get(k), list)), None)


def _names(
    groups: list[dict[Any, Any]],
    numbers: list[Any],
    states: Mapping[Any, Any],
    masters: Any,
    shapes: Mapping[str, Shape],
) -> list[list[str]] | None:
    wanted = [
        [wanted_shapes(states.get(i), masters, g, n, len(ids)) for n, i in enumerate(ids)]
        for g, ids in enumerate(numbers)
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


def wanted_shapes(own: Any, masters: Any, g: int, n: int, count: int) -> frozenset[Shape] | None:
    """Return the shapes that a parameter may have, from its states and its fp32 copy; None for any."""
    known = {k: t.shape for k, t in own.items() if isinstance(t, StoredTensor)} if isinstance(own, dict) else {}
    group = masters[g] if masters is not None and g < len(masters) and isinstance(masters[g], list) else []
    if len(group) == count and isinstance(group[n], StoredTensor):
        known["fp32"] = group[n].shape
    return possible_shapes(known)


def _planned(groups: list[dict[Any, Any]], shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    """Yield the names in each group, as Megatron forms groups: no weight decay for biases and 1-d parameters."""
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
