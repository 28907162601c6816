"""The tensors of a state under other names: cut, joined and turned by placement, in either direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...core.box import Box, Shape
from ...core.compose import Piece, compose
from ...core.index import TensorSpec, renamed
from .table import Cut, Entry, pattern

Rows = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention: ``queries`` heads in ``groups`` groups that share k and v; ``dim`` rows of each head."""

    queries: int
    groups: int
    dim: int


class _Unfit(ValueError):
    """A tensor cannot be cut as the table says; the text says why."""


def rename(
    specs: Mapping[str, TensorSpec],
    entries: Sequence[Entry],
    heads: Heads | None,
    back: bool,
    gated: bool | None = None,
) -> tuple[dict[str, TensorSpec], dict[str, str], list[str]]:
    """-> (the tensors by new name, old name -> new name where it is one tensor, lines on what stays as it is).
    ``gated``: whether Megatron's MLPs have a gate; None if nothing tells."""
    renaming = _Renaming(specs, heads, gated)
    for name in specs:
        if name not in renaming.used:
            for entry in entries:
                if renaming.joined(name, entry) if back else renaming.cut(name, entry):
                    break
            else:
                renaming.keep(name)
    return renaming.found, renaming.one, renaming.problems()


class _Renaming:
    def __init__(self, specs: Mapping[str, TensorSpec], heads: Heads | None, gated: bool | None) -> None:
        self.specs = specs
        self.heads = heads
        self.gated = gated
        self.found: dict[str, TensorSpec] = {}
        self.one: dict[str, str] = {}
        self.used: set[str] = set()
        self._kept: list[str] = []
        self._unfit: dict[str, list[str]] = {}

    def keep(self, name: str) -> None:
        self._kept.append(name)
        self._add(self.specs[name], name)

    def cut(self, name: str, entry: Entry) -> bool:
        """Left to right. False if the entry is not about that name."""
        match = pattern(entry.left).fullmatch(name)
        if match is None:
            return False
        targets = [right.format(**match.groupdict()) for right in entry.right]
        spec = self.specs[name]
        try:
            if entry.cut == "halves" and _is_ungated(name, self.specs, self.gated):
                raise _Unfit("this model's MLP has no gate: there are no two halves in it")
            made = _cut(spec, targets, entry, self.heads)
        except _Unfit as e:
            self._unfit.setdefault(str(e), []).append(name)
            self._add(spec, name)
            return True
        for one in made:
            self._add(one, one.name)
        if len(targets) == 1:
            self.one[name] = targets[0]
        return True

    def joined(self, name: str, entry: Entry) -> bool:
        """Right to left. False if the entry is not about that name, or another one has given its target already."""
        match = next((m for right in entry.right if (m := pattern(right).fullmatch(name))), None)
        if match is None:
            return False
        target = entry.left.format(**match.groupdict())
        if target in self.found:
            return False
        names = [right.format(**match.groupdict()) for right in entry.right]
        missing = [n for n in names if n not in self.specs]
        try:
            if missing:
                raise _Unfit(f"{', '.join(entry.right)} have to be there together")
            spec = _joined([self.specs[n] for n in names], target, entry, self.heads)
        except _Unfit as e:
            self._unfit.setdefault(str(e), []).append(name)
            self._add(self.specs[name], name)
            return True
        self.used.update(names)
        self._add(spec, target)
        if len(names) == 1:
            self.one[name] = target
        return True

    def problems(self) -> list[str]:
        """What stays under its own name, a line for each reason."""
        lines = []
        if self._kept:
            lines.append(f"the table has no entry for {_some(self._kept)}: as they were")
        return lines + [f"{_some(names)} stay as they were: {reason}" for reason, names in self._unfit.items()]

    def _add(self, spec: TensorSpec, name: str) -> None:
        self.found.setdefault(name, renamed(spec, name))


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3]) + (", ..." if names[3:] else "")
    return f"{len(names):,} {'names' if len(names) > 1 else 'name'} ({listed})"


def _is_ungated(name: str, specs: Mapping[str, TensorSpec], gated: bool | None) -> bool:
    """Whether the first matrix of one of Megatron's MLPs is no gate and up in one: then it has as many rows as the
    second has columns."""
    if "linear_fc1." not in name:
        return False
    second = specs.get(f"{name.rpartition('.')[0].replace('linear_fc1', 'linear_fc2')}.weight")
    shape = specs[name].shape
    if second is not None and len(second.shape) == 2 and shape:
        return shape[0] == second.shape[1]
    return gated is False


def _rows(cut: Cut, count: int, heads: Heads | None) -> list[Rows]:
    """The rows of each tensor that a fused one of ``count`` rows is made of."""
    if cut == "halves":
        if count % 2:
            raise _Unfit(f"{count} rows are not two halves")
        return [[(0, count // 2)], [(count // 2, count)]]
    if cut == "qkv":
        if heads is None:
            raise _Unfit("how many heads and groups there are is not known (args or config.json would tell)")
        per = heads.queries // heads.groups
        group = (per + 2) * heads.dim
        if heads.queries % heads.groups or count != heads.groups * group:
            raise _Unfit(
                f"{count} rows are not q, k and v of {heads.queries} heads of {heads.dim} in {heads.groups} groups"
            )
        starts = [g * group for g in range(heads.groups)]
        q, k = per * heads.dim, (per + 1) * heads.dim
        return [[(s, s + q) for s in starts], [(s + q, s + k) for s in starts], [(s + k, s + group) for s in starts]]
    return [[(0, count)]]


def _cut(spec: TensorSpec, targets: list[str], entry: Entry, heads: Heads | None) -> list[TensorSpec]:
    turn = entry.transpose and len(spec.shape) == 2
    if not spec.shape or (not turn and not entry.cut):  # a number (a step) is that of all
        return [renamed(spec, target) for target in targets]
    parts = _rows(entry.cut, spec.shape[0], heads)
    if len(targets) == 1:
        parts = [[rows for part in parts for rows in part]]
    made = []
    for target, rows in zip(targets, parts, strict=True):
        pieces = []
        for (a, b), at in zip(rows, _starts(rows), strict=True):
            block = Box((a, *(0,) * (len(spec.shape) - 1)), (b, *spec.shape[1:]))
            start = (at, *(0,) * (len(spec.shape) - 1))
            pieces.append(Piece(spec, block, start[::-1] if turn else start, (1, 0) if turn else None))
        shape = (sum(b - a for a, b in rows), *spec.shape[1:])
        made.append(compose(target, shape[::-1] if turn else shape, pieces, _rule(spec, entry, rows), _stored(spec)))
    return made


def _joined(specs: list[TensorSpec], target: str, entry: Entry, heads: Heads | None) -> TensorSpec:
    first = specs[0]
    turn = entry.transpose and len(first.shape) == 2
    if not first.shape or (not turn and not entry.cut):
        return renamed(first, target)
    if any(len(s.shape) != len(first.shape) or s.dtype != first.dtype for s in specs):
        raise _Unfit("they differ in dtype or in dimensions")
    shapes = [s.shape[::-1] if turn else s.shape for s in specs]
    count = sum(shape[0] for shape in shapes)
    parts = _rows(entry.cut, count, heads)
    if len(specs) == 1:
        parts = [[rows for part in parts for rows in part]]
    if any(shape[1:] != shapes[0][1:] for shape in shapes) or any(
        shape[0] != sum(b - a for a, b in rows) for shape, rows in zip(shapes, parts, strict=True)
    ):
        raise _Unfit(f"tensors of {', '.join(map(str, shapes))} do not make one with cut = {entry.cut!r}")
    pieces = []
    for spec, shape, rows in zip(specs, shapes, parts, strict=True):
        rest: Shape = shape[1:]
        for (a, b), at in zip(rows, _starts(rows), strict=True):
            low, high = (at, *(0,) * len(rest)), (at + b - a, *rest)
            block = Box(low[::-1], high[::-1]) if turn else Box(low, high)
            pieces.append(Piece(spec, block, (a, *(0,) * len(rest)), (1, 0) if turn else None))
    return compose(target, (count, *shapes[0][1:]), pieces, f"joined from {', '.join(s.name for s in specs)}")


def _starts(rows: Rows) -> list[int]:
    return [0, *accumulate(b - a for a, b in rows)][:-1]


def _rule(spec: TensorSpec, entry: Entry, rows: Rows) -> str:
    what = f"rows {rows[0][0]}:{rows[0][1]}" + (f" and {len(rows) - 1} more blocks" if len(rows) > 1 else "")
    turned = ", transposed" if entry.transpose else ""
    return "; ".join(filter(None, (spec.rule, f"{what} of {spec.name!r}{turned}")))


def _stored(spec: TensorSpec) -> str:
    return spec.stored_as or spec.name
