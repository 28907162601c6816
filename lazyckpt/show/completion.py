"""What IPython may look at while it completes, once a user has asked for it (``%load_ext lazyckpt``).

By its policy IPython calls no ``__getitem__`` and no property of classes that it does not know, as they might do
anything (IPython/core/guarded_eval.py `SelectivePolicy`). Without the extension ``view["<Tab>`` completes all the same;
what comes behind a further step (``view.states["``, ``view["layers.0"]["``) does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .states import States


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
