"""Which of several state dicts an optimizer is of, and under which of its names. Pure.

A checkpoint may have more models than one, each with its optimizer ("critic", "critic_optimizer"): their shapes may be
the same, and their names (torch/optim/optimizer.py `param_names`) too. What the two are called tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.box import Shape
from ..io.plain import Path
from .numbering import Wanted
from .wrappers import bare_names

_COMMON = re.compile(r"optimi[sz]ers?|optim|opt|states?|dicts?|models?|modules?|nets?|[^a-z0-9]+")


def label(name: Any) -> str:
    """What tells a model or an optimizer from the others of its kind; empty for a word that any may be called.

    >>> label("critic_optimizer"), label("critic"), label("optimizer_2"), label("model2"), label("optim")
    ('critic', 'critic', '2', '2', '')
    """
    return _COMMON.sub("", str(name).lower())


def owner(root: Path, tops: Iterable[str]) -> str | None:
    """Which of the state dicts an optimizer at that path is of; None if it is not called after one of them.

    >>> owner(("critic_optimizer",), ["critic", "ema"]), owner(("optimizer",), ["critic", "ema"])
    ('critic', None)
    """
    wanted = "".join(label(part) for part in root)
    found = [top for top in tops if wanted and label(top) == wanted]
    return found[0] if len(found) == 1 else None


def by_names(
    listed: Sequence[str], wanted: Sequence[Wanted], shapes: Mapping[str, Shape], root: Path
) -> list[str] | None:
    """The model's names for those that an optimizer was given with its parameters: the same but for what wraps either,
    or below one of several models. None if one is of no such name or shape, or of two models."""
    own, given = bare_names(shapes), bare_names(listed)
    own_by_bare = {bare: name for name, bare in own.items()}
    if len(own_by_bare) < len(own):
        own_by_bare = {name: name for name in own}
    tops = {bare.partition(".")[0]: 0 for bare in own_by_bare}
    fitting = {}
    for prefix in ("", *(f"{top}." for top in tops)):
        names = [own_by_bare.get(prefix + given[name]) for name in listed]
        found = [name for name in names if name is not None]
        if len(found) == len(listed) and all(w is None or shapes[n] in w for n, w in zip(found, wanted, strict=True)):
            fitting[prefix] = found
    if "" in fitting or len(fitting) < 2:
        return fitting.get("", next(iter(fitting.values()), None))
    mine = owner(root, [prefix[:-1] for prefix in fitting])
    return None if mine is None else fitting[f"{mine}."]
