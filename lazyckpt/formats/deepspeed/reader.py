"""Build an Index from the rank files of one tag: parallel degrees, kinds of states, and shards that form a tensor.

The layouts differ only in the position of the data: a model-parallel rank's tensors (from a module, from pipeline
layers, from flat partitions) are gathered as shards, stage by stage, and merged over tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.box import Shape
from ...core.index import Index
from ...core.names import natural
from ...core.placement import Mesh, Rank
from ...errors import CorruptError, FormatError, LazyckptError, MissingFileError, Problem, cannot_read, sentences
from ...io.containers.pickle.plain import Plain
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import Opaque
from ...io.containers.torch_file import TorchFile
from ...layouts.autotp import autotp_rules, described_rules, uncut_rules, undescribed_rules, uses_autotp
from ...layouts.families import family_rules
from ...layouts.merge import Source as RuleSource
from ...layouts.merge import replicated, user_rules
from ...layouts.universal import joined
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.rank_shards import Shards, update
from ..torch_save import ties, warnings
from . import universal
from .autoep import placements, router_aliases
from .building import Building, Shapes, Stage, buffer_names, check_ranks, keep_one_save, shapes_of, table, tensors_in
from .files import RankFiles, find_folder
from .mappings import mapped_groups, sizes, spans_by_name, without_gaps
from .partitions import Optim, OptimFiles, Stage3, Stage12, flat_states, optim_files, shard_size, spread_experts
from .pipeline import Layers, layer_shards, local_shapes, read_layers, tied_layers, without_repeats
from .plainopt import named_shapes, numbered_groups
from .present import lost_stages, set_aside, with_lost_experts, with_lost_layers, with_lost_states
from .weights import (
    alike,
    announce_rest,
    compare_writers,
    copies,
    expert_shards,
    module_shards,
    report_fused_attention,
    sharded_rest,
)
from .zenflow import turn_back, uses_zenflow
from .zero0 import optimizer_states, ties_of_plain_optimizers, undecided_optimizers, with_undecided

_BUFFER = (replicated, "buffer_names: buffers are not cut over ranks")


def read(source: Source) -> Index:
    """Index the tag that `find_folder` selects."""
    files = find_folder(source)
    if not files:
        raise FormatError(f"{source.where} holds no rank files of DeepSpeed")
    if files.universal:
        return universal.read(source, files)
    b = Building(source.store)
    _announce(b, files)
    stages = read_stages(b, source, files)
    if files.zero_model:
        announce_rest(b, files, stages.values())
    compare_writers(b, files, stages.values())
    first = stages[min(stages)]
    degree = data_parallel_degree(first.model, files, b.ranks)
    b.world = shard_size(b, files, first, degree) if files.zero_model else degree
    b.sources = merge_rules(source, stages)
    b.placements = placements(first.model)
    set_aside(b, files, b.ranks, first.model)
    plain = Plain(first.file.root, f"{source.where}/{first.file.path}", first.file.pickle_size, _name(first.file) + "/")
    for problem in warnings(first.file.path, first.file, plain):
        b.report(problem)
    module = tensors_in(first.file, first.model.get("module"))
    aliases = _aliases(first.model, module, bool(files.zero_model))
    if b.placements:
        aliases |= router_aliases(first.model, list(module))

    pipeline = bool(files.layers)
    sharded = bool(files.zero_model)
    any_optim = next(iter(files.optim.values()), None)
    optims: dict[int, OptimFiles] = {}
    if any_optim is not None:
        optims = {mp: optim_files(b, files, b.world, mp, any_optim) for mp in stages}
    layers, tied = read_layers(b, files), {}
    if pipeline:
        listed = _listed(stages, optims)
        tied = tied_layers(layers, listed) if listed else ties_of_plain_optimizers(b, stages, layers)
        if listed:
            layers = without_repeats(layers, tied, {name.split(".", 1)[0] for name in listed})
        trained = [(s.rank, g) for s in stages.values() for g in s.groups]
        buffers = {n for s in stages.values() for n in buffer_names(s.model)}
        b.add(with_lost_layers(b, files, trained, buffers, layer_shards(b, layers, tied)))
    if files.experts:
        b.add(with_lost_experts(b, files, first.model, expert_shards(b, files)))
    by_stage: list[Shards] = []
    for pp in range(b.ranks // b.tp):
        here = [s for s in stages.values() if s.rank.pp == pp]
        shards: Shards = {}
        for stage in here:
            mp = stage.rank.pp * b.tp + stage.rank.tp
            if not pipeline:
                update(shards, module_shards(stage.file, stage.model, aliases, stage.rank))
            if any_optim is not None:
                layout = Stage3() if sharded else Stage12(optims[mp])
                data_first = _flag(stage.model, "use_data_before_expert_parallelism")
                groups = stage.groups or _mapped(b, stage, optims[mp], layers, tied)
                states = flat_states(b, groups, optims[mp], layout, stage.rank, data_first)
                update(shards, states if stage.groups else without_gaps(states))
            if sharded:
                update(shards, sharded_rest(b, files, stage.model, stage.file, stage.rank))
        if optims and b.placements and b.tp > 1:
            update(shards, spread_experts(b, here, optims, sharded))
        by_stage.append(shards)
    for shards in with_lost_states(b, by_stage):
        b.add(shards)
    if any_optim is None:
        optimizer_states(b, files, stages, layers, tied, aliases)
        if files.expert_optim:
            aliases |= _tied_copies(b, first, module)
        if sharded:
            line = "there are no optimizer states (*_optim_states.pt): no parameter of a ZeRO-3 model can be read"
            b.report(Problem("missing-optimizer", line))
        elif any(stage.groups for stage in stages.values()):  # ZeRO's optimizers have files of their own
            line = "there are no optimizer states: their files (*_optim_states.pt) are missing"
            b.report(Problem("missing-optimizer", line))
    if pipeline and b.lost:
        lost_stages(b, _first_stages(stages))
    if sharded and b.states.get("fp32"):
        _report_unlisted(b, first, module, aliases)
    bare = _complete(b, sharded, {n for s in stages.values() for g in s.groups for n in g})
    if sharded and uses_zenflow(first.model):
        turn_back(b.states, buffer_names(first.model))
    for path in files.zero_model.values():
        try:
            b.files.setdefault(path, b.info(path))
        except LazyckptError as e:
            b.report(cannot_read(path, e))
    found = {s: b.states[s] for s in sorted(b.states, key=_state_order) if b.states[s]}
    if not found:
        raise CorruptError(
            f"{source.where}/{files.folder}: no parameter can be read from these files, which are probably not of one "
            f"save. {sentences(b.problems, 4)}"
        )
    if b.tp > 1 and hasattr(first.model.get("args"), "num_attention_heads"):
        report_fused_attention(b)
    b.report_unmerged()
    stage_number = 3 if sharded else _zero_stage(first.model, optims)
    undecided = undecided_optimizers(b) if b.unnamed else None
    return Index(
        format=f"deepspeed-zero{stage_number}",
        states=with_undecided(b, found, undecided) if undecided else found,
        files=b.files,
        indexed=b.indexed,
        aliases={a: o for a, o in aliases.items() if a != o},
        meta=_meta(plain, optims, files) | _kinds(stages, bare),
        mesh=Mesh(b.tp, b.ranks // b.tp, degree, _expert_parallel(optims, files, b)),
        problems=tuple(b.problems),
        unreadable=b.unreadable,
        open_problems=undecided.problems if undecided else None,
    )


def _state_order(state: str) -> tuple[int, str]:
    known = ("weights", "fp32", "exp_avg", "exp_avg_sq")
    return (known.index(state) if state in known else len(known) + (state == "step"), state)


def _announce(b: Building, files: RankFiles) -> None:
    """Announce the files of which the whole index is read."""
    first = min(files.zero_model, default=None)
    announce(b.store, files.model.values() if first is None else [files.zero_model[first]])
    ranks = sorted(files.optim, key=lambda key: key[::-1])
    announce(b.store, [files.optim[key] for key in ranks])
    announce(b.store, [path for _, path in sorted(files.layers.items())])
    announce(b.store, [*files.experts.values(), *files.expert_optim.values()])


# -- the mesh


def read_stages(b: Building, source: Source, files: RankFiles) -> dict[int, Stage]:
    """Read every model-parallel rank's model states, by mp rank, except unreadable ones. Raises if none can be read.
    (With ZeRO-3 every data-parallel rank's model states name the same parameters: the lowest readable rank's are
    used.)"""
    keep_one_save(b, files)
    copies: dict[int, list[str]] = {mp: [path, *files.copies.get(path, ())] for mp, path in files.model.items()}
    for (_, mp), path in sorted(files.zero_model.items()):
        copies.setdefault(mp, []).append(path)
    paths = {mp: same[0] for mp, same in sorted(copies.items())}
    found: dict[int, tuple[TorchFile, dict[Any, Any]]] = {}
    errors = []
    for mp in paths:
        for path in copies[mp]:
            try:
                file = b.file(path)
                found[mp] = file, table(file, file.root)
                break
            except LazyckptError as e:
                errors.append(e)
                b.report(cannot_read(path, e))
        else:
            b.lost[mp] = paths[mp]
            line = f"{paths[mp]} cannot be read, what model-parallel rank {mp} holds is lost"
            b.report(Problem("unreadable-file", line, paths[mp]))
    if not found:
        if errors:
            raise errors[0]
        raise MissingFileError(
            f"{source.where}/{files.folder}: the model states are missing; they name the parameters, nothing can be "
            "read without them"
        )
    if files.zero_model and files.zero_model.get((0, 0)) != found[min(found)][0].path:
        line = "the model states of rank 0 are lost: other ranks' are read, which do not list all tied names"
        b.report(Problem("missing-file", line))
    count, tp = degrees(found[min(found)][1], files, found)
    b.ranks, b.tp = count, tp
    known = paths[min(found)]
    for mp in range(count):
        if mp not in paths:
            b.lost[mp] = re.sub(r"mp_rank_\d+_model", f"mp_rank_{mp:02d}_model", known)
            line = f"{b.lost[mp]} is missing: what model-parallel rank {mp} of {count} holds is lost"
            b.report(Problem("missing-file", line, b.lost[mp]))
    for mp in sorted(set(found) - set(range(count))):
        line = f"{paths[mp]} belongs to model-parallel rank {mp}, but {count} wrote this: left over, not used"
        b.report(Problem("left-over-file", line, paths[mp]))
    stages = {}
    for mp, (file, model) in found.items():
        if mp < count:
            shapes = model.get("param_shapes")
            groups = [shapes_of(file, g) for g in shapes] if isinstance(shapes, list) else []
            stages[mp] = Stage(Rank(tp=mp % tp, pp=mp // tp), file, model, groups)
    return stages


def degrees(model: Mapping[Any, Any], files: RankFiles, found: Mapping[int, Any]) -> tuple[int, int]:
    """Return (number of model-parallel ranks, tensor-parallel ranks among them), from the model states or the files."""
    count = model.get("mp_world_size")
    if type(count) is not int or count < 1:
        count = 1 + max(found)
    check_ranks(count, "model-parallel ranks", len(files.model) + len(files.zero_model), files.folder)
    known = model.get("checkpoint_parallel_dimensions")
    degree = known.get("tp_degree") if isinstance(known, dict) else None
    if type(degree) is int and degree > 0 and count % degree == 0:
        tp = degree
    else:
        tp = 1 + max(t for _, t in files.layers) if files.layers else count
    return count, tp if count % tp == 0 else count


def data_parallel_degree(model: Mapping[Any, Any], files: RankFiles, count: int) -> int:
    """Return the data-parallel degree, from the model states or the ranks in file names. ``count``: number of
    model-parallel ranks. Raises CorruptError if the product is implausible."""
    world = model.get("dp_world_size")
    if type(world) is not int or world < 1:
        world = 1 + max([dp for dp, _ in files.optim] + [dp for dp, _ in files.zero_model] + [0])
    check_ranks(world * count, "ranks", len(files.model) + len(files.zero_model) + len(files.optim), files.folder)
    return world


def _expert_parallel(optims: Mapping[int, OptimFiles], files: RankFiles, b: Building) -> int:
    if b.placements:
        return max(map(len, b.placements.values()))
    for optim in optims.values():
        for rank in optim.values():
            counts = rank.state.get("partition_count") if isinstance(rank, Optim) else None
            if isinstance(counts, list) and counts and all(type(c) is int and c > 0 for c in counts):
                return max(1, b.world // int(min(counts)))
    return max([1 + ep for ep, _ in files.expert_optim] + [1])


def merge_rules(source: Source, stages: Mapping[int, Stage]) -> tuple[RuleSource, ...]:
    """Return the sources of merge rules, in order of precedence: the user, the buffers' names,
    universal_checkpoint_info, AutoTP, the model family."""
    first = stages[min(stages)]
    model = first.model
    buffers = {n for s in stages.values() for n in buffer_names(s.model)}
    args = model.get("args")
    gated = getattr(args, "swiglu", None)
    family = family_rules(gated if isinstance(gated, bool) else None)
    known = joined([stage.model.get("universal_checkpoint_info") for stage in stages.values()])
    config = model.get("ds_config")
    shapes = {n: t.shape for n, t in tensors_in(first.file, model.get("module")).items()}
    shapes |= {n: s for group in first.groups for n, s in group.items()}
    own: tuple[RuleSource, ...] = ()
    if known:
        own = described_rules(known, config, shapes, family)
    elif uses_autotp(config):
        own = (uncut_rules() if alike(stages) else autotp_rules(known, config, shapes, family),)
    elif args is None:
        own = (undescribed_rules(shapes),)
    return (user_rules(source.rules), RuleSource(lambda name: _BUFFER if name in buffers else None), *own, family)


def _first_stages(stages: Mapping[int, Stage]) -> dict[str, int]:
    """Return the names that pipeline stages list -> the first stage that lists them."""
    first: dict[str, int] = {}
    for _, stage in sorted(stages.items()):
        for name in (*buffer_names(stage.model), *(n for group in stage.groups for n in group)):
            first.setdefault(name, stage.rank.pp)
    return first


# -- pipelines


def _listed(stages: Mapping[int, Stage], optims: Mapping[int, OptimFiles]) -> dict[str, Shape | int]:
    """Return the trained parameters that some file lists by name -> their shape, or their number of elements."""
    listed: dict[str, Shape | int] = {n: s for stage in stages.values() for g in stage.groups for n, s in g.items()}
    if not listed:
        listed = {n: s for optim in optims.values() for n, s in sizes(spans_by_name(optim)).items()}
    if not listed:
        optimizers = [numbered_groups(stage.model.get("optimizer")) for stage in stages.values()]
        listed = {n: s for groups in optimizers for n, s in named_shapes(groups).items()}
    return listed


def _mapped(b: Building, stage: Stage, optim: OptimFiles, layers: Layers, tied: Mapping[int, str]) -> list[Shapes]:
    """Return the flat groups of a stage whose model states do not list them."""
    shapes: Shapes = {}
    for idx in layers:
        shapes.update(local_shapes(layers, idx, stage.rank.tp, tied.get(idx, str(idx)), set()))
    return mapped_groups(b, optim, shapes, stage.file.path)


# -- the rest


def _aliases(model: Mapping[Any, Any], module: Mapping[str, StoredTensor], sharded: bool) -> dict[str, str]:
    """Return tied names -> owners, from shared_params and from names of the module that share memory.

    engine.py `_get_shared_params` compares addresses, and ties all parameters without elements together; with
    exclude_frozen_parameters, a frozen owner is not in the module, but its aliases are."""
    shared = model.get("shared_params")
    aliases = {a: o for a, o in shared.items() if isinstance(o, str)} if isinstance(shared, dict) else {}
    empty = {n for n, t in module.items() if 0 in t.shape and not sharded}
    aliases = {a: o for a, o in aliases.items() if a not in empty and (o in module or a not in module)}
    for alias, owner in ties(module).items():
        if alias not in aliases and owner not in aliases:
            aliases[alias] = owner
    return aliases


def _report_unlisted(b: Building, first: Stage, module: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> None:
    """Report parameters that no file holds. ZeRO-3's `_get_shared_params` walks `named_children`, which lists a module
    once: if one parent has it under two names, no file ties the second names of its parameters to the first ones."""
    known = {*aliases, *table(first.file, first.model.get("shared_params"))}
    known = known.union(*b.states.values(), buffer_names(first.model))
    lost = {n for group in first.groups for n in group} - known
    if lost:
        reason = f"trained according to {first.file.path}, but in no optimizer file: probably files not of one save"
        line = f"{len(lost):,} parameters cannot be read, such as {min(lost)!r}: {reason}"
        b.report(Problem("missing-tensor", line, min(lost)))
        b.unreadable.update({name: f"{name!r}: {reason}" for name in lost})
    for name, t in module.items():
        if name in lost:
            continue
        if t.shape == (0,) and name not in known:
            b.unreadable[name] = (
                f"{name!r}: {first.file.path} lists it, and no file holds a tensor of that name. It is likely another "
                "name of a parameter here: ZeRO-3 saves only one name of a module that one parent has twice"
            )
            b.report(Problem("missing-tensor", b.unreadable[name], name))


def _tied_copies(b: Building, first: Stage, module: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return tied names -> owners for weights saved as `copies`; the owners' weights are then read for both."""
    trained = {n for state, specs in b.states.items() if state != "weights" for n in specs}
    aliases = copies(first.file, {n: t for n, t in module.items() if n not in buffer_names(first.model)}, trained)
    for alias in aliases:
        b.states["weights"].pop(alias, None)
    return aliases


def _complete(b: Building, sharded: bool, trained: set[str]) -> list[str]:
    """Complete fp32 to a whole state dict: add tensors without a master copy (buffers, frozen parameters) as stored,
    and return their names. ZeRO-3 stores no other weights: there they are in fp32 only."""
    weights = b.states.get("weights", {})
    if sharded:
        b.states.pop("weights", None)
    if not sharded and not b.states.get("fp32"):
        return []
    masters = b.states.setdefault("fp32", {})
    # a master known only by its number may be any parameter of its shape
    unnamed = {s.shape for n, s in masters.items() if n not in weights and n not in trained and not sharded}
    bare = [n for n, s in weights.items() if n not in trained and n not in masters and s.shape not in unnamed]
    masters.update((name, weights[name]) for name in bare)
    return bare


def _kinds(stages: Mapping[int, Stage], bare: list[str]) -> dict[str, list[str]]:
    """Return the entries of `meta` that list the buffers and the parameters that were not trained, of all ranks."""
    buffers = sorted({n for s in stages.values() for n in buffer_names(s.model)}, key=natural)
    frozen = {n: None for s in stages.values() for n in shapes_of(s.file, s.model.get("frozen_param_shapes"))}
    frozen |= {n: None for n in bare if n not in buffers}
    return {"buffer_names": buffers, "frozen_parameters": list(frozen)}


def _zero_stage(model: Mapping[Any, Any], optims: Mapping[int, OptimFiles]) -> int:
    for optim in optims.values():
        for rank in optim.values():
            if isinstance(rank, Optim):
                stage: Any = rank.state.get("zero_stage", 1)  # BF16_Optimizer does not save it, and counts as 1
                value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
                if type(value) is int and value in (1, 2, 3):
                    return value
    if not optims:
        return 0
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    number = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return number if type(number) is int and number in (1, 2, 3) else 0


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


def _recognises(source: Source) -> bool:
    return not source.path and find_folder(source, strict=False) is not None


READER = Reader("deepspeed", "DeepSpeed folders (a tag, or the folder with `latest`)", _recognises, read, tags=True)
