"""The search in the names of a view: an index that is made once, and the names that a text finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..core.names import matcher
from ..show.outline import Outline

_EVERY = 20_000  # names between two questions whether the result is still wanted


class Search:
    """The names of an outline, to be searched without regard to case.

    The small letters of the names are made by the first search. A text that goes on from the last one is searched in
    what that one found."""

    def __init__(self, of: Outline) -> None:
        self.outline = of
        self._last: tuple[str, NDArray[np.int64]] = "", np.arange(len(of.names))

    @cached_property
    def _small(self) -> list[str]:
        return [name.lower() for name in self.outline.names]

    def found(self, text: str, check: Callable[[], None] = lambda: None) -> Outline:
        """Return the outline of the names that contain a text, or match it as a glob, in which ``*`` matches dots.

        ``check`` is called now and then; what it raises ends the search."""
        if not text:
            return self.outline
        indices = self._contain(text.lower(), check)
        if any(c in text for c in "*?["):
            match, names = matcher(text), self.outline.names
            also: list[int] = []
            for start in range(0, len(names), _EVERY):
                check()
                also += [n for n, name in enumerate(names[start : start + _EVERY], start) if match(name)]
            indices = np.union1d(indices, np.array(also, np.int64))
        return self.outline.part(indices)

    def _contain(self, small: str, check: Callable[[], None]) -> NDArray[np.int64]:
        before, among = self._last
        if before not in small:
            among = np.arange(len(self.outline.names))
        names, found = self._small, list[int]()
        for start in range(0, len(among), _EVERY):
            check()
            found += [n for n in among[start : start + _EVERY].tolist() if small in names[n]]
        indices = np.array(found, np.int64)
        self._last = small, indices
        return indices
