"""The states of an FSDP1 optimizer that was saved as it is: every rank's slices, under numbers.

verl's checkpoints of FSDP1 hold ``optimizer.state_dict()`` of every rank (verl/utils/checkpoint/
fsdp_checkpoint_manager.py): ordinary 1-d tensors, that are slices of the parameters (``use_orig_params=True``) or of
the flat parameters (torch/distributed/fsdp/_flat_param.py), one behind the other in the order of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...core.box import Shape
from ...core.index import Fragment, Rank, TensorSpec
from ...io.plain import Path
from ..deepspeed.flat import FlatFragments, Partition
from ..paths import some
from ..placements import Cut
from .collect import Collected, Lost, Meshed, Plains


@dataclass(slots=True)
class Slices:
    """One state of one numbered parameter: the slices in the order of the shards."""

    raw: str
    held: Plains
    order: list[int]

    @property
    def sizes(self) -> list[int]:
        return [self.held.extents[r].shape[0] for r in self.order]


def join(collected: Collected, lost: Lost, problems: list[str]) -> tuple[dict[str, tuple[Path, TensorSpec]], set[str]]:
    """Put together the states that are slices: -> (raw name -> path, with the parameter's name where that is certain,
    and tensor; the raw names of what they are made of)."""
    states = {raw: held for raw, held in collected.tensors.items() if _is_state(held.path)}
    if not states or not all(isinstance(held, Plains) for held in states.values()):
        return {}, set()
    weights, order = _weights(collected)
    if not order:
        return {}, set()
    kinds: dict[str, list[Slices]] = {}
    for raw, held in sorted(states.items(), key=lambda item: int(item[1].path[-2])):
        assert isinstance(held, Plains)
        if all(len(e.shape) == 1 for e in held.extents.values()) and set(order) <= held.extents.keys():
            kinds.setdefault(str(held.path[-1]), []).append(Slices(raw, held, order))
    found: dict[str, tuple[Path, TensorSpec]] = {}
    gone: set[str] = set()
    unnamed: dict[str, None] = {}
    names: dict[Path, list[str]] = {}  # a number's path -> the parameters that it stands for
    for slices in kinds.values():
        if len(order) > 1 and [sum(s.sizes) for s in slices] == [prod(shape) for _, shape in weights]:
            found |= {s.raw: _whole(s, name, shape) for s, (name, shape) in zip(slices, weights, strict=True)}
            names |= {s.held.path[:-1]: [name] for s, (name, _) in zip(slices, weights, strict=True)}
        elif groups := _groups(weights, [s.sizes[0] for s in slices], len(order)):
            for s, group in zip(slices, groups, strict=True):
                found |= _parameters(s, group)
                names[s.held.path[:-1]] = [name for name, _ in group]
        elif len(order) > 1:
            found |= {s.raw: _whole(s, str(s.held.path[-2]), (sum(s.sizes),)) for s in slices}
            unnamed |= dict.fromkeys(str(s.held.path[-2]) for s in slices)
        else:
            continue
        gone |= {s.raw for s in slices}
    for raw, held in states.items():  # the others, such as the step: one for all that a number stands for
        if raw not in gone and held.path[:-1] in names:
            for name in names[held.path[:-1]]:
                path = (*held.path[:-2], name, held.path[-1])
                found[".".join(map(str, path))] = path, collected.spec(raw, lost)
            gone.add(raw)
    if unnamed:
        problems.append(
            f"the optimizer's states of {len(unnamed):,} numbers ({some(unnamed)}) are flat parameters of FSDP: "
            "nothing in the files says which parameters these are made of, so they are 1-d tensors under their numbers"
        )
    return found, gone


def _weights(collected: Collected) -> tuple[list[tuple[str, Shape]], list[int]]:
    """The parameters, in the module's order, and one rank for each of their shards, in order; none if they are not cut
    as FSDP1 cuts."""
    cut: dict[Shape, int] = {}
    count = 1
    weights = []
    for held in collected.tensors.values():
        if isinstance(held, Meshed) and not _is_state(held.path):
            weights.append((str(held.path[-1]), held.shape))  # buffers are no DTensors
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
    for rank, size in zip(s.order, s.sizes, strict=True):
        if size:
            fragments.append(Fragment(s.held.extents[rank], shape, None, (at, at + size)))
        at += size
    rule = f"slices of {len(s.order)} ranks, one behind the other"
    return (*s.held.path[:-2], name, s.held.path[-1]), TensorSpec(
        s.raw, shape, s.held.dtype, tuple(fragments), rule=rule
    )


def _parameters(s: Slices, group: Sequence[tuple[str, Shape]]) -> dict[str, tuple[Path, TensorSpec]]:
    """The parameters of a flat one."""
    parts = tuple(Partition(s.held.extents[rank], Rank(dp=n)) for n, rank in enumerate(s.order))
    found = {}
    at = 0
    for name, shape in group:
        where = f"elements {at:,} to {at + prod(shape):,} of the flat parameter {s.held.path[-2]}"
        rule = f"{where}; known from its size and the names of modules"
        path = (*s.held.path[:-2], name, s.held.path[-1])
        fragments = FlatFragments(shape, s.sizes[0], parts, at)
        found[".".join(map(str, path))] = path, TensorSpec(s.raw, shape, s.held.dtype, fragments, rule=rule)
        at += prod(shape)
    return found


def _groups(
    weights: Sequence[tuple[str, Shape]], widths: Sequence[int], world: int
) -> list[list[tuple[str, Shape]]] | None:
    """Which weights each flat parameter is made of: one for each module of a list of layers and one, the first, for the
    rest (or for the rest alone), or one for all. None unless exactly one way fits every size.

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
