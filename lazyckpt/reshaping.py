"""Indexes of views with other names, another dtype, shards for other ranks, or only the tensors of a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .core.dtypes import dtype_of
from .core.expr import computed, converted, make, operand
from .core.index import Index
from .core.placement import Division
from .core.specs import Specs, TensorSpec, renamed, some_of
from .errors import DataError
from .layouts.ranks import division_of, mesh_of
from .lookup import STORED
from .namespace import Namespace

if TYPE_CHECKING:
    import torch


def with_names(view: Namespace[Any], names: str | Mapping[str, Any], reverse: bool) -> Index:
    """See `lazyckpt.CheckpointView.rename`."""
    from .layouts.rename.apply import renamed_index

    index, shown = shown_of(view, "rename")
    return renamed_index(index, shown, names, reverse)


def of_rank(
    view: Namespace[Any],
    division: Division,
    rank: int | tuple[int, ...] | Mapping[str, int],
    rules: Mapping[str, Any],
) -> Index:
    """See `lazyckpt.CheckpointView.shard`."""
    from .layouts.shard import sharded

    index, shown = shown_of(view, "shard")
    return sharded(index, shown, division, rank, rules, view.kept)


def division(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    layout: str | Sequence[int] | None = None,
    vocab_multiple: int | None = None,
) -> Division:
    """Return the division of a model among ranks, from the arguments of `lazyckpt.CheckpointView.shard`."""
    from .layouts.pipeline import pipeline_of

    return division_of(mesh_of(tp, pp, dp, ep), etp, pipeline_of(pp, vpp, layout), vocab_multiple)


def with_dtype(view: Namespace[Any], dtype: torch.dtype) -> Index:
    """See `lazyckpt.CheckpointView.astype`."""
    wanted = dtype_of(dtype)
    if not wanted.is_floating_point:
        raise DataError(f"floating-point tensors are not converted to {dtype}: name a floating-point dtype")
    state = view._state

    def of(index: Index) -> Index:
        if state == STORED:
            return replace(index, stored=converted(view.specs, wanted))
        layout = index.layout and replace(index.layout, source=of(index.layout.source))
        states = {**index.states, state: converted(index.states[state], wanted)}
        return replace(index, states=states, layout=layout)

    return of(view._index)


def with_function(
    view: Namespace[Any], function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None, whole: bool
) -> Index:
    """See `lazyckpt.CheckpointView.map`."""
    from .core.ops.mapped import Function

    call, kind = Function(function), None if dtype is None else dtype_of(dtype)

    def of(spec: TensorSpec) -> TensorSpec:
        expr = make("map", operand(spec), function=call, dtype=kind, whole=whole)
        return computed(spec.name, expr, spec.rule, spec.stored_as)

    index, state = view._index, view._state
    specs = {name: of(spec) for name, spec in (view.specs if state == STORED else index.states[state]).items()}
    if state == STORED:
        return replace(index, stored=specs, layout=None)
    return replace(index, states={**index.states, state: specs}, layout=None)


def shown_of(view: Namespace[Any], what: str) -> tuple[Index, dict[str, dict[str, TensorSpec]]]:
    """Return the index of a view, and the specs that the view shows of every state, by full names. In the index only
    names of the view are tied; if the view lacks the owner of a tensor, its first tied name in the view owns it."""
    if any(kind == "below" for kind, _ in view._steps):
        raise DataError(f"the names of this view are relative to a prefix: {what} the whole view, then take the part")
    index, sides = view._index, view.states
    shown = {
        state: {name: side.specs[name] for name in side._listed if name in side.specs} for state, side in sides.items()
    }
    if not view._steps:
        return index, shown
    listed = {name for side in sides.values() for name in side._listed}
    aliases: dict[str, str] = {}
    heirs: dict[str, str] = {}
    for alias, owner in index.aliases.items():
        if alias in listed:
            new = owner if owner in listed else heirs.setdefault(owner, alias)
            aliases |= {alias: new} if new != alias else {}
    if heirs and index.layout is not None:
        owner, alias = next(iter(heirs.items()))
        raise DataError(f"{alias!r} is a tied name of {owner!r} in this shard: to {what} it, select {owner!r}, too")
    states = dict(index.states)
    for state, side in sides.items():
        own = {o: heir for o, heir in heirs.items() if heir in side._listed and o in side.specs}
        added = {heir: renamed(side.specs[owner], heir) for owner, heir in own.items()}
        states[state] = {**states[state], **added}
        shown[state] |= added
    return replace(index, states=states, aliases=aliases), shown


def of_part(view: Namespace[Any]) -> Index:
    """Return the index of a view with only the tensors that the view shows, in every state: what a worker needs of a
    part of a large checkpoint. Reads nothing.

    The files, aliases and problems are those of the whole checkpoint, as in the view itself. States whose names are not
    decided yet are kept whole.
    """
    index = view._index
    if not view._steps or index.layout is not None:
        return index
    states, kept = dict(index.states), dict[str, TensorSpec]()
    for state, specs in index.states.items():
        if not isinstance(specs, Specs) and type(specs) is not dict:
            continue
        shown = set(view._side(state)._listed.values())
        wanted = shown | {index.aliases.get(name, name) for name in shown}
        states[state] = some_of(specs, wanted.__contains__)
        kept |= {f"{state} {name}": spec for name, spec in states[state].items()}
    stored = index.stored
    if stored is not None:
        raw = dict.fromkeys(view._listed.values() if view._state == STORED else ())
        raw |= dict.fromkeys(spec.stored_as or spec.name for spec in kept.values())
        names = stored if isinstance(stored, dict) else raw  # (to list others may read the objects of the checkpoint)
        stored = {name: stored[name] for name in names if name in raw and name in stored}
    return replace(index, states=states, stored=stored)
