"""From the distributed optimizer's buckets ("dp_reshardable") to states by parameter.

Sources, in megatron/core: optimizer/__init__.py `get_megatron_optimizer` (which optimizers, and how their
data-parallel groups are numbered: by the model-parallel rank, tensor-parallel ranks first, then expert-parallel ones,
then pipeline ranks), distributed/distributed_data_parallel.py (buffers by chunk of the model and dtype; experts that
expert parallelism spreads have their own). The arguments tell how the model was cut, the chunks of the weights how each
parameter was. What these lead to is believed if every bucket is as long and is cut just so (see `buckets`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from ...core.index import TensorSpec
from ...core.plan import fragment_boxes
from ..merge import Merge, MergedFragments, concatenated, in_parts, replicated
from .buckets import Place, Sliced, chunk_ends, ends_of, ranks_of, walk
from .degrees import Degrees, degrees, flag, number
from .layers import offsets, planned
from .names import is_buffer, is_expert
from .order import EXPERTS, sort_key, staged

_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\((?P<dtype>[\w.]+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_NAMES = {"param": "fp32"}
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_FC1 = re.compile(r"\.linear_fc1\.(weight|bias)$")
_NUMBERS = re.compile(r"\d+")
_HEAD = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"
States = dict[str, dict[str, TensorSpec]]
_Buffers = list[tuple[str, list[str]]]  # for each its dtype, and the parameters in it


@dataclass(slots=True)
class _Buffer:
    """One buffer of a rank: bucket -> state -> its flat tensor."""

    dtype: str
    buckets: dict[int, dict[str, TensorSpec]] = field(default_factory=dict)

    def totals(self) -> list[int] | None:
        """The lengths of the buckets; None if some lack, or states differ in theirs."""
        states = set(self.buckets.get(0, ()))
        if sorted(self.buckets) != list(range(len(self.buckets))):
            return None
        if any(set(b) != states or len({s.shape for s in b.values()}) != 1 for b in self.buckets.values()):
            return None
        return [next(iter(self.buckets[n].values())).shape[0] for n in range(len(self.buckets))]


@dataclass(slots=True)
class _Model:
    """``stages``: name -> (pipeline rank, chunk); ``merges``: how its shards form the whole."""

    degrees: Degrees
    stages: Mapping[str, tuple[int, int]]
    weights: Mapping[str, TensorSpec]
    merges: dict[tuple[str, tuple[int, ...], int], Merge] = field(default_factory=dict)

    def ranks(self, name: str) -> int:
        """Over how many ranks it is cut, or copied."""
        return self.degrees.etp if is_expert(name) else self.degrees.tp

    def merge(self, name: str) -> Merge:
        """How its shards form the whole: as its weight is saved. Raises ValueError if that tells nothing."""
        spec = self.weights[name]
        key = (_NUMBERS.sub("", name), spec.shape, self.ranks(name))
        found = self.merges.get(key)
        if found is None:
            found = self.merges[key] = _merge_of(spec, self.ranks(name))
        return found


def by_parameter(
    buffers: Mapping[str, TensorSpec], weights: Mapping[str, TensorSpec], args: Any, local: bool | None
) -> tuple[States, list[str]]:
    """The states of all parameters, and why those of some are not known. ``buffers``: flat tensors by their keys;
    ``local``: whether the model was made of the local spec (None: not known)."""
    if args is None:
        return {}, ["common.pt has no args, so how the model was cut is not known"]
    sets = _buffers(buffers)
    if sets is None:
        return {}, ["their keys are not those that megatron-core writes"]
    try:
        model = _model(weights, args)
    except ValueError as e:
        return {}, [str(e)]
    spread = model.degrees.ep > 1 and any(map(is_expert, model.stages))
    if not spread and model.degrees.etp != model.degrees.tp and any(map(is_expert, model.stages)):
        return {}, ["experts are cut over other ranks than the rest, in the same buffers"]
    chains = sorted({chain for chain, _ in sets})
    dense = {key: found for key, found in sets.items() if not spread or key[0] != chains[-1]}
    experts = {key: found for key, found in sets.items() if spread and key[0] == chains[-1]}
    states: States = {}
    lines = []
    for which, group in ((False, dense), (True, experts)):
        if group or (spread if which else True):
            found, reason = _taken_apart(model, group, which if spread else None, args, local)
            for state, tensors in found.items():
                states.setdefault(state, {}).update(tensors)
            lines += [reason] if reason else []
    return states, list(dict.fromkeys(lines))


def _buffers(buffers: Mapping[str, TensorSpec]) -> dict[tuple[int, int], list[_Buffer]] | None:
    """(optimizer of a chain, data-parallel group) -> its buffers, in order."""
    found: dict[tuple[int, int], dict[int, _Buffer]] = {}
    for key, spec in buffers.items():
        match = _KEY.fullmatch(key)
        if match is None or len(spec.shape) != 1:
            return None
        table = found.setdefault((int((match["chain"] or "0")[:9]), int(match["group"][:9])), {})
        one = table.setdefault(int(match["buffer"][:9]), _Buffer(match["dtype"]))
        one.buckets.setdefault(int(match["bucket"][:9]), {})[_NAMES.get(match["state"], match["state"])] = spec
    return {at: [one for _, one in sorted(table.items())] for at, table in found.items()}


def _model(weights: Mapping[str, TensorSpec], args: Any) -> _Model:
    """Raises ValueError if the arguments do not tell where a parameter is."""
    chunks = number(args, "virtual_pipeline_model_parallel_size") or 1
    d = degrees(args, (1, 1, 1), chunks)
    names = [name for name, spec in weights.items() if not is_buffer(name) and spec.dtype.is_floating_point]
    counts = planned(args, d.pp, chunks)
    if not counts:
        raise ValueError("the arguments do not tell which layers each pipeline stage has")
    return _Model(d, staged(names, offsets(d.pp, chunks, counts), counts), weights)


def _merge_of(spec: TensorSpec, ranks: int) -> Merge:
    boxes = {(box.start, box.stop) for fragment in spec.fragments for _, box in fragment_boxes(fragment)}
    cut = [d for d in range(len(spec.shape)) if len({start[d] for start, _ in boxes}) > 1]
    if not cut:
        return replicated([spec.shape] * ranks)
    if len(cut) == 1:
        dim = cut[0]
        width, rest = divmod(spec.shape[dim], ranks)
        shapes = [(*spec.shape[:dim], width, *spec.shape[dim + 1 :])] * ranks
        pieces = 2 if len(boxes) == 2 * ranks and dim == 0 and _FC1.search(spec.name) else 1
        if not rest and len(boxes) == pieces * ranks:
            merged = (in_parts(dim, 2) if pieces == 2 else concatenated(dim))(shapes)
            if boxes == {(b.start, b.stop) for parts in merged.parts for b in _targets(parts or ())}:
                return merged
    raise ValueError(f"{spec.name!r} is saved in {len(boxes)} blocks: over {ranks} ranks, how it was cut is not known")


def _targets(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        yield part.local.shift([b - a for a, b in zip(part.local.start, part.start, strict=True)])


@dataclass(frozen=True, slots=True)
class _Owner:
    """A model-parallel rank, as an optimizer's groups are numbered; ``cut``: which shard of a tensor it has."""

    group: int
    pp: int
    cut: int
    ep: int


def _owners(d: Degrees, experts: bool | None) -> list[_Owner]:
    if experts:
        return [
            _Owner((pp * d.ep + ep) * d.etp + r, pp, r, ep)
            for pp in range(d.pp)
            for ep in range(d.ep)
            for r in range(d.etp)
        ]
    return [_Owner(pp * d.tp + r, pp, r, 0) for pp in range(d.pp) for r in range(d.tp)]


def _taken_apart(
    model: _Model, sets: Mapping[tuple[int, int], list[_Buffer]], experts: bool | None, args: Any, local: bool | None
) -> tuple[States, str]:
    """The states in one optimizer's buffers: of experts, of all others, or (None) of all parameters. With the reason
    why they are not known."""
    owners = _owners(model.degrees, experts)
    what = "experts" if experts else "parameters"
    groups = {group for _, group in sets}
    if groups - {owner.group for owner in owners}:
        return {}, f"there are {1 + max(groups)} model-parallel ranks, the arguments tell of {len(owners)}"
    by_owner = [
        (owner, [one for (_, group), found in sorted(sets.items()) if group == owner.group for one in found])
        for owner in owners
    ]
    fits: list[list[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]] = []
    reasons = []
    for key in _orders(args, local):
        try:
            found = _laid_out(model, by_owner, experts, key)
        except ValueError as e:
            reasons.append(str(e))
            continue
        if found not in fits:
            fits.append(found)
    if not fits:
        return {}, reasons[0]
    if len(fits) > 1:
        return {}, f"{len(fits)} orders of its {what} fit: which one it was is not known"
    return _states(model, fits[0]), ""


def _orders(args: Any, local: bool | None) -> Iterator[Callable[[str], Any]]:
    """The orders that the model may have, as far as the arguments leave that open."""
    experts = EXPERTS[:1] if flag(args, "moe_grouped_gemm") is False else EXPERTS
    for how, unfused in product(experts, (False,) if local is not None else (False, True)):
        yield lambda name, how=how, unfused=unfused: sort_key(name, how, unfused)


def _laid_out(
    model: _Model,
    by_owner: Sequence[tuple[_Owner, list[_Buffer]]],
    experts: bool | None,
    key: Callable[[str], Any],
) -> list[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]:
    """Where all parameters lie. Raises ValueError if the buckets are not cut so."""
    plan = _plan(model, key, experts)
    placed = []
    found: list[set[int]] = []
    expected: list[set[int]] = []
    for owner, buffers in by_owner:
        wanted = plan.get((owner.pp, owner.ep), [])
        if [dtype for dtype, _ in wanted] != [one.dtype for one in buffers]:
            raise ValueError(
                f"model-parallel rank {owner.group} has buffers of {[one.dtype for one in buffers]}, "
                f"{[dtype for dtype, _ in wanted]} are expected for its chunks of the model"
            )
        for (_, own), one in zip(wanted, buffers, strict=True):
            sizes = [_size(model, name) for name in own]
            totals = one.totals()
            places = None if totals is None else walk(sizes, totals)
            if totals is None or places is None:
                raise ValueError(
                    f"the buckets of model-parallel rank {owner.group} are {totals} long, which {len(own)} parameters "
                    f"of {sum(sizes):,} elements do not fill"
                )
            ends = ends_of(places, sizes, totals)
            for n, bucket in sorted(one.buckets.items()):
                found += map(chunk_ends, bucket.values())
                expected += [ends[n]] * len(bucket)
            placed.append((owner, one, list(zip(own, places, strict=True))))
    if not placed or ranks_of(found, expected) is None:
        raise ValueError("their chunks do not begin and end where the parameters would")
    return placed


def _size(model: _Model, name: str) -> int:
    own = _EMBEDDING if name == _HEAD and name not in model.weights else name
    total = model.weights[own].numel
    return total if model.merge(own).parts[0] is None else total // model.ranks(own)


def _plan(model: _Model, key: Callable[[str], Any], experts: bool | None) -> dict[tuple[int, int], _Buffers]:
    """The buffers that ranks should have: (pipeline, expert-parallel rank) -> for each buffer the dtype, and the
    parameters in the model's order. Raises ValueError if the order is not known."""
    d = model.degrees
    own = [name for name in model.stages if experts is None or is_expert(name) == experts]
    unknown = next((name for name in own if key(name) is None), None)
    if unknown is not None:
        raise ValueError(f"where {unknown!r} stands among the model's parameters is not known")
    total = 1 + max((e for name in own if (e := _expert(name)) is not None), default=0)
    tables: dict[tuple[int, int, int], dict[str, list[str]]] = {}
    for name in sorted(own, key=key):
        pp, chunk = model.stages[name]
        ep = ((_expert(name) or 0) * d.ep // total) if experts else 0
        by_dtype = tables.setdefault((pp, ep, chunk), {})
        by_dtype.setdefault(str(model.weights[name].dtype), []).append(name)
    if not experts and d.pp > 1 and _HEAD not in model.weights and _EMBEDDING in model.weights:
        by_dtype = tables.setdefault((d.pp - 1, 0, d.chunks - 1), {})  # the last stage's copy of tied embeddings
        by_dtype.setdefault(str(model.weights[_EMBEDDING].dtype), []).append(_HEAD)
    found: dict[tuple[int, int], _Buffers] = {}
    for (pp, ep, _), by_dtype in sorted(tables.items(), key=lambda item: item[0]):
        found.setdefault((pp, ep), []).extend(by_dtype.items())
    return found


def _expert(name: str) -> int | None:
    match = _EXPERT.search(name)
    return int(match[1][:9]) if match else None


def _states(model: _Model, placed: Sequence[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]) -> States:
    shards: dict[str, dict[str, dict[int, Sliced]]] = {}
    first: dict[str, TensorSpec] = {}
    for owner, one, names in placed:
        for name, (bucket, at) in names:
            if name not in model.weights:
                continue
            merged = model.merge(name)
            shape = merged.shape if merged.parts[0] is None else _local(merged, owner.cut)
            for state, spec in one.buckets[bucket].items():
                shards.setdefault(state, {}).setdefault(name, {})[owner.cut] = Sliced(spec.fragments, at, shape)
                first.setdefault(state, spec)
    states: States = {}
    for state, table in shards.items():
        for name in (n for n in model.weights if n in table):
            merged = model.merge(name)
            rows = tuple(table[name][r] for r in sorted(table[name]))
            how = "taken from the buckets of the distributed optimizer, whose chunks end where its parameters do"
            rule = f"{merged.rule}, as the weight is saved; {how}" if len(rows) > 1 else how
            states.setdefault(state, {})[name] = TensorSpec(
                name, merged.shape, first[state].dtype, MergedFragments(rows, merged.parts), rule=rule
            )
    return states


def _local(merged: Merge, rank: int) -> tuple[int, ...]:
    """The shape of a rank's shard."""
    parts = merged.parts[rank] or ()
    return tuple(max(part.local.stop[d] for part in parts) for d in range(len(merged.shape)))
