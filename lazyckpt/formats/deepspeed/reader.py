"""From the rank files of one tag to an Index: which degrees, which kind of states, what goes together.

The layouts differ in where things stand, not in what they are: a model-parallel rank's tensors (from a module, from
pipeline layers, from flat partitions) are gathered as shards, stage by stage, and merged over tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.index import Index, Mesh, Rank
from ...errors import FormatError, LazyckptError, MissingFileError
from ...io.plain import Plain
from ...io.rebuild import StoredTensor
from ...io.records import Opaque
from ...io.torchfile import TorchFile
from ..families import family_rules
from ..merge import Source as RuleSource
from ..merge import replicated, user_rules
from ..reader import Source
from ..torchsave import ties, warnings
from . import universal
from .building import Building, Shapes, Shards, shapes_of, table, tensors_in
from .files import RankFiles, find_folder
from .partitions import Optim, OptimFiles, Stage3, Stage12, flat_states, optim_files
from .plainopt import optimizer_shards, stage_names
from .present import lost_stages, set_aside, with_lost_experts, with_lost_layers, with_lost_states
from .ucp import universal_rules
from .weights import buffer_names, expert_shards, layer_shards, module_shards, sharded_rest

_BUFFER = (replicated, "buffer_names: nothing cuts a buffer over ranks")


class Stage(NamedTuple):
    """One model-parallel rank's model states: the dict that was saved, and the shapes of its flat groups."""

    rank: Rank
    file: TorchFile
    model: dict[Any, Any]
    groups: list[Shapes]


def read(source: Source) -> Index:
    """Index the tag that `find_folder` finds."""
    files = find_folder(source)
    if not files:
        raise FormatError(f"{source.where} holds no rank files of DeepSpeed")
    if files.universal:
        return universal.read(source, files)
    b = Building(source.store)
    stages = _stages(b, source, files)
    first = stages[min(stages)]
    b.world = _world(first.model, files)
    b.sources = _rules(source, stages)
    set_aside(b, files, b.ranks, first.model)
    plain = Plain(first.file.root, f"{source.where}/{first.file.path}", first.file.pickle_size, _name(first.file) + "/")
    b.problems += [w for w in warnings(first.file.path, first.file, plain) if w not in b.problems]
    aliases = _aliases(first.model, tensors_in(first.file, first.model.get("module")))

    pipeline = bool(files.layers)
    buffers = {n for s in stages.values() for n in buffer_names(s.model)}
    if pipeline:
        trained = [(s.rank, g) for s in stages.values() for g in s.groups]
        b.add(with_lost_layers(b, files, trained, buffers, layer_shards(b, files, [g for _, g in trained])))
    if files.experts:
        b.add(with_lost_experts(b, files, first.model, expert_shards(b, files)))
    sharded = bool(files.zero_model)
    any_optim = next(iter(files.optim.values()), None)
    optims: dict[int, OptimFiles] = {}
    by_stage: list[Shards] = []
    for pp in range(b.ranks // b.tp):
        here = [s for s in stages.values() if s.rank.pp == pp]
        shards: Shards = {}
        for stage in here:
            mp = stage.rank.pp * b.tp + stage.rank.tp
            if not pipeline:
                _update(shards, module_shards(stage.file, stage.model, aliases, stage.rank))
            if any_optim is not None:
                optim = optims[mp] = optim_files(b, files, b.world, mp, any_optim)
                layout = Stage3() if sharded else Stage12(optim)
                data_first = _flag(stage.model, "use_data_before_expert_parallelism")
                _update(shards, flat_states(b, stage.groups, optim, layout, stage.rank, data_first))
            if sharded:
                _update(shards, sharded_rest(b, files, stage.model, stage.file, stage.rank))
        by_stage.append(shards)
    for shards in with_lost_states(b, by_stage):
        b.add(shards)
    if any_optim is None:
        _plain_optimizers(b, files, stages, pipeline, aliases)
        if sharded:
            b.tell("there are no optimizer states (*_optim_states.pt): no parameter of a ZeRO-3 model can be read")
    if pipeline and b.lost:
        lost_stages(b, _first_stages(stages))
    _complete(b, sharded, {n for s in stages.values() for g in s.groups for n in g})
    for path in files.zero_model.values():
        b.files.setdefault(path, source.store.stat(path))
    stage_number = 3 if sharded else _zero_stage(first.model, optims)
    return Index(
        format=f"deepspeed-zero{stage_number}",
        states={s: b.states[s] for s in sorted(b.states, key=_state_order) if b.states[s]},
        files=b.files,
        aliases={a: o for a, o in aliases.items() if a != o},
        meta=_meta(plain, optims, files),
        mesh=Mesh(b.tp, b.ranks // b.tp, b.world, _expert_parallel(optims, files, b)),
        problems=tuple(b.problems),
        unreadable=b.unreadable,
    )


def _state_order(state: str) -> tuple[int, str]:
    known = ("weights", "fp32", "exp_avg", "exp_avg_sq")
    return (known.index(state) if state in known else len(known) + (state == "step"), state)


def _update(shards: Shards, more: Shards) -> None:
    for state, names in more.items():
        known = shards.setdefault(state, {})
        for name, by_rank in names.items():
            known.setdefault(name, {}).update(by_rank)


# -- the mesh


def _stages(b: Building, source: Source, files: RankFiles) -> dict[int, Stage]:
    """Every model-parallel rank's model states that can be read, by mp rank. Raises if none can."""
    paths = {mp: p for (dp, mp), p in files.zero_model.items() if dp == 0} if files.zero_model else dict(files.model)
    found: dict[int, tuple[TorchFile, dict[Any, Any]]] = {}
    errors = []
    for mp, path in sorted(paths.items()):
        try:
            file = b.file(path)
            found[mp] = file, table(file, file.root)
        except LazyckptError as e:
            errors.append(e)
            b.lost[mp] = path
            b.tell(f"{path} cannot be read, what its model-parallel rank holds is lost: {e}")
    if not found:
        if errors:
            raise errors[0]
        raise MissingFileError(
            f"{source.where}/{files.folder}: the model states of rank 0 are missing; they name the parameters, nothing "
            "can be told without them"
        )
    count, tp = _degrees(found[min(found)][1], files, found)
    b.ranks, b.tp = count, tp
    known = paths[min(found)]
    for mp in range(count):
        if mp not in paths:
            b.lost[mp] = re.sub(r"mp_rank_\d+_model", f"mp_rank_{mp:02d}_model", known)
            b.tell(f"{b.lost[mp]} is missing: what model-parallel rank {mp} of {count} holds is lost")
    for mp in sorted(set(found) - set(range(count))):
        b.tell(f"{paths[mp]} belongs to model-parallel rank {mp}, but {count} wrote this: left over, not used")
    stages = {}
    for mp, (file, model) in found.items():
        if mp < count:
            shapes = model.get("param_shapes")
            groups = [shapes_of(file, g) for g in shapes] if isinstance(shapes, list) else []
            stages[mp] = Stage(Rank(tp=mp % tp, pp=mp // tp), file, model, groups)
    return stages


def _degrees(model: Mapping[Any, Any], files: RankFiles, found: Mapping[int, Any]) -> tuple[int, int]:
    """(model-parallel ranks, tensor-parallel ranks among them): as the model states say, else as the files show."""
    count = model.get("mp_world_size")
    if type(count) is not int or count < 1:
        count = 1 + max(found)
    degrees = model.get("checkpoint_parallel_dimensions")
    said = degrees.get("tp_degree") if isinstance(degrees, dict) else None
    if type(said) is int and said > 0 and count % said == 0:
        tp = said
    else:
        tp = 1 + max(t for _, t in files.layers) if files.layers else count
    return count, tp if count % tp == 0 else count


def _world(model: Mapping[Any, Any], files: RankFiles) -> int:
    """The data-parallel degree: as the model states say, else as many as there are files."""
    world = model.get("dp_world_size")
    if type(world) is int and 0 < world <= 1 << 20:
        return world
    return 1 + max([dp for dp, _ in files.optim] + [dp for dp, _ in files.zero_model] + [0])


def _expert_parallel(optims: Mapping[int, OptimFiles], files: RankFiles, b: Building) -> int:
    for optim in optims.values():
        for rank in optim.values():
            counts = rank.state.get("partition_count") if isinstance(rank, Optim) else None
            if isinstance(counts, list) and counts and all(type(c) is int and c > 0 for c in counts):
                return max(1, b.world // int(min(counts)))
    return 1 + max([ep for ep, _ in files.expert_optim] + [0])


def _rules(source: Source, stages: Mapping[int, Stage]) -> tuple[RuleSource, ...]:
    model = stages[min(stages)].model
    buffers = {n for s in stages.values() for n in buffer_names(s.model)}
    args = model.get("args")
    gated = getattr(args, "swiglu", None)
    family = family_rules(gated if isinstance(gated, bool) else None)
    info = model.get("universal_checkpoint_info")
    own = (universal_rules(info, family),) if isinstance(info, dict) and info else ()
    return (user_rules(source.rules), RuleSource(lambda name: _BUFFER if name in buffers else None), *own, family)


def _first_stages(stages: Mapping[int, Stage]) -> dict[str, int]:
    """Names that pipeline stages list -> the first stage that does."""
    first: dict[str, int] = {}
    for _, stage in sorted(stages.items()):
        for name in (*buffer_names(stage.model), *(n for group in stage.groups for n in group)):
            first.setdefault(name, stage.rank.pp)
    return first


# -- states that are not flat


def _plain_optimizers(
    b: Building, files: RankFiles, stages: Mapping[int, Stage], pipeline: bool, aliases: Mapping[str, str]
) -> None:
    """ZeRO-0: a torch optimizer in the model states, or (with experts) in files of every expert-parallel rank."""
    shards: Shards = {}
    by_stage = {mp: n for t in range(b.tp) for mp, n in _pipeline_names(b, stages, t).items()} if pipeline else {}
    for mp, stage in stages.items():
        if stage.model.get("optimizer") is None and not files.expert_optim:
            continue
        if pipeline:
            names = by_stage.get(mp, {})
        else:
            own = tensors_in(stage.file, stage.model.get("module"))
            skip = buffer_names(stage.model) | aliases.keys()
            names = {n: t.shape for n, t in own.items() if n not in skip}
        if files.expert_optim:
            _expert_optimizers(b, files, stage, names, shards)
        else:
            where = f"optimizer of rank {mp}"
            _update(shards, optimizer_shards(b, stage.file, stage.model.get("optimizer"), names, stage.rank, where))
    b.add(shards)


def _expert_optimizers(b: Building, files: RankFiles, stage: Stage, names: dict[str, Shape], shards: Shards) -> None:
    weights = b.states.get("weights", {})
    experts = {n: s.shape for n, s in weights.items() if ".deepspeed_experts." in n}
    degree = 1 + max(ep for ep, _ in files.expert_optim)
    for (ep, mp), path in files.expert_optim.items():
        if mp != stage.rank.pp * b.tp + stage.rank.tp:
            continue
        try:
            file = b.file(path)
            optimizer = table(file, table(file, file.root).get("optimizer"))
        except LazyckptError as e:
            b.tell(f"{path} cannot be read, the optimizer states in it are lost: {e}")
            continue
        all_names = _with_experts(names, experts, degree, ep)
        more = optimizer_shards(b, file, optimizer, all_names, stage.rank._replace(ep=ep), f"optimizer of {path}")
        for state, tensors in more.items():
            known = shards.setdefault(state, {})
            for name, by_rank in tensors.items():
                known.setdefault(name, by_rank)


def _with_experts(names: dict[str, Shape], experts: dict[str, Shape], degree: int, ep: int) -> dict[str, Shape]:
    """The parameters of one expert-parallel rank, in the module's order: experts stand behind their layer's gate."""
    per_layer: dict[str, list[str]] = {}
    for name in experts:
        per_layer.setdefault(name.split(".deepspeed_experts.")[0], []).append(name)
    mine: dict[str, dict[str, Shape]] = {}
    for layer, members in per_layer.items():
        ids = sorted({int(n.split(".deepspeed_experts.")[1].split(".")[0]) for n in members})
        share = len(ids) // degree
        wanted = ids[ep * share : (ep + 1) * share]
        mine[layer] = {
            n: experts[n] for i in wanted for n in members if n.startswith(f"{layer}.deepspeed_experts.{i}.")
        }
    ordered: dict[str, Shape] = {}
    for name, shape in names.items():
        ordered[name] = shape
        gate = f"{name.rsplit('.gate.', 1)[0]}.experts" if ".deepspeed_moe.gate." in name else ""
        ordered.update(mine.pop(gate, {}))
    for rest in mine.values():
        ordered.update(rest)
    return ordered


def _pipeline_names(b: Building, stages: Mapping[int, Stage], tp: int) -> dict[int, Shapes]:
    """The parameters of every pipeline stage, by mp rank: nothing lists them, but every stage has a run of layers."""
    ranks = [mp for mp, s in sorted(stages.items()) if s.rank.tp == tp]
    buffers = {n for s in stages.values() for n in buffer_names(s.model)}
    shared_layers = set(b.layer_of_tie.values())
    layers = [
        {n: s for n, s in b.layers[idx].get(tp, {}).items() if n not in buffers}
        for idx in sorted(b.layers)
        if idx not in shared_layers
    ]
    shared = {n: s for idx in shared_layers for n, s in b.layers[idx].get(tp, {}).items() if n not in buffers}
    found = stage_names([stages[mp].model.get("optimizer") for mp in ranks], layers, shared)
    return dict(zip(ranks, found, strict=True)) if found else {}


# -- the rest


def _aliases(model: Mapping[Any, Any], module: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Tied names -> owners: as shared_params says, and where two names of the module are the same memory."""
    shared = model.get("shared_params")
    aliases = {a: o for a, o in shared.items() if isinstance(o, str)} if isinstance(shared, dict) else {}
    for alias, owner in ties(module).items():
        if alias not in aliases and owner not in aliases:
            aliases[alias] = owner
    return aliases


def _complete(b: Building, sharded: bool, trained: set[str]) -> None:
    """fp32 is a whole state dict: what has no master copy (buffers, frozen parameters) stands there as it is stored.
    ZeRO-3 stores no weights but those: they are in fp32 only."""
    weights = b.states.get("weights", {})
    if sharded:
        b.states.pop("weights", None)
    if sharded or b.states.get("fp32"):
        masters = b.states.setdefault("fp32", {})
        for name, spec in weights.items():
            if name not in trained:
                masters.setdefault(name, spec)


def _zero_stage(model: Mapping[Any, Any], optims: Mapping[int, OptimFiles]) -> int:
    for optim in optims.values():
        for rank in optim.values():
            if isinstance(rank, Optim):
                stage: Any = rank.state.get("zero_stage", 1)  # BF16_Optimizer does not say it: it is a ZeRO-1
                value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
                if type(value) is int:
                    return value
    if not optims:
        return 0
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    number = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return int(number) if type(number) is int else 0


def _flag(model: Mapping[Any, Any], key: str) -> bool:
    config = model.get("ds_config")
    return isinstance(config, dict) and config.get(key) is True


def _name(file: TorchFile) -> str:
    return file.path.rsplit("/", 1)[-1]


def _meta(plain: Plain, optims: Mapping[int, OptimFiles], files: RankFiles) -> dict[str, Any]:
    meta = dict(plain.rest) if isinstance(plain.rest, dict) else {}
    ranks = [r for optim in optims.values() for r in optim.values() if isinstance(r, Optim)]
    if ranks:
        file = ranks[0].file
        meta["optimizer"] = Plain(file.root, file.path, file.pickle_size, f"{_name(file)}/").rest
    meta["tag"] = files.folder
    if "global_steps" in meta:
        meta.setdefault("step", meta["global_steps"])
    return meta
