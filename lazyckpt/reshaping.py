"""Indexes of views with other names, another dtype, or shards for other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .core.dtypes import dtype_of
from .core.index import Index, TensorSpec, converted, renamed
from .errors import DataError
from .layouts.ranks import mesh_of
from .namespace import STORED, Namespace

if TYPE_CHECKING:
    import torch


def with_names(view: Namespace[Any], names: str | Mapping[str, Any], reverse: bool) -> Index:
    """See `lazyckpt.CheckpointView.rename`."""
    from .layouts.rename.apply import renamed_index

    index, shown = shown_of(view, "rename")
    return renamed_index(index, shown, names, reverse)


def of_rank(
    view: Namespace[Any],
    degrees: tuple[int, int, int, int],
    rank: int | tuple[int, ...] | Mapping[str, int],
    rules: Mapping[str, Any],
) -> Index:
    """See `lazyckpt.CheckpointView.shard`; ``degrees``: tp, pp, dp, ep."""
    from .layouts.shard import sharded

    index, shown = shown_of(view, "shard")
    return sharded(index, shown, mesh_of(*degrees), rank, rules, view.kept)


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
