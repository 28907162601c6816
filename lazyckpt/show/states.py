"""The states of a checkpoint as a mapping that says what it holds."""

from __future__ import annotations

from typing import Any

from ..core.names import shortened
from ..namespace import States as Base
from ..printing import printable
from .html.parts import page, safe, tag
from .text import human_bytes, plural


class States(Base[Any]):
    """The same, with what a terminal and a notebook show of it."""

    __slots__ = ()

    def _lines(self) -> list[tuple[str, str]]:
        return [
            (shortened(state), f"{plural(len(view), 'tensor')}, {human_bytes(view.nbytes)}")
            for state, view in self._views.items()
        ]

    def __repr__(self) -> str:
        lines = [(printable(state), told) for state, told in self._lines()]
        width = max((len(state) for state, _ in lines), default=0)
        return "\n".join(f"{state:<{width}}  {told}" for state, told in lines) or "(no states)"

    def _repr_html_(self) -> str:
        lines = (tag("li", f"{tag('code', safe(state))} {tag('span', told, 'dim')}") for state, told in self._lines())
        return page([tag("ul", "\n".join(lines))])
