"""FSDP1's flat parameters, split into the parameters that they consist of.

Writer: torch/distributed/fsdp/_state_dict_utils.py `_local_post_state_dict_hook` (LOCAL_STATE_DICT). It stores the flat
parameter as a ShardedTensor ``MODULE._flat_param``, with one shard for each rank, but not the positions of the
parameters. With ``use_orig_params=True`` each rank also saves its slice of every parameter, as a view of the same
storage, so only the shapes are unknown. Otherwise names, order and shapes may be known from an optimizer in the same
folder, or from the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ...core.box import Shape
from ...core.extents import Hole
from ...core.names import matcher, unwrapped
from ...core.placement import Rank
from ...core.specs import TensorSpec
from ...errors import FormatError, Problem, only_one, some
from ...io.containers.pickle.plain import Path
from ...layouts.flat_rules import FlatRule, flat_rule, is_flat_rule, places, size_mismatch
from ..shared.flat import FlatFragments, Partition
from .collect import Collected, Lost, Plains, Sharded

FLAT = "_flat_param"
_HOW = "rules={'%s': {'flat': {'up.weight': [64, 32], 'up.bias': [64], ...}}}"


@dataclass(frozen=True, slots=True)
class Hints:
    """The known names and shapes of the model's parameters, in the module's order, and their source."""

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    source: str = ""


@dataclass(slots=True)
class Split:
    """The parameters of split flat parameters.

    ``parameters`` maps raw names to (path, tensor), ``made_of`` the raw name of a flat parameter to those of its
    parameters, in order. ``gone`` holds the raw names that the parameters replace, ``flats`` the names that the user's
    rules match.
    """

    parameters: dict[str, tuple[Path, TensorSpec]] = field(default_factory=dict)
    made_of: dict[str, list[str]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    flats: list[str] = field(default_factory=list)


def split(
    collected: Collected, rules: Mapping[str, object], hints: Hints, lost: Lost, problems: list[Problem]
) -> Split:
    """Split the flat parameters whose layout is known. Raises FormatError for a rule that does not fit."""
    table = [(glob, matcher(glob), flat_rule(glob, r)) for glob, r in rules.items() if is_flat_rule(r)]
    flats = {
        raw: held
        for raw, held in collected.tensors.items()
        if isinstance(held, Sharded) and str(held.path[-1]).endswith(FLAT) and len(held.shape) == 1 and not held.clash
    }
    names = {raw: unwrapped(str(held.path[-1])) for raw, held in flats.items()}
    modules = [name.removesuffix(FLAT) for name in names.values()]
    found = Split(flats=list(names.values()))
    kept: list[str] = []
    shapeless: list[str] = []
    torn: dict[str, str] = {}  # the key of a parameter -> a file that is gone
    for raw, held in flats.items():
        name = names[raw]
        partitions = _partitions(raw, held, lost)
        if partitions is None:
            kept.append(name)
            continue
        width, parts = partitions
        total, world = held.shape[0], len(held.listed)
        given = next(((glob, rule) for glob, match, rule in table if match(name)), None)
        slices = _slices(collected, raw, held)
        hole = next((p.extent for p in parts if isinstance(p.extent, Hole)), None)
        module = name.removesuffix(FLAT)
        evidence = hints.source
        shapes: Mapping[str, Shape] | None
        if given is not None:
            evidence = f"rules[{given[0]!r}]"
            shapes, begins = _by_rule(name, given[0], given[1], total, world, [s[1] for s in slices.values()])
            shapes = {module + n: s for n, s in shapes.items()}
        elif slices:
            shapes, begins = _by_slices(slices, hints.shapes, parts, width, shapeless, torn)
            evidence = "the slices that each rank saved" + (f", shapes from {hints.source}" if hints.source else "")
        else:
            shapes = {n: s for n, s in hints.shapes.items() if _module_of(unwrapped(n), modules) == module}
            sizes = [prod(s) for s in shapes.values()]
            # without slices, the save was probably made with use_orig_params=False, which aligns nothing
            fitting = (places(sizes, total, world, 0) or places(sizes, total, world)) if shapes else []
            if len(fitting) != 1:
                kept.append(name)
                continue
            begins = fitting[0]
        found.gone |= {raw, *slices}
        if slices and hole is not None:  # a parameter that only lost ranks hold is empty on all others
            empty = _empty(collected, held)
            torn |= dict.fromkeys(empty.values(), hole.path)
            found.gone |= set(empty)
        inner = held.key[: len(held.key) - len(str(held.path[-1]))]
        for (n, shape), begin in zip(shapes.items(), begins, strict=True):
            path = (*held.path[:-1], n)
            key = ".".join(map(str, path))
            rule = f"elements {begin:,} to {begin + prod(shape):,} of {name!r}; known from {evidence}"
            fragments = FlatFragments(shape, width, parts, begin)
            found.made_of.setdefault(raw, []).append(key)
            found.parameters[key] = path, TensorSpec(inner + n, shape, held.dtype, fragments, rule=rule)
    if kept:
        line = (
            f"{len(kept):,} flat parameters of FSDP ({some(kept)}) are 1-d tensors: nothing in the checkpoint says "
            f"which parameters they are made of. Say it with {_HOW % kept[0]}"
        )
        problems.append(Problem("flat-parameter", line, only_one(kept)))
    if shapeless:
        line = (
            f"{len(shapeless):,} parameters ({some(shapeless)}) are 1-d tensors: FSDP's local state dict has no "
            f"shapes, nor has an optimizer beside it. Say them with {_HOW % found.flats[0]}"
        )
        problems.append(Problem("flat-parameter", line, only_one(shapeless)))
    for key, file in torn.items():
        collected.unreadable[key] = f"{key!r} lies on a rank whose file, {file}, is gone; nothing else tells its shape"
    if torn:
        line = (
            f"{len(torn):,} parameters ({some(torn)}) lie on ranks whose files are gone, and nothing else says what "
            "shapes they have: they are left out"
        )
        problems.append(Problem("missing-tensor", line, only_one(list(torn))))
    return found


def _by_rule(
    name: str, glob: str, rule: FlatRule, total: int, world: int, known: Sequence[int]
) -> tuple[Mapping[str, Shape], list[int]]:
    """Return the parameters' shapes and first elements from a user's rule.

    ``known`` holds the first elements of some parameters, or of their parts on ranks whose files exist.
    """
    sizes = [prod(s) for s in rule.shapes.values()]
    fitting = places(sizes, total, world, rule.align)
    if len(fitting) > 1 and known:
        most = max(len({*begins} & {*known}) for begins in fitting)
        fitting = [begins for begins in fitting if len({*begins} & {*known}) == most]
    if not fitting:
        raise FormatError(f"rules[{glob!r}] does not fit {name!r}: {size_mismatch(sizes, total, world)}")
    if len(fitting) > 1:
        raise FormatError(
            f"rules[{glob!r}] fits {name!r} in {len(fitting)} ways, as the parameters may be aligned "
            "(use_orig_params): add 'align': 0 (not), 4 (float32) or 8 (bfloat16)"
        )
    return rule.shapes, fitting[0]


def _by_slices(
    slices: Mapping[str, tuple[str, int, int]],
    shapes: Mapping[str, Shape],
    parts: Sequence[Partition],
    width: int,
    shapeless: list[str],
    torn: dict[str, str],
) -> tuple[dict[str, Shape], list[int]]:
    """Return the parameters' shapes and first elements from the ranks' slices.

    If a parameter may continue in a lost shard and its shape is unknown, it is added to ``torn``.
    """
    found: dict[str, Shape] = {}
    begins = []
    gone = [n for n, part in enumerate(parts) if isinstance(part.extent, Hole)]
    for key, begin, end in sorted(slices.values(), key=lambda s: s[1]):
        before, behind = begin in [(n + 1) * width for n in gone], end in [n * width for n in gone]
        shape = shapes.get(key) or shapes.get(unwrapped(key))
        size = end - begin if shape is None else prod(shape)
        if (before or behind) and (shape is None or (before and behind and size > end - begin)):
            torn[key] = parts[next(n for n in gone if begin == (n + 1) * width or end == n * width)].extent.path
            continue
        if size > end - begin and before:
            begin = end - size
        if shape is None or (size != end - begin and not (size > end - begin and (before or behind))):
            shape = (end - begin,)
            shapeless.append(key)
        found[key] = shape
        begins.append(begin)
    return found, begins


def _slices(collected: Collected, raw: str, flat: Sharded) -> dict[str, tuple[str, int, int]]:
    """Return the parameters whose slices are views of a flat parameter's shards, as raw name -> (key, start, stop)."""
    local = {r: (start[0], e) for (start, _), extents in flat.held.items() for r, e in extents.items()}
    owners = {(r, key) for r, key in flat.storages.items()}
    found = {}
    for name, held in collected.tensors.items():
        if not isinstance(held, Plains) or held.path[:-1] != flat.path[:-1] or name == raw:
            continue
        lo = hi = -1
        for rank, extent in held.extents.items():
            if len(extent.shape) != 1 or extent.dtype != flat.dtype:
                break
            if 0 in extent.shape or (rank, held.storages[rank]) not in owners:
                continue
            start, whole = local[rank]
            begin = start + (extent.offset - whole.offset) // extent.dtype.itemsize
            lo = begin if lo < 0 else min(lo, begin)
            hi = max(hi, begin + extent.shape[0])
        else:
            if lo >= 0 and hi <= flat.shape[0]:
                found[name] = (str(held.path[-1]), lo, hi)
    return found


def _empty(collected: Collected, flat: Sharded) -> dict[str, str]:
    """Return the 1-d tensors in the flat parameter's module that are empty in all files: raw name -> key."""
    return {
        name: str(held.path[-1])
        for name, held in collected.tensors.items()
        if isinstance(held, Plains)
        and held.path[:-1] == flat.path[:-1]
        and all(extent.shape == (0,) for extent in held.extents.values())
    }


def _partitions(name: str, held: Sharded, lost: Lost) -> tuple[int, tuple[Partition, ...]] | None:
    """Return the width of a shard, and the shards in order; None if they are not cut as by FSDP."""
    chunks = sorted((start[0], shape[0], rank) for (start, shape), rank in held.listed.items())
    if not chunks or sum(n for _, n, _ in chunks) != held.shape[0]:
        return None
    width = chunks[0][1]
    if any(start != n * width or size > width for n, (start, size, _) in enumerate(chunks)) or not width:
        return None
    parts = []
    for n, (start, size, rank) in enumerate(chunks):
        extents = held.held.get(((start,), (size,)))
        here = Rank(dp=n)
        if extents:
            parts.append(Partition(extents[min(extents)], here))
        else:
            path, reason = lost(held.root, rank if rank is not None else n)
            parts.append(Partition(Hole(path, reason or f"{path} does not hold its shard of {name!r}"), here))
    return width, tuple(parts)


def _module_of(name: str, modules: Sequence[str]) -> str:
    """Return the innermost wrapped module that a parameter is in."""
    return max((m for m in modules if name.startswith(m)), key=len, default="\0")
