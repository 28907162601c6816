"""Norms of the experts of a mixture-of-experts model, by layer and expert.

Experts are tensors of their own (``experts.3.up_proj.weight``) or the first dimension of stacks, whose slices are
measured alone. The norm of an expert is that of all its tensors together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..layouts.stages import expert_of, is_stack
from ..lazy import LazyArray
from .architecture import layer_and_kind
from .layers import Layers
from .stats import stats_of_all
from .table import Stats, Table

EXPERTS = 2048
"""Experts of a layer, at most: Switch Transformers have so many. A longer first dimension is no stack of experts, and
more experts are not compared with each other."""
_CELLS = 1 << 24  # of a grid of layers and experts


def expert_norms(
    tensors: Mapping[str, LazyArray],
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    check: Callable[[], None] = lambda: None,
) -> Layers:
    """Return the L2 norm of each expert. Every tensor of an expert is read once.

    Parameters
    ----------
    tensors
        Tensors by full name. Those of no expert are not read.
    executor, memory, progress
        See `WriteOptions`.
    check
        Called before each run of elements; what it raises ends the work.

    Returns
    -------
    Layers
        The rows (``kinds``) are the layers that have experts: their numbers, or names such as
        ``thinker.model.layers.0`` if several stacks of layers have experts. The columns (``layers``) are the experts. A
        mark tells of tensors that cannot be read, or that have NaN or infinities.

    Raises
    ------
    DataError
        There are no experts, or more than 16 Mi pairs of a layer and an expert.
    WorkerError
        Workers of the executor died.
    """
    parts = {key: (cell, t) for key, cell, t in parts_of(tensors)}
    if not parts:
        raise DataError("no tensor of this view is of an expert: there are no norms of experts")
    layers = tuple(dict.fromkeys(layer for (layer, _), _ in parts.values()))
    experts = tuple(sorted({expert for (_, expert), _ in parts.values()}))
    values = grid_of(layers, experts)
    cells: dict[tuple[str, int], list[Stats]] = {}
    for one in stats_of_all({key: t for key, (_, t) in parts.items()}, None, executor, memory, progress, check):
        cells.setdefault(parts[one.name][0], []).append(one)
    marks: dict[tuple[str, int | None], str] = {}
    for (layer, expert), found in cells.items():
        good = [one for one in found if one.error is None]
        norm = Table(good).total.l2 if good else None
        values[layers.index(layer), experts.index(expert)] = math.nan if norm is None else norm
        odd = any(one.finite < one.count for one in good)
        mark = "?" if len(good) < len(found) else "!" if odd else ""
        if mark:
            marks[layer, expert] = mark
    return Layers("norm", layers, experts, values, {}, marks)


def grid_of(layers: Sequence[str], experts: Sequence[int]) -> NDArray[np.float64]:
    """Return a value for each layer and expert, all NaN. Raises DataError if names make many of a few experts."""
    if len(layers) * len(experts) > _CELLS:
        raise DataError(
            f"{len(layers):,} layers by {len(experts):,} experts are more than {_CELLS:,} cells: take a part of them"
        )
    return np.full((len(layers), len(experts)), math.nan)


def parts_of(tensors: Mapping[str, LazyArray]) -> Iterator[tuple[str, tuple[str, int], LazyArray]]:
    """Yield a name of its own, layer and expert, and tensor, for each tensor of an expert and slice of a stack, in the
    order of the layers. Layers are named as by `expert_norms`."""
    found: dict[tuple[str, int], list[tuple[str, int | None]]] = {}  # stack and layer -> tensors and experts
    for name, t in tensors.items():
        expert = expert_of(name)
        if expert is not None:
            found.setdefault(_layer_of(expert.layer), []).append((name, expert.number))
        elif is_stack(name) and t.ndim > 1 and t.shape[0] <= EXPERTS:
            found.setdefault(_layer_of(name), []).append((name, None))
    several = len({stack for stack, _ in found}) > 1
    for (stack, layer), names in sorted(found.items()):
        label = str(layer) if not several else f"{stack}{layer}" if stack.endswith(".") else stack
        for name, number in names:
            t = tensors[name]
            if number is not None:
                yield name, (label, number), t
                continue
            for n in range(t.shape[0]):
                yield f"{name}[{n}]", (label, n), t.lazy[n]


def _layer_of(name: str) -> tuple[str, int]:
    """Return the stack of layers that experts belong to, and the number of the layer; 0 of those in no layer."""
    head = name[: name.rindex(".experts.")]
    layer, kind = layer_and_kind(f"{head}.")
    return (head, 0) if layer is None else (kind.partition("*")[0], layer)
