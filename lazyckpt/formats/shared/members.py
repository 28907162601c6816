"""A training state from its members: files or folders, each with a part of it at some path of the whole.

One writer puts {"model": ..., "optimizer": ...} into one file of torch.save, another into two files or into two folders
of torch.distributed.checkpoint. Every such format returns members; this module and `naming` assign them to states.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.box import Shape
from ...core.index import FileInfo, Index
from ...core.specs import TensorSpec
from ...errors import Problem
from ...io.containers.pickle.plain import Path, TensorRef
from .naming import By, Sorted, sort
from .paths import at, put


@dataclass(slots=True)
class Member:
    """The content of a file or folder."""

    format: str
    tensors: dict[str, tuple[Path, TensorSpec]]
    """Raw name -> path in the state dict, and spec under the raw name."""
    objects: Sequence[Path]
    """Paths of the objects other than tensors."""
    meta: Mapping[str, Any]
    """The objects."""
    named: Callable[[Sequence[tuple[Path, str]]], Mapping[str, Any]]
    """Return ``meta`` with references to the given (path, raw name) tensors."""
    files: Mapping[str, FileInfo]
    stored: Mapping[str, TensorSpec] | None = None
    """The raw namespace, if it differs from ``tensors``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Raw names that share memory: later name -> first name."""
    reshaped: Mapping[str, Shape] = field(default_factory=dict)
    """Raw names of tensors that were reshaped for saving -> their original shapes."""
    unwanted: Mapping[str, Any] = field(default_factory=dict)
    """The places of objects that the caller did not want: they are not in ``objects`` and ``meta``."""
    problems: Sequence[Problem] = ()

    @property
    def raw(self) -> Mapping[str, TensorSpec]:
        return {key: spec for key, (_, spec) in self.tensors.items()} if self.stored is None else self.stored


def references_in(meta: dict[Any, Any]) -> Callable[[Sequence[tuple[Path, str]]], Mapping[str, Any]]:
    """Return the ``named`` of a member: what puts the references into its objects ``meta``."""

    def named(rest: Sequence[tuple[Path, str]]) -> Mapping[str, Any]:
        for path, key in rest:
            put(meta, path, TensorRef(key))
        return meta

    return named


def together(
    format: str, members: Sequence[tuple[Path, Member]], models: Sequence[str] = (), by: By = "order"
) -> Index:
    """Return the index of members, each with its path in the whole (() if its own paths are complete). ``models`` and
    ``by`` are those of `sort`."""
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
    """Merge mappings into one; lazy mappings stay lazy."""
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
    """Translate ties between raw names to names of weights, and remove the aliases from the weights."""
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
