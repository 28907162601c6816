"""The names of a view, level by level: a level is found when it is asked for, however many names there are below."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from ..core.names import natural
from ..view import CheckpointView

_JOINED = 100  # levels that are one row


class Entry(NamedTuple):
    """A row of a level. ``label``: what it adds to the names above. ``start``: what the names below it begin with, up
    to a dot; of a tensor its name. ``tensors``, ``numel``, ``nbytes``: of what is below, each tied tensor once."""

    label: str
    start: str
    leaf: bool
    tensors: int
    numel: int
    nbytes: int


class Levels:
    """Of a view; making one looks at every name once. Reads no tensor data."""

    def __init__(self, view: CheckpointView) -> None:
        self.view = view
        self._names = view.names.sorted
        sizes: dict[str, tuple[int, int]] = {}
        seen: set[str] = set()
        for name in view:
            owner = view.owner(name)
            if owner not in seen:
                seen.add(owner)
                spec = view[name].spec
                sizes[name] = spec.numel, spec.nbytes
        found = [sizes.get(name, (0, 0)) for name in self._names]
        self._numel = list(accumulate((n for n, _ in found), initial=0))
        self._nbytes = list(accumulate((n for _, n in found), initial=0))

    @property
    def whole(self) -> Entry:
        """All of it."""
        return self._entry("", "", False, 0, len(self._names))

    def below(self, start: str = "") -> list[Entry]:
        """What there is at the level behind ``start`` (an entry's; "": the first), in natural order. Chains of levels
        that leave nothing to choose are one entry."""
        names = self._names
        at = bisect_left(names, start)
        end = bisect_left(names, _behind(start), at) if start else len(names)
        found = []
        while at < end:
            name = names[at]
            dot = name.find(".", len(start))
            stop = at + 1 if dot < 0 else bisect_left(names, _behind(name[: dot + 1]), at)
            if stop - at == 1:
                found.append(self._entry(name[len(start) :], name, True, at, stop))
            else:
                inner = self._joined(dot + 1, at, stop)
                found.append(self._entry(inner[len(start) : -1], inner, False, at, stop))
            at = stop
        return sorted(found, key=lambda e: (natural(e.label), not e.leaf))

    def _joined(self, length: int, at: int, stop: int) -> str:
        """What all of these names begin with, up to a dot."""
        first, last = self._names[at], self._names[stop - 1]
        for _ in range(_JOINED):
            dot = first.find(".", length)
            if dot < 0 or not last.startswith(first[: dot + 1]):
                break
            length = dot + 1
        return first[:length]

    def _entry(self, label: str, start: str, leaf: bool, at: int, stop: int) -> Entry:
        numel, nbytes = self._numel, self._nbytes
        return Entry(label, start, leaf, stop - at, numel[stop] - numel[at], nbytes[stop] - nbytes[at])


def _behind(start: str) -> str:
    """The least text that sorts behind all that begin with ``start``, which ends with a dot."""
    return start[:-1] + "/"


def chosen(view: CheckpointView, text: str) -> CheckpointView:
    """The names that a filter leaves: those that hold the text, or match it as a glob (``*`` also crosses dots)."""
    if not text:
        return view
    names = set(view.select(lambda name: text in name))
    if any(c in text for c in "*?["):
        names.update(view.select(text))
    return view.select(names.__contains__)
