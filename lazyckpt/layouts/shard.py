"""One rank's part of a checkpoint under another parallel layout, and the checkpoint from all ranks' parts.

A shard consists of blocks of the whole tensors, so it is as lazy as they are. The index keeps a `Layout`, which records
the blocks of every tensor: a shard of a shard is cut from the whole tensors again, with the degrees multiplied, and
`unsharded` joins the blocks.

Order: expert-parallel ranks take whole experts, tensor-parallel ranks cut the remaining tensors, and each data-parallel
rank has a flat partition of the result, as in ZeRO-3 (deepspeed/runtime/zero/partition_parameters.py
`_partition_param`): ceil(n / dp) of n elements in C order, the last ranks' padded with zeros. Scalars (an optimizer's
step) are whole on every rank. A tensor is cut over the tp ranks, a tensor of experts over the etp ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ..core.box import Shape
from ..core.compose import compose
from ..core.dtypes import DType
from ..core.expr import computed, leaves, operand
from ..core.extents import Chunk
from ..core.flat import interval, joined
from ..core.index import Index, Layout
from ..core.names import matcher
from ..core.placement import Division, Mesh, Pipeline, Place, Placed, Placement
from ..core.specs import Fragment, TensorSpec, kind_of, renamed
from ..errors import FormatError, MeshError, Problem, only_one, some
from .cut import Known, cut, regrouped
from .megatron import is_expert
from .merge import Rule, user_rules
from .ranks import RankLike, place_of, within, world_size
from .rules import heads_in, is_megatron, sources_of
from .stages import Stages, expert_of, is_stack
from .tables import pattern

Piece = tuple[TensorSpec, Placement]

_UNDIVIDED = Division(Mesh(), 1, Pipeline())
_UNTIED = "untie_embeddings_and_output_weights"
_HEADS = {  # embedding -> the name of its copy on Megatron's last stage, if the head is tied to the embedding
    "embedding.word_embeddings.weight": "output_layer.weight",
    "language_model.embedding.word_embeddings.weight": "word_embeddings_for_head.weight",
}


def sharded(
    index: Index,
    names: Mapping[str, Iterable[str]],
    division: Division,
    rank: RankLike,
    rules: Mapping[str, Any],
    kept: dict[str, Any],
) -> Index:
    """Return the index of one rank's part of the named tensors, state by state.

    ``kept`` caches the plan of the division, which is the same for all ranks.

    Raises SelectionError if the division has no such rank, MeshError if a degree does not divide a tensor, its experts
    or the layers, and FormatError for a rule that is not understood or a tensor without a rule.
    """
    place, old = place_of(division, rank), index.layout
    if old is None:
        wanted = {state: set(listed) for state, listed in names.items()}
        return _Sharding(_plan(index, division, rules, kept), place).index(wanted)
    division, place = within(old.division, old.place, division, place)
    of_whole = {state: {old.placed[state][name].source for name in listed} for state, listed in names.items()}
    rules = {**rules, **{glob: rule for glob, rule in old.rules.items() if glob not in rules}}
    return _Sharding(_plan(old.source, division, rules, kept), place).index(of_whole)


def _plan(source: Index, division: Division, rules: Mapping[str, Any], kept: dict[str, Any]) -> _Plan:
    """Return the cached plan if it is of these arguments, else a new one."""
    plan = kept.get("sharding")
    if not isinstance(plan, _Plan) or plan.source is not source or (plan.division, plan.rules) != (division, rules):
        plan = kept["sharding"] = _Plan(source, division, rules)
    return plan


class _Plan:
    """The facts that are the same for all ranks of a division.

    ``every`` holds all tensors of the source by name, each from the first state that has it. ``cuts`` caches shards by
    name, shape, index among the ranks that cut the tensor and expert-parallel rank.
    """

    def __init__(self, source: Index, division: Division, rules: Mapping[str, Any]) -> None:
        mesh = division.mesh
        self.source, self.division, self.rules = source, division, dict(rules)
        self.every = {name: spec for specs in reversed(list(source.states.values())) for name, spec in specs.items()}
        self.rule_of = sources_of(source, self.every, rules)
        self.widths = [(matcher(glob), rule["widths"]) for glob, rule in rules.items() if _has_widths(rule)]
        self.heads = heads_in(source)
        self.multiple = division.vocab_multiple or _multiple(source.meta.get("args"))
        self.experts = _experts(self.every) if mesh.ep > 1 else {}
        self.stages = Stages(self.every, division.pipeline, is_megatron(source, self.every))
        self.cuts: dict[tuple[str, Shape, int, int], Known] = {}
        self._rules: dict[str, tuple[Rule, str] | None] = {}

    def rule(self, name: str) -> tuple[Rule, str] | None:
        """Return how tensor-parallel ranks cut a tensor, and the evidence for it; None if no source knows."""
        if name not in self._rules:
            found = (source.find(name) for source in self.rule_of)
            self._rules[name] = next((rule for rule in found if rule is not None), None)
        return self._rules[name]

    def stages_of(self, name: str) -> list[tuple[int, str]]:
        """Return what `Stages.of` returns. Raises MeshError if the layers cannot be distributed."""
        try:
            return self.stages.of(name)
        except ValueError as e:
            raise MeshError(f"pp={self.division.mesh.pp}: {e} ({name!r} is in one)") from None


class _Sharding:
    """The implementation of `sharded`. ``unknown`` collects the tensors without a rule."""

    def __init__(self, plan: _Plan, place: Place) -> None:
        self.plan, self.source, self.mesh = plan, plan.source, plan.division.mesh
        self.place, self.rank = place, place.rank
        self.stages, self.every = plan.stages, plan.every
        self.unknown: dict[str, Shape] = {}

    def index(self, wanted: Mapping[str, Container[str]]) -> Index:
        states: dict[str, dict[str, TensorSpec]] = {}
        placed: dict[str, dict[str, Placed]] = {}
        ties, aliases = self._ties()
        for state, specs in self.source.states.items():
            if state not in wanted:
                continue
            states[state], placed[state] = {}, {}
            for name, spec in specs.items():
                here = [*self._here(name), *ties.get(name, ())] if name in wanted[state] else ()
                one = self._cut(state, name, spec) if here else None
                if one is not None:
                    for local in here:
                        states[state][local], placed[state][local] = self._spec(local, spec, one)
        if self.unknown:
            raise FormatError(self._message())
        problems = list(self.source.problems)
        if self.stages.every:
            names = list(self.stages.every)
            line = f"nothing says which pipeline stage has {some(names)}: on all of them"
            problems.append(Problem("assumed-stage", line, only_one(names)))
        return replace(
            self.source,
            states=states,
            aliases={alias: owner for alias, owner in aliases.items() if any(owner in s for s in states.values())},
            mesh=self.mesh,
            problems=tuple(problems),
            layout=Layout(self.plan.division, self.place, self.source, self.plan.rules, placed),
        )

    def _message(self) -> str:
        listed = some(f"{name!r} of shape {shape}" for name, shape in self.unknown.items())
        return (
            f"tp={self.mesh.tp}: nothing tells how {listed} {'is' if len(self.unknown) == 1 else 'are'} cut over "
            "tensor-parallel ranks (replicated? along which dimension?). Say it with rules={'pattern': 'row' | "
            "'column' | 'replicated' | ...}, or select the other tensors first"
        )

    def _here(self, name: str) -> list[str]:
        """Return the names of the tensor on this rank: one or none, or several if several model chunks have it."""
        found = [local for stage, local in self.plan.stages_of(name) if stage == self.rank.pp]
        expert = expert_of(name) if self.mesh.ep > 1 else None
        if not found or expert is None:
            return found
        count = self.plan.experts[expert.layer]
        if count % self.mesh.ep:
            raise MeshError(f"ep={self.mesh.ep}: the {count} experts of {name!r} and its like cannot be dealt evenly")
        each = count // self.mesh.ep
        if expert.number // each != self.rank.ep:
            return []
        if not expert.counted:
            return found
        # the number of the layer, which precedes that of the expert, may differ on this rank
        heads = [local.removesuffix(f"{expert.number}{expert.tail}") for local in found]
        return [f"{head}{expert.number % each}{expert.tail}" for head in heads]

    def _ties(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Return the ties of this rank.

        The first mapping holds a tensor's additional names, if the tensor that they are tied to is on another rank; the
        second one maps aliases to owners, both under their names on this rank.
        """
        ties: dict[str, list[str]] = {}
        aliases: dict[str, str] = {}
        owners = {owner: self._here(owner) for owner in self.source.aliases.values() if owner in self.every}
        for alias, owner in self.source.aliases.items():
            for local in self._here(alias) if owner in owners else ():
                there = [*owners[owner], *ties.get(owner, ())]
                if there:
                    aliases[local] = there[0]
                else:
                    ties[owner] = [local]
        if self.rank.pp and getattr(self.source.meta.get("args"), _UNTIED, None) is False:
            for embedding, head in _HEADS.items():
                if embedding in self.every and head not in self.every:
                    ties.setdefault(embedding, self._here(head))
        return ties, aliases

    def _cut(self, state: str, name: str, spec: TensorSpec) -> Known | None:
        """Return this rank's tensor- and expert-parallel shard of a tensor; None if no rule is known."""
        key = (name, spec.shape, self._cutting(name)[1], self.rank.ep)
        if key not in self.plan.cuts:
            found = self._find_cut(state, name, spec)
            if found is None:
                return None
            self.plan.cuts[key] = found
        return self.plan.cuts[key]

    def _find_cut(self, state: str, name: str, spec: TensorSpec) -> Known | None:
        shape, ahead, mesh = spec.shape, 0, self.mesh
        if self._is_number(spec):
            return Placement(shape), ""
        if mesh.ep > 1 and is_stack(name):
            if shape[0] % mesh.ep:
                raise MeshError(f"ep={mesh.ep}: the {shape[0]} experts of {name!r} {shape} cannot be dealt evenly")
            each = shape[0] // mesh.ep
            shape, ahead = (each, *shape[1:]), self.rank.ep * each
        found: Known = Placement(shape), ""
        degree, _ = self._cutting(name)
        if degree == 1 and shape and self._pads(name):
            rows = -(-shape[0] // self.plan.multiple) * self.plan.multiple
            note = f"{rows - shape[0]:,} rows of padding behind the last" if rows > shape[0] else ""
            return Placement((rows, *shape[1:]), Placement(shape).blocks), note
        if degree > 1 and 0 not in shape:
            try:
                one = self._tensor_parallel(name, spec, shape)
            except ValueError as e:
                which = "tp" if degree == mesh.tp else "etp"
                raise MeshError(f"{which}={degree}, state {state!r}: {e}. Ask for another {which}") from None
            if one is None:
                self.unknown[name] = shape
                return None
            found = one
        if not ahead:
            return found
        placement, rule = found
        parts = tuple(replace(p, start=(p.start[0] + ahead, *p.start[1:])) for p in placement.blocks)
        return replace(placement, parts=parts), rule

    def _pads(self, name: str) -> bool:
        """Return whether the rows of a tensor are padded to the multiple that the division has."""
        return self.plan.division.vocab_multiple is not None and pattern("model.vocabulary").search(name) is not None

    def _cutting(self, name: str) -> tuple[int, int]:
        """Return how many ranks cut a tensor, and this rank's index among them."""
        return (self.plan.division.etp, self.place.etp) if is_expert(name) else (self.mesh.tp, self.rank.tp)

    def _tensor_parallel(self, name: str, spec: TensorSpec, shape: Shape) -> Known | None:
        """Return the tensor-parallel shard of a tensor, or of its experts, of this shape; None if no rule is known.

        Raises ValueError if the tensor cannot be cut.
        """
        degree, index = self._cutting(name)
        by_user = self.plan.rule_of[0].find(name) is not None
        if not by_user and not is_stack(name) and not self._pads(name):
            stored = regrouped(spec, degree, index, self.plan.heads)
            if stored is not None:
                return stored
        rule = self.plan.rule(name)
        widths = next((widths for match, widths in self.plan.widths if match(name)), None)
        heads = None if by_user else self.plan.heads
        return None if rule is None else cut(name, shape, rule, degree, index, self.plan.multiple, heads, widths)

    def _spec(self, local: str, whole: TensorSpec, found: Known) -> tuple[TensorSpec, Placed]:
        spec = _block(local, whole, *found)
        shape, parts = found[0].shape, found[0].blocks
        placed = Placed(shape=shape, parts=parts, source=whole.name, whole=whole.shape)
        dp, n = self.mesh.dp, prod(shape)
        if dp == 1 or self._is_number(whole):
            return spec, placed
        each = -(-n // dp)
        lo, hi = min(self.rank.dp * each, n), min((self.rank.dp + 1) * each, n)
        rule = f"{spec.rule}; elements {lo:,} to {hi:,} of {n:,}".lstrip("; ")
        flat = replace(interval(spec, lo, hi), rule=rule)
        if hi - lo < each:
            pieces = [(flat, Placement.at(flat.shape, (0,)))] if hi > lo else []
            rest = (each - hi + lo,)
            pieces.append((zeros_like(whole, rest), Placement.at(rest, (hi - lo,))))
            flat = compose(local, (each,), pieces, f"{rule}, and zeros", spec.stored_as)
        return flat, replace(placed, flat=(lo, hi))

    def _is_number(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is a scalar about a parameter (its optimizer's step), the same on all ranks."""
        return not spec.shape or (spec.numel == 1 and self.every[spec.name].shape != spec.shape)


def _has_widths(rule: Any) -> bool:
    return isinstance(rule, Mapping) and "widths" in rule


def _block(local: str, whole: TensorSpec, placement: Placement, how: str) -> TensorSpec:
    """Return the shard as a tensor, including padding. ``how`` is the evidence for its placement."""
    shape, blocks = placement.shape, placement.blocks
    if shape == whole.shape and blocks == Placement(shape).blocks:
        return renamed(whole, local)
    pieces = [(whole, Placement.of(whole.shape, placement.target(p), p.local.start)) for p in blocks]
    if placement.numel < prod(shape):  # only the last rows of a vocabulary can be padding
        full = max((p.local.stop[0] for p in blocks), default=0)
        rest = (shape[0] - full, *shape[1:])
        pieces.append((zeros_like(whole, rest), Placement.at(rest, (full, *(0 for _ in rest[1:])))))
    if not pieces:  # the shard is empty
        pieces = [(whole, Placement(whole.shape, ()))]
    rule = "; ".join(filter(None, (whole.rule, how)))
    return compose(local, shape, pieces, rule, whole.stored_as or whole.name)


def zeros_like(like: TensorSpec, shape: Shape) -> TensorSpec:
    """Return a tensor of zeros that no file holds. It is computed if ``like`` is, which may be in several stores."""
    paths = (f.extent.path for one in leaves(like) if not one.source for f in one.spec.fragments)
    path = next(paths, "")
    strides = (0,) * len(shape)
    chunk = Chunk(path, like.dtype, shape, strides, 0, fill=bytes(like.dtype.itemsize), present=False)
    found = replace(like, shape=shape, fragments=(Fragment(chunk, shape),), expr=None)
    return found if like.expr is None else computed(like.name, operand(found), like.rule, like.stored_as)


def _multiple(args: Any) -> int:
    """Return the number that Megatron pads a vocabulary's rows on each tensor-parallel rank to a multiple of."""
    value = getattr(args, "make_vocab_size_divisible_by", None)
    return value if type(value) is int and 0 < value < 1 << 20 else 1


def _experts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of experts of every layer (by `Expert.layer`)."""
    counts: dict[str, int] = {}
    for expert in filter(None, map(expert_of, names)):
        counts[expert.layer] = max(counts.get(expert.layer, 0), expert.number + 1)
    return counts


# -- sizes


class StageSize(NamedTuple):
    """What a rank of a pipeline stage holds before data-parallel ranks divide it: elements by dtype, padding included.

    ``experts`` are the parameters that expert parallelism distributes, ``others`` all others."""

    others: dict[DType, int]
    experts: dict[DType, int]
    tensors: int


def stage_sizes(
    index: Index,
    state: str,
    names: Iterable[str],
    division: Division,
    rules: Mapping[str, Any],
    kept: dict[str, Any],
    check: Callable[[], None],
) -> list[StageSize]:
    """Return the size of the named tensors of a state on the first tensor- and expert-parallel rank of each stage.

    Other ranks of the stage hold as much, because tensors are cut evenly. ``check`` is called now and then. Raises what
    `sharded` raises, and MeshError if the index is one rank's part.
    """
    if index.layout is not None:
        raise MeshError("this view is one rank's part of a checkpoint: ask for the sizes in the whole checkpoint")
    wanted = dict.fromkeys(names)
    if replace(division, mesh=replace(division.mesh, dp=1)) == _UNDIVIDED:
        user_rules(rules)  # raises the error of a rule that is not understood
        return [_whole_size(index.states[state], wanted, check)]
    plan = _plan(index, division, rules, kept)
    by_stage: dict[int, list[str]] = {}
    for name in wanted:
        for stage in {stage for stage, _ in plan.stages_of(name)}:
            by_stage.setdefault(stage, []).append(name)
    specs, found = index.states[state], []
    for stage in range(division.mesh.pp):
        sharding = _Sharding(plan, place_of(division, {"pp": stage}))
        ties = {owner: local for owner, local in sharding._ties()[0].items() if owner in wanted}
        size = StageSize({}, {}, 0)
        tensors = 0
        for n, name in enumerate(dict.fromkeys([*by_stage.get(stage, ()), *ties])):
            if n % 1024 == 0:
                check()
            here = [*sharding._here(name), *ties.get(name, ())]
            known = sharding._cut(state, name, specs[name]) if here and name in specs else None
            if known is None:
                continue
            tensors += len(here)
            table = size.experts if is_expert(name) else size.others
            dtype = specs[name].dtype
            table[dtype] = table.get(dtype, 0) + prod(known[0].shape) * len(here)
        if sharding.unknown:
            raise FormatError(sharding._message())
        found.append(size._replace(tensors=tensors))
    return found


def _whole_size(specs: Mapping[str, TensorSpec], names: Iterable[str], check: Callable[[], None]) -> StageSize:
    """Return the size of the named tensors if no rank cuts them, without making their specs: there may be very many."""
    counts: Counter[tuple[bool, tuple[Shape, DType]]] = Counter()
    for n, name in enumerate(names):
        if n % 1024 == 0:
            check()
        if name in specs:
            counts[is_expert(name), kind_of(specs, name)] += 1
    size = StageSize({}, {}, counts.total())
    for (expert, (shape, dtype)), count in counts.items():
        table = size.experts if expert else size.others
        table[dtype] = table.get(dtype, 0) + count * prod(shape)
    return size


# -- the reverse


def unsharded(shards: Sequence[Index]) -> Index:
    """Return the checkpoint from the parts of all ranks.

    Raises MeshError if the parts are from different meshes or checkpoints, or if some are missing.
    """
    layouts = [index.layout for index in shards]
    first = layouts[0] if layouts else None
    if first is None or any(one is None for one in layouts):
        raise MeshError("only views that `shard` gave can be put together, one of each rank")
    by_rank = {one.place: index for one, index in zip(layouts, shards, strict=True) if one is not None}
    source = first.source
    for one in layouts:
        if one is not None and (one.division != first.division or not _same(one.source, source)):
            both = _differing(first.division, one.division)
            raise MeshError(f"the shards are not of one checkpoint on one mesh: {both[0]} and {both[1]}")
    division = first.division
    every = [place_of(division, n) for n in range(world_size(division.mesh, division.etp))]
    missing = [tuple(place.rank) for place in every if place not in by_rank]
    if missing:
        raise MeshError(f"{len(missing)} of {len(every)} ranks are missing: {some(missing)}")
    states: dict[str, dict[str, TensorSpec]] = {}
    for state, specs in source.states.items():
        if state not in first.placed:
            continue
        found: dict[str, dict[tuple[Shape, Shape], Piece]] = {}
        for placed, local in _locals(by_rank, every, state):
            blocks = found.setdefault(placed.source, {})
            for part in placed.blocks:
                piece = local, Placement(placed.shape, (part,))
                blocks.setdefault((part.start, part.local.shape), piece)
        states[state] = {  # those that `select` had left when the view was sharded
            name: _whole(spec, list(found[name].values()), len(every)) for name, spec in specs.items() if name in found
        }
    names = {name for table in states.values() for name in table}
    aliases = {alias: owner for alias, owner in source.aliases.items() if owner in names}
    return replace(source, states=states, aliases=aliases, layout=None)


def _differing(a: Division, b: Division) -> tuple[Any, Any]:
    same = replace(a, mesh=b.mesh) == b
    return (a.mesh, b.mesh) if same else (a, b)


def _same(a: Index, b: Index) -> bool:
    """Return whether two sources have the same tensor names."""
    return a is b or {s: list(t) for s, t in a.states.items()} == {s: list(t) for s, t in b.states.items()}


def _locals(by_rank: Mapping[Place, Index], every: Sequence[Place], state: str) -> Iterator[tuple[Placed, TensorSpec]]:
    """Yield the placements and tensors of all ranks, with the partitions of data-parallel ranks joined."""
    for place in every:
        if place.rank.dp:
            continue
        layout = by_rank[place].layout
        for name, placed in layout.placed[state].items() if layout is not None else ():
            spec = by_rank[place].states[state][name]
            if placed.flat is None:
                yield placed, spec
                continue
            partitions = []
            for other in (p for p in every if p._replace(rank=p.rank._replace(dp=0)) == place):
                index = by_rank[other]
                flat = index.layout.placed[state][name].flat if index.layout is not None else None
                if flat is not None and flat[1] > flat[0]:
                    partitions.append((flat[0], index.states[state][name]))
            yield placed, joined(spec, placed.shape, partitions)


def _whole(spec: TensorSpec, pieces: Sequence[Piece], ranks: int) -> TensorSpec:
    if not pieces:
        return spec
    source, placement = pieces[0]
    if len(pieces) == 1 and placement.blocks[0].local.shape == spec.shape == source.shape:
        return replace(source, name=spec.name, rule=spec.rule, stored_as=spec.stored_as)
    return compose(spec.name, spec.shape, pieces, f"joined from the shards of {ranks} ranks", spec.stored_as)
