"""What of a view goes into a zarr hierarchy, where it stands there, and what the root says about it.

A view that reads the checkpoint's default state brings the same part of all states; one of another state brings that
state alone. Tied tensors stand there once, the root lists their other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...core.index import Mesh
from ...io.plainjson import encode
from .nodes import component, paths

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Part(Protocol[T_co]):
    """What is asked of a view."""

    @property
    def state(self) -> str: ...
    @property
    def states(self) -> Mapping[str, Part[T_co]]: ...
    @property
    def format(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def problems(self) -> tuple[str, ...]: ...
    def once(self) -> tuple[Mapping[str, T_co], Mapping[str, str]]: ...


@dataclass(frozen=True, slots=True)
class Contents(Generic[T]):
    """``arrays``: path -> tensor; ``names``: path -> the name that the view has for it; ``groups``: the paths of the
    states' groups; ``about``: what the root's attributes say (documents.hierarchy)."""

    arrays: dict[str, T]
    names: dict[str, str]
    groups: tuple[str, ...]
    about: dict[str, Any]


def contents(view: Part[T]) -> Contents[T]:
    """The hierarchy of a view. Reads no tensor data. Raises DataError for metadata that is no plain object."""
    whole = view.state == next(iter(view.states), None)
    states: Mapping[str, Part[T]] = view.states if whole else {view.state: view}
    arrays: dict[str, T] = {}
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    groups = {state: component(state) for state in states}
    for state, part in states.items():
        tensors, tied = part.once()
        aliases.update(tied)
        for name, path in paths(tensors).items():
            where = f"{groups[state]}/{path}"
            arrays[where] = tensors[name]
            names[where] = name
    mesh = view.mesh
    about = {
        "format": view.format,
        "mesh": {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep},
        "state": view.state,
        "states": list(states),
        "aliases": aliases,
        "meta": encode(dict(view.meta)),
        "problems": list(view.problems),
    }
    return Contents(arrays, names, tuple(groups.values()), about)
