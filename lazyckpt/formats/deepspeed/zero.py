"""ZeRO-1, ZeRO-2 and ZeRO-3 of dense models, over any number of data-parallel ranks.

Model states: engine.py `_save_checkpoint`. Optimizer states: stage_1_and_2.py `state_dict`, stage3.py
`_rigid_state_dict`. The order of the parameters in a flat group is that of ``param_shapes`` (right also with
round_robin_gradients, where ``param_slice_mappings`` is wrong: it is not used).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...core.index import Extent, FileInfo, Hole, Index, Mesh, Rank, TensorSpec, whole
from ...errors import CorruptError, FormatError, LazyckptError, MissingFileError
from ...io.pickles import Opaque
from ...io.plain import Plain
from ...io.rebuild import StoredTensor
from ...io.store import Store
from ...io.torchfile import Record, TorchFile, read_torch_file
from ..reader import Source
from ..torchsave import ties, warnings
from .files import RankFiles, find_folder
from .flat import FlatFragments, Partition

Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class _Building:
    """What is found out on the way to an Index."""

    store: Store
    files: dict[str, FileInfo] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    states: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)

    def file(self, path: str) -> TorchFile:
        """Index a rank file. Raises the errors of `read_torch_file`."""
        file = read_torch_file(self.store, path)
        self.files[path] = file.info
        return file

    def add(self, state: str, spec: TensorSpec) -> None:
        self.states.setdefault(state, {}).setdefault(spec.name, spec)


def read(source: Source) -> Index:
    """Index the tag that `find_folder` finds."""
    files = find_folder(source)
    if files is None:
        raise FormatError(f"{source.where} holds no rank files of DeepSpeed")
    _refuse(source, files)
    b = _Building(source.store)
    sharded = bool(files.zero_model)
    first_path = files.zero_model.get((0, 0)) or files.model.get(0)
    if first_path is None:
        raise MissingFileError(
            f"{source.where}/{files.folder}: the model states of rank 0 are missing; they name the parameters, "
            "nothing can be told without them"
        )
    first = b.file(first_path)
    model = _table(first, first.root)
    plain = Plain(first.root, f"{source.where}/{first_path}", first.pickle_size, f"{first_path.split('/')[-1]}/")
    b.problems += warnings(first_path, first, plain)

    groups = [_shapes(first, g) for g in model.get("param_shapes") or []]
    world = _world(model, files)
    optim = _optim_files(b, files, world)
    module = {k: t for k, t in _table(first, model.get("module")).items() if isinstance(t, StoredTensor)}
    aliases = _aliases(model, module)
    stage = 3 if sharded else _stage(model, optim)

    weights = {n: t for n, t in module.items() if not (sharded and t.shape == (0,))}
    full = {n: whole(n, first.extent(t, n)) for n, t in weights.items() if n not in aliases}
    if not sharded:
        b.states["weights"] = full
    if sharded:
        _flat_states(b, groups, optim, world, _Stage3())
        _frozen(b, files, first, model, world)
        _compare_buffers(b, files, first, module)
    elif optim:
        _flat_states(b, groups, optim, world, _Stage12(optim))
    if sharded or "fp32" in b.states:
        # a whole state dict: what has no master copy (buffers, frozen parameters) stands as it is stored
        b.states.setdefault("fp32", {})
        trained = {n for g in groups for n in g}
        for spec in full.values():
            if spec.name not in trained:
                b.add("fp32", spec)
    for path in files.zero_model.values():
        if path not in b.files:
            b.files[path] = source.store.stat(path)
    return Index(
        format=f"deepspeed-zero{stage}",
        states={s: b.states[s] for s in sorted(b.states, key=_state_order)},
        files=b.files,
        aliases=aliases,
        meta=_meta(plain, optim, files),
        mesh=Mesh(dp=world),
        problems=tuple(b.problems),
    )


def _state_order(state: str) -> tuple[int, str]:
    known = ("weights", "fp32", "exp_avg", "exp_avg_sq")
    return (known.index(state) if state in known else len(known) + (state == "step"), state)


def _refuse(source: Source, files: RankFiles) -> None:
    several = max(list(files.model) + [mp for _, mp in files.optim] + [mp for _, mp in files.zero_model] + [0])
    what = (
        "a pipeline checkpoint (layer_*-model_states.pt)" if files.layers
        else "a mixture-of-experts checkpoint (*expert_*)" if files.experts
        else f"cut over {several + 1} model-parallel ranks (mp_rank_{several:02d})" if several
        else ""
    )  # fmt: skip
    if what:
        raise FormatError(
            f"{source.where}/{files.folder} is {what}; this version reads DeepSpeed's dense data-parallel checkpoints "
            "(ZeRO-1, 2, 3). Single rank files can be opened on their own"
        )


# -- what the pickles say


def _table(file: TorchFile, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptError(f"{file.path}: a {type(value).__name__} stands where DeepSpeed writes a dict")
    return value


def _shapes(file: TorchFile, value: Any) -> Shapes:
    shapes = {}
    for name, shape in _table(file, value).items():
        if (
            not isinstance(name, str)
            or not isinstance(shape, tuple)
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise CorruptError(f"{file.path}: param_shapes holds {name!r:.80}: {shape!r:.80}")
        shapes[name] = tuple(shape)
    return shapes


def _world(model: Mapping[str, Any], files: RankFiles) -> int:
    """The data-parallel degree: as the model states say, else as many as there are files."""
    world = model.get("dp_world_size")
    if type(world) is int and world > 0:
        return world
    return 1 + max([dp for dp, _ in files.optim] + [dp for dp, _ in files.zero_model] + [0])


def _stage(model: Mapping[str, Any], optim: Mapping[int, Any]) -> int:
    for state in optim.values():
        if isinstance(state, _Rank):
            stage: Any = state.state.get("zero_stage")
            value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
            if type(value) is int:
                return value
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return stage if type(stage) is int else 0


def _aliases(model: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Tied names -> owners: as shared_params says, and where two names of the module are the same memory."""
    shared = model.get("shared_params")
    aliases = {a: o for a, o in shared.items() if isinstance(o, str)} if isinstance(shared, dict) else {}
    for alias, owner in ties(module).items():
        if alias not in aliases and owner not in aliases:
            aliases[alias] = owner
    return aliases


def _meta(plain: Plain, optim: Mapping[int, _Rank | Hole], files: RankFiles) -> dict[str, Any]:
    meta = dict(plain.rest) if isinstance(plain.rest, dict) else {}
    for rank in optim.values():
        if isinstance(rank, _Rank):
            name = rank.file.path.split("/")[-1]
            meta["optimizer"] = Plain(rank.file.root, rank.file.path, rank.file.pickle_size, f"{name}/").rest
            break
    meta["tag"] = files.folder
    if "global_steps" in meta:
        meta.setdefault("step", meta["global_steps"])
    return meta


# -- optimizer states


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's optimizer file: ``state`` is the part of it that holds the groups."""

    file: TorchFile
    state: dict[Any, Any]


def _optim_files(b: _Building, files: RankFiles, world: int) -> dict[int, _Rank | Hole]:
    """Every rank's optimizer file, or why there is none. {} if the checkpoint has no optimizer states at all."""
    if not files.optim:
        if files.zero_model:
            b.problems.append(
                "there are no optimizer states (*_optim_states.pt): no parameter of a ZeRO-3 model can be read"
            )
        return {}
    found: dict[int, _Rank | Hole] = {}
    pattern = next(iter(files.optim.values()))
    for dp in range(world):
        path = files.optim.get((dp, 0))
        if path is None:
            path = _name_of_rank(pattern, dp)
            found[dp] = Hole(path, f"{path} is missing")
            b.problems.append(f"{path} is missing: what rank {dp} of {world} holds cannot be read")
            continue
        try:
            file = b.file(path)
            state = _table(file, _table(file, file.root).get("optimizer_state_dict"))
            found[dp] = _Rank(file, state)
        except LazyckptError as e:
            found[dp] = Hole(path, f"{path} cannot be read ({e})")
            b.problems.append(f"{path} cannot be read, what rank {dp} of {world} holds is lost: {e}")
    for dp, _ in files.optim:
        if dp >= world:
            b.problems.append(
                f"{files.optim[dp, 0]} belongs to rank {dp}, but {world} ranks wrote this: left over, not used"
            )
    return found


def _name_of_rank(path: str, dp: int) -> str:
    head, _, tail = path.rpartition("zero_pp_rank_")
    return f"{head}zero_pp_rank_{dp}_{tail.split('_', 1)[1]}"


class _Stage12:
    """Groups are flat buffers that all ranks together hold, in equal parts."""

    def __init__(self, optim: Mapping[int, _Rank | Hole]) -> None:
        self._paddings: list[Any] = next(
            (r.state.get("param_alignment_paddings") or [] for r in optim.values() if isinstance(r, _Rank)), []
        )

    def masters(self, rank: _Rank) -> list[Any]:
        return list(rank.state.get("single_partition_of_fp32_groups") or [])

    def states(self, rank: _Rank) -> list[dict[str, Any]]:
        """The optimizer's state of every group."""
        base = rank.state.get("base_optimizer_state")
        if isinstance(base, list):  # elastic_checkpoint: a state per group, padding stripped
            return [s if isinstance(s, dict) else {} for s in base]
        return _by_group(base)

    def place(self, g: int, shapes: Shapes, world: int, held: list[int]) -> tuple[int, dict[str, tuple[int, int]]]:
        """-> (width of a partition, name -> (position in the flat buffer, 0))."""
        pads = self._paddings[g] if g < len(self._paddings) and isinstance(self._paddings[g], list) else []
        at, places = 0, {}
        for n, (name, shape) in enumerate(shapes.items()):
            places[name] = (at, 0)
            at += prod(shape) + (pads[n] if n < len(pads) and type(pads[n]) is int else 0)
        # The buffer is padded to a multiple of 2 per rank (nccl_start_alignment_factor); other versions aligned
        # otherwise, then the longest partition tells (padding is stripped from the last ones only).
        aligned = -(-at // (2 * world)) * 2
        for width in dict.fromkeys((aligned, max(held, default=0))):
            needed = [min(width, max(0, at - r * width)) for r in range(world)]
            if width * world >= at and all(h < 0 or n <= h <= width for n, h in zip(needed, held, strict=True)):
                return width, places
        raise CorruptError(
            f"group {g} of the optimizer states has {at:,} elements in {len(shapes)} parameters, which does not fit "
            f"partitions of {held[:8]} elements over {world} ranks"
        )

    def fragments(
        self, shape: tuple[int, ...], width: int, place: tuple[int, int], parts: tuple[Partition, ...]
    ) -> FlatFragments:
        return FlatFragments(shape, width, parts, within=place[0])


class _Stage3:
    """Every parameter is cut on its own, ceil(numel / world) elements a rank; a group is what follows each other."""

    def masters(self, rank: _Rank) -> list[Any]:
        return list(rank.state.get("fp32_flat_groups") or [])

    def states(self, rank: _Rank) -> list[dict[str, Any]]:
        inner = rank.state.get("optimizer_state_dict")
        table = inner.get("state") if isinstance(inner, dict) else None
        count = len(self.masters(rank))
        return [table.get(n, {}) if isinstance(table, dict) else {} for n in range(count)]

    def place(self, g: int, shapes: Shapes, world: int, held: list[int]) -> tuple[int, dict[str, tuple[int, int]]]:
        at, places = 0, {}
        for name, shape in shapes.items():
            width = -(-prod(shape) // world)
            places[name] = (at, width)
            at += width
        if any(h >= 0 and h < at for h in held):
            raise CorruptError(
                f"sub-group {g} of the optimizer states needs {at:,} elements a rank for {len(shapes)} parameters; the "
                f"ranks hold {held[:8]}"
            )
        return 0, places

    def fragments(
        self, shape: tuple[int, ...], width: int, place: tuple[int, int], parts: tuple[Partition, ...]
    ) -> FlatFragments:
        return FlatFragments(shape, place[1], parts, at=place[0])


def _by_group(base: Any) -> list[dict[str, Any]]:
    """A torch optimizer's state_dict whose only parameter per group is the flat buffer."""
    if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        return []
    table, groups = base["state"], base.get("param_groups")
    if (
        isinstance(groups, list)
        and groups
        and all(isinstance(g, dict) and len(g.get("params", ())) == 1 for g in groups)
    ):
        ids = [g["params"][0] for g in groups]
    else:
        ids = sorted(k for k in table if isinstance(k, int))
    return [table.get(i, {}) if isinstance(table.get(i, {}), dict) else {} for i in ids]


def _flat_states(
    b: _Building, groups: list[Shapes], optim: Mapping[int, _Rank | Hole], world: int, stage: _Stage12 | _Stage3
) -> None:
    """fp32 and every state of the optimizer, per parameter, by spans over the rank files."""
    masters = {dp: stage.masters(r) for dp, r in optim.items() if isinstance(r, _Rank)}
    states = {dp: stage.states(r) for dp, r in optim.items() if isinstance(r, _Rank)}
    for g, shapes in enumerate(groups):
        flat = {"fp32": {dp: m[g] for dp, m in masters.items() if g < len(m)}}
        keys = dict.fromkeys(k for s in states.values() if g < len(s) for k in s[g])
        for key in keys:
            flat[str(key)] = {dp: s[g][key] for dp, s in states.items() if g < len(s) and key in s[g]}
        for state, tensors in flat.items():
            found = {dp: t for dp, t in tensors.items() if isinstance(t, StoredTensor)}
            if not found:
                continue
            dims = {len(t.shape) for t in found.values()}
            if dims == {0}:
                _scalar_state(b, state, shapes, optim, found)
            elif dims == {1}:
                _flat_state(b, state, g, shapes, optim, found, world, stage)
            else:
                b.problems.append(
                    f"the optimizer's state {state!r} of group {g} is not flat: it is in view.stored only"
                )


def _scalar_state(
    b: _Building, state: str, shapes: Shapes, optim: Mapping[int, _Rank | Hole], found: dict[int, StoredTensor]
) -> None:
    """One number for the whole group (Adam's step): the same for every parameter in it; the lowest rank's."""
    dp = min(found)
    rank = optim[dp]
    assert isinstance(rank, _Rank)  # its tensor was found in it
    extent = rank.file.extent(found[dp], state)
    for name in shapes:
        b.add(state, whole(name, extent, Rank(dp=dp)))


def _flat_state(
    b: _Building,
    state: str,
    g: int,
    shapes: Shapes,
    optim: Mapping[int, _Rank | Hole],
    found: dict[int, StoredTensor],
    world: int,
    stage: _Stage12 | _Stage3,
) -> None:
    partitions = []
    for dp in range(world):
        rank = optim[dp]
        extent: Extent | Hole
        if isinstance(rank, Hole):
            extent = rank
        elif dp in found:
            extent = rank.file.extent(found[dp], f"{state} of group {g}")
        else:
            extent = Hole(rank.file.path, f"{rank.file.path} has no {state!r} of group {g}")
        partitions.append(Partition(extent, Rank(dp=dp)))
    held = [p.extent.shape[0] if isinstance(p.extent, Extent) else -1 for p in partitions]
    try:
        width, places = stage.place(g, shapes, world, held)
    except CorruptError as e:
        b.problems.append(f"{state}: {e}")
        width, places = 1, dict.fromkeys(shapes, (0, 1))
        partitions = [Partition(Hole(p.extent.path, f"{p.extent.path}: {e}"), p.rank) for p in partitions]
    dtype = next(t.dtype for t in found.values())
    parts = tuple(partitions)
    for name, shape in shapes.items():
        b.add(state, TensorSpec(name, shape, dtype, stage.fragments(shape, width, places[name], parts)))


# -- what only the model states hold


def _frozen(b: _Building, files: RankFiles, first: TorchFile, model: Mapping[str, Any], world: int) -> None:
    """ZeRO-3: frozen parameters, in the training dtype, cut over the ranks' model states."""
    shapes = _shapes(first, model.get("frozen_param_shapes"))
    if not shapes:
        return
    pieces: dict[str, list[Partition]] = {name: [] for name in shapes}
    dtypes = {}
    for dp, fragments, problem in _each_rank(b, files, world, "frozen_param_fragments"):
        for name in shapes:
            tensor = fragments[1].get(name) if fragments else None
            extent: Extent | Hole
            if isinstance(tensor, StoredTensor) and fragments and len(tensor.shape) == 1:
                extent = fragments[0].extent(tensor, name)
                dtypes[name] = tensor.dtype
            else:
                extent = problem or Hole(
                    files.zero_model[dp, 0], f"{files.zero_model[dp, 0]} has no fragment of {name!r}"
                )
            pieces[name].append(Partition(extent, Rank(dp=dp)))
    for name, shape in shapes.items():
        if name in dtypes:
            fragments_of = FlatFragments(shape, -(-prod(shape) // world), tuple(pieces[name]))
            b.add("fp32", TensorSpec(name, shape, dtypes[name], fragments_of))


def _each_rank(
    b: _Building, files: RankFiles, world: int, key: str
) -> Iterator[tuple[int, tuple[TorchFile, dict[Any, Any]] | None, Hole | None]]:
    """(dp rank, (its model states' file, the table under ``key``) or None, why there is none)."""
    for dp in range(world):
        path = files.zero_model.get((dp, 0)) or _name_of_rank(next(iter(files.zero_model.values())), dp)
        try:
            file = b.file(path)
            yield dp, (file, _table(file, _table(file, file.root).get(key))), None
        except LazyckptError as e:
            line = f"{path} cannot be read: {e}"
            if line not in b.problems:
                b.problems.append(line)
            yield dp, None, Hole(path, line)


def _compare_buffers(b: _Building, files: RankFiles, first: TorchFile, module: Mapping[str, StoredTensor]) -> None:
    """ZeRO-3: every rank saves its own buffers. Rank 0's are read; where the zip's checksums tell that another rank's
    differ, a line says so. (Parameters are empty there: they are not saved.)"""
    buffers = {n: c for n, t in module.items() if 0 not in t.shape and (c := _crc(first.records, t)) is not None}
    if not buffers:
        return
    differ: dict[str, list[int]] = {}
    for dp, found, _ in _each_rank(b, files, 1 + max(dp for dp, _ in files.zero_model), "module"):
        if dp == 0 or found is None:
            continue
        for name, crc in buffers.items():
            tensor = found[1].get(name)
            if isinstance(tensor, StoredTensor) and _crc(found[0].records, tensor) not in (crc, None):
                differ.setdefault(name, []).append(dp)
    for name, ranks in differ.items():
        b.problems.append(
            f"the buffer {name!r} differs on ranks {_listed(ranks)}: rank 0's is read (the others: view.stored)"
        )


def _crc(records: Mapping[str, Record], tensor: StoredTensor) -> int | None:
    """The checksum of a tensor's bytes, where it is all of its storage."""
    if tensor.storage is None:
        return None
    record = records.get(tensor.storage.key)
    if record is None or record.nbytes != prod(tensor.shape) * tensor.dtype.itemsize:
        return None
    return record.crc


def _listed(ranks: Iterable[int]) -> str:
    items = list(map(str, ranks))
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
