"""The states of an FSDP1 optimizer in its own numbered state dict, as every rank's slices.

verl's checkpoints of FSDP1 hold ``optimizer.state_dict()`` of every rank (verl/utils/checkpoint/
fsdp_checkpoint_manager.py). Its 1-d tensors are slices of the parameters (``use_orig_params=True``) or of the flat
parameters (torch/distributed/fsdp/_flat_param.py), to be concatenated in the order of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.extents import Extent, Hole
from ...core.placement import Rank
from ...core.specs import Fragment, TensorSpec
from ...errors import Problem, only_one, some
from ...io.containers.pickle.plain import Path
from ...layouts.placements import Cut
from ..shared.flat import FlatFragments, Partition
from ..shared.numbering import agreed
from .collect import Collected, Lost, Meshed, Plains


@dataclass(slots=True)
class Slices:
    """One state of one numbered parameter. ``pieces`` holds each rank's slice in shard order (None: no slice)."""

    raw: str
    held: Plains
    pieces: list[Extent | Hole | None]

    @property
    def sizes(self) -> list[int]:
        return [piece.shape[0] if isinstance(piece, Extent) else 0 for piece in self.pieces]

    @property
    def number(self) -> str:
        return str(self.held.path[-2])


def join(
    collected: Collected, param_groups: Any, lost: Lost, problems: list[Problem]
) -> tuple[dict[str, tuple[Path, TensorSpec]], set[str]]:
    """Join the states that are slices.

    Return a mapping of raw names to (path, tensor), with the parameter's name in the path if it is certain, and the raw
    names of the joined slices.
    """
    states = {raw: held for raw, held in collected.tensors.items() if _is_state(held.path)}
    if not states or not all(isinstance(held, Plains) for held in states.values()):
        return {}, set()
    weights, order = _weights(collected)
    if not order:
        return {}, set()
    kinds: dict[str, list[Slices]] = {}
    torn: set[str] = set()
    for raw, held in sorted(states.items(), key=lambda item: int(item[1].path[-2])):
        assert isinstance(held, Plains)
        if all(len(e.shape) == 1 for e in held.extents.values()):
            pieces: list[Extent | Hole | None] = []
            for rank in order:
                file, reason = lost(held.root, rank)
                pieces.append(Hole(file, reason) if reason else held.extents.get(rank))
                torn |= {file} if reason else set()
            kinds.setdefault(str(held.path[-1]), []).append(Slices(raw, held, pieces))
    found: dict[str, tuple[Path, TensorSpec]] = {}
    gone: set[str] = set()
    unnamed: dict[str, None] = {}
    names: dict[Path, list[str]] = {}  # the path of a number -> the names of its parameters
    for slices in kinds.values():
        groups = _groups(weights, [max(s.sizes) for s in slices], len(order))
        single = _single(weights, slices, param_groups) if len(order) > 1 and not torn else {}
        for n, s in enumerate(slices):
            if groups:
                found |= _parameters(s, groups[n])
                names[s.held.path[:-1]] = [name for name, _ in groups[n]]
            elif s.number in single:
                name, shape = single[s.number]
                found[s.raw] = _whole(s, name, shape)
                names[s.held.path[:-1]] = [name]
            elif len(order) > 1 and not torn:
                found[s.raw] = _whole(s, s.number, (sum(s.sizes),))
                unnamed[s.number] = None
            elif len(order) == 1:
                continue
            gone.add(s.raw)
    for raw, held in states.items():  # other states, such as the step: one for all parameters of a number
        if raw not in gone and held.path[:-1] in names:
            for name in names[held.path[:-1]]:
                path = (*held.path[:-2], name, held.path[-1])
                found[".".join(map(str, path))] = path, collected.spec(raw, lost)
            gone.add(raw)
    if unnamed:
        line = (
            f"the optimizer's states of {len(unnamed):,} numbers ({some(unnamed)}) are slices of parameters or of flat "
            "ones: nothing in the files says which these are, so they are 1-d tensors under their numbers"
        )
        problems.append(Problem("undecided-name", line))
    if torn and not found:
        line = (
            f"the optimizer's states are slices that fit together only with those in {some(sorted(torn))}: they are in "
            "view.stored only"
        )
        problems.append(Problem("missing-optimizer", line, only_one(sorted(torn))))
    return found, gone


def _single(
    weights: Sequence[tuple[str, Shape]], slices: Sequence[Slices], param_groups: Any
) -> dict[str, tuple[str, Shape]]:
    """Return number -> (name, shape) if each number is one parameter, by the total size of its slices."""
    sums = {s.number: sum(s.sizes) for s in slices}
    groups = [g for g in param_groups if isinstance(g, dict)] if isinstance(param_groups, list) else []
    listed = [m if isinstance(m := g.get("params"), list) else [] for g in groups]
    members = [[str(n) for n in m if type(n) is int] for m in listed]
    wanted = [[frozenset({(sums[n],)}) if n in sums else None for n in group] for group in members]
    named = agreed([(name, (prod(shape),)) for name, shape in weights], wanted)
    if named is None:
        return {}
    shapes = dict(weights)
    pairs = zip(members, named.names, strict=True)
    return {
        n: (name, shapes[name]) for ns, found in pairs for n, name in zip(ns, found, strict=True) if name is not None
    }


def _weights(collected: Collected) -> tuple[list[tuple[str, Shape]], list[int]]:
    """Return the parameters in the module's order, and one rank for each of their shards, in order.

    There are no ranks if the parameters are not cut as by FSDP1.
    """
    cut: dict[Shape, int] = {}
    count = 1
    weights = []
    for held in collected.tensors.values():
        if isinstance(held, Meshed) and not _is_state(held.path):
            weights.append((str(held.path[-1]), held.shape))  # buffers are not DTensors
            count = prod(n for n, p in zip(held.layout.mesh, held.layout.placements, strict=True) if isinstance(p, Cut))
            for rank in sorted(held.places):
                cut.setdefault(held.layout.key(held.places[rank]), rank)
    if weights:
        one = len(cut) == count and all(len(key) == 1 for key in cut)
        return weights, [cut[key] for key in sorted(cut)] if one else []
    plains = [
        (str(h.path[-1]), h) for h in collected.tensors.values() if isinstance(h, Plains) and not _is_state(h.path)
    ]
    ranks = {rank for _, held in plains for rank in held.extents}
    trained = [(name, held.shape) for name, held in plains if held.dtype.is_floating_point]
    return trained, sorted(ranks) if len(
        ranks
    ) == 1 else []  # of one rank FSDP shards nothing, but flattens all the same


def _is_state(path: Path) -> bool:
    return len(path) > 3 and path[-3] == "state" and str(path[-2]).isdecimal() and str(path[0]).startswith("optim")


def _whole(s: Slices, name: str, shape: Shape) -> tuple[Path, TensorSpec]:
    at = 0
    fragments = []
    for piece, size in zip(s.pieces, s.sizes, strict=True):
        if piece is not None and size:
            fragments.append(Fragment(piece, shape, None, (at, at + size)))
        at += size
    rule = f"slices of {len(s.pieces)} ranks, one behind the other"
    path = (*s.held.path[:-2], name, s.held.path[-1])
    return path, TensorSpec(s.held.key, shape, s.held.dtype, tuple(fragments), rule=rule)


def _parameters(s: Slices, group: Sequence[tuple[str, Shape]]) -> dict[str, tuple[Path, TensorSpec]]:
    """Return the states of the parameters in a flat one, as raw name -> (path, tensor)."""
    nothing = Hole("", f"no rank holds its part of the state {s.held.key!r}")
    parts = tuple(Partition(nothing if p is None else p, Rank(dp=n)) for n, p in enumerate(s.pieces))
    found = {}
    at = 0
    for name, shape in group:
        where = f"elements {at:,} to {at + prod(shape):,} of the flat parameter {s.number}"
        rule = f"{where}; known from its size and the names of modules"
        path = (*s.held.path[:-2], name, s.held.path[-1])
        fragments = FlatFragments(shape, max(s.sizes), parts, at)
        found[".".join(map(str, path))] = path, TensorSpec(s.held.key, shape, s.held.dtype, fragments, rule=rule)
        at += prod(shape)
    return found


def _groups(
    weights: Sequence[tuple[str, Shape]], widths: Sequence[int], world: int
) -> list[list[tuple[str, Shape]]] | None:
    """Return the weights of each flat parameter.

    Either the first flat parameter holds the weights outside a list of layers, if any, and each layer has one, or a
    single flat parameter holds all weights. Return None unless exactly one of the possible groupings fits all sizes.

    >>> _groups([("emb", (5,)), ("h.0.w", (3, 2)), ("h.1.w", (3, 2)), ("head", (5,))], [5, 3, 3], 2)
    [[('emb', (5,)), ('head', (5,))], [('h.0.w', (3, 2))], [('h.1.w', (3, 2))]]
    """
    patterns = {""}
    for name, _ in weights:
        parts = name.split(".")
        patterns |= {_pattern(parts[: n + 1]) for n, part in enumerate(parts[:-1]) if part.isdecimal()}
    fitting = []
    for pattern in sorted(patterns):
        rest: list[tuple[str, Shape]] = []
        modules: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in weights:
            match = re.match(pattern, name) if pattern else None
            (modules.setdefault(match[0], []) if match else rest).append((name, shape))
        groups = ([rest] if rest else []) + list(modules.values())
        if [-(-sum(prod(s) for _, s in g) // world) for g in groups] == list(widths) and groups not in fitting:
            fitting.append(groups)
    return fitting[0] if len(fitting) == 1 else None


def _pattern(parts: Sequence[str]) -> str:
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in parts) + r"\."
