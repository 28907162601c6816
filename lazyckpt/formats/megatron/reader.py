"""From the rank files of one iteration to an Index."""

from __future__ import annotations

from typing import Any

from ...core.index import Index, Mesh, TensorSpec
from ...core.names import natural
from ...errors import CorruptError
from ...io.plain import Plain
from ..paths import told_together
from ..reader import Source
from ..torchsave import warnings
from .degrees import data_parallel, number, version
from .files import find_ranks
from .gather import Gathered
from .lost import lost_names
from .oldorder import in_todays_order, splits_of
from .ranks import read_grid
from .rules import megatron_rules
from .weights import Attributes, Namer, add_buffers, add_states, add_weights, number_layers

_ORDER = ("weights", "fp32", "exp_avg", "exp_avg_sq")


def read(source: Source) -> Index:
    """Index the iteration that `find_ranks` finds."""
    found = find_ranks(source)
    grid = read_grid(source.store, found)
    first = grid.first
    label = f"{first.folder.name}/{first.folder.model.rpartition('/')[2]}/"
    plain = Plain(first.file.root, f"{source.where}/{first.file.path}", first.file.pickle_size, label)
    for line in warnings(first.file.path, first.file, plain):
        grid.tell(line)
    if grid.args is None:
        grid.tell(f"{first.file.path} has no args: how the model was cut is guessed from names and shapes")
    number_layers(grid)
    attributes: Attributes = {}
    g = Gathered(grid, megatron_rules(grid.args, source.rules, attributes), lambda name: bool(source.rules))
    namer = Namer(grid)
    add_weights(g, namer)
    add_states(g, namer, attributes)
    add_buffers(g, namer, source.store)
    old = version(first.root)
    states: dict[str, dict[str, TensorSpec]] = {}
    for state in sorted(g.states, key=_state_order):
        names = sorted(g.states[state], key=natural) if grid.degrees.pp > 1 else list(g.states[state])
        states[state] = {name: _spec(g, state, name, old) for name in names}
    for line in told_together(g.unmerged, "cannot be put together"):
        grid.tell(line)
    if not states.get("weights"):
        raise CorruptError(
            f"{source.where}/{found.folder}: its files hold no weights; {'; '.join(list(grid.problems)[:3])}"
        )
    return Index(
        format="megatron",
        states=states,
        files=grid.files,
        meta=_meta(plain, found.folder),
        mesh=Mesh(grid.degrees.tp, grid.degrees.pp, data_parallel(grid.args, grid.degrees), grid.degrees.ep),
        problems=tuple(grid.problems),
        unreadable=lost_names(grid, g),
    )


def _spec(g: Gathered, state: str, name: str, old: float) -> TensorSpec:
    splits = splits_of(name, old)
    shards = g.states[state][name]
    said = g.sources[0].find(name) is not None  # by the user
    if said or not splits or (0, 0) not in shards or shards[0, 0].shape == ():
        return g.spec(state, name)
    heads = number(g.grid.args, "num_attention_heads")
    size = number(g.grid.args, "kv_channels")
    hidden = number(g.grid.args, "hidden_size")
    if size is None and heads and hidden:
        size = hidden // heads
    if size is None or len(shards) < g.grid.degrees.tp:
        g.grid.tell(f"{name!r} of checkpoint_version {old:g} cannot be put into today's order: it is as stored")
        return g.spec(state, name)
    try:
        return in_todays_order(name, [shards[key] for key in sorted(shards)], splits, old, size)
    except ValueError as e:
        g.grid.tell(f"{name!r} of checkpoint_version {old:g} cannot be put into today's order: {e}: it is as stored")
        return g.spec(state, name)


def _state_order(state: str) -> tuple[int, str]:
    return (_ORDER.index(state) if state in _ORDER else len(_ORDER) + (state == "step"), state)


def _meta(plain: Plain, folder: str) -> dict[str, Any]:
    meta = dict(plain.rest) if isinstance(plain.rest, dict) else {}
    meta["tag"] = folder
    if "iteration" in meta:
        meta.setdefault("step", meta["iteration"])
    return meta
