"""What of a view goes into a zarr hierarchy, where it stands there, and what the root says about it.

A view that reads the checkpoint's default state brings the same part of all states; one of another state brings that
state alone. Tied tensors stand there once, the root lists their other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...core.index import Mesh
from ...errors import DataError
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


def contents(view: Part[T], only: Sequence[str] | None = None) -> Contents[T]:
    """The hierarchy of a view; ``only``: of these states. Reads no tensor data. Raises DataError for metadata that is
    no plain object, or a state that there is not."""
    whole = view.state == next(iter(view.states), None)
    states: Mapping[str, Part[T]] = view.states if whole else {view.state: view}
    if only is not None:
        only = (only,) if isinstance(only, str) else only
        if not only:
            raise DataError("states=[]: there is nothing to write; None stands for all")
        for state in only:
            if state not in view.states:
                raise DataError(f"there is no state {state!r}: there are {', '.join(map(repr, view.states))}")
        states = {state: part for state, part in view.states.items() if state in only}
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
        "state": view.state if view.state in states else next(iter(states), view.state),
        "states": list(states),
        "aliases": aliases,
        "meta": encode(dict(view.meta)),
        "problems": list(view.problems),
    }
    return Contents(arrays, names, tuple(groups.values()), about)
