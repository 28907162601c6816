"""Master weights and optimizer states per parameter, from the flat partitions of ZeRO.

Sources: runtime/zero/stage_1_and_2.py `state_dict`, runtime/zero/stage3.py `_rigid_state_dict`,
runtime/bf16_optimizer.py. The parameters in a flat group have the order of ``param_shapes``, also with
round_robin_gradients, where ``param_slice_mappings`` are wrong: they place no parameter here. Neither do
``group_paddings``, which can exceed the partition; the padding follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.dtypes import DType
from ...core.extents import Extent, Hole
from ...core.placement import Rank
from ...core.specs import Fragment
from ...errors import CorruptError, LazyckptError, Problem, cannot_read
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import Opaque
from ...io.containers.torch_file import TorchFile
from ...layouts.tables import pattern
from ..shared.flat import FlatFragments, Partition
from ..shared.rank_shards import Shard, Shards
from .autoep import Stacks, add_stacks, layer_of
from .building import Building, Shapes, Stage, table
from .files import RankFiles, name_of_rank
from .muon import RULE, Kept, as_partitions, fragments, matrices, use_muon
from .plainopt import state_name


@dataclass(frozen=True, slots=True)
class Optim:
    """The optimizer file of one rank. ``state``: the part of the file that holds the groups."""

    file: TorchFile
    state: dict[Any, Any]


OptimFiles = dict[int, Optim | Hole]  # data-parallel rank -> its file, or the hole of a lost file


def optim_files(b: Building, files: RankFiles, world: int, mp: int, known: str) -> OptimFiles:
    """Read one model-parallel rank's optimizer files, one per data-parallel rank. ``known``: the path of any such file,
    from which the paths of missing ones follow."""
    found: OptimFiles = {}
    for dp in range(world):
        path = files.optim.get((dp, mp))
        who = f"rank {dp} of {world}"
        if b.ranks > 1:
            stage = f"pp={mp // b.tp}, " if b.ranks > b.tp else ""
            shard = f"tp={mp % b.tp}, " if b.tp > 1 else ""
            who = f"the rank with {stage}{shard}dp={dp}"
        if path is None:
            path = name_of_rank(known, dp, mp)
            found[dp] = Hole(path, f"{path} is missing")
            b.report(Problem("missing-file", f"{path} is missing: what {who} holds cannot be read", path))
            continue
        try:
            file = b.file(path)
            found[dp] = Optim(file, table(file, table(file, file.root).get("optimizer_state_dict")))
        except LazyckptError as e:
            found[dp] = Hole(path, f"{path} cannot be read ({e})")
            b.report(cannot_read(path, e, f", what {who} holds is lost"))
    return found


def shard_size(b: Building, files: RankFiles, first: Stage, degree: int) -> int:
    """Return the number of ranks over which ZeRO-3 partitions: all data-parallel ranks (``degree``), or with MiCS (up
    to deepspeed 0.18, runtime/zero/mics.py [read, not run]) ``mics_shard_size``. The shard group then replaces the
    data-parallel group: ``partition_count`` is its size, its ranks name the files, and only the first group writes any
    (engine.py `_configure_checkpointing`). A size is accepted if the flat groups have the length that it implies.
    """
    config = first.model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    claimed: list[Any] = [zero.get("mics_shard_size")] if isinstance(zero, dict) else []
    masters: list[Any] = []
    path = next((p for (_, mp), p in files.optim.items() if mp == first.rank.pp * b.tp + first.rank.tp), None)
    if path is not None:
        try:
            file = b.file(path)
            state = table(file, table(file, file.root).get("optimizer_state_dict"))
        except LazyckptError:
            state = {}  # reported where the ranks' files are read
        claimed.insert(0, state.get("partition_count"))
        masters = _list(state.get("fp32_flat_groups"))
    for size in claimed:
        if (
            type(size) is int
            and 0 < size < degree
            and all(
                isinstance(flat, StoredTensor) and flat.shape == (sum(-(-prod(s) // size) for s in shapes.values()),)
                for flat, shapes in zip(masters, first.groups, strict=False)
            )
        ):
            return size
    return degree


class Stage12:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: a group is one flat buffer, partitioned equally over all ranks."""

    def __init__(self, optim: Mapping[int, Optim | Hole]) -> None:
        paddings = next((r.state.get("param_alignment_paddings") for r in optim.values() if isinstance(r, Optim)), None)
        self._paddings: list[Any] = paddings if isinstance(paddings, list) else []

    def masters(self, rank: Optim) -> list[Any]:
        return _list(rank.state.get("single_partition_of_fp32_groups"))

    def states(self, rank: Optim) -> list[dict[str, Any]]:
        """Return the optimizer's state of every group."""
        base = rank.state.get("base_optimizer_state")
        if isinstance(base, list):  # elastic_checkpoint: a state per group, padding stripped
            return [s if isinstance(s, dict) else {} for s in base]
        return _by_group(base)

    def place(self, g: int, shapes: Shapes, world: int, held: Sequence[int]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return (width of a partition, name -> (position in the flat buffer, 0)), in elements. ``held``: number of
        elements on each rank, -1 if not known. Raises CorruptError if they do not fit."""
        pads = self._paddings[g] if g < len(self._paddings) and isinstance(self._paddings[g], list) else []
        at, places = 0, {}
        for n, (name, shape) in enumerate(shapes.items()):
            places[name] = (at, 0)
            pad = pads[n] if n < len(pads) else 0
            at += prod(shape) + (pad if type(pad) is int and 0 < pad < 1 << 62 else 0)
        # The buffer is padded to a multiple of 2 per rank (nccl_start_alignment_factor); other versions align
        # differently, and the longest partition shows how (padding is stripped from the last ones only).
        aligned = -(-at // (2 * world)) * 2
        for width in dict.fromkeys((aligned, max(held, default=0))):
            needed = [min(width, max(0, at - r * width)) for r in range(world)]
            if width * world >= at and all(h < 0 or n <= h <= width for n, h in zip(needed, held, strict=True)):
                return width, places
        raise CorruptError(
            f"group {g} of the optimizer states has {at:,} elements in {len(shapes)} parameters, which does not fit "
            f"partitions of {list(held[:8])} elements over {world} ranks"
        )

    def by_element(self, rank: Optim | Hole, g: int, length: int, master: Shape, width: int) -> bool:
        """Return whether a state of that length has a value per element of an fp32 partition: it is as long, or still
        has the padding stripped from the partition (as in ``group_paddings``, up to the width of a partition)."""
        paddings = rank.state.get("group_paddings") if isinstance(rank, Optim) else None
        padding = paddings[g] if isinstance(paddings, list) and g < len(paddings) else 0
        return length in (master[0], width) or (type(padding) is int and length == master[0] + padding)

    def matrices(
        self, cut: _Cut, places: Mapping[str, tuple[int, int]], width: int
    ) -> tuple[list[int], dict[str, list[Kept]]] | None:
        """Return what the ranks keep of the matrices of a group that uses Muon (see `muon`); None for other groups."""
        if not any(
            use_muon(r.state.get("base_optimizer_state"), cut.g) for r in cut.optim.values() if isinstance(r, Optim)
        ):
            return None
        return matrices(cut.shapes, places, width, len(cut.optim))

    def fragments(
        self, shape: tuple[int, ...], width: int, place: tuple[int, int], parts: tuple[Partition, ...]
    ) -> FlatFragments:
        return FlatFragments(shape, width, parts, within=place[0])


class Stage3:
    """ZeRO-3: every parameter is cut on its own, ceil(numel / world) elements per rank; a group concatenates these."""

    def masters(self, rank: Optim) -> list[Any]:
        return _list(rank.state.get("fp32_flat_groups"))

    def states(self, rank: Optim) -> list[dict[str, Any]]:
        inner = rank.state.get("optimizer_state_dict")
        by_id = inner.get("state") if isinstance(inner, dict) else None
        count = len(self.masters(rank))
        return [by_id.get(n, {}) if isinstance(by_id, dict) else {} for n in range(count)]

    def place(self, g: int, shapes: Shapes, world: int, held: Sequence[int]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return (0, name -> (position in every rank's flat buffer, width of a piece)), in elements. Raises
        CorruptError if the ranks hold fewer."""
        at, places = 0, {}
        for name, shape in shapes.items():
            width = -(-prod(shape) // world)
            places[name] = (at, width)
            at += width
        if any(0 <= h < at for h in held):
            raise CorruptError(
                f"sub-group {g} of the optimizer states needs {at:,} elements a rank for {len(shapes)} parameters; the "
                f"ranks hold {list(held[:8])}"
            )
        return 0, places

    def by_element(self, rank: Optim | Hole, g: int, length: int, master: Shape, width: int) -> bool:
        """Return whether a state of that length has a value per element of an fp32 partition: it is as long."""
        return length == master[0]

    def matrices(self, cut: _Cut, places: Mapping[str, tuple[int, int]], width: int) -> None:
        """Return None: the momenta of Muon are cut as the weights are."""

    def fragments(
        self, shape: tuple[int, ...], width: int, place: tuple[int, int], parts: tuple[Partition, ...]
    ) -> FlatFragments:
        return FlatFragments(shape, place[1], parts, at=place[0])


def _by_group(base: Any) -> list[dict[str, Any]]:
    """Return the state of each group, from a torch optimizer's state_dict with one parameter, the flat buffer, per
    group."""
    if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        return []
    by_id, groups = base["state"], base.get("param_groups")
    listed = [g.get("params") if isinstance(g, dict) else None for g in (groups if isinstance(groups, list) else ())]
    if listed and all(isinstance(p, list | tuple) and len(p) == 1 and isinstance(p[0], int) for p in listed):
        ids = [p[0] for p in listed if p]
    else:
        ids = sorted(k for k in by_id if isinstance(k, int))
    return [by_id.get(i, {}) if isinstance(by_id.get(i, {}), dict) else {} for i in ids]


def flat_states(
    b: Building, groups: Sequence[Shapes], optim: OptimFiles, stage: Stage12 | Stage3, rank: Rank, data_first: bool
) -> Shards:
    """Return fp32 and every state of the optimizer, of one model-parallel rank. ``rank``: its coordinates, with dp=0.

    A group of experts is partitioned only over the ranks that hold the same experts, and every expert-parallel rank
    counts its own from 0 (engine.py `_save_moe_checkpoint`): experts get their global ids here. ``data_first``: whether
    ranks with the same experts have consecutive numbers (ds_config use_data_before_expert_parallelism).
    """
    world = len(optim)
    counts = next((_counts(r) for r in optim.values() if isinstance(r, Optim)), None)
    cuts: list[_Cut] = []
    for g, shapes in enumerate(groups):
        if b.tp > 1 and any(layer_of(name, b.placements) is not None for name in shapes):
            continue  # see `spread_experts`
        count = counts[g] if isinstance(counts, list) and g < len(counts) else world
        if type(count) is not int or count == world or count < 1 or world % count:
            cuts.append(_cut(g, shapes, optim, stage, rank))
            continue
        expert_parallel = world // count
        for ep in range(expert_parallel):
            ranks = [ep * count + n if data_first else ep + n * expert_parallel for n in range(count)]
            mine = {n: optim[dp] for n, dp in enumerate(ranks)}
            cuts.append(_cut(g, global_experts(shapes, ep), mine, stage, rank._replace(ep=ep)))
    return _of_cuts(b, cuts, stage)


def spread_experts(b: Building, stages: Sequence[Stage], optims: Mapping[int, OptimFiles], sharded: bool) -> Shards:
    """Return fp32 and every state of AutoEP's experts, with AutoTP: of the groups that `flat_states` leaves out.

    Expert-parallel ranks are consecutive global ranks; global ranks count the tensor-parallel ranks first
    (module_inject/auto_ep_folding.py `expected_folding_group_tables`). ``stages``: those of one pipeline stage.
    """
    first = stages[0]
    own = optims[first.rank.pp * b.tp + first.rank.tp]
    ranks: dict[int, Optim | Hole] = {}
    for dp in own:
        for tp in range(b.tp):
            mp = first.rank.pp * b.tp + tp
            lost = b.lost.get(mp, "")
            ranks[dp * b.tp + tp] = optims[mp][dp] if mp in optims else Hole(lost, f"{lost} is lost, or its ranks are")
    layout = Stage3() if sharded else Stage12(own)
    cuts = []
    for g, shapes in enumerate(first.groups):
        ids = next((ids for n in shapes if (ids := layer_of(n, b.placements)) is not None), None)
        if ids is None:
            continue
        if len(ranks) % len(ids) or any(layer_of(n, b.placements) is None for n in shapes):
            line = f"group {g} of the optimizer states has experts, and cannot be read: see view.stored"
            b.report(Problem("inconsistent-metadata", line))
            continue
        for ep in range(len(ids)):
            mine = {n: ranks[rank] for n, rank in enumerate(range(ep, len(ranks), len(ids)))}
            cuts.append(_cut(g, shapes, mine, layout, first.rank._replace(ep=ep)))
    return _of_cuts(b, cuts, layout)


def _of_cuts(b: Building, cuts: Sequence[_Cut], stage: Stage12 | Stage3) -> Shards:
    """Return the states of groups. What every expert-parallel rank has of AutoEP's experts is stacked."""
    other = _not_by_element(b, cuts, stage)
    shards: Shards = {}
    stacks: Stacks = {}
    same: set[tuple[str, str]] = set()
    for cut in cuts:
        own: Shards = {}
        _group_states(b, cut, other, stage, own)
        for state, names in own.items():
            for name, by_rank in names.items():
                mine = by_rank[cut.rank.tp]
                if mine.shape != () and layer_of(name, b.placements) is not None:
                    stacks.setdefault((state, name), {})[cut.rank.ep] = mine
                elif mine.shape != () and name in shards.get(state, {}):
                    same.add((state, name))
                else:
                    shards.setdefault(state, {}).setdefault(name, {}).update(by_rank)
    for state, name in same:
        del shards[state][name]
        line = (
            f"several expert-parallel ranks have a {name!r} of their own, and no file says how they belong together: "
            "it is in view.stored"
        )
        b.report(Problem("mismatched-shards", line, name))
    lost = {c.rank.ep: h for c in cuts for h in c.optim.values() if isinstance(h, Hole)}
    add_stacks(b, shards, stacks, lost)
    return shards


def _counts(rank: Optim) -> Any:
    """Return the number of ranks that share each group. ZeRO-3 saves one per group only where they differ (AutoEP)."""
    groups = rank.state.get("ds_zero_partition_groups")
    if isinstance(groups, list) and all(isinstance(g, dict) and type(g.get("sub_group")) is int for g in groups):
        by_number = {g.get("sub_group"): g.get("partition_count") for g in groups}
        return [by_number.get(n) for n in range(len(groups))]
    return rank.state.get("partition_count")


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


class _Cut(NamedTuple):
    """A group, and the ranks that share it. ``found``: state -> rank among these -> its tensor; ``whole``: states of
    Muon -> name -> the ranks that keep its whole matrix."""

    g: int
    shapes: Shapes
    optim: OptimFiles
    rank: Rank
    found: dict[str, dict[int, StoredTensor]]
    whole: dict[str, dict[str, list[Kept]]]


def _cut(g: int, shapes: Shapes, optim: OptimFiles, stage: Stage12 | Stage3, rank: Rank) -> _Cut:
    found: dict[str, dict[int, StoredTensor]] = {"fp32": {}}
    for dp, r in optim.items():
        if isinstance(r, Hole):
            continue
        masters, states = stage.masters(r), stage.states(r)
        own = states[g] if g < len(states) else None
        values = {state_name(k): v for k, v in own.items()} if isinstance(own, dict) else {}
        if g < len(masters):
            values["fp32"] = masters[g]
        for key, value in values.items():
            if isinstance(value, StoredTensor):
                found.setdefault(key, {})[dp] = value
    return _Cut(g, shapes, optim, rank, found, {})


def _not_by_element(b: Building, cuts: Sequence[_Cut], stage: Stage12 | Stage3) -> set[str]:
    """Return the states that do not have one value per element: in some group their length is not that of the fp32
    partition, or they are not flat. (8-bit optimizers keep a table of codes, and a scale per block of elements.)"""
    other: dict[str, str] = {}
    for cut in cuts:
        masters = cut.found["fp32"]
        try:
            held = [masters[dp].shape[0] if dp in masters and len(masters[dp].shape) == 1 else -1 for dp in cut.optim]
            width, places = stage.place(cut.g, cut.shapes, len(cut.optim), held)
        except CorruptError:
            continue  # the groups themselves do not fit: reported where they are read
        lengths, kept = stage.matrices(cut, places, width) or ([], {})
        for state, found in cut.found.items():
            if state == "fp32" or state in other:
                continue
            uneven = None
            for dp, t in found.items():
                if t.shape == () or dp not in masters:
                    continue
                own = masters[dp].shape
                if len(t.shape) != 1 or not stage.by_element(cut.optim[dp], cut.g, t.shape[0], own, width):
                    uneven = f"a tensor of shape {tuple(t.shape)} where a rank has {own[0]:,} elements of a group"
                    break
            if kept and all(t.shape == (lengths[dp],) for dp, t in found.items()) and not as_partitions(kept, found):
                if uneven is None:
                    other[state] = "it may be of whole matrices, as Muon keeps them, or of partitions"
                cut.whole[state] = kept
            elif uneven is not None:
                other[state] = uneven
    for state, evidence in other.items():
        line = (
            f"the optimizer's state {state!r} does not have one value per element ({evidence}): it is in view.stored "
            "only"
        )
        b.report(Problem("undecided-layout", line))
    return set(other)


def global_experts(shapes: Shapes, ep: int) -> Shapes:
    """Replace local expert ids by global ones: every expert-parallel rank holds equally many experts of a layer."""
    local_count: dict[str, int] = {}
    for name in shapes:
        if m := pattern("deepspeed.expert").fullmatch(name):
            local_count[m[1]] = max(local_count.get(m[1], 0), int(m[2]) + 1)
    renamed = {}
    for name, shape in shapes.items():
        m = pattern("deepspeed.expert").fullmatch(name)
        renamed[f"{m[1]}{int(m[2]) + ep * local_count[m[1]]}{m[3]}" if m else name] = shape
    return renamed


def _group_states(b: Building, cut: _Cut, other: set[str], stage: Stage12 | Stage3, shards: Shards) -> None:
    holes = [r for r in cut.optim.values() if isinstance(r, Hole)]
    if len(holes) == len(cut.optim):
        b.gone.append((cut.rank, cut.shapes, holes[0]))
    for state, found in cut.found.items():
        if not found or state in other:
            continue
        dims = {len(t.shape) for t in found.values()}
        names = shards.setdefault(state, {})
        if dims == {0}:  # one number per group (Adam's step), shared by its parameters: take the lowest rank's
            dp = min(found)
            optim = cut.optim[dp]
            assert isinstance(optim, Optim)
            extent = optim.file.extent(found[dp], state)
            one = Shard((), extent.dtype, (Fragment(extent, (), rank=cut.rank._replace(dp=dp)),))
            for name in cut.shapes:
                names.setdefault(name, {})[cut.rank.tp] = one
        elif dims == {1}:
            for name, tensor in _flat_state(b, state, cut, stage).items():
                names.setdefault(name, {})[cut.rank.tp] = tensor
        else:
            line = f"the optimizer's state {state!r} of group {cut.g} is not flat: it is in view.stored only"
            b.report(Problem("undecided-layout", line))


def _flat_state(b: Building, state: str, cut: _Cut, stage: Stage12 | Stage3) -> dict[str, Shard]:
    g, shapes, found = cut.g, cut.shapes, cut.found[state]
    world = len(cut.optim)
    partitions = []
    for dp, r in cut.optim.items():
        extent: Extent | Hole
        if isinstance(r, Hole):
            extent = r
        elif dp in found:
            extent = r.file.extent(found[dp], f"{state} of group {g}")
        else:
            extent = Hole(r.file.path, f"{r.file.path} has no {state!r} of group {g}")
        partitions.append(Partition(extent, cut.rank._replace(dp=dp)))
    if state in cut.whole:
        kept, own = cut.whole[state], next(t.dtype for t in found.values())
        return {n: Shard(s, own, fragments(s, kept[n], partitions), RULE) for n, s in shapes.items()}
    held = [p.extent.shape[0] if isinstance(p.extent, Extent) else -1 for p in partitions]
    try:
        width, places = stage.place(g, shapes, world, held)
    except CorruptError as e:
        b.report(Problem("inconsistent-metadata", f"{state}: {e}"))
        width, places = 1, dict.fromkeys(shapes, (0, 1))
        partitions = [Partition(Hole(p.extent.path, f"{p.extent.path}: {e}"), p.rank) for p in partitions]
    if state == "fp32" and isinstance(stage, Stage12):
        _compare_slices(b, g, places, width, cut.optim)
    dtype: DType = next(t.dtype for t in found.values())
    parts = tuple(partitions)
    return {n: Shard(s, dtype, stage.fragments(s, width, places[n], parts)) for n, s in shapes.items()}


def _compare_slices(b: Building, g: int, places: Mapping[str, tuple[int, int]], width: int, optim: OptimFiles) -> None:
    """Report ``param_slice_mappings`` of the first readable rank that contradict ``param_shapes``: converters that
    trust them read wrong values. (base_optimizer.py `_link_all_hp_params` uses the order before round_robin_gradients
    changes it.)"""
    n, rank = next((n, r) for n, r in optim.items() if isinstance(r, Optim))
    mappings = rank.state.get("param_slice_mappings")
    mapping = mappings[g] if isinstance(mappings, list) and g < len(mappings) else None
    for name, address in mapping.items() if isinstance(mapping, dict) else ():
        start = address.attributes.get("start") if isinstance(address, Opaque) else None
        if name not in places or type(start) is not int:
            continue
        at = places[name][0]
        if start != max(0, at - n * width) or at >= (n + 1) * width:
            line = (
                f"{rank.file.path}: its param_slice_mappings give wrong positions of parameters, as DeepSpeed writes "
                "them with round_robin_gradients. They are not used here; ds_to_universal, which relies on them, "
                "converts this checkpoint wrongly"
            )
            b.report(Problem("inconsistent-metadata", line, rank.file.path))
            return
