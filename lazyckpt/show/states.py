"""The states of a checkpoint as a mapping that says what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..core.names import shortened
from ..errors import TensorNotFoundError
from ..printing import printable
from .html.parts import page, safe, tag
from .text import human_bytes, plural

if TYPE_CHECKING:
    from ..view import CheckpointView


class States(Mapping[str, "CheckpointView"]):
    """State name -> view; cannot be written to. Raises TensorNotFoundError for a state that there is not."""

    __slots__ = ("_views",)

    def __init__(self, views: Mapping[str, CheckpointView]) -> None:
        self._views = dict(views)

    def __getitem__(self, state: str) -> CheckpointView:
        found = self._views.get(state)
        if found is None:
            raise TensorNotFoundError(f"there is no state {state!r}; there are: {', '.join(self._views) or 'none'}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

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

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)
