"""Build an Index from the rank files of one iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...core.box import Box
from ...core.extents import Extent
from ...core.index import Index
from ...core.names import natural
from ...core.placement import Mesh, Part
from ...core.specs import Fragment, TensorSpec
from ...errors import CorruptError, Problem, sentences
from ...io.containers.pickle.plain import Plain
from ...layouts.megatron import data_parallel, megatron_rules, number, place, version
from ...layouts.tables import pattern
from ..reader import Reader, Source
from ..shared.paths import grouped
from ..shared.rank_shards import Shard
from ..torch_save import warnings
from .dpshards import add_dp_shards
from .files import Iteration, find_ranks, is_legacy
from .gather import Gathered
from .layers import offsets, planned
from .layerwise import add_layerwise
from .ranks import Grid, read_grid
from .weights import Attributes, Namer, add_buffers, add_states, add_weights, number_layers

# -- Names of lost tensors, as far as the names on other ranks determine them, and why each is lost.


def lost_names(grid: Grid, g: Gathered) -> dict[str, str]:
    """Return the names of tensors of stages and experts whose ranks have no file -> why they cannot be read."""
    weights = g.states.get("weights", {})
    found = [*_of_stages(grid, list(weights)), *_of_experts(grid, list(weights))]
    return {name: f"{name!r}: {why}" for name, why in found if name not in weights}


def _of_stages(grid: Grid, names: list[str]) -> Iterator[tuple[str, str]]:
    d = grid.degrees
    layers: dict[str, set[str]] = {}
    for name in names:
        at = place(name)
        if at.layer is not None:
            layers.setdefault(f"{at.head}{{}}", set()).add(at.tail)
    counts = planned(grid.args, d.pp, d.chunks) if len(layers) == 1 else {}  # (the arguments describe one stack)
    starts = offsets(d.pp, d.chunks, counts) if counts else {}
    core = any(name.startswith("decoder.layers.") for name in names)
    for pp in range(d.pp):
        if not all((tp, pp) in grid.lost for tp in range(d.tp)):
            continue
        why = grid.lost[0, pp].reason
        if core and pp == 0:
            yield "embedding.word_embeddings.weight", why
        if core and pp == d.pp - 1:
            yield "decoder.final_layernorm.weight", why
            if getattr(grid.args, "untie_embeddings_and_output_weights", None) is True:
                yield "output_layer.weight", why
        for chunk in range(d.chunks):
            for layer in range(counts.get((pp, chunk), 0)):
                for head, tails in layers.items():
                    yield from ((head.format(starts[pp, chunk] + layer) + tail, why) for tail in tails)


def _of_experts(grid: Grid, names: list[str]) -> Iterator[tuple[str, str]]:
    experts = number(grid.args, "num_experts", "num_moe_experts")
    if not grid.lost_experts or experts is None:
        return
    each = experts // grid.degrees.ep
    lost = {ep: hole.reason for (_, ep), hole in grid.lost_experts.items()}
    found = ((name, pattern("megatron.expert").search(name)) for name in names)
    like = dict.fromkeys((name[: m.end(1)], name[m.end(2) :]) for name, m in found if m is not None)
    for head, tail in like:
        for ep, why in lost.items():
            yield from ((f"{head}{n}{tail}", why) for n in range(ep * each, (ep + 1) * each))


# -- Query, key and value rows of checkpoints of version 0 and 1, in the order of today's Megatron.

_BLOCKS = 4096


def splits_of(name: str, version: float) -> int:
    """Return the number of matrices fused in a tensor of that name, if they have an old order; else 0."""
    match = pattern("megatron.old_qkv").search(name)
    if match is None or version >= 2:
        return 0
    return 3 if match[2] == "query_key_value" else 2


def in_todays_order(name: str, shards: Sequence[Shard], splits: int, version: float, size: int) -> TensorSpec:
    """Return the whole tensor in today's order, in blocks of one head of one matrix. ``size``: rows per head. Raises
    ValueError if the shards do not consist of whole heads."""
    first = shards[0]
    fragments: list[Fragment] = []
    at = 0
    for shard in shards:
        heads, rest = divmod(shard.shape[0], splits * size)
        if rest or not heads or heads * splits > _BLOCKS:
            raise ValueError(f"{shard.shape[0]} rows are not {splits} x heads x {size}")
        for copy in shard.fragments:
            for head in range(heads):
                for k in range(splits):
                    start = at + (head * splits + k) * size
                    fragments.append(_block(copy, version, heads, head, k, splits, size, start))
        at += shard.shape[0]
    order = f"[{splits}, heads, {size}]" if version < 1 else f"[heads, {size}, {splits}]"
    rule = (
        f"concatenated along dimension 0 over {len(shards)} ranks, each rank's rows {order} put into the order [heads, "
        f"{splits}, {size}]; known from checkpoint_version = {version:g}"
    )
    return TensorSpec(name, (at, *first.shape[1:]), first.dtype, tuple(fragments), rule=rule)


def _block(
    copy: Fragment, version: float, heads: int, head: int, k: int, splits: int, size: int, start: int
) -> Fragment:
    extent = copy.extent
    shape = (size, *copy.local_shape[1:])
    if isinstance(extent, Extent):
        row = extent.strides[0]
        ahead, step = ((k * heads + head) * size, 1) if version < 1 else (head * size * splits + k, splits)
        offset = extent.offset + ahead * row * extent.dtype.itemsize
        extent = replace(extent, offset=offset, shape=shape, strides=(row * step, *extent.strides[1:]))
    part = Part(Box.of(shape), (start, *(0,) * (len(shape) - 1)))
    return Fragment(extent, shape, (part,), rank=copy.rank)


# -- The Index.

_ORDER = ("weights", "fp32", "exp_avg", "exp_avg_sq")


def read(source: Source) -> Index:
    """Index the iteration that `find_ranks` selects."""
    return read_ranks(source, find_ranks(source))


def read_ranks(source: Source, found: Iteration) -> Index:
    """Index the files of some ranks."""
    grid = read_grid(source.store, found)
    first = grid.first
    label = f"{first.folder.name}/{first.folder.model.rpartition('/')[2]}/".lstrip("/")
    plain = Plain(first.file.root, f"{source.where}/{first.file.path}", first.file.pickle_size, label)
    for problem in warnings(first.file.path, first.file, plain):
        grid.report(problem)
    if grid.args is None:
        line = f"{first.file.path} has no args: how the model was cut is guessed from names and shapes"
        grid.report(Problem("missing-metadata", line, first.file.path))
    number_layers(grid)
    attributes: Attributes = {}
    g = Gathered(grid, megatron_rules(grid.args, source.rules, attributes), lambda name: bool(source.rules))
    namer = Namer(grid)
    add_weights(g, namer)
    add_states(g, namer, attributes)
    add_layerwise(g, namer, source.store, attributes)
    add_dp_shards(g, namer, source.store)
    add_buffers(g, namer, source.store)
    old = version(first.root)
    states: dict[str, dict[str, TensorSpec]] = {}
    for state in sorted(g.states, key=_state_order):
        names = sorted(g.states[state], key=natural) if grid.degrees.pp > 1 else list(g.states[state])
        states[state] = {name: _spec(g, state, name, old) for name in names}
    for problem in grouped("unmerged-tensor", g.merging.unmerged, "cannot be put together"):
        grid.report(problem)
    if not states.get("weights"):
        raise CorruptError(f"{source.where}/{found.folder}: its files hold no weights; {sentences(grid.problems)}")
    return Index(
        format="megatron",
        states=states,
        files=grid.files,
        indexed=grid.indexed,
        meta=_meta(plain, found.folder) if found.unwrap is None else {**plain.meta, "args": grid.args},
        mesh=Mesh(grid.degrees.tp, grid.degrees.pp, data_parallel(grid.args, grid.degrees), grid.degrees.ep),
        problems=tuple(grid.problems),
        unreadable=lost_names(grid, g),
    )


def _spec(g: Gathered, state: str, name: str, old: float) -> TensorSpec:
    splits = splits_of(name, old)
    shards = g.states[state][name]
    has_user_rule = g.sources[0].find(name) is not None
    if has_user_rule or not splits or 0 not in shards or shards[0].shape == ():
        return g.spec(state, name)
    heads = number(g.grid.args, "num_attention_heads")
    size = number(g.grid.args, "kv_channels")
    hidden = number(g.grid.args, "hidden_size")
    if size is None and heads and hidden:
        size = hidden // heads
    if size is None or len(shards) < g.grid.degrees.tp:
        line = f"{name!r} of checkpoint_version {old:g} cannot be put into today's order: it is read as stored"
        g.grid.report(Problem("unsupported-tensor", line, name))
        return g.spec(state, name)
    try:
        return in_todays_order(name, [shards[key] for key in sorted(shards)], splits, old, size)
    except ValueError as e:
        line = f"{name!r} of checkpoint_version {old:g} cannot be put into today's order: {e}: it is read as stored"
        g.grid.report(Problem("unsupported-tensor", line, name))
        return g.spec(state, name)


def _state_order(state: str) -> tuple[int, str]:
    return (_ORDER.index(state) if state in _ORDER else len(_ORDER) + (state == "step"), state)


def _meta(plain: Plain, folder: str) -> dict[str, Any]:
    meta = dict(plain.rest) if isinstance(plain.rest, dict) else {}
    meta["tag"] = folder
    if "iteration" in meta:
        meta.setdefault("step", meta["iteration"])
    return meta


READER = Reader(
    "megatron",
    "Megatron folders (an iteration, or the folder with `latest_checkpointed_iteration.txt`)",
    is_legacy,
    read,
    tags=True,
)
