"""The states of a checkpoint as a mapping that says what it holds, and what IPython's completion may look at."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

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
            (state, f"{plural(len(view), 'tensor')}, {human_bytes(view.nbytes)}") for state, view in self._views.items()
        ]

    def __repr__(self) -> str:
        width = max((len(printable(state)) for state in self._views), default=0)
        return "\n".join(f"{printable(state):<{width}}  {told}" for state, told in self._lines()) or "(no states)"

    def _repr_html_(self) -> str:
        lines = (tag("li", f"{tag('code', safe(state))} {tag('span', told, 'dim')}") for state, told in self._lines())
        return page([tag("ul", "\n".join(lines))])

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


def completable(*views: type) -> None:
    """Tell a running IPython that it may look into views when one presses Tab: `view.states["`, `view["layers.0"]["`.

    Without that it completes ``view["`` only: by its policy it calls no ``__getitem__`` and no property of classes that
    it does not know, as they might do anything (IPython/core/guarded_eval.py `SelectivePolicy`). Those of views read
    no tensor data.
    """
    module = "IPython.core.guarded_eval"
    if "IPython" not in sys.modules or importlib.util.find_spec(module) is None:
        return  # no IPython runs here, or one that asks nobody
    policies = getattr(importlib.import_module(module), "EVALUATION_POLICIES", {})
    for name in ("allowed_getitem", "allowed_getattr"):
        allowed = getattr(policies.get("limited"), name, None)
        if isinstance(allowed, set):
            allowed.update((*views, States))
