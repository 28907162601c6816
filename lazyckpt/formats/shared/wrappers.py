"""Names as the model's own, without what wraps it: the modules of data parallelism, compilation and adapters.

Wrappers are modules, so their attribute stands in the names: those of core/names.py wherever they stand, and
torch/nn/parallel/distributed.py (`module`), lightning/fabric/wrappers.py `_FabricModule` (`_forward_module`),
peft/peft_model.py (`base_model.model`) in front of all of them: these words could be a model's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.box import Shape
from ...core.index import Index, TensorSpec, renamed
from ...core.names import unwrapped
from ...errors import Problem
from ...io.containers.pickle.plain import Path
from .evidence import UndecidedTable
from .numbering import Wanted

_LEADING = ("_forward_module.", "base_model.model.", "module.")


def without_wrappers(index: Index) -> Index:
    """The index under the model's own names; each tensor keeps the name it is stored under. Unchanged if nothing wraps
    the model, in a zarr hierarchy, or if two tensors would get one name (that is told)."""
    if index.format == "zarr":  # an export has the names of the view that it was; others are no modules
        return index
    names = {n for table in index.states.values() if not isinstance(table, UndecidedTable) for n in table}
    first = next(iter(index.states.values()), {})
    # deepspeed takes its own wrapper off before it saves: there the word is the model's
    own = "module." if index.format.startswith("deepspeed") else ""
    leading = _leading(first or names, own)
    bare = {name: new for name in (*names, *index.aliases, *index.unreadable) if (new := _bare(name, leading)) != name}
    if not bare:
        return index
    states: dict[str, Mapping[str, TensorSpec]] = {}
    for state, table in index.states.items():
        if isinstance(table, UndecidedTable):  # it has names of weights, or numbers
            states[state] = table.renamed(bare)
            continue
        states[state] = {bare.get(name, name): renamed(spec, bare.get(name, name)) for name, spec in table.items()}
        if len(states[state]) < len(table):
            line = f"two tensors of {state!r} have one name but for what wraps their module: names stay as stored"
            return replace(index, problems=(*index.problems, Problem("duplicate-tensor", line)))
    return replace(
        index,
        states=states,
        aliases={bare.get(a, a): bare.get(o, o) for a, o in index.aliases.items()},
        unreadable={bare.get(name, name): reason for name, reason in index.unreadable.items()},
    )


def own_names(names: Collection[str]) -> dict[str, str]:
    """Name in a module that may be wrapped -> the model's own.

    >>> own_names(["module.up.weight", "module._orig_mod.up.bias"])
    {'module.up.weight': 'up.weight', 'module._orig_mod.up.bias': 'up.bias'}
    """
    leading = _leading(names)
    return {name: _bare(name, leading) for name in names}


def _leading(names: Collection[str] | Mapping[str, TensorSpec], own: str = "") -> str:
    """What all names begin with, of the prefixes that wrappers give, once the words that go anywhere are gone.

    >>> _leading(["module._orig_mod.base_model.model.a", "module.base_model.model.b"])
    'module.base_model.model.'
    """
    left = [unwrapped(name) for name in names]
    found = ""
    while left:
        prefix = next((p for p in _LEADING if p != own and all(n.startswith(p) and len(n) > len(p) for n in left)), "")
        if not prefix:
            break
        found += prefix
        left = [n[len(prefix) :] for n in left]
    return found


def bare_names(names: Collection[str]) -> dict[str, str]:
    """Every name -> what it is without wrappers.

    >>> bare_names(["_orig_mod.a", "_orig_mod.b"])
    {'_orig_mod.a': 'a', '_orig_mod.b': 'b'}
    """
    leading = _leading(names)
    return {name: _bare(name, leading) for name in names}


def _bare(name: str, leading: str) -> str:
    return unwrapped(name).removeprefix(leading)


# -- Which of several state dicts an optimizer is of, and under which of its names. Pure.

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
