"""An index of a subfolder, as part of the index of the folder around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...core.expr import relocated
from ...core.index import Index
from ...core.specs import TensorSpec, renamed
from ...errors import Problem


def below(index: Index, folder: str, prefix: str = "") -> Index:
    """Return the index of a subfolder with the paths of the folder around it.

    Parameters
    ----------
    index
        The index of the subfolder. Its metadata stays as it is.
    folder
        The subfolder's path.
    prefix
        What is put in front of the names of all tensors and, with "/" in place of "." at its end, of the raw names.
    """
    states = {state: _Below(table, folder, prefix) for state, table in index.states.items()}
    names = {name for table in index.states.values() for name in table}
    return replace(
        index,
        states={state: dict(table) for state, table in states.items()},
        stored=None if index.stored is None else _Below(index.stored, folder, prefix and f"{folder}/"),
        files={f"{folder}/{path}": info for path, info in index.files.items()},
        aliases={prefix + alias: prefix + owner for alias, owner in index.aliases.items()},
        unreadable={prefix + name: why for name, why in index.unreadable.items()},
        ruled=tuple(prefix + name for name in index.ruled),
        guards={f"{folder}/{path}": guard for path, guard in index.guards.items()},
        problems=tuple(_problem(problem, folder, prefix, names) for problem in index.problems),
    )


def _problem(problem: Problem, folder: str, prefix: str, names: set[str]) -> Problem:
    """Return a problem with its file or tensor under the new name."""
    path = problem.path
    if path is not None:
        path = prefix + path if path in names else f"{folder}/{path}"
    return Problem(problem.code, f"{folder}: {problem}" if prefix else str(problem), path)


class _Below(Mapping[str, TensorSpec]):
    """Tensors of a subfolder, which are described when they are looked up."""

    def __init__(self, inside: Mapping[str, TensorSpec], folder: str, prefix: str) -> None:
        self._inside = inside
        self._folder = folder
        self._prefix = prefix

    def __getitem__(self, name: str) -> TensorSpec:
        if not name.startswith(self._prefix):
            raise KeyError(name)
        own = name.removeprefix(self._prefix)
        spec = relocated(self._inside[own], self._folder)
        return renamed(spec, name) if self._prefix else spec

    def __iter__(self) -> Iterator[str]:
        return (self._prefix + name for name in self._inside)

    def __len__(self) -> int:
        return len(self._inside)
