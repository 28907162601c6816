"""Rename the tensors of a state by a table, in either direction. Placements split, join, stack and transpose them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from ...core.box import Box, Shape
from ...core.compose import compose
from ...core.expr import computed, make, operand
from ...core.placement import Placement
from ...core.specs import TensorSpec, renamed
from ...errors import Problem, only_one, some
from .table import Entry, pattern

Rows = list[tuple[int, int]]
_MOST = 1 << 16  # tensors in a stack
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: ``queries`` heads in ``groups`` groups that share k and v; each head has ``dim`` rows.

    Of a gated delta net: ``queries`` heads of v with ``values`` rows each, in ``groups`` groups that share q and k.
    """

    queries: int
    groups: int
    dim: int
    values: int = 0


# the heads of the language model (""), of its delta nets ("delta") and of a vision tower ("vision"), as far as known
AllHeads = Mapping[str, Heads | None]


class _Unfit(ValueError):
    """A tensor cannot be split or joined as its table entry requires; the message is the reason."""


@dataclass(slots=True)
class Report:
    """Results of renaming that concern all states.

    ``kept`` has the names without an entry in the table. ``unfit`` maps a reason to the names that have an entry but
    cannot be split or joined. ``one`` maps old to new names of tensors that are renamed as a whole.
    """

    kept: dict[str, None] = field(default_factory=dict)
    unfit: dict[str, dict[str, None]] = field(default_factory=dict)
    one: dict[str, str] = field(default_factory=dict)

    def problems(self) -> list[Problem]:
        """Return a problem for each reason why tensors keep their names."""
        lines = {f"the table has no entry for {_some(self.kept)}: as they were": self.kept} if self.kept else {}
        lines |= {f"{_some(names)} stay as they were: {reason}": names for reason, names in self.unfit.items()}
        return [Problem("not-renamed", line, only_one(list(names))) for line, names in lines.items()]


def rename(
    specs: Mapping[str, TensorSpec],
    entries: Sequence[Entry],
    heads: AllHeads,
    back: bool,
    report: Report,
    stacked: bool = False,
    gated: bool | None = None,
    counts: Mapping[str, int] | None = None,
    *,
    values: bool = True,
) -> dict[str, TensorSpec]:
    """Return the tensors of a state by new name.

    ``stacked`` says that saved names without a layer number are otherwise the model's own names. ``gated`` says whether
    Megatron's MLPs have a gate; None if that is unknown. ``counts`` has the length of the first dimension by name,
    where a state of scalars does not tell how many tensors are in a stack. ``values`` says that the state has values of
    parameters, and not moments of an optimizer.
    """
    renaming = _Renaming(specs, heads, report, stacked, gated, counts or {}, values)
    for name in specs:
        if name not in renaming.used and not (
            renaming.joined(name, entries) if back else renaming.cut_by(name, entries)
        ):
            renaming.keep(name, reported=not _is_there(name, entries, back))
    return renaming.found


def new_names(name: str, entries: Sequence[Entry], back: bool) -> list[str]:
    """Return the new names of a name: several if its tensor is split, the name itself if the table has no entry, or if
    the names do not tell how many tensors there are in a stack."""
    if not back:
        for entry, match in _fitting(name, entries)[:1]:
            return [other.format(**match.groupdict()) for other in entry.right]
    for entry in entries if back else ():
        for right in () if entry.stack else entry.right:
            found = pattern(right).fullmatch(name)
            if found is not None:
                return [entry.left.format(**found.groupdict())]
    return [name]


def _fitting(name: str, entries: Sequence[Entry]) -> list[tuple[Entry, re.Match[str]]]:
    """Return the entries that match a name on the left. Those whose {p} stands for less come first.

    `linear_fc1.layer_norm_{p}` has to come before `linear_fc1.{p}`, in whichever table it is.
    """
    found = [(e, m) for e in entries if name.startswith(_start(e.left)) and (m := pattern(e.left).fullmatch(name))]
    return found if len(found) < 2 else sorted(found, key=lambda one: sum(map(len, one[1].groupdict().values())))


@lru_cache(maxsize=4096)
def _start(name: str) -> str:
    return name.partition("{")[0]


def _is_there(name: str, entries: Sequence[Entry], back: bool) -> bool:
    """Return whether the name already belongs to the target side of the table."""
    return any(pattern(one).fullmatch(name) for e in entries for one in ((e.left,) if back else e.right))


class _Renaming:
    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        heads: AllHeads,
        report: Report,
        stacked: bool,
        gated: bool | None,
        counts: Mapping[str, int],
        values: bool,
    ) -> None:
        self.specs = specs
        self.heads = heads
        self.report = report
        self.stacked = stacked
        self.gated = gated
        self.counts = counts
        self.values = values
        self.found: dict[str, TensorSpec] = {}
        self.used: set[str] = set()
        self.runs: dict[str, dict[str, None]] = {}  # the names of a stack, by the name with * for the number

    def keep(self, name: str, reported: bool) -> None:
        if reported:
            self.report.kept[name] = None
        self._add(self.specs[name], name)

    def cut_by(self, name: str, entries: Sequence[Entry]) -> bool:
        """Rename from the left side to the right by the entry that fits best. Return False if none matches."""
        found = [(entry, match) for entry, match in _fitting(name, entries) if self._given(entry, match)]
        if found and found[0][0].cut == "halves" and _is_ungated(name, self.specs, self.gated):
            found = [one for one in found if one[0].cut != "halves"] or found
        if not found:
            return False
        entry, match = found[0]
        if entry.stack:
            self.stack(name, entry, match)
        else:
            self.cut(name, entry, match)
        return True

    def _given(self, entry: Entry, match: re.Match[str]) -> bool:
        """Return whether the left tensor is there that has to be there for an entry."""
        return not entry.given or entry.given.format(**match.groupdict()) in self.specs

    def stack(self, name: str, entry: Entry, match: re.Match[str]) -> None:
        """Stack the tensors of all numbers of a name on the left."""
        rest = {key: value for key, value in match.groupdict().items() if key != entry.stack}
        stem = entry.left.format(**rest, **{entry.stack: "*"})
        if stem not in self.runs:
            names: list[str] = []
            while len(names) < _MOST and (one := entry.left.format(**rest, **{entry.stack: len(names)})) in self.specs:
                names.append(one)
            self.runs[stem] = dict.fromkeys(names)
        try:
            if name not in self.runs[stem]:
                raise _Unfit("the tensors before it are missing: those of all numbers form one tensor")
            made = _stacked([self.specs[n] for n in self.runs[stem]], entry.right[0].format(**rest), entry)
            self._check_free([made.name])
        except _Unfit as e:
            self._unfit(name, e)
            return
        self.used.update(self.runs[stem])
        self._add(made, made.name)

    def unstack(self, name: str, entry: Entry, match: re.Match[str], count: int | None) -> None:
        """Take apart the stack of a name on the right."""
        spec = self.specs[name]
        targets = [entry.left.format(**match.groupdict(), **{entry.stack: n}) for n in range(count or 0)]
        try:
            self._check_free(targets)
            for n, target in enumerate(targets):
                one = renamed(spec, target) if not spec.shape else _member(spec, n, target, entry)
                self._add(one, target)
            if not targets:
                raise _Unfit("how many tensors are stacked in it is not known")
        except _Unfit as e:
            self._unfit(name, e)

    def cut(self, name: str, entry: Entry, match: re.Match[str]) -> None:
        """Rename from the left side to the right."""
        targets = [right.format(**match.groupdict()) for right in entry.right]
        spec = self.specs[name]
        try:
            if entry.cut == "halves" and _is_ungated(name, self.specs, self.gated):
                raise _Unfit("this model's MLP has no gate: there are no two halves in it")
            made = [self._value(one, entry, 1.0) for one in _cut(spec, targets, entry, self.heads)]
            self._check_free(targets)
        except _Unfit as e:
            self._unfit(name, e)
            return
        for one in made:
            self._add(one, one.name)
        if len(targets) == 1:
            self.report.one[name] = targets[0]

    def joined(self, name: str, entries: Sequence[Entry]) -> bool:
        """Rename from the right side to the left. Return False if no entry matches, or the target name is taken.

        If several entries match, the one that restores the saved name is used, otherwise the first.
        """
        about = [(e, m) for e in entries for right in e.right if (m := pattern(right).fullmatch(name))]
        about = [(e, m) for e, m in about if not e.beside or e.beside.format(**m.groupdict()) in self.specs]
        if about and about[0][0].stack:
            try:
                self.unstack(
                    name, *self._as_it_lies(name, [one for one in about if one[0].stack]), self.counts.get(name)
                )
            except _Unfit as e:
                self._unfit(name, e)
            return True
        possible = [
            (e, m, target)
            for e, m in about
            if not e.stack and (target := e.left.format(**m.groupdict())) not in self.found
        ]
        if not possible:
            return False
        entry, match, target = next((p for p in possible if self._was(name, *p[:2])), possible[0])
        names = [right.format(**match.groupdict()) for right in entry.right]
        missing = [n for n in names if n not in self.specs]
        try:
            if missing:
                raise _Unfit(f"{', '.join(entry.right)} have to be there together")
            spec = self._value(_joined([self.specs[n] for n in names], target, entry, self.heads), entry, -1.0)
        except _Unfit as e:
            self._unfit(name, e)
            return True
        self.used.update(names)
        self._add(spec, target)
        if len(names) == 1:
            self.report.one[name] = target
        return True

    def _as_it_lies(self, name: str, about: list[tuple[Entry, re.Match[str]]]) -> tuple[Entry, re.Match[str]]:
        """Return the entry whose matrices lie as those in a stack, where the table has entries for both ways."""
        shape = self.specs[name].shape
        if len(shape) != 3 or len({entry.transpose for entry, _ in about}) == 1:
            return about[0]
        hidden = next((s.shape[1] for n, s in self.specs.items() if n.endswith(_EMBEDDING) and len(s.shape) == 2), None)
        fits = [one for one in about if hidden == shape[1:][(".linear_fc1." in one[0].left) != one[0].transpose]]
        if len({entry.transpose for entry, _ in fits}) != 1:
            raise _Unfit("whether its matrices are [in, out] or [out, in] is not clear from the shape")
        return fits[0]

    def _value(self, spec: TensorSpec, entry: Entry, change: float) -> TensorSpec:
        """Return a tensor plus 1, or less 1, if that is how the two sides store its values."""
        if not (entry.less_one and self.values):
            return spec
        if not spec.dtype.is_floating_point or not spec.dtype.is_number:
            raise _Unfit(f"1 cannot be added to values of {spec.dtype}")
        ones = make("fill", shape=spec.shape, value=1.0, dtype=spec.dtype)
        rule = "plus 1" if change > 0 else "less 1"
        expr = make("linear", operand(spec), ones, weights=(1.0, change))
        return computed(spec.name, expr, "; ".join(filter(None, (spec.rule, rule))), _stored(spec))

    def _was(self, name: str, entry: Entry, match: re.Match[str]) -> bool:
        """Return whether the left name of the entry is the saved name of the tensor."""
        saved = self.specs[name].stored_as
        left = entry.left.format(**match.groupdict())
        return (
            saved == left
            or saved.endswith(f".{left}")
            or (self.stacked and saved == entry.left.replace(".{l}", "").format(**match.groupdict()))
        )

    def _check_free(self, targets: Iterable[str]) -> None:
        taken = [target for target in targets if target in self.found]
        if taken:
            raise _Unfit(f"another tensor is {taken[0]!r} already")

    def _unfit(self, name: str, why: _Unfit) -> None:
        self.report.unfit.setdefault(str(why), {})[name] = None
        self._add(self.specs[name], name)

    def _add(self, spec: TensorSpec, name: str) -> None:
        self.found.setdefault(name, renamed(spec, name))


def _some(found: Mapping[str, None]) -> str:
    return f"{len(found):,} {'names' if len(found) > 1 else 'name'} ({some(found)})"


def _is_ungated(name: str, specs: Mapping[str, TensorSpec], gated: bool | None) -> bool:
    """Return whether the first matrix of a Megatron MLP has no gate: it has as many rows as the second has columns."""
    if "linear_fc1." not in name:
        return False
    second = specs.get(f"{name.rpartition('.')[0].replace('linear_fc1', 'linear_fc2')}.weight")
    shape = specs[name].shape
    if second is not None and len(second.shape) == 2 and shape:
        return shape[0] == second.shape[1]
    return gated is False


def _rows(entry: Entry, count: int, all_heads: AllHeads) -> list[Rows]:
    """Return the rows of each tensor that is part of a fused tensor of ``count`` rows."""
    cut = entry.cut
    if cut == "halves":
        if count % 2:
            raise _Unfit(f"{count} rows are not two halves")
        return [[(0, count // 2)], [(count // 2, count)]]
    if cut == "delta":
        return _rows_of_delta_net(len(entry.right), count, all_heads.get("delta"))
    if cut in ("qkv", "qgkv", "kv"):
        heads = all_heads.get(entry.heads)
        if heads is None:
            raise _Unfit("how many heads and groups there are is not known (args or config.json would say)")
        per = heads.queries // heads.groups
        wide = per * {"qkv": 1, "qgkv": 2, "kv": 0}[cut]  # the heads of q, and their gates, in a group
        group = (wide + 2) * heads.dim
        if heads.queries % heads.groups or count != heads.groups * group:
            what = {"qkv": "q, k and v", "qgkv": "q, its gates, k and v", "kv": "k and v"}[cut]
            raise _Unfit(
                f"{count} rows are not {what} of {heads.queries} heads of {heads.dim} in {heads.groups} groups"
            )
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
        raise _Unfit("how many heads the delta nets have is not known (args or config.json would say)")
    keys, values, number = heads.groups * heads.dim, heads.queries * heads.values, heads.queries
    ends = [0, *accumulate([keys, keys, values, values, number, number])]
    if heads.queries % heads.groups or count != ends[-1]:
        raise _Unfit(
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


def _cut(spec: TensorSpec, targets: list[str], entry: Entry, heads: AllHeads) -> list[TensorSpec]:
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
        made.append(compose(target, shape[::-1] if turn else shape, pieces, _rule(spec, entry, rows), _stored(spec)))
    return made


def _joined(specs: list[TensorSpec], target: str, entry: Entry, heads: AllHeads) -> TensorSpec:
    first = specs[0]
    turn = entry.transpose and len(first.shape) == 2
    if not first.shape or (not turn and not entry.cut and not entry.outer):
        return renamed(first, target)
    if entry.outer:
        return _with_outer(first, target, entry.outer)
    if entry.cut == "swapped":
        return _swapped(first, target)
    if any(len(s.shape) != len(first.shape) or s.dtype != first.dtype for s in specs):
        raise _Unfit("they differ in dtype or in dimensions")
    shapes = [s.shape[::-1] if turn else s.shape for s in specs]
    count = sum(shape[0] for shape in shapes)
    parts = _rows(entry, count, heads)
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
            start = (a, *(0,) * len(rest))
            pieces.append((spec, Placement.of(spec.shape, block, start, (1, 0) if turn else None)))
    return compose(target, (count, *shapes[0][1:]), pieces, f"joined from {', '.join(s.name for s in specs)}")


def _with_outer(spec: TensorSpec, target: str, count: int) -> TensorSpec:
    """Return a tensor with ``count`` dimensions of length 1 before its own, or without so many if it is negative."""
    if count < 0 and (spec.shape[:-count] != (1,) * -count or len(spec.shape) < -count):
        raise _Unfit(f"the shape is {spec.shape}: the first {-count} lengths are not 1")
    shape: Shape = (1,) * count + spec.shape if count > 0 else spec.shape[-count:]
    expr = make("reshape", operand(spec), shape=shape)
    return computed(target, expr, "; ".join(filter(None, (spec.rule, f"as {shape}"))), _stored(spec))


def _swapped(spec: TensorSpec, target: str) -> TensorSpec:
    """Return a matrix whose left and right halves have changed places."""
    if len(spec.shape) != 2 or spec.shape[1] % 2:
        raise _Unfit(f"the shape is {spec.shape}: the columns are not two halves")
    rows, columns = spec.shape
    half = columns // 2
    pieces = [(spec, Placement.of(spec.shape, Box((0, a), (rows, a + half)), (0, half - a), None)) for a in (0, half)]
    rule = "; ".join(filter(None, (spec.rule, f"halves of the columns of {spec.name!r} swapped")))
    return compose(target, spec.shape, pieces, rule, _stored(spec))


def _member(spec: TensorSpec, number: int, target: str, entry: Entry) -> TensorSpec:
    """Return the tensor of a number in a stack, as the left side has it."""
    inner = spec.shape[1:]
    turn = entry.transpose and len(inner) == 2
    axes = (2, 1) if turn else tuple(range(1, len(spec.shape)))
    block = Box((number, *(0 for _ in inner)), (number + 1, *inner))
    placement = Placement.of(spec.shape, block, (0,) * len(inner), axes)
    shape = inner[::-1] if turn else inner
    rule = "; ".join(filter(None, (spec.rule, f"number {number} of {spec.name!r}{', transposed' if turn else ''}")))
    one = compose(target, shape, [(spec, placement)], rule, _stored(spec))
    return _in_turns(one, apart=True) if entry.cut == "alternating" else one


def _stacked(specs: list[TensorSpec], target: str, entry: Entry) -> TensorSpec:
    """Return the stack of the tensors of all numbers, as the right side has it."""
    first = specs[0]
    if any((s.shape, s.dtype) != (first.shape, first.dtype) for s in specs):
        raise _Unfit("the tensors to be stacked differ in dtype or shape")
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
        raise _Unfit(f"{rows} rows are not two halves")
    split = (rows // 2, 2, *rest) if apart else (2, rows // 2, *rest)
    other = make("transpose", make("reshape", operand(spec), shape=split), axes=(1, 0, *range(2, 2 + len(rest))))
    expr = make("reshape", other, shape=spec.shape)
    rule = "gate above up" if apart else "rows of gate and up in turns"
    return computed(spec.name, expr, "; ".join(filter(None, (spec.rule, rule))), _stored(spec))


def _starts(rows: Rows) -> list[int]:
    return [0, *accumulate(b - a for a, b in rows)][:-1]


def _rule(spec: TensorSpec, entry: Entry, rows: Rows) -> str:
    what = f"rows {rows[0][0]}:{rows[0][1]}" + (f" and {len(rows) - 1} more blocks" if len(rows) > 1 else "")
    turned = ", transposed" if entry.transpose else ""
    return "; ".join(filter(None, (spec.rule, f"{what} of {spec.name!r}{turned}")))


def _stored(spec: TensorSpec) -> str:
    return spec.stored_as or spec.name
