"""The states of a checkpoint as a mapping that says what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..core.names import shortened
from ..core.units import human_bytes, plural
from ..errors import printable
from ..namespace import States as Base
from .html.parts import page, safe, tag


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


# -- What IPython may look at while it completes, once a user has asked for it (``%load_ext lazyckpt``).


def allow(*views: type) -> None:
    """Let IPython's completion look into views of these classes, and into their states."""
    for allowed in _allowed():
        allowed.update((*views, States))


def forbid(*views: type) -> None:
    """Take that back."""
    for allowed in _allowed():
        allowed.difference_update((*views, States))


def _allowed() -> Iterator[set[type]]:
    """IPython's sets of classes that are looked into; none in versions of it that have no such policy."""
    try:
        policies = getattr(import_module("IPython.core.guarded_eval"), "EVALUATION_POLICIES", {})
    except ImportError:
        return
    for name in ("allowed_getitem", "allowed_getattr"):
        allowed = getattr(policies.get("limited"), name, None)
        if isinstance(allowed, set):
            yield allowed
