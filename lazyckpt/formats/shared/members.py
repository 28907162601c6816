"""A training state from its members: each a file or a folder that holds a part of it, at some place in the whole.

What one file of torch.save holds as {"model": ..., "optimizer": ...}, others write as two files, or as two folders of
torch.distributed.checkpoint. So every such format gives members, and what they are is decided once, here and in naming.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.box import Shape
from ...core.index import FileInfo, Index, TensorSpec
from ...errors import Problem
from ...io.containers.pickle.plain import Path
from .naming import By, Sorted, sort
from .paths import at, put


@dataclass(slots=True)
class Member:
    """What a file or folder holds.

    ``tensors``: raw name -> where it stood in the state dict, and the tensor (under its raw name). ``objects``: the
    paths of what is no tensor; ``meta`` has it all; ``named`` gives the same with some tensors named in their places.
    ``stored``: the raw namespace, if it has more than ``tensors``. ``aliases``: raw names that are one memory, later
    name -> first. ``reshaped``: raw names of tensors that were reshaped to be saved -> their shape before.
    """

    format: str
    tensors: dict[str, tuple[Path, TensorSpec]]
    objects: Sequence[Path]
    meta: Mapping[str, Any]
    named: Callable[[Sequence[tuple[Path, str]]], Mapping[str, Any]]
    files: Mapping[str, FileInfo]
    stored: Mapping[str, TensorSpec] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    reshaped: Mapping[str, Shape] = field(default_factory=dict)
    problems: Sequence[Problem] = ()

    @property
    def raw(self) -> Mapping[str, TensorSpec]:
        return {key: spec for key, (_, spec) in self.tensors.items()} if self.stored is None else self.stored


def together(
    format: str, members: Sequence[tuple[Path, Member]], models: Sequence[str] = (), by: By = "order"
) -> Index:
    """The index of members, each with the path that it stands at (() for one whose own paths say it all). ``models``,
    ``by``: as in `sort`."""
    tensors = {key: ((*base, *path), spec) for base, member in members for key, (path, spec) in member.tensors.items()}
    objects = [(*base, *path) for base, member in members for path in member.objects]
    meta = _meta([(base, member.meta) for base, member in members])
    owners = {alias: owner for _, member in members for alias, owner in member.aliases.items()}
    found = sort(tensors, objects, lambda path: at(meta, path), models, owners, by)
    rest = set(found.rest)
    named = [
        (base, member.named([(path, key) for key, (path, _) in member.tensors.items() if key in rest]))
        for base, member in members
    ]
    aliases = _aliases(owners, found)
    return Index(
        format=format,
        states=found.states or {"weights": {}},
        files={path: info for _, member in members for path, info in member.files.items()},
        stored=_union([member.raw for _, member in members]),
        aliases=aliases,
        meta=_meta(named),
        problems=(*(line for _, member in members for line in member.problems), *found.problems),
    )


def _meta(parts: Sequence[tuple[Path, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """One mapping of all of them; what is only read when asked for stays so."""
    placed: list[Mapping[str, Any]] = []
    table: dict[str, Any] = {}
    for base, meta in parts:
        if not base:
            placed.append(meta)
        elif meta:
            put(table, base, meta)
    return _union([*placed, table] if table else placed)


def _union(tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(tables) == 1:
        return tables[0]
    if all(type(table) is dict for table in tables):
        return {key: value for table in reversed(tables) for key, value in table.items()}
    return ChainMap(*tables)  # type: ignore[arg-type]


def _aliases(raw: Mapping[str, str], found: Sorted) -> dict[str, str]:
    """Ties by raw names -> those among the weights, by their names there; the tied names leave the weights."""
    weights = found.states.get("weights")
    if not weights or not raw:
        return {}
    names = {spec.stored_as or name: name for name, spec in weights.items()}
    first: dict[str, str] = {}  # the owner, or its first tied name among the weights
    aliases = {}
    for alias, owner in raw.items():
        if alias in names:
            kept = names[owner] if owner in names else first.setdefault(owner, names[alias])
            if kept != names[alias]:
                aliases[names[alias]] = kept
                del weights[names[alias]]
    return aliases
