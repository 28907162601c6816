"""Rename the tensors of a state by a table, in either direction. Placements split, join, stack and transpose them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.specs import TensorSpec, renamed
from ...errors import Problem, only_one, some
from .pieces import AllHeads, Misfit, Unfit, cut_apart, join, member, plus, stack
from .table import Entry, matched

_MOST = 1 << 16  # tensors in a stack
_EMBEDDING = "embed_tokens.weight"


@dataclass(slots=True)
class Report:
    """Results of renaming that concern all states.

    ``kept`` has the names without an entry in the table. ``unfit`` maps a reason to the names that have an entry but
    cannot be split or joined. ``one`` maps old to new names of tensors that are renamed as a whole. ``misfit`` says how
    the heads of the configuration contradict a weight; "" if they do not.
    """

    kept: dict[str, None] = field(default_factory=dict)
    unfit: dict[str, dict[str, None]] = field(default_factory=dict)
    one: dict[str, str] = field(default_factory=dict)
    misfit: str = ""

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
    values: bool | None = True,
) -> dict[str, TensorSpec]:
    """Return the tensors of a state by new name.

    ``stacked`` says that saved names without a layer number are otherwise the model's own names. ``gated`` says whether
    Megatron's MLPs have a gate; None if that is unknown. ``counts`` has the length of the first dimension by name,
    where a state of scalars does not tell how many tensors are in a stack. ``values`` says whether the state has values
    of parameters, or moments of an optimizer; None if that is unknown.
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
            return [other.format(**match.groupdict()) for other in entry.right] or [name]
    for entry in entries if back else ():
        for right in () if entry.stack else entry.right:
            found = matched(name, right)
            if found is not None:
                return [entry.left.format(**found.groupdict())]
    return [name]


def _fitting(name: str, entries: Sequence[Entry]) -> list[tuple[Entry, re.Match[str]]]:
    """Return the entries that match a name on the left. Those whose {p} stands for less come first.

    `linear_fc1.layer_norm_{p}` has to come before `linear_fc1.{p}`, in whichever table it is.
    """
    found = [(e, m) for e in entries if (m := matched(name, e.left))]
    return found if len(found) < 2 else sorted(found, key=lambda one: sum(map(len, one[1].groupdict().values())))


def _is_there(name: str, entries: Sequence[Entry], back: bool) -> bool:
    """Return whether the name already belongs to the target side of the table."""
    return any(matched(name, one) for e in entries for one in ((e.left,) if back else e.right))


class _Renaming:
    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        heads: AllHeads,
        report: Report,
        stacked: bool,
        gated: bool | None,
        counts: Mapping[str, int],
        values: bool | None,
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
        if not found or not found[0][0].right:
            return False
        entry, match = found[0]
        if entry.stack:
            self.stack(name, entry, match)
        else:
            self.cut(name, entry, match)
        return True

    def _heads(self, match: re.Match[str]) -> AllHeads:
        """Return the heads of the layer that a name is of, if layers differ in them."""
        own = self.heads.get("mtp" if "mtp." in match.string else match.groupdict().get("l", ""))
        return self.heads if own is None else {**self.heads, "": own}

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
                raise Unfit("the tensors before it are missing: those of all numbers form one tensor")
            made = stack([self.specs[n] for n in self.runs[stem]], entry.right[0].format(**rest), entry)
            self._check_free([made.name])
        except Unfit as e:
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
                one = renamed(spec, target) if not spec.shape else member(spec, n, target, entry)
                self._add(one, target)
            if not targets:
                raise Unfit("how many tensors are stacked in it is not known")
        except Unfit as e:
            self._unfit(name, e)

    def cut(self, name: str, entry: Entry, match: re.Match[str]) -> None:
        """Rename from the left side to the right."""
        targets = [right.format(**match.groupdict()) for right in entry.right]
        spec = self.specs[name]
        try:
            if entry.cut == "halves" and _is_ungated(name, self.specs, self.gated):
                raise Unfit("this model's MLP has no gate: there are no two halves in it")
            made = [self._value(one, entry, 1.0) for one in cut_apart(spec, targets, entry, self._heads(match))]
            self._check_free(targets)
        except Unfit as e:
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
        about = [(e, m) for e in entries for right in e.right if (m := matched(name, right))]
        about = [(e, m) for e, m in about if not e.beside or e.beside.format(**m.groupdict()) in self.specs]
        if about and about[0][0].stack:
            try:
                self.unstack(
                    name, *self._as_it_lies(name, [one for one in about if one[0].stack]), self.counts.get(name)
                )
            except Unfit as e:
                self._unfit(name, e)
            return True
        possible = [
            (e, m, target)
            for e, m in about
            if not e.stack
            and (target := e.left.format(**m.groupdict())) not in self.found
            and not self._is_second(e, m, entries)
        ]
        if not possible:
            return False
        entry, match, target = next((p for p in possible if self._was(name, *p[:2])), possible[0])
        names = [right.format(**match.groupdict()) for right in entry.right]
        missing = [n for n in names if n not in self.specs]
        try:
            if missing:
                raise Unfit(f"{', '.join(entry.right)} have to be there together")
            joined = join([self.specs[n] for n in names], target, entry, self._heads(match))
            spec = self._value(joined, entry, -1.0)
        except Unfit as e:
            self._unfit(name, e)
            return True
        self.used.update(names)
        self._add(spec, target)
        if len(names) == 1:
            self.report.one[name] = target
        return True

    def _is_second(self, entry: Entry, match: re.Match[str], entries: Sequence[Entry]) -> bool:
        """Return whether tensors of an earlier naming of the same left name are there, too, which then count."""
        for other in entries:
            if other is entry:
                return False
            if other.left == entry.left and not other.stack and other.right:
                names = [one.format(**match.groupdict()) for one in (*other.right, other.beside) if one]
                if all(name in self.specs for name in names):
                    return True
        return False

    def _as_it_lies(self, name: str, about: list[tuple[Entry, re.Match[str]]]) -> tuple[Entry, re.Match[str]]:
        """Return the entry whose matrices lie as those in a stack, where the table has entries for both ways."""
        shape = self.specs[name].shape
        if len(shape) != 3 or len({entry.transpose for entry, _ in about}) == 1:
            return about[0]
        hidden = next((s.shape[1] for n, s in self.specs.items() if n.endswith(_EMBEDDING) and len(s.shape) == 2), None)
        fits = [one for one in about if hidden == shape[1:][(".linear_fc1." in one[0].left) != one[0].transpose]]
        if len({entry.transpose for entry, _ in fits}) != 1:
            raise Unfit("whether its matrices are [in, out] or [out, in] is not clear from the shape")
        return fits[0]

    def _value(self, spec: TensorSpec, entry: Entry, change: float) -> TensorSpec:
        """Return a tensor plus 1, or less 1, if that is how the two sides store its values."""
        if not entry.less_one or self.values is False:
            return spec
        if self.values is None:
            raise Unfit("whether the state has values of parameters, to which 1 is added, is not known")
        return plus(spec, change)

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
            raise Unfit(f"another tensor is {taken[0]!r} already")

    def _unfit(self, name: str, why: Unfit) -> None:
        self.report.unfit.setdefault(str(why), {})[name] = None
        if isinstance(why, Misfit) and self.values and not self.report.misfit:
            self.report.misfit = f"{name} has shape {list(self.specs[name].shape)}, and {why}"
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
