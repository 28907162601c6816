"""ZeRO-0: the states in each rank's plain optimizer, for the parameters of a module, a pipeline stage, or experts.

Sources: runtime/engine.py `_save_checkpoint` (``optimizer`` in the model states), `_save_moe_checkpoint`
(``expp_rank_*``: every expert-parallel rank's optimizer, with experts under its own local ids).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from ...core.box import Shape
from ...core.specs import TensorSpec
from ...errors import LazyckptError, Problem, cannot_read
from ..shared.evidence import Copies, Undecided, UndecidedTable
from ..shared.numbering import Effort
from ..shared.rank_shards import Shards, update
from .autoep import Stacks, add_stacks, layer_of
from .building import Building, Shapes, Stage, buffer_names, table, tensors_in
from .files import RankFiles
from .fused import flat_masters, fused_shards
from .pipeline import Layers, evident_ties, local_shapes, stage_names
from .plainopt import Group, match, numbered_groups, optimizer_shards

EXPERTS = ".deepspeed_experts."
_TRIES = 256  # limit on the ways to distribute the layers' experts over ranks that are tried


def optimizer_states(
    b: Building,
    files: RankFiles,
    stages: Mapping[int, Stage],
    layers: Layers,
    tied: Mapping[int, str],
    aliases: Iterable[str],
) -> None:
    """Add the states of every rank's plain optimizer. ``tied``: pipeline layer -> the shared module in its file."""
    by_stage = {mp: n for t in range(b.tp) for mp, n in _stages_of(stages, layers, tied, t).items()} if layers else {}
    for pp in sorted({s.rank.pp for s in stages.values()}):  # the first stage that holds a tensor is read
        shards: Shards = {}
        stacks: Stacks = {}
        for mp, stage in stages.items():
            if stage.rank.pp != pp or (stage.model.get("optimizer") is None and not files.expert_optim):
                continue
            if layers:
                names = by_stage.get(mp, {})
            else:
                own = tensors_in(stage.file, stage.model.get("module"))
                skip = buffer_names(stage.model) | set(aliases)
                names = {n: t.shape for n, t in own.items() if n not in skip}
            if files.expert_optim:
                _expert_optimizers(b, files, stage, names, shards, stacks)
            else:
                where, optimizer = f"optimizer of rank {mp}", stage.model.get("optimizer")
                kind = optimizer_shards if flat_masters(optimizer) is None else fused_shards
                update(shards, kind(b, stage.file, optimizer, names, stage.rank, where))
        add_stacks(b, shards, stacks, {})
        b.add(shards)


# -- parameters that order and shapes do not name


def undecided_optimizers(b: Building) -> Undecided:
    """Return the optimizers whose fp32 copies will name parameters (one tensor-parallel rank: weights are whole)."""
    copies, weights = b.states.get("fp32", {}), b.states.get("weights", {})
    return Undecided(
        b.store.pinned(b.files),
        [
            Copies(
                of.where,
                of.total,
                {number: copies[number] for number in of.numbers},
                {name: weights[name] for name in of.names or weights if name in weights},
                of.ways,
            )
            for of in b.unnamed
        ],
    )


def with_undecided(
    b: Building, states: Mapping[str, Mapping[str, TensorSpec]], undecided: Undecided
) -> dict[str, Mapping[str, TensorSpec]]:
    """Wrap the states that have numbered parameters, to replace the numbers by names on first access."""
    numbers = {number for of in b.unnamed for number in of.numbers}
    return {
        state: UndecidedTable(table, undecided, b.states["weights"] if state == "fp32" else {})
        if numbers & table.keys()
        else table
        for state, table in states.items()
    }


# -- pipelines


def ties_of_plain_optimizers(b: Building, stages: Mapping[int, Stage], layers: Layers) -> dict[int, str]:
    """Return the layers whose files hold a shared module, as far as the stages' plain optimizers show it without
    names: layer -> the prefix of its names (see `evident_ties`)."""
    optimizers = {mp: numbered_groups(s.model.get("optimizer")) for mp, s in sorted(stages.items())}
    first = [groups for mp, groups in optimizers.items() if stages[mp].rank.tp == 0]
    info = stages[min(stages)].model.get("universal_checkpoint_info")
    found = {}
    for idx, key in evident_ties(layers, _buffers(stages), first, 0, info).items():
        found[idx] = key or str(idx)
        if key is None:
            line = (
                f"pipeline layer {idx} is shared by several stages (their optimizers have its parameters): its name in "
                f"the model is tied_modules.KEY, no file says what KEY is, so its names here begin with {idx}"
            )
            b.report(Problem("undecided-name", line))
    return found


def _stages_of(stages: Mapping[int, Stage], layers: Layers, tied: Mapping[int, str], tp: int) -> dict[int, Shapes]:
    """Return the parameters of every pipeline stage, by mp rank. No file lists them; a stage has a run of layers."""
    ranks = [mp for mp, s in sorted(stages.items()) if s.rank.tp == tp]
    buffers = _buffers(stages)
    tables = {idx: local_shapes(layers, idx, tp, tied.get(idx, str(idx)), buffers) for idx in layers}
    shared = {n: s for idx in tied for n, s in tables[idx].items()}
    optimizers: list[list[Group]] = [numbered_groups(stages[mp].model.get("optimizer")) for mp in ranks]
    if all(group.names is not None for groups in optimizers for group in groups):
        everything = {n: s for t in tables.values() for n, s in t.items()}
        return dict.fromkeys(ranks, everything)
    found = stage_names(optimizers, [t for idx, t in tables.items() if idx not in tied], shared, Effort())
    return dict(zip(ranks, found, strict=True)) if found else {}


def _buffers(stages: Mapping[int, Stage]) -> set[str]:
    return {n for s in stages.values() for n in buffer_names(s.model)}


# -- experts


def _expert_optimizers(
    b: Building, files: RankFiles, stage: Stage, names: dict[str, Shape], shards: Shards, stacks: Stacks
) -> None:
    weights = b.states.get("weights", {})
    experts = {n: s.shape for n, s in weights.items() if EXPERTS in n}
    degree = 1 + max(ep for ep, _ in files.expert_optim)
    for (ep, mp), path in files.expert_optim.items():
        if mp != stage.rank.pp * b.tp + stage.rank.tp:
            continue
        try:
            file = b.file(path)
            optimizer = table(file, table(file, file.root).get("optimizer"))
        except LazyckptError as e:
            b.report(cannot_read(path, e, ", the optimizer states in it are lost"))
            continue
        if flat_masters(optimizer) is not None:
            line = f"{path}: its groups are flat, and nothing says how the parameters lie in them: see view.stored"
            b.report(Problem("undecided-name", line, path))
            continue
        data_first = table(file, stage.model.get("ds_config")).get("use_data_before_expert_parallelism") is True
        all_names, spread = _with_experts(names, experts, numbered_groups(optimizer), degree, ep, data_first)
        for name, spec in weights.items():
            ids = layer_of(name, b.placements)
            if ids is not None and ep < len(ids):
                all_names[name] = (len(ids[ep]), *spec.shape[1:])
        rank, where = stage.rank._replace(ep=ep), f"optimizer of {path}"
        more = optimizer_shards(b, file, optimizer, all_names, rank, where, spread)
        for state, tensors in more.items():
            known = shards.setdefault(state, {})
            for name, by_rank in tensors.items():
                if layer_of(name, b.placements) is not None and by_rank[stage.rank.tp].shape != ():
                    stacks.setdefault((state, name), {})[ep] = by_rank[stage.rank.tp]
                else:
                    known[name] = by_rank | known.get(name, {})


def _with_experts(
    names: Shapes, experts: Shapes, groups: list[Group], degree: int, ep: int, data_first: bool
) -> tuple[Shapes, dict[str, int] | None]:
    """Return the parameters of one expert-parallel rank, in the module's order, and expert -> the number of ranks over
    which it is distributed, if layers differ in that. ``degree``: the largest such number; ``ep``: the rank in it."""
    per_layer: dict[str, dict[int, Shapes]] = {}
    for name, shape in experts.items():
        layer, rest = name.split(EXPERTS)
        per_layer.setdefault(layer, {}).setdefault(int(rest.split(".")[0]), {})[name] = shape
    sizes = {group.experts for group in groups if group.experts}
    if len(sizes) < 2:
        return _ordered(names, {x: _share(ids, degree, ep) for x, ids in per_layer.items()}), None
    fitting = []
    effort = Effort()
    for degrees in product(sorted(sizes), repeat=len(per_layer)) if len(sizes) ** len(per_layer) <= _TRIES else ():
        if any(len(ids) % d for ids, d in zip(per_layer.values(), degrees, strict=True)):
            continue
        mine: dict[str, Shapes] = {}
        spread: dict[str, int] = {}
        for (layer, ids), d in zip(per_layer.items(), degrees, strict=True):
            mine[layer] = _share(ids, d, ep * d // degree if data_first else ep % d)
            spread |= dict.fromkeys(mine[layer], d)
        ordered = _ordered(names, mine)
        if match(ordered, groups, spread, effort) is not None:
            fitting.append((ordered, spread))
    return fitting[0] if len(fitting) == 1 else ({}, None)


def _share(ids: Mapping[int, Shapes], degree: int, rank: int) -> Shapes:
    """Return a rank's experts of a layer, under their global ids."""
    width = len(ids) // degree
    return {n: s for i in sorted(ids)[rank * width : (rank + 1) * width] for n, s in ids[i].items()}


def _ordered(names: Shapes, mine: Mapping[str, Shapes]) -> Shapes:
    """Return all parameters in the module's order, where experts follow their layer's gate."""
    left, ordered = dict(mine), {}
    for name, shape in names.items():
        ordered[name] = shape
        gate = f"{name.rsplit('.gate.', 1)[0]}.experts" if ".deepspeed_moe.gate." in name else ""
        ordered.update(left.pop(gate, {}))
    for rest in left.values():
        ordered.update(rest)
    return ordered
