"""Tensors that are rows, halves, stacks or transposes of others, as an entry of a table says: by placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...core.box import Box, Shape
from ...core.compose import compose
from ...core.expr import computed, make, operand
from ...core.placement import Placement
from ...core.specs import TensorSpec, renamed
from .table import Entry

Rows = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: ``queries`` heads in ``groups`` groups that share k and v. Each head has ``dim`` rows, but
    one of v has ``values``, if that is not 0.

    Of a gated delta net: ``queries`` heads of v with ``values`` rows each, in ``groups`` groups that share q and k.
    """

    queries: int
    groups: int
    dim: int
    values: int = 0


# the heads of the language model (""), of its delta nets ("delta"), of a vision tower ("vision"), and of the language
# model's layers by number ("3") and of those that predict further tokens ("mtp") if they differ, as far as known
AllHeads = Mapping[str, Heads | None]


class Unfit(ValueError):
    """A tensor cannot be split or joined as its table entry requires; the message is the reason."""


class Misfit(Unfit):
    """The heads that the configuration says do not explain the rows of a tensor."""


def _rows(entry: Entry, count: int, all_heads: AllHeads) -> list[Rows]:
    """Return the rows of each tensor that is part of a fused tensor of ``count`` rows."""
    cut = entry.cut
    if cut == "halves":
        if count % 2:
            raise Unfit(f"{count} rows are not two halves")
        return [[(0, count // 2)], [(count // 2, count)]]
    if cut == "delta":
        return _rows_of_delta_net(len(entry.right), count, all_heads.get("delta"))
    if cut in ("qkv", "qgkv", "kv"):
        heads = all_heads.get(entry.heads)
        if heads is None:
            raise Unfit("how many heads and groups there are is not known (args or config.json would say)")
        per = heads.queries // heads.groups
        wide = per * {"qkv": 1, "qgkv": 2, "kv": 0}[cut]  # the heads of q, and their gates, in a group
        value = heads.values or heads.dim
        group = (wide + 1) * heads.dim + value
        if heads.queries % heads.groups or count != heads.groups * group:
            what = {"qkv": "q, k and v", "qgkv": "q, its gates, k and v", "kv": "k and v"}[cut]
            size = f"{heads.dim} (v: {value})" if heads.values else heads.dim
            raise Misfit(f"{count} rows are not {what} of {heads.queries} heads of {size} in {heads.groups} groups")
        starts = [g * group for g in range(heads.groups)]
        q, k = wide * heads.dim, (wide + 1) * heads.dim
        queries = [(s, s + q) for s in starts]
        if cut == "qgkv":  # the rows of each head's gate behind those of the head
            heads_at = [s + n * heads.dim for s in starts for n in range(per)]
            queries = [(a, a + heads.dim) for at in heads_at for a in (at, at + per * heads.dim)]
        parts = [queries, [(s + q, s + k) for s in starts], [(s + k, s + group) for s in starts]]
        return parts[1:] if cut == "kv" else parts
    return [[(0, count)]]


def _rows_of_delta_net(names: int, count: int, heads: Heads | None) -> list[Rows]:
    """Return the rows of q, k, v, the gate z, b and a in Megatron's one matrix, as they are in ``names`` others.

    Qwen3-Next has two, both with one group of heads after the other: q, k, v and z; b and a. Qwen3.5 has q, k and v in
    one, and one each for z, b and a.
    """
    if heads is None:
        raise Unfit("how many heads the delta nets have is not known (args or config.json would say)")
    keys, values, number = heads.groups * heads.dim, heads.queries * heads.values, heads.queries
    ends = [0, *accumulate([keys, keys, values, values, number, number])]
    if heads.queries % heads.groups or count != ends[-1]:
        raise Misfit(
            f"{count} rows are not those of a delta net with {heads.groups} heads of {heads.dim} for q and k and "
            f"{heads.queries} of {heads.values} for v"
        )
    if names == 4:
        return [[(0, ends[3])], *([(a, b)] for a, b in pairwise(ends[3:]))]
    grouped = [
        [(a + g * (b - a) // heads.groups, a + (g + 1) * (b - a) // heads.groups) for g in range(heads.groups)]
        for a, b in pairwise(ends)
    ]
    return [
        [rows for group in zip(*grouped[:4], strict=True) for rows in group],
        [rows for group in zip(*grouped[4:], strict=True) for rows in group],
    ]


def cut_apart(spec: TensorSpec, targets: list[str], entry: Entry, heads: AllHeads) -> list[TensorSpec]:
    turn = entry.transpose and len(spec.shape) == 2
    if not spec.shape or (not turn and not entry.cut and not entry.outer):  # all parts share a scalar, such as a step
        return [renamed(spec, target) for target in targets]
    if entry.outer:
        return [_with_outer(spec, targets[0], -entry.outer)]
    if entry.cut == "swapped":
        return [_swapped(spec, targets[0])]
    parts = _rows(entry, spec.shape[0], heads)
    if len(targets) == 1:
        parts = [[rows for part in parts for rows in part]]
    made = []
    for target, rows in zip(targets, parts, strict=True):
        pieces = []
        for (a, b), at in zip(rows, _starts(rows), strict=True):
            block = Box((a, *(0,) * (len(spec.shape) - 1)), (b, *spec.shape[1:]))
            start = (at, *(0,) * (len(spec.shape) - 1))
            axes = (1, 0) if turn else None
            pieces.append((spec, Placement.of(spec.shape, block, start[::-1] if turn else start, axes)))
        shape = (sum(b - a for a, b in rows), *spec.shape[1:])
        made.append(compose(target, shape[::-1] if turn else shape, pieces, _rule(spec, entry, rows), origin(spec)))
    return made


def join(specs: list[TensorSpec], target: str, entry: Entry, heads: AllHeads) -> TensorSpec:
    first = specs[0]
    turn = entry.transpose and len(first.shape) == 2
    if not first.shape or (not turn and not entry.cut and not entry.outer):
        return renamed(first, target)
    if entry.outer:
        return _with_outer(first, target, entry.outer)
    if entry.cut == "swapped":
        return _swapped(first, target)
    if any(len(s.shape) != len(first.shape) or s.dtype != first.dtype for s in specs):
        raise Unfit("they differ in dtype or in dimensions")
    shapes = [s.shape[::-1] if turn else s.shape for s in specs]
    count = sum(shape[0] for shape in shapes)
    parts = _rows(entry, count, heads)
    if len(specs) == 1:
        parts = [[rows for part in parts for rows in part]]
    if any(shape[1:] != shapes[0][1:] for shape in shapes) or any(
        shape[0] != sum(b - a for a, b in rows) for shape, rows in zip(shapes, parts, strict=True)
    ):
        raise Unfit(f"tensors of {', '.join(map(str, shapes))} do not make one with cut = {entry.cut!r}")
    pieces = []
    for spec, shape, rows in zip(specs, shapes, parts, strict=True):
        rest: Shape = shape[1:]
        for (a, b), at in zip(rows, _starts(rows), strict=True):
            low, high = (at, *(0,) * len(rest)), (at + b - a, *rest)
            block = Box(low[::-1], high[::-1]) if turn else Box(low, high)
            start = (a, *(0,) * len(rest))
            pieces.append((spec, Placement.of(spec.shape, block, start, (1, 0) if turn else None)))
    return compose(target, (count, *shapes[0][1:]), pieces, f"joined from {', '.join(s.name for s in specs)}")


def _with_outer(spec: TensorSpec, target: str, count: int) -> TensorSpec:
    """Return a tensor with ``count`` dimensions of length 1 before its own, or without so many if it is negative."""
    if count < 0 and (spec.shape[:-count] != (1,) * -count or len(spec.shape) < -count):
        raise Unfit(f"the shape is {spec.shape}: the first {-count} lengths are not 1")
    shape: Shape = (1,) * count + spec.shape if count > 0 else spec.shape[-count:]
    expr = make("reshape", operand(spec), shape=shape)
    return computed(target, expr, "; ".join(filter(None, (spec.rule, f"as {shape}"))), origin(spec))


def _swapped(spec: TensorSpec, target: str) -> TensorSpec:
    """Return a matrix whose left and right halves have changed places."""
    if len(spec.shape) != 2 or spec.shape[1] % 2:
        raise Unfit(f"the shape is {spec.shape}: the columns are not two halves")
    rows, columns = spec.shape
    half = columns // 2
    pieces = [(spec, Placement.of(spec.shape, Box((0, a), (rows, a + half)), (0, half - a), None)) for a in (0, half)]
    rule = "; ".join(filter(None, (spec.rule, f"halves of the columns of {spec.name!r} swapped")))
    return compose(target, spec.shape, pieces, rule, origin(spec))


def member(spec: TensorSpec, number: int, target: str, entry: Entry) -> TensorSpec:
    """Return the tensor of a number in a stack, as the left side has it."""
    inner = spec.shape[1:]
    turn = entry.transpose and len(inner) == 2
    axes = (2, 1) if turn else tuple(range(1, len(spec.shape)))
    block = Box((number, *(0 for _ in inner)), (number + 1, *inner))
    placement = Placement.of(spec.shape, block, (0,) * len(inner), axes)
    shape = inner[::-1] if turn else inner
    rule = "; ".join(filter(None, (spec.rule, f"number {number} of {spec.name!r}{', transposed' if turn else ''}")))
    one = compose(target, shape, [(spec, placement)], rule, origin(spec))
    return _in_turns(one, apart=True) if entry.cut == "alternating" else one


def stack(specs: list[TensorSpec], target: str, entry: Entry) -> TensorSpec:
    """Return the stack of the tensors of all numbers, as the right side has it."""
    first = specs[0]
    if any((s.shape, s.dtype) != (first.shape, first.dtype) for s in specs):
        raise Unfit("the tensors to be stacked differ in dtype or shape")
    if not first.shape:  # a scalar, such as a step, is shared by all
        return renamed(first, target)
    if entry.cut == "alternating":
        specs = [_in_turns(one, apart=False) for one in specs]
    turn = entry.transpose and len(first.shape) == 2
    axes: tuple[int | None, ...] = (None, 1, 0) if turn else (None, *range(len(first.shape)))
    zeros = (0,) * len(first.shape)
    pieces = [(one, Placement.at(first.shape, (n, *zeros), axes)) for n, one in enumerate(specs)]
    shape = first.shape[::-1] if turn else first.shape
    return compose(target, (len(specs), *shape), pieces, f"stacked from {specs[0].name} to {specs[-1].name}")


def _in_turns(spec: TensorSpec, *, apart: bool) -> TensorSpec:
    """Return gate and up with their rows in turns, or ``apart``: with gate above up."""
    rows, *rest = spec.shape
    if rows % 2:
        raise Unfit(f"{rows} rows are not two halves")
    split = (rows // 2, 2, *rest) if apart else (2, rows // 2, *rest)
    other = make("transpose", make("reshape", operand(spec), shape=split), axes=(1, 0, *range(2, 2 + len(rest))))
    expr = make("reshape", other, shape=spec.shape)
    rule = "gate above up" if apart else "rows of gate and up in turns"
    return computed(spec.name, expr, "; ".join(filter(None, (spec.rule, rule))), origin(spec))


def _starts(rows: Rows) -> list[int]:
    return [0, *accumulate(b - a for a, b in rows)][:-1]


def _rule(spec: TensorSpec, entry: Entry, rows: Rows) -> str:
    what = f"rows {rows[0][0]}:{rows[0][1]}" + (f" and {len(rows) - 1} more blocks" if len(rows) > 1 else "")
    turned = ", transposed" if entry.transpose else ""
    return "; ".join(filter(None, (spec.rule, f"{what} of {spec.name!r}{turned}")))


def origin(spec: TensorSpec) -> str:
    return spec.stored_as or spec.name


def plus(spec: TensorSpec, number: float) -> TensorSpec:
    """Return a tensor with a number added to each value, in the dtype of the values."""
    if not spec.dtype.is_floating_point or not spec.dtype.is_number:
        raise Unfit(f"nothing can be added to values of {spec.dtype}")
    ones = make("fill", shape=spec.shape, value=1.0, dtype=spec.dtype)
    expr = make("linear", operand(spec), ones, weights=(1.0, number))
    return computed(spec.name, expr, "; ".join(filter(None, (spec.rule, f"plus {number:g}"))), origin(spec))
