"""States by parameter, from the distributed optimizer's buckets ("dp_reshardable").

Sources, in megatron/core: optimizer/__init__.py `get_megatron_optimizer` (the optimizers, and the numbers of their
data-parallel groups: by the model-parallel rank, tensor-parallel ranks first, then expert-parallel ones, then pipeline
ranks), distributed/distributed_data_parallel.py (buffers by chunk of the model and dtype; experts that expert
parallelism distributes have their own). The arguments show how the model was cut, the chunks of the weights how each
parameter was. The layout that these imply is accepted if every bucket has its length and its cuts (see `buckets`).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.flat import Interval, Joined
from ...core.fragments import fragment_boxes
from ...core.specs import TensorSpec
from ...layouts.megatron import Degrees, degrees, flag, fused_parts, is_buffer, is_expert, number, place
from ...layouts.merge import Merge, concatenated, in_parts, replicated
from ...layouts.tables import pattern
from .buckets import Place, chunk_ends, ends_of, ranks_of, walk
from .layers import EXPERTS, decoder_layer, offsets, planned, sort_key, staged

_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\((?P<dtype>[\w.]+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_NAMES = {"param": "fp32"}
_NUMBERS = re.compile(r"\d+")
_MOST = 4096  # limit on the ranks for each one that has buffers
_HEAD = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"
States = dict[str, dict[str, TensorSpec]]
_Buffers = list[tuple[str, list[str]]]  # of each buffer, the dtype and the parameters


@dataclass(slots=True)
class _Buffer:
    """One buffer of a rank: bucket -> state -> its flat tensor."""

    dtype: str
    buckets: dict[int, dict[str, TensorSpec]] = field(default_factory=dict)

    def totals(self) -> list[int] | None:
        """Return the lengths of the buckets; None if some are missing, or if they differ between states."""
        states = set(self.buckets.get(0, ()))
        if sorted(self.buckets) != list(range(len(self.buckets))):
            return None
        if any(set(b) != states or len({s.shape for s in b.values()}) != 1 for b in self.buckets.values()):
            return None
        found = [next(iter(self.buckets[n].values())).shape[0] for n in range(len(self.buckets))]
        return found if all(found) else None


Reasons = list[tuple[list[str], str]]
Sets = Mapping[tuple[int, int], list[_Buffer]]  # (optimizer of a chain, data-parallel group) -> its buffers, in order


@dataclass(slots=True)
class _Model:
    """How the model was cut. ``stages``: name -> (pipeline rank, chunk); ``merges``: known results of `merge`;
    ``source``: where the degrees come from, for messages."""

    degrees: Degrees
    source: str
    stages: Mapping[str, tuple[int, int]]
    weights: Mapping[str, TensorSpec]
    args: Any
    merges: dict[tuple[str, Shape, int], Merge] = field(default_factory=dict)

    def ranks(self, name: str) -> int:
        """Return the number of ranks over which a parameter is cut or replicated."""
        return self.degrees.etp if is_expert(name) else self.degrees.tp

    def merge(self, name: str) -> Merge:
        """Return how a parameter's shards form the whole, from the blocks of its weight. Raises ValueError if these do
        not show it."""
        spec = self.weights[name]
        key = (_NUMBERS.sub("", name), spec.shape, self.ranks(name))
        found = self.merges.get(key)
        if found is None:
            found = self.merges[key] = _merge_of(spec, self.ranks(name), self.args)
        return found


def by_parameter(
    buffers: Mapping[str, TensorSpec], weights: Mapping[str, TensorSpec], args: Any, local: bool | None
) -> tuple[States, Reasons]:
    """Return the states of all parameters, and (keys, reason) for buffers whose parameters are not known. ``buffers``:
    flat tensors by key; ``local``: whether the model was built from the local spec (None: not known)."""
    sets = _buffers(buffers)
    if sets is None:
        return {}, [(list(buffers), "their keys are not those that megatron-core writes")]
    if args is not None:
        return _by_parameter(sets, weights, args, local, "the arguments")
    found: States = {}
    reasons: Reasons = [(list(buffers), "the saved tensors do not show it")]
    inferred = _inferred(sets, weights)
    if inferred is not None:
        source = "the chunks of the weights and the number of groups (there are no args)"
        found, reasons = _by_parameter(sets, weights, inferred, local, source)
    return found, [
        (keys, f"common.pt has no args that say how the model was cut, and {reason}") for keys, reason in reasons
    ]


def _inferred(sets: Sets, weights: Mapping[str, TensorSpec]) -> Any:
    """Infer the args from the chunks of the weights and the number of groups, if all stages have equally many layers;
    None if that is not enough. The embedding is always cut over tensor-parallel ranks, an expert's second matrix over
    expert-tensor-parallel ones."""
    fc2 = next((name for name in weights if is_expert(name) and name.endswith(".linear_fc2.weight")), None)
    chains = sorted({chain for chain, _ in sets})
    spread = fc2 is not None and len(chains) > 1
    dense = [found for (chain, _), found in sets.items() if not spread or chain != chains[-1]]
    numbers = [layer for name in weights if (layer := decoder_layer(name)) is not None]
    if _EMBEDDING not in weights or not numbers or not dense:
        return None
    tp = len(_boxes(weights[_EMBEDDING]))
    etp = len(_boxes(weights[fc2])) if fc2 is not None else tp
    pp, rest = divmod(len(dense), tp)
    ep, rest_of_experts = divmod(len(sets) - len(dense), pp * etp) if spread and pp else (1, 0)
    if rest or rest_of_experts or not ep:
        return None
    return Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=len(dense[0]) // len({one.dtype for one in dense[0]}),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_layers=1 + max(numbers),
    )


def _by_parameter(
    sets: Sets, weights: Mapping[str, TensorSpec], args: Any, local: bool | None, source: str
) -> tuple[States, Reasons]:
    try:
        model = _model(sets, weights, args, source)
    except ValueError as e:
        return {}, [(_keys(sets), str(e))]
    d = model.degrees
    expert = any(map(is_expert, model.stages))
    if expert and d.ep == 1 and d.etp != d.tp:
        return {}, [(_keys(sets), "experts are cut over other ranks than the rest, in the same buffers")]
    if not expert or d.ep == 1:
        states, reason = _split_buffers(model, sets, None, args, local)
        return states, [(_keys(sets), reason)] if reason else []
    last = max(chain for chain, _ in sets)
    states, reasons = {}, []
    for which in (False, True):
        own = {key: found for key, found in sets.items() if (key[0] == last) == which}
        found, reason = _split_buffers(model, own, which, args, local)
        for state, tensors in found.items():
            states.setdefault(state, {}).update(tensors)
        reasons += [(_keys(own), reason)] if reason else []
    return states, reasons


def _keys(sets: Sets) -> list[str]:
    buckets = [bucket for buffers in sets.values() for one in buffers for bucket in one.buckets.values()]
    return [spec.name for bucket in buckets for spec in bucket.values()]


def _buffers(buffers: Mapping[str, TensorSpec]) -> Sets | None:
    """Return (optimizer of a chain, data-parallel group) -> its buffers, in order; None for unexpected keys."""
    found: dict[tuple[int, int], dict[int, _Buffer]] = {}
    for key, spec in buffers.items():
        match = _KEY.fullmatch(key)
        if match is None or len(spec.shape) != 1:
            return None
        table = found.setdefault((int((match["chain"] or "0")[:9]), int(match["group"][:9])), {})
        one = table.setdefault(int(match["buffer"][:9]), _Buffer(match["dtype"]))
        one.buckets.setdefault(int(match["bucket"][:9]), {})[_NAMES.get(match["state"], match["state"])] = spec
    return {at: [one for _, one in sorted(table.items())] for at, table in found.items()}


def _model(sets: Sets, weights: Mapping[str, TensorSpec], args: Any, source: str) -> _Model:
    """Return how the model was cut. Raises ValueError if the arguments do not determine where a parameter is, or imply
    other ranks than have buffers."""
    chunks = number(args, "virtual_pipeline_model_parallel_size") or 1
    d = degrees(args, (1, 1, 1), chunks)
    groups = len({group for _, group in sets})
    if max(d.tp * d.pp, d.ep) > groups or chunks > sum(map(len, sets.values())):
        raise ValueError(
            f"{source} imply tp={d.tp}, pp={d.pp}, vpp={chunks}, ep={d.ep}: there are buffers of {groups} "
            "model-parallel ranks only"
        )
    names = [name for name, spec in weights.items() if not is_buffer(name) and spec.dtype.is_floating_point]
    counts = planned(args, d.pp, chunks)
    if not counts:
        raise ValueError(f"{source} do not tell which layers each pipeline stage has")
    return _Model(d, source, staged(names, offsets(d.pp, chunks, counts), counts), weights, args)


def _merge_of(spec: TensorSpec, ranks: int, args: Any) -> Merge:
    boxes = _boxes(spec)
    if ranks == 1:  # (blocks are then parts that are stored one by one)
        return replicated([spec.shape])
    cut = [d for d in range(len(spec.shape)) if len({start[d] for start, _ in boxes}) > 1]
    if not cut:
        return replicated([spec.shape] * ranks)
    if len(cut) == 1:
        dim = cut[0]
        width, rest = divmod(spec.shape[dim], ranks)
        shapes = [(*spec.shape[:dim], width, *spec.shape[dim + 1 :])] * ranks
        pieces = 2 if len(boxes) == 2 * ranks and dim == 0 and pattern("megatron.fc1").fullmatch(spec.name) else 1
        fused = fused_parts(spec.name, args)  # of Mamba layers and delta nets
        if not rest and len(boxes) == (len(fused) if fused else pieces) * ranks:
            rule = in_parts(dim, [size for _, size in fused]) if fused else in_parts(dim, 2) if pieces == 2 else None
            merged = (rule or concatenated(dim))(shapes)
            targets = [one.target(part) for one in merged.placements for part in one.blocks]
            if boxes == {(box.start, box.stop) for box in targets}:
                return merged
    raise ValueError(f"{spec.name!r} is saved in {len(boxes)} blocks: how it was cut over {ranks} ranks is not known")


def _boxes(spec: TensorSpec) -> set[tuple[Shape, Shape]]:
    """Return the blocks (start, stop) in which a tensor is saved."""
    return {(box.start, box.stop) for fragment in spec.fragments for _, box in fragment_boxes(fragment)}


@dataclass(frozen=True, slots=True)
class _Owner:
    """A model-parallel rank that has a data-parallel group. ``group``: its number; ``cut``: the index of its shards."""

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


def _split_buffers(
    model: _Model, sets: Sets, experts: bool | None, args: Any, local: bool | None
) -> tuple[States, str]:
    """Return the states in one optimizer's buffers, and the reason if they are not known. ``experts``: whether the
    buffers are those of experts or of the other parameters; None: of all."""
    d = model.degrees
    what = "experts" if experts else "parameters"
    groups = {group for _, group in sets}
    ranks = d.pp * d.ep * d.etp if experts else d.pp * d.tp
    if max(groups, default=0) >= ranks or ranks > _MOST * max(1, len(groups)):
        return {}, f"{len(groups)} model-parallel ranks have buffers of {what}, {model.source} imply {ranks}"
    by_group: dict[int, list[_Buffer]] = {}
    for (_, group), buffers in sorted(sets.items(), key=lambda item: item[0]):
        by_group.setdefault(group, []).extend(buffers)
    by_owner = [(owner, by_group.get(owner.group, [])) for owner in _owners(d, experts)]
    fits: list[list[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]] = []
    reasons = []
    for key in _orders(args, local):
        try:
            found = _laid_out(model, by_owner, experts, key)
        except ValueError as e:
            reasons.append(str(e))
            continue
        if not any([places for *_, places in found] == [places for *_, places in other] for other in fits):
            fits.append(found)
    if not fits:
        stacks = experts is not False and flag(args, "moe_use_legacy_grouped_gemm") is True
        return {}, reasons[0] + (" (experts of legacy grouped GEMM are one array on a rank)" if stacks else "")
    if len(fits) > 1:
        return {}, f"{len(fits)} orders of its {what} fit: which one it was is not known"
    return _states(model, fits[0]), ""


def _orders(args: Any, local: bool | None) -> Iterator[Callable[[str], Any]]:
    """Yield sort keys for the orders of parameters that the arguments allow."""
    experts = EXPERTS[:1] if flag(args, "moe_grouped_gemm") is False else EXPERTS
    for how, unfused in product(experts, (False,) if local is not None else (False, True)):
        yield partial(sort_key, experts=how, unfused=unfused)


def _laid_out(
    model: _Model,
    by_owner: Sequence[tuple[_Owner, list[_Buffer]]],
    experts: bool | None,
    key: Callable[[str], Any],
) -> list[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]:
    """Return the places of all parameters. Raises ValueError if the buckets are not cut accordingly."""
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
        raise ValueError("the chunks of the buckets do not begin and end where the parameters would")
    return placed


def _size(model: _Model, name: str) -> int:
    own = _EMBEDDING if name == _HEAD and name not in model.weights else name
    total = model.weights[own].numel
    return total if model.merge(own).placements[0].parts is None else total // model.ranks(own)


def _plan(model: _Model, key: Callable[[str], Any], experts: bool | None) -> dict[tuple[int, int], _Buffers]:
    """Return the buffers that ranks should have: (pipeline, expert-parallel rank) -> for each buffer the dtype, and the
    parameters in the model's order. Raises ValueError if the order is not known."""
    d = model.degrees
    own = [name for name in model.stages if experts is None or is_expert(name) == experts]
    unknown = next((name for name in own if key(name) is None), None)
    if unknown is not None:
        raise ValueError(f"the place of {unknown!r} among the model's parameters is not known")
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
    return place(name).number


def _states(model: _Model, placed: Sequence[tuple[_Owner, _Buffer, list[tuple[str, Place]]]]) -> States:
    shards: dict[str, dict[str, dict[int, Joined]]] = {}
    first: dict[str, TensorSpec] = {}
    for owner, one, names in placed:
        for name, (bucket, at) in names:
            if name not in model.weights:
                continue
            merged = model.merge(name)
            shape = merged.placements[owner.cut].shape
            for state, spec in one.buckets[bucket].items():
                here = Interval(spec.shape, spec.fragments, at, at + prod(shape))
                held = Joined(shape, ((0, prod(shape), here),))
                shards.setdefault(state, {}).setdefault(name, {})[owner.cut] = held
                first.setdefault(state, spec)
    how = f"taken from the distributed optimizer's buckets: laid out as {model.source} imply, as its chunks confirm"
    states: States = {}
    for state, table in shards.items():
        for name in (n for n in model.weights if n in table):
            merged = model.merge(name)
            rows = [table[name][r] for r in sorted(table[name])]
            rule = f"{merged.rule}, as the weight is saved; {how}" if len(rows) > 1 else how
            states.setdefault(state, {})[name] = TensorSpec(
                name, merged.shape, first[state].dtype, merged.join(rows), rule=rule
            )
    return states
