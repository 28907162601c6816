"""Display of a checkpoint's states in terminals and notebooks, and permission for IPython to complete on views."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..core.names import shortened
from ..core.units import human_bytes, plural
from ..errors import printable
from ..lookup import States as Base
from ..markup import page, safe, tag


class States(Base[Any]):
    """Mapping of state names to views, with text and HTML representations."""

    __slots__ = ()

    def _lines(self) -> list[tuple[str, str]]:
        return [
            (shortened(state), f"{plural(len(view), 'tensor')}, {human_bytes(view.nbytes)}")
            for state, view in self._views.items()
        ]

    def __repr__(self) -> str:
        lines = [(printable(state), size) for state, size in self._lines()]
        width = max((len(state) for state, _ in lines), default=0)
        return "\n".join(f"{state:<{width}}  {size}" for state, size in lines) or "(no states)"

    def _repr_html_(self) -> str:
        lines = (tag("li", f"{tag('code', safe(state))} {tag('span', size, 'dim')}") for state, size in self._lines())
        return page([tag("ul", "\n".join(lines))])


# -- IPython's completion: ``%load_ext lazyckpt`` allows it to evaluate look-ups in views.


def allow(*views: type) -> None:
    """Allow IPython's completion to evaluate attributes and items of views of these classes and of their states."""
    for allowed in _allowed():
        allowed.update((*views, States))


def forbid(*views: type) -> None:
    """Revoke the permission of `allow`."""
    for allowed in _allowed():
        allowed.difference_update((*views, States))


def _allowed() -> Iterator[set[type]]:
    """Yield IPython's sets of classes that completion may evaluate; nothing in versions without such a policy."""
    try:
        policies = getattr(import_module("IPython.core.guarded_eval"), "EVALUATION_POLICIES", {})
    except ImportError:
        return
    for name in ("allowed_getitem", "allowed_getattr"):
        allowed = getattr(policies.get("limited"), name, None)
        if isinstance(allowed, set):
            yield allowed
