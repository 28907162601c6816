"""Stack the indexes of a run's checkpoints: every tensor over all steps that have it, and problems for differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..core.compose import Layer, is_mean, readable, stack
from ..core.dtypes import BOOL, F64, DType, dtype_of
from ..core.index import Index
from ..core.specs import TensorSpec
from ..errors import Problem, only_one, some
from ..view import CheckpointView

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_SHOWN = 5  # names, or steps, in a line


class Checkpoint(NamedTuple):
    """A checkpoint of a run. ``name``: its name in messages; ``folder``: the folder of its files in the run."""

    step: int
    name: str
    folder: str
    view: CheckpointView


class Stacks(Mapping[str, TensorSpec]):
    """Name -> stacked tensor, built on demand. ``layers``: the tensors of the single steps, by name."""

    def __init__(self, layers: Mapping[str, tuple[Layer, ...]], dtypes: Mapping[str, DType]) -> None:
        self.layers = layers
        self.steps = tuple(sorted({layer.step for each in layers.values() for layer in each}))
        self._dtypes = dtypes
        self._made: dict[str, TensorSpec] = {}

    def __getitem__(self, name: str) -> TensorSpec:
        spec = self._made.get(name)
        if spec is None:
            spec = self._made[name] = stack(name, self.layers[name], self._dtypes[name])
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __contains__(self, name: object) -> bool:
        return name in self.layers


def stacked(checkpoints: Sequence[Checkpoint], problems: Sequence[Problem]) -> Index:
    """Return the index of a run; ``checkpoints``: at least one, in the order of their steps.

    The first state is the default state of each checkpoint, under the name "weights" if one of them has that state.
    """
    newest = checkpoints[-1].view
    names = list(dict.fromkeys(state for c in reversed(checkpoints) for state in c.view.states))
    defaults = {c.step: next(iter(c.view.states), "") for c in checkpoints}
    first = "weights" if "weights" in names else next(iter(newest.states), "weights")
    found = [*problems]
    for state in dict.fromkeys(d for d in defaults.values() if d and d != first):
        steps = [step for step, default in defaults.items() if default == state]
        line = f"{at(steps)}: there is no state {first!r}: {state!r} is read there"
        found.append(Problem("changed-tensor", line))
    aliases: dict[str, str] = {}
    states: dict[str, Stacks] = {}
    known: set[tuple[str, str]] = set()  # (name, line): a problem in one state is not repeated for other states
    for state in (first, *(name for name in names if name != first)):
        views = {c.step: _state(c.view, state, default=state == first) for c in checkpoints}
        states[state], tied, notes = _stacks([(c, v) for c in checkpoints if (v := views[c.step]) is not None], known)
        aliases |= {alias: owner for alias, owner in tied.items() if alias not in aliases}
        found += notes if state == first else [problem.prefixed(f"state {state!r}") for problem in notes]
    return Index(
        format="run",
        states=states,
        files={f"{c.folder}/{p}" if c.folder else p: info for c in checkpoints for p, info in c.view.files.items()},
        stored={},
        aliases={alias: owner for alias, owner in aliases.items() if not any(alias in s for s in states.values())},
        meta={str(c.step): c.view.meta for c in checkpoints},
        mesh=newest.mesh,
        problems=tuple(found),
    )


def _state(view: CheckpointView, state: str, default: bool) -> CheckpointView | None:
    if state in view.states:
        return view.states[state]
    return view if default else None


@dataclass(slots=True)
class _Held:
    """The layers of a name. ``owners``: the names that it is tied to; "" for steps at which it owns its tensor."""

    layers: list[Layer] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)


def _stacks(
    views: Sequence[tuple[Checkpoint, CheckpointView]], known: set[tuple[str, str]]
) -> tuple[Stacks, dict[str, str], list[Problem]]:
    """Return the tensors of a state, its tied names, and problems for differences between the steps."""
    held: dict[str, _Held] = {}
    for c, view in reversed(views):  # names are in the order of the newest checkpoint
        for name in view:
            one = held.setdefault(name, _Held())
            owner = "" if name in view.specs else view.aliases[name]
            one.layers.insert(0, Layer(c.step, c.folder, view.specs[owner or name]))
            one.owners.add(owner)
    tied: dict[str, str] = {}
    for name, one in held.items():
        owner = next(iter(one.owners))
        if len(one.owners) > 1 or owner not in held or held[owner].owners != {""}:
            continue
        if [x.step for x in one.layers] == [x.step for x in held[owner].layers]:
            tied[name] = owner
    every = [c.step for c, _ in views]
    layers: dict[str, tuple[Layer, ...]] = {}
    dtypes: dict[str, DType] = {}
    notes: dict[str, list[str]] = {}  # line -> names that it is about
    for name, one in held.items():
        if name in tied:
            continue
        kept, lines = _alike(one.layers)
        absent = sorted(set(every) - {x.step for x in one.layers})
        if absent:
            lines.append(f"not there {at(absent)}")
        if kept:
            layers[name] = tuple(kept)
            dtypes[name], more = _dtype(kept)
            lines += more
        for line in lines:
            if (name, line) not in known:
                known.add((name, line))
                notes.setdefault(line, []).append(name)
    problems = [Problem("changed-tensor", f"{some(names)}: {line}", only_one(names)) for line, names in notes.items()]
    return Stacks(layers, dtypes), {a: o for a, o in tied.items() if o in layers}, problems


def _alike(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """Return the complete layers that are like the newest complete one, and lines about the others."""
    lines: list[str] = []
    kept = [x for x in layers if readable(x.spec)]
    lost = [x.step for x in layers if not readable(x.spec)] if len(kept) < len(layers) else []
    if lost:
        lines.append(f"parts of it are lost {at(lost)}, which is left out (run.at(step) reads the rest)")
    if not kept:
        return kept, lines
    newest = kept[-1].spec
    for what, same in (
        (f"the shape is another than {list(newest.shape)}", lambda s: s.shape == newest.shape),
        ("replicas are averaged at some steps only, not", lambda s: is_mean(s) == is_mean(newest)),
        (f"torch has no common dtype with {newest.dtype.short}", lambda s: _common(s.dtype, newest.dtype)),
    ):
        odd = [x.step for x in kept if not same(x.spec)]
        if odd:
            lines.append(f"{what} {at(odd)}, which is left out (run.at(step) reads it)")
            kept = [x for x in kept if x.step not in odd]
    return kept, lines


def _dtype(layers: Sequence[Layer]) -> tuple[DType, list[str]]:
    """Return a dtype that holds all values, and a line if the dtypes differ."""
    steps: dict[DType, list[int]] = {}
    for layer in layers:
        steps.setdefault(layer.spec.dtype, []).append(layer.step)
    dtype, *others = steps
    for other in others:
        dtype = _common(dtype, other) or dtype
    if not others:
        return dtype, []
    parts = ", ".join(f"{d.short} {at(s)}" for d, s in steps.items())
    return dtype, [f"{parts}: read as {dtype.short}"]


def _common(a: DType, b: DType) -> DType | None:
    """Return a dtype that holds the values of both: the one that torch promotes to, but float64 for integers with
    floats, where torch would round. None if there is none.

    >>> _common(dtype_of("bfloat16"), dtype_of("float16")), _common(dtype_of("int64"), dtype_of("bfloat16"))
    (torch.float32, torch.float64)
    """
    try:
        both = dtype_of(torch.promote_types(a.torch, b.torch))
    except RuntimeError:  # torch promotes no 8-bit floats, among others
        return None
    counts = any(not (d.is_floating_point or d.is_complex or d is BOOL) for d in (a, b))
    return F64 if counts and both.is_floating_point else both


def at(steps: Sequence[int]) -> str:
    """Return steps as a phrase for a message.

    >>> at([1, 2]), at([7]), at(range(100, 900, 100))
    ('at steps 1, 2', 'at step 7', 'at steps 100, 200, 300, 400, 500 and 3 more')
    """
    return f"at step{'s' * (len(steps) != 1)} {some(steps, _SHOWN)}"
