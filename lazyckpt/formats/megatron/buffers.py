"""The distributed optimizer's file: where each parameter's state lies in its flat buffers.

Sources, in megatron/core: optimizer/distrib_optimizer.py `get_parameter_state_dp_zero`; `_ParamAndGradBuffer.__init__`
in distributed/param_and_grad_buffer.py; distributed/distributed_data_parallel.py (how many buckets). For every chunk of
the model and every dtype one buffer: parameters in reverse order, each from a multiple of 64 elements on, in buckets
whose padding at the end is left out. How many buckets there are, the file does not say: the arguments do, and the
buffer's length has to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape
from ...io.rebuild import StoredTensor
from .degrees import data_parallel, flag, number
from .names import is_head
from .ranks import Grid

_STATES = {"param": "fp32"}  # in the file -> as the state is called
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in a buffer, in elements; ``bucket`` and ``start`` for files that keep buckets apart."""

    name: str
    at: int
    bucket: int
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    slots: list[Slot]
    total: int
    buckets: list[int]


def layout(
    shapes: Mapping[str, Shape], bucket: int | None, alone: frozenset[str] = frozenset(), alignment: int = _ALIGNMENT
) -> Layout:
    """Lay out a buffer for parameters in the model's order. ``bucket``: the size from which on a bucket is closed
    (None: there is one); ``alone``: parameters that have a bucket of their own.

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
    """The layouts that a buffer may have: the one that the arguments tell first, then others that some version or
    option gives; with words for each."""
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
    told = size if overlap and first else None
    yield "as the arguments tell", layout(shapes, told, alone)
    yield "one bucket", layout(shapes, None, alone)
    yield f"buckets of {size:,}", layout(shapes, size, alone)
    yield "one bucket, also for shared embeddings", layout(shapes, None)
    yield "without alignment", layout(shapes, None, alignment=1)


def states_in(buffer: Mapping[Any, Any]) -> dict[str, StoredTensor | list[StoredTensor]]:
    """State -> its flat tensor, or (in old files) one for every bucket."""
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
    """Whether the tensors are as long as the layout says (buckets that are kept apart have padding at their end)."""
    for value in states.values():
        if isinstance(value, list):
            if len(value) != len(plan.buckets):
                return False
            if any(not n <= v.shape[0] < n + (1 << 17) for n, v in zip(plan.buckets, value, strict=True)):
                return False
        elif value.shape[0] != plan.total:
            return False
    return bool(states)
