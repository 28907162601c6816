"""Layer-wise optimizers (Muon and others), whose data-parallel ranks each keep the states of some whole parameters.

Writer: megatron-core 0.16 and 0.17 optimizer/layer_wise_optimizer.py `LayerWiseDistributedOptimizer`: `shard_params`
sorts the parameters of all groups by size and deals them to the data-parallel ranks, to and fro;
`save_state_dict_to_file` writes ``layer_wise_optimizer_{dp}.pt`` into the folder of the model-parallel rank
(Megatron-LM megatron/training/checkpointing.py, with optimizers that are called ``dist_...``). Which parameters belong
to which group: optimizer/muon.py `get_megatron_muon_optimizer`. Later versions deal them by the buffers of the
gradients, and are called otherwise: of those, nothing is assumed.

No name is saved. The parameters of every rank are computed as the writer does it, and all shapes have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...core.box import Shape
from ...errors import LazyckptError, Problem, cannot_read, some
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.limits import check_ranks
from ...io.storage.base import Store
from ...layouts.megatron import is_buffer, is_expert, number
from ...layouts.tables import pattern
from ..shared.announce import announce
from .gather import Gathered
from .optimizer import groups_of, masters_of, parts_of, wanted_shapes
from .ranks import RankFile
from .weights import Attributes, Namer, add_state

_Rows = list[list[list[str]]]  # optimizer -> group -> names


@dataclass(slots=True)
class _File:
    """A data-parallel rank's file, its optimizers, and the model-parallel rank whose folder it is in."""

    dp: int
    owner: RankFile
    file: TorchFile
    parts: list[dict[Any, Any]]


def add_layerwise(g: Gathered, namer: Namer, store: Store, attributes: Attributes) -> None:
    """Add the states in the files of layer-wise optimizers."""
    stages: dict[tuple[int, int], list[RankFile]] = {}
    for (tp, pp, _), rank in g.grid.ranks.items():
        if rank.folder.layers:
            stages.setdefault((tp, pp), []).append(rank)
    announce(store, [path for ranks in stages.values() for rank in ranks for path in rank.folder.layers.values()])
    pickles = Pickles()
    for ranks in stages.values():
        files = []
        for rank in ranks:
            for dp, path in rank.folder.layers.items():
                try:
                    file = read_torch_file(store, path, pickles)
                except LazyckptError as e:
                    g.grid.report(cannot_read(path, e, ", the optimizer's states in it are lost"))
                    continue
                g.grid.files[path] = file.info
                g.grid.indexed.keep(file)
                files.append(_File(dp, rank, file, parts_of(file.root)))
        _add(g, namer, ranks, files, attributes)


def _add(g: Gathered, namer: Namer, ranks: list[RankFile], files: list[_File], attributes: Attributes) -> None:
    known = number(g.grid.args, "data_parallel_size")
    there = {dp for rank in ranks for dp in rank.folder.layers}
    count = known or 1 + max(there)
    where = ranks[0].folder.model.rpartition("/")[0]
    check_ranks(f"{where}: args.data_parallel_size", count, len(there))
    missing = [f"layer_wise_optimizer_{dp}.pt" for dp in range(count) if dp not in there]
    if missing:
        line = (
            f"{where}: {len(missing)} of {count} files of its optimizer are missing ({some(missing)}): states are lost"
        )
        g.grid.report(Problem("missing-file", line, f"{where}/{missing[0]}"))
    try:
        _assign(g, namer, files, count, attributes)
    except ValueError as e:
        line = f"{where}: which parameter is which in layer_wise_optimizer_*.pt is not known: {e}: see view.stored"
        g.grid.report(Problem("undecided-name", line, where))


def _assign(g: Gathered, namer: Namer, files: list[_File], count: int, attributes: Attributes) -> None:
    """Add the states of one stage. Raises ValueError if the parameters cannot be told."""
    d = g.grid.degrees
    if count > 1:
        name = getattr(g.grid.args, "optimizer", None)
        if not isinstance(name, str) or not name.startswith("dist_"):
            raise ValueError(f"args.optimizer = {name!r:.40} is not of a version that is known to deal them by size")
        if (number(g.grid.args, "context_parallel_size") or 1) > 1:
            raise ValueError("several context-parallel ranks wrote the same files")
        if d.ep > 1 and (d.etp != d.tp or count % d.ep):
            raise ValueError(f"experts are cut otherwise than the rest (etp={d.etp}, tp={d.tp}, ep={d.ep})")
    todo = []
    for one in files:
        if one.dp >= count or (d.ep > 1 and one.dp % d.ep != one.owner.rank.ep):
            raise ValueError(f"{one.file.path} is not of a data-parallel rank of {count} in this folder")
        table = _parameters(namer, one.owner)
        shapes = {key: tensor.shape for key, (tensor, _) in table.items()}
        found = _dealt(_grouped(one.parts, shapes), one, shapes, count, d.ep)
        _check(one, found, shapes)
        todo.append((one, found, table))
    for one, found, table in todo:
        holder = replace(one.owner, file=one.file)
        experts = namer.local_experts(one.owner.chunks[0])
        for part, rows in zip(one.parts, found, strict=True):
            states, masters = _states(part), masters_of(part)
            for n, (group, names) in enumerate(zip(groups_of(part), rows, strict=True)):
                mains = masters[n] if masters is not None else []
                for k, (key, number_) in enumerate(zip(names, group["params"], strict=True)):
                    name = table[key][1]
                    own = states.get(number_)
                    held = (
                        {s: t for s, t in own.items() if isinstance(t, StoredTensor)} if isinstance(own, dict) else {}
                    )
                    if len(mains) == len(names) and isinstance(mains[k], StoredTensor):
                        held["fp32"] = mains[k]
                        if isinstance(mains[k].state, dict):
                            attributes.setdefault(name, mains[k].state)
                    for state, value in held.items():
                        add_state(g, holder, state, name, value, experts)


def _parameters(namer: Namer, rank: RankFile) -> dict[str, tuple[StoredTensor, str]]:
    """Return the parameters of a rank in the model's order: a name that is unique among chunks -> (tensor, name in the
    model)."""
    return {
        f"{chunk}.{own}": (tensors[own], name)
        for chunk, tensors in enumerate(rank.chunks)
        for own, name in namer.names(rank, chunk)
        if not is_buffer(own)
    }


def _grouped(parts: Sequence[Mapping[Any, Any]], shapes: Mapping[str, Shape]) -> _Rows:
    """Return the names in every group before parameters are dealt to ranks. Raises ValueError if a parameter has no
    group, or more than one."""
    groups = [
        (n, k, len(parts) > 1 and n == 0, group.get("wd_mult", 1.0) != 0.0, group.get("is_expert_parallel") is True)
        for n, part in enumerate(parts)
        for k, group in enumerate(groups_of(part))
    ]
    rows: _Rows = [[[] for _ in groups_of(part)] for part in parts]
    separate = any(expert for *_, expert in groups)
    for key, shape in shapes.items():
        matrix = len(shape) == 2 and not pattern("model.vocabulary").search(key)
        decays = len(shape) > 1 and not key.endswith(".bias")
        fitting = [
            (n, k)
            for n, k, first, decay, expert in groups
            if decay == decays and (len(parts) == 1 or first == matrix) and (not separate or expert == is_expert(key))
        ]
        if len(fitting) != 1:
            raise ValueError(f"{len(fitting)} groups may have {key.partition('.')[2]!r}")
        n, k = fitting[0]
        rows[n][k].append(key)
    return rows


def _dealt(rows: _Rows, one: _File, shapes: Mapping[str, Shape], count: int, ep: int) -> _Rows:
    """Return the names in the groups of one data-parallel rank (`shard_params`)."""
    if count == 1:
        return rows
    groups = [(n, k, groups_of(one.parts[n])[k]) for n, part in enumerate(rows) for k in range(len(part))]
    every = [(key, n, k, group.get("is_expert_parallel") is True) for n, k, group in groups for key in rows[n][k]]
    every.sort(key=lambda item: prod(shapes[item[0]]))
    found: _Rows = [[[] for _ in part] for part in rows]
    at = {False: 0, True: 0}
    for key, n, k, expert in every:
        size = count // ep if expert else count
        turn = at[expert] % (2 * size)
        if min(turn, 2 * size - 1 - turn) == (one.dp // ep if expert else one.dp):
            found[n][k].append(key)
        at[expert] += 1
    return found


def _check(one: _File, found: _Rows, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError if a file's states do not have the shapes of the parameters that it should have."""
    for part, rows in zip(one.parts, found, strict=True):
        states, masters = _states(part), masters_of(part)
        for n, (group, names) in enumerate(zip(groups_of(part), rows, strict=True)):
            ids = group.get("params")
            if not isinstance(ids, list) or len(ids) != len(names):
                raise ValueError(f"{one.file.path} has another number of parameters in group {n} than {len(names)}")
            for k, (number_, key) in enumerate(zip(ids, names, strict=True)):
                wanted = wanted_shapes(states.get(number_), masters, n, k, len(ids))
                if wanted is not None and shapes[key] not in wanted:
                    raise ValueError(f"{one.file.path} has a state of another shape for {key.partition('.')[2]!r}")


def _states(part: Mapping[Any, Any]) -> dict[Any, Any]:
    inner = part.get("optimizer", part)
    states = inner.get("state") if isinstance(inner, dict) else None
    return states if isinstance(states, dict) else {}
