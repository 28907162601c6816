"""The optimizer states of nanotron: a file of torch.save for each rank.

Writer: nanotron/serialize/optimizer.py `save_optimizer`; optim/named_optimizer.py (``names``: number -> name of the
parameter); optim/optimizer_from_gradient_accumulator.py (``gradient_accumulator``: name -> the parameter in fp32);
optim/zero.py `_partition_parameters` (ZeRO-1). Without ZeRO, data-parallel rank 0 of each pipeline and
tensor-parallel rank writes its states, in the shapes of its shards. With ZeRO-1, every rank writes a flat interval of
each of its shards: the intervals are equal, the first ones are one element longer where the shard does not divide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ...core.compose import compose
from ...core.extents import Hole
from ...core.flat import joined
from ...core.index import FileInfo
from ...core.placement import Placement
from ...core.specs import Fragment, TensorSpec
from ...errors import LazyckptError, Problem, cannot_read
from ...io.limits import check_ranks
from ..reader import Source
from ..shared.announce import announce
from ..shared.members import Member
from ..shared.paths import grouped
from ..shared.rank_shards import undecided
from ..torch_save import member
from .weights import Weight

FOLDER = "optimizer"
_FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d{1,7})-of-(?P<pps>\d{1,7})(?:_dp-(?P<dp>\d{1,7})-of-(?P<dps>\d{1,7}))?"
    r"_tp-(?P<tp>\d{1,7})-of-(?P<tps>\d{1,7})(?:_exp-(?P<exp>\d{1,7})-of-(?P<exps>\d{1,7}))?\.pt"
)
_FP32 = "gradient_accumulator"


class _Place(NamedTuple):
    """The ranks of a file; ``dp`` is None without ZeRO."""

    pp: int
    tp: int
    dp: int | None


@dataclass(slots=True)
class Optimizer:
    """What the files below ``optimizer/`` hold."""

    states: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    stored: dict[str, TensorSpec] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1


def read_optimizer(source: Source, kinds: Mapping[str, Weight], problems: list[Problem]) -> Optimizer:
    """Index the optimizer's states by parameter. ``kinds`` are the shapes and shards of the parameters."""
    found = Optimizer()
    named = {name: match for name in sorted(source.inside(FOLDER)) if (match := _FILE.fullmatch(name))}
    if not named:
        return found
    layouts = {tuple(int(m[k] or 1) for k in ("pps", "dps", "tps", "exps")) for m in named.values()}
    found.pp, found.dp, found.tp, found.ep = max(layouts)
    for degree in (found.pp, found.dp, found.tp, found.ep):
        check_ranks(source.where, degree, len(named))
    if len(layouts) > 1:
        line = f"the files of {FOLDER}/ are of {len(layouts)} layouts: those of tp={found.tp}, dp={found.dp} are read"
        problems.append(Problem("left-over-file", line, FOLDER))
        named = {
            n: m
            for n, m in named.items()
            if tuple(int(m[k] or 1) for k in ("pps", "dps", "tps", "exps")) == max(layouts)
        }
    announce(source.store, [f"{FOLDER}/{name}" for name in named])
    ranks: dict[_Place, tuple[str, Member]] = {}
    for name, match in named.items():
        path = f"{FOLDER}/{name}"
        place = _Place(int(match["pp"]), int(match["tp"]), None if match["dp"] is None else int(match["dp"]))
        try:
            held = member(source.store, path, f"{path}/")
        except LazyckptError as e:
            problems.append(cannot_read(path, e))
            continue
        found.files |= held.files
        found.stored |= dict(held.raw)
        problems += held.problems
        found.meta = found.meta or {k: v for k, v in held.meta.items() if k in ("param_groups", "names")}
        ranks[place] = path, held
    if found.ep > 1:
        line = f"the states of {found.ep} expert-parallel ranks are not put together: they are in view.stored"
        problems.append(Problem("unmerged-tensor", line, FOLDER))
        return found
    example = next(iter(named))
    zero = named[example]["dp"] is not None
    lost: dict[_Place, str] = {}
    for pp in range(found.pp):
        for tp in range(found.tp):
            for dp in range(found.dp) if zero else (None,):
                if (place := _Place(pp, tp, dp)) not in ranks:
                    lost[place] = path = f"{FOLDER}/{_name(example, place)}"
                    if path.partition("/")[2] not in named:
                        problems.append(Problem("missing-file", f"{path} is missing", path))
    _States(found, kinds, ranks, lost, zero, problems).build()
    return found


def _name(example: str, place: _Place) -> str:
    name = re.sub(r"_pp-\d+-", f"_pp-{place.pp}-", example)
    name = re.sub(r"_tp-\d+-", f"_tp-{place.tp}-", name)
    return name if place.dp is None else re.sub(r"_dp-\d+-", f"_dp-{place.dp}-", name)


class _States:
    """The states of all parameters, from the files of the ranks."""

    def __init__(
        self,
        found: Optimizer,
        kinds: Mapping[str, Weight],
        ranks: Mapping[_Place, tuple[str, Member]],
        lost: Mapping[_Place, str],
        zero: bool,
        problems: list[Problem],
    ) -> None:
        self.found, self.kinds, self.lost, self.zero, self.problems = found, kinds, lost, zero, problems
        # (state, parameter) -> pipeline rank -> (tp, dp) -> tensor
        self.held: dict[tuple[str, str], dict[int, dict[tuple[int, int], TensorSpec]]] = {}
        for place, (_, one) in ranks.items():
            names = one.meta.get("names")
            names = {str(k): v for k, v in names.items()} if isinstance(names, Mapping) else {}
            for path, spec in one.tensors.values():
                key = _key(path, names)
                if key is not None:
                    self.held.setdefault(key, {}).setdefault(place.pp, {})[place.tp, place.dp or 0] = spec
        self.undecided: dict[str, str] = {}

    def build(self) -> None:
        for (state, name), stages in self.held.items():
            pp = min(stages)
            spec = self._whole(state, name, pp, stages[pp])
            self.found.states.setdefault(state, {})[name] = spec
        self.problems += grouped("unmerged-tensor", self.undecided, "have states that cannot be put together")

    def _whole(self, state: str, name: str, pp: int, held: Mapping[tuple[int, int], TensorSpec]) -> TensorSpec:
        first = held[min(held)]
        if first.shape == ():  # a step, the same on all ranks
            return replace(first, name=name, stored_as=first.name)
        kind = self.kinds.get(name)
        try:
            if kind is None:
                raise ValueError("its parameter is in no file, so the shapes of the shards are unknown")
            if not kind.parts:
                tps = [tp for tp in range(self.found.tp) if any((tp, d) in held for d in range(self.found.dp))]
                local = self._local(name, pp, tps[0], held, first, kind.shape)
                return replace(local, name=name, stored_as=first.name, rule="the same on all tensor-parallel ranks")
            pieces = []
            for tp in range(self.found.tp):
                shape, parts = kind.parts.get(tp, (None, ()))
                if shape is None:
                    raise ValueError(f"the shard of tensor-parallel rank {tp} of its parameter is lost")
                pieces.append((self._local(name, pp, tp, held, first, shape), Placement(shape, parts)))
            rule = "slices in the parameter's files (local_global_slices_pairs)"
            return compose(name, kind.shape, pieces, rule, stored_as=first.name)
        except ValueError as e:
            self.undecided[name] = str(e)
            return undecided(name, first.shape, first.dtype, str(e))

    def _local(
        self,
        name: str,
        pp: int,
        tp: int,
        held: Mapping[tuple[int, int], TensorSpec],
        like: TensorSpec,
        shape: tuple[int, ...],
    ) -> TensorSpec:
        """Return the state of a tensor-parallel rank, in the shape of its shard. Raises ValueError."""
        if not self.zero:
            spec = held.get((tp, 0)) or self._hole(name, like, _Place(pp, tp, None), shape)
            if spec.shape != shape:
                raise ValueError(f"the state has the shape {spec.shape}, the shard of the parameter {shape}")
            return spec
        count = prod(shape)
        width, longer = divmod(count, self.found.dp)
        at, intervals = 0, []
        for dp in range(self.found.dp):
            size = width + (dp < longer)
            if size:
                spec = held.get((tp, dp)) or self._hole(name, like, _Place(pp, tp, dp), (size,))
                if spec.shape != (size,):
                    raise ValueError(f"data-parallel rank {dp} has {spec.shape} of its elements, not {size:,}")
                intervals.append((at, spec))
            at += size
        return joined(like, shape, intervals)

    def _hole(self, name: str, like: TensorSpec, place: _Place, shape: tuple[int, ...]) -> TensorSpec:
        path = self.lost.get(place)
        if path is None:
            raise ValueError(f"the file of {place} lacks it")
        return replace(
            like, shape=shape, fragments=(Fragment(Hole(path, f"{path} is lost: states of {name!r}"), shape),)
        )


def _key(path: tuple[str | int, ...], names: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (state, parameter) of a tensor of a rank's file; None for other tensors."""
    if len(path) == 3 and path[0] == "state" and isinstance(names.get(str(path[1])), str):
        return str(path[2]), names[str(path[1])]
    if len(path) == 2 and path[0] == _FP32:
        return "fp32", str(path[1])
    return None
