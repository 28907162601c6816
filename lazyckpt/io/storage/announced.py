"""Files that are announced before they are read: what parsing them takes, and the bytes that are held of them.

`prefetch` requests these bytes.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from ...core.index import FileInfo

SMALL = 64 << 10  # bytes; a smaller file is requested as a whole, and a small read is extended to so many


class _Entry(Protocol):
    @property
    def info(self) -> FileInfo: ...
    @property
    def is_dir(self) -> bool: ...


E = TypeVar("E", bound=_Entry)
E_co = TypeVar("E_co", bound=_Entry, covariant=True)


class Requesting(Protocol[E_co]):
    """What `Ahead` needs of a store."""

    @property
    def gap(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def pins(self) -> Mapping[str, FileInfo]: ...
    @property
    def seen(self) -> Mapping[str, FileInfo]: ...
    def list(self, folder: str = "") -> Mapping[str, E_co]: ...
    def stat(self, path: str) -> FileInfo: ...
    def request(self, path: str, offset: int, target: memoryview) -> None: ...


# Returns the bytes at (offset, length) of a file if they were requested, else None.
Held = Callable[[int, int], bytes | None]


class Needs(NamedTuple):
    """What opening a file takes, in bytes from its start and from its end."""

    head: int = 0
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known about files before any of them is read.

    Attributes
    ----------
    first
        The bytes that are requested of the first file.
    needs
        Return what the parser of a file of this size will read, as far as the bytes held so far tell. It must not
        raise: whatever it finds odd is left to the parser. Without it, ``first`` is all that is requested.
    """

    first: Needs
    needs: Callable[[int, Held], Needs] | None = None


@dataclass(slots=True)
class Group:
    """Files of one layout. ``waiting`` are those that are not requested yet, ``guess`` is what the next ones need."""

    layout: Layout
    waiting: deque[str]
    guess: Needs
    started: int = 0
    learned: bool = False


@dataclass(eq=False, slots=True)
class Pending:
    """A range of a file that a thread is requesting."""

    start: int
    stop: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class File:
    """The bytes held of a file, as (offset, bytes) in ascending order without overlaps.

    ``open`` counts the requests of its group that are under way, and ``done`` is set when none is left."""

    path: str
    size: int = -1
    runs: list[tuple[int, bytes]] = field(default_factory=list)
    open: int = 0
    rounds: int = 0
    error: Exception | None = None
    taken: bool = False
    done: threading.Event | None = None
    pending: list[Pending] = field(default_factory=list)

    def held(self, offset: int, length: int) -> bytes | None:
        for start, data in self.runs:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not held."""
        found = []
        for at, data in self.runs:
            if at >= stop:
                break
            if at + len(data) <= start:
                continue
            if at > start:
                found.append((start, at))
            start = at + len(data)
        if start < stop:
            found.append((start, stop))
        return found

    def add(self, start: int, data: bytes) -> None:
        """Add a run, joined with those that touch it."""
        for run in [run for run in self.runs if run[0] + len(run[1]) == start or start + len(data) == run[0]]:
            self.runs.remove(run)
            start, data = (run[0], run[1] + data) if run[0] < start else (start, data + run[1])
        insort(self.runs, (start, data))

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.runs)
