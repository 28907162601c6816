"""Rank files that are missing, and rank files that are left over from another, larger save.

A save over an older one with the same tag leaves behind the files of ranks that no longer exist; a copy may lack some.
The model states determine the files that should exist: dp_world_size, mp_world_size, the layers and experts in
param_shapes and num_experts. In the index, a `Hole` that names the file replaces lost data.

Sources: runtime/engine.py `_common_checkpoint_state`, `_save_moe_checkpoint`; runtime/pipe/module.py `ckpt_layer_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

from ...core.box import Shape
from ...core.dtypes import F32
from ...core.extents import Hole
from ...core.placement import Rank
from ...core.specs import Fragment, TensorSpec
from ...errors import LazyckptError, Problem, some
from ...io.containers.pickle.records import short
from ..shared.rank_shards import Shard, Shards, missing
from .autoep import layer_of
from .building import Building, Shapes, table, tensors_in
from .files import RankFiles
from .plainopt import numbered_groups
from .weights import expert_in

K = TypeVar("K")


def set_aside(b: Building, files: RankFiles, count: int, model: Mapping[Any, Any]) -> None:
    """Report the files of ranks and experts that this save did not have, and remove them from ``files``. ``count``:
    number of model-parallel ranks; ``model``: the model states of one of them."""
    experts = num_experts(model, files)
    if not experts and model.get("num_experts"):
        line = f"num_experts is {short(model['num_experts'])}, which cannot be right: lost experts are not reported"
        b.report(Problem("inconsistent-metadata", line))
    if files.optim and numbered_groups(model.get("optimizer")):  # with a plain optimizer, ZeRO writes no files
        files.left_over += files.optim.values()
        files.optim.clear()
    for path in files.left_over:
        line = f"{path} is of another save under this tag, older than the files that are read here: left over, not used"
        b.report(Problem("left-over-file", line, path))
    for group in (files.optim, files.zero_model):
        _drop(b, group, lambda k: k[0] >= b.world, lambda k: f"rank {k[0]}", f"{b.world} ranks")
        _drop(b, group, lambda k: k[1] >= count, lambda k: f"model-parallel rank {k[1]}", str(count))
    _drop(b, files.layers, lambda k: k[1] >= b.tp, lambda k: f"tensor-parallel rank {k[1]}", str(b.tp))
    _drop(b, files.experts, lambda k: k[2] >= count, lambda k: f"model-parallel rank {k[2]}", str(count))
    _drop(
        b, files.expert_optim, lambda k: k[0] >= b.world, lambda k: f"expert-parallel rank {k[0]}", f"{b.world} ranks"
    )
    _drop(b, files.expert_optim, lambda k: k[1] >= count, lambda k: f"model-parallel rank {k[1]}", str(count))
    expert_parallel = 1 + max((ep for ep, _ in files.expert_optim), default=-1)
    for ep in range(expert_parallel):
        for mp in range(count):
            # AutoEP with AutoTP: expert-parallel ranks are consecutive global ranks (see `autoep`)
            spread = b.placements and b.tp > 1
            if spread and all((dp * b.tp + mp) % expert_parallel != ep for dp in range(b.world)):
                continue
            if (ep, mp) not in files.expert_optim:
                path = f"{files.folder}/expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt".lstrip("/")
                b.report(Problem("missing-file", f"{path} is missing: the optimizer states in it are lost", path))
    for key, path in list(files.experts.items()) if experts else ():
        if key[0] >= len(experts) or key[1] >= experts[key[0]]:
            line = f"{path} is of an expert that this model does not have (num_experts {experts}): left over, not used"
            b.report(Problem("left-over-file", line, path))
            del files.experts[key]


def _drop(b: Building, group: dict[K, str], over: Any, what: Any, of: str) -> None:
    for key, path in list(group.items()):
        if over(key):
            line = f"{path} belongs to {what(key)}, but {of} wrote this: left over, not used"
            b.report(Problem("left-over-file", line, path))
            del group[key]


def num_experts(model: Mapping[Any, Any], files: RankFiles) -> list[int]:
    """Return the number of experts of each layer; [] if it is not recorded, or implausible."""
    counts = model.get("num_experts")
    if isinstance(counts, list) and all(type(n) is int and n > 0 for n in counts):
        return counts if sum(counts) <= 4096 + 64 * len(files.experts) else []
    return []


def with_lost_layers(
    b: Building, files: RankFiles, trained: Iterable[tuple[Rank, Shapes]], buffers: Iterable[str], shards: Shards
) -> Shards:
    """Add holes to the weights for layers that param_shapes lists but that no readable file holds. Report these, and
    layers that param_shapes does not list. ``trained``: the parameters of every model-parallel rank. Of tensors that
    are not trained, only the names of buffers are known: only the lost file names frozen parameters."""
    weights = shards["weights"]
    listed: set[str] = set()
    lost: dict[tuple[int, int], str] = {}
    dtype = next((t.dtype for by_rank in weights.values() for t in by_rank.values()), None)
    for rank, shapes in trained:
        for name, shape in shapes.items():
            head = name.split(".", 1)[0]
            listed.add(head)
            if rank.tp in weights.get(name, ()) or dtype is None:
                continue
            if head.isdecimal() and head.isascii() and len(head) < 8:
                hole = _lost_layer(b, files, int(head), rank.tp)
                lost[int(head), rank.tp] = hole.path
            else:
                hole = _lost_shared(b, files, weights, rank.tp)
            weights.setdefault(name, {})[rank.tp] = missing(hole, shape, dtype, rank)
    for idx, tp in lost:  # other tensor-parallel ranks have the tensors that are not trained
        for name, by_rank in weights.items():
            if name.startswith(f"{idx}.") and tp not in by_rank:
                first = by_rank[min(by_rank)]
                hole = _lost_layer(b, files, idx, tp)
                by_rank[tp] = missing(hole, first.shape, first.dtype, Rank(tp=tp))
    paths = {str(idx): path for (idx, _), path in lost.items()}
    for name in buffers:
        if name not in weights and (head := name.split(".", 1)[0]) in paths:
            b.unreadable[name] = f"{name!r}: {paths[head]} is missing, or cannot be read"
    _report_extra_layers(b, files, listed, weights)
    return shards


def _lost_shared(b: Building, files: RankFiles, weights: Mapping[str, Any], tp: int) -> Hole:
    """Return the hole for a module that several layers share: no file records which of the lost files held it."""
    read = {name.split(".", 1)[0] for name, by_rank in weights.items() if tp in by_rank}
    paths = [p for (idx, t), p in files.layers.items() if t == tp and str(idx) not in read and p not in b.files]
    if not paths:
        numbers = {idx for idx, t in files.layers if t == tp}
        missing = (idx for idx in range(max(numbers, default=0)) if idx not in numbers)
        paths = [_layer_path(files, idx, tp) for idx in islice(missing, 8)]
    hole = Hole(paths[0] if paths else "", f"the file of a module that layers share is lost: one of {some(paths, 8)}")
    b.report(Problem("missing-file", hole.reason, hole.path or None))
    return hole


def _lost_layer(b: Building, files: RankFiles, idx: int, tp: int) -> Hole:
    path = files.layers.get((idx, tp))
    if path is not None:  # its error has been reported
        return Hole(path, f"{path} cannot be read")
    path = _layer_path(files, idx, tp)
    b.report(Problem("missing-file", f"{path} is missing: the weights of layer {idx} cannot be read", path))
    return Hole(path, f"{path} is missing")


def _layer_path(files: RankFiles, idx: int, tp: int) -> str:
    known = next(iter(files.layers.values()), "layer_00-model_states.pt")
    part = f"-model_{tp:02d}" if re.search(r"layer_\d+-model_\d+-", known) else ""
    return f"{files.folder}/layer_{idx:02d}{part}-model_states.pt".lstrip("/")


def _report_extra_layers(b: Building, files: RankFiles, listed: set[str], weights: Mapping[str, Any]) -> None:
    """Report layers after the last trained one: frozen ones, or those of a deeper model. (A layer that reuses a shared
    module has a file, too.)"""
    last = max((int(head) for head in listed if head.isdecimal() and len(head) < 7), default=-1)
    shared = {name.split(".", 2)[2] for name in weights if name.startswith("tied_modules.")}
    for (idx, _), path in files.layers.items():
        own = {name.split(".", 1)[1] for name in weights if name.startswith(f"{idx}.")}
        if idx > last >= 0 and own - shared:
            line = f"{path}: param_shapes ends with layer {last}: its parameters are frozen, or it was left over"
            b.report(Problem("left-over-file", line, path))


def with_lost_experts(b: Building, files: RankFiles, model: Mapping[Any, Any], shards: Shards) -> Shards:
    """Add holes to the weights for experts that num_experts counts but that no file holds, and report them."""
    weights = shards["weights"]
    ranks = sorted({mp for _, _, mp in files.experts})
    for layer, count in enumerate(num_experts(model, files)):
        sibling = next((s for k in files.experts if k[0] == layer if (s := _own(b, k[1], files.experts[k]))), None)
        if sibling and any(layer_of(n.rpartition(".")[0], b.placements) is not None for n in sibling[1]):
            continue  # AutoEP: reported where the stack is read
        for expert in range(count):
            for mp in ranks:
                path = files.experts.get((layer, expert, mp))
                if path is not None and any(expert_in(name) in (None, expert) for name in _shapes(b, path)):
                    continue
                if path is None:
                    path = f"{files.folder}/layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt".lstrip("/")
                    b.report(
                        Problem("missing-file", f"{path} is missing: the weights of its expert cannot be read", path)
                    )
                known, tensors = sibling or (0, {})
                for name, (shape, dtype) in tensors.items():
                    own = name.replace(f".deepspeed_experts.{known}.", f".deepspeed_experts.{expert}.")
                    hole = Hole(path, f"{path} is missing, or cannot be read, or is that of another expert")
                    weights.setdefault(own, {})[mp % b.tp] = missing(hole, shape, dtype)
    return shards


def _own(b: Building, expert: int, path: str) -> tuple[int, dict[str, tuple[Shape, Any]]] | None:
    """Return an expert's number and the tensors in its file; None if it holds none of this expert."""
    found = {name: kind for name, kind in _shapes(b, path).items() if expert_in(name) in (None, expert)}
    return (expert, found) if found else None


def _shapes(b: Building, path: str) -> dict[str, tuple[Shape, Any]]:
    """Return the tensors of an expert's file; {} if it cannot be read (which has been reported)."""
    try:
        file = b.file(path)
        return {n: (t.shape, t.dtype) for n, t in tensors_in(file, table(file, file.root)).items()}
    except LazyckptError:
        return {}


def lost_stages(b: Building, seen: Mapping[str, int]) -> None:
    """Add holes to the optimizer states for pipeline layers whose stage's model states are lost (``b.lost``): nothing
    records the positions of their parameters. ``seen``: names that other stages list -> the first such stage. A later
    stage's copy of a shared module does not replace the lost one: it may be stale."""
    layers = {name.split(".", 1)[0] for name in seen if not name.startswith("tied_modules.")}
    stage = min(mp // b.tp for mp in b.lost)
    hole = Hole(min(b.lost.values()), f"{', '.join(sorted(b.lost.values()))} is lost: it names its stage's parameters")
    for state, specs in b.states.items():
        if state in ("weights", "step"):
            continue
        dtype = next((s.dtype for s in specs.values()), F32)
        for name, spec in b.states.get("weights", {}).items():
            if name.startswith("tied_modules."):
                lost = stage < seen.get(name, stage + 1)
            else:
                lost = name not in specs and name.split(".", 1)[0] not in layers
            if lost:
                specs[name] = TensorSpec(name, spec.shape, dtype, (Fragment(hole, spec.shape),))


def with_lost_states(b: Building, stages: list[Shards]) -> list[Shards]:
    """Add holes to the shards of every pipeline stage for groups for which no rank has a file (``b.gone``), in every
    state that other ranks have."""
    known: dict[str, Shard] = {}
    for shards in stages:
        for state, names in shards.items():
            if state != "weights":
                for by_rank in names.values():
                    for tensor in by_rank.values():
                        known.setdefault(state, tensor)
    for rank, shapes, hole in b.gone:
        for state, like in known.items():
            for name, whole in shapes.items():
                shape = () if state == "step" and like.shape == () else whole
                by_rank = stages[rank.pp].setdefault(state, {}).setdefault(name, {})
                by_rank.setdefault(rank.tp, missing(hole, shape, like.dtype, rank))
    return stages
