"""The checkpoint as data: its states, each a table of tensors (`core.specs`), its files, and what else it records.

An index is picklable, holds no handles and does no I/O. A reader creates it; all other code only reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import Problem, printable
from .placement import Division, Mesh, Place, Placed
from .specs import TensorSpec


class FileInfo(NamedTuple):
    """The state of a file when it was indexed.

    Attributes
    ----------
    size
        The size in bytes.
    mtime_ns
        The modification time in nanoseconds; 0 if unknown.
    version
        The version in the protocol's terms (an ETag, a generation); empty if there is none, as for a local file.
    """

    size: int
    mtime_ns: int
    version: str = ""

    def may_be(self, other: FileInfo) -> bool:
        """Return whether both may describe the same state of a file.

        Different sizes never do. If both have a version, it decides; else the modification times, if both are known.

        Parameters
        ----------
        other
            The other description of the file.
        """
        if self.size != other.size:
            return False
        if self.version and other.version:
            return self.version == other.version
        return self.mtime_ns == other.mtime_ns or not (self.mtime_ns and other.mtime_ns)


@dataclass(frozen=True, slots=True)
class Index:
    """The whole checkpoint as data.

    Attributes
    ----------
    format
        The name of the format.
    states
        State name -> tensor name -> spec. A plain ``view[...]`` reads the first state.
    files
        Path -> state of the file, for all files of the checkpoint.
    stored
        Raw name -> spec of every tensor as the files hold it. None: indexing ``files`` again yields them (formats of
        many rank files).
    indexed
        The files of ``files`` that are kept in memory as they were indexed. They are not pickled.
    aliases
        Tied name -> the name that owns the data.
    meta
        The objects of the checkpoint that are not tensors.
    mesh
        The parallel degrees that the checkpoint was written with.
    problems
        What is wrong with the checkpoint. A reader of another package may give plain sentences.
    unreadable
        Name -> reason, for names that the checkpoint lists but whose tensor cannot be described (its file is gone).
    ruled
        Names that the user's rules may match although they are no tensors any more (split flat parameters).
    guards
        Path -> what a read of the file has to check (io/storage/base.py `Guard`).
    watched
        The files that were looked at, if ``files`` has more (thousands of chunks, which are looked at on reading).
    listed
        The states of the files that were looked at and of those that listings told, if they are more than ``watched``.
        None of these files must change while the checkpoint is open. See io/storage/listed.py.
    layout
        The rank's layout, if the index is one rank's part of a resharded checkpoint.
    open_problems
        A function that returns the problems of decisions that are made on demand; the list changes with them.
    """

    format: str
    states: Mapping[str, Mapping[str, TensorSpec]]
    files: Mapping[str, FileInfo]
    stored: Mapping[str, TensorSpec] | None = None
    indexed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)
    problems: tuple[Problem, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    ruled: tuple[str, ...] = ()
    guards: Mapping[str, Any] = field(default_factory=dict)
    watched: Mapping[str, FileInfo] | None = None
    listed: Mapping[str, FileInfo] | None = None
    layout: Layout | None = None
    open_problems: Callable[[], tuple[Problem, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", tuple(map(_problem, self.problems)))
        object.__setattr__(self, "unreadable", {name: printable(why) for name, why in self.unreadable.items()})

    @property
    def pins(self) -> Mapping[str, FileInfo]:
        """The files that the index was made from. They must not change while the checkpoint is open."""
        return self.files if self.watched is None else self.watched


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part of a checkpoint on a mesh.

    Attributes
    ----------
    division, place
        The division of the checkpoint among ranks, and the rank's place in it.
    source
        The index of the whole checkpoint.
    rules
        The user's merge rules.
    placed
        State name -> name on the rank -> placement in the whole tensor.
    """

    division: Division
    place: Place
    source: Index
    rules: Mapping[str, Any]
    placed: Mapping[str, Mapping[str, Placed]]


def _problem(line: str) -> Problem:
    """Return a problem; readers of other packages may give plain sentences."""
    return line if isinstance(line, Problem) else Problem("reader-note", line)
