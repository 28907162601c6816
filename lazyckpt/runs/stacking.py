"""The indexes of a run's checkpoints as one: every tensor over all steps that have it, and lines about what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..core.compose import Layer, readable, stack
from ..core.dtypes import BOOL, F64, DType, dtype_of
from ..core.index import Index, TensorSpec
from ..errors import Problem, only_one, some
from ..view import CheckpointView

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_SHOWN = 5  # names, or steps, in a line


class Checkpoint(NamedTuple):
    """One of a run. ``name``: as messages call it; ``folder``: where its files lie, from the folder of the run on."""

    step: int
    name: str
    folder: str
    view: CheckpointView


class Stacks(Mapping[str, TensorSpec]):
    """Name -> the stacked tensor, which is put together when it is asked for. ``layers``: what it is made of."""

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
    """The index of a run, whose checkpoints (one at least) come in the order of their steps.

    The first state is what each checkpoint's view reads by default, under the name "weights" if one of them has that.
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
    known: set[tuple[str, str]] = set()  # what was told of a name in one state need not be told of it in another
    for state in (first, *(name for name in names if name != first)):
        views = {c.step: _state(c.view, state, default=state == first) for c in checkpoints}
        states[state], tied, told = _stacks([(c, v) for c in checkpoints if (v := views[c.step]) is not None], known)
        aliases |= {alias: owner for alias, owner in tied.items() if alias not in aliases}
        found += told if state == first else [problem.prefixed(f"state {state!r}") for problem in told]
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
    """What there is of a name. ``owners``: those that it is tied to; "" where it is a tensor of its own."""

    layers: list[Layer] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)


def _stacks(
    views: Sequence[tuple[Checkpoint, CheckpointView]], known: set[tuple[str, str]]
) -> tuple[Stacks, dict[str, str], list[Problem]]:
    """-> (the tensors of a state, its tied names, the problems of what differs between the steps)."""
    held: dict[str, _Held] = {}
    for c, view in reversed(views):  # names stand in the order of the newest
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
    notes: dict[str, list[str]] = {}  # what is told -> of which names
    for name, one in held.items():
        if name in tied:
            continue
        kept, told = _alike(one.layers)
        absent = sorted(set(every) - {x.step for x in one.layers})
        if absent:
            told.append(f"not there {at(absent)}")
        if kept:
            layers[name] = tuple(kept)
            dtypes[name], more = _dtype(kept)
            told += more
        for line in told:
            if (name, line) not in known:
                known.add((name, line))
                notes.setdefault(line, []).append(name)
    problems = [Problem("changed-tensor", f"{some(names)}: {line}", only_one(names)) for line, names in notes.items()]
    return Stacks(layers, dtypes), {a: o for a, o in tied.items() if o in layers}, problems


def _alike(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """-> (the layers that are there as a whole, and as the newest of these is; lines about the others)."""
    told: list[str] = []
    kept = [x for x in layers if readable(x.spec)]
    lost = [x.step for x in layers if not readable(x.spec)] if len(kept) < len(layers) else []
    if lost:
        told.append(f"parts of it are lost {at(lost)}, which is left out (run.at(step) reads the rest)")
    if not kept:
        return kept, told
    newest = kept[-1].spec
    for what, same in (
        (f"the shape is another than {list(newest.shape)}", lambda s: s.shape == newest.shape),
        ("replicas are averaged at some steps only, not", lambda s: s.combine == newest.combine),
        (f"torch has no common dtype with {newest.dtype.short}", lambda s: _common(s.dtype, newest.dtype)),
    ):
        odd = [x.step for x in kept if not same(x.spec)]
        if odd:
            told.append(f"{what} {at(odd)}, which is left out (run.at(step) reads it)")
            kept = [x for x in kept if x.step not in odd]
    return kept, told


def _dtype(layers: Sequence[Layer]) -> tuple[DType, list[str]]:
    """-> (a dtype that holds all, a line if they differ)."""
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
    """A dtype that holds the values of both: the one that torch promotes to, but float64 for integers beside floats,
    which torch would round. None if there is none.

    >>> _common(dtype_of("bfloat16"), dtype_of("float16")), _common(dtype_of("int64"), dtype_of("bfloat16"))
    (torch.float32, torch.float64)
    """
    try:
        both = dtype_of(torch.promote_types(a.torch, b.torch))
    except RuntimeError:  # torch's way to say so, of 8-bit floats above all
        return None
    counts = any(not (d.is_floating_point or d.is_complex or d is BOOL) for d in (a, b))
    return F64 if counts and both.is_floating_point else both


def at(steps: Sequence[int]) -> str:
    """
    >>> at([1, 2]), at([7]), at(range(100, 900, 100))
    ('at steps 1, 2', 'at step 7', 'at steps 100, 200, 300, 400, 500 and 3 more')
    """
    return f"at step{'s' * (len(steps) != 1)} {some(steps, _SHOWN)}"
