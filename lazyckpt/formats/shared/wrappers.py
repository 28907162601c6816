"""Removal of wrappers from names: the modules of data parallelism, compilation and adapters around a model.

A wrapper is a module, so its attribute becomes part of the names. The attributes in core/names.py are removed wherever
they are. Those of torch/nn/parallel/distributed.py (`module`), lightning/fabric/wrappers.py `_FabricModule`
(`_forward_module`) and peft/peft_model.py (`base_model.model`) could be a model's own names, and are removed only if
all names start with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.box import Shape
from ...core.index import Index
from ...core.names import any_wrapped, unwrapped
from ...core.specs import TensorSpec, renamed
from ...errors import Problem
from ...io.containers.pickle.plain import Path
from .evidence import UndecidedTable
from .numbering import Wanted

_LEADING = ("_forward_module.", "base_model.model.", "module.")


def without_wrappers(index: Index) -> Index:
    """Rename the tensors of an index to the model's own names; each tensor keeps its raw name.

    The index is returned unchanged if there are no wrappers, if it is a zarr hierarchy, or, with a problem, if two
    tensors would get the same name."""
    if index.format == "zarr":  # an export has the names of its view, and other arrays do not belong to modules
        return index
    names = {n for table in index.states.values() if not isinstance(table, UndecidedTable) for n in table}
    first = next(iter(index.states.values()), {})
    # deepspeed removes its own wrapper before it saves, so there "module." belongs to the model
    own = "module." if index.format.startswith("deepspeed") else ""
    leading = _leading(first or names, own)
    if not leading and not any_wrapped((*names, *index.aliases, *index.unreadable)):
        return index
    bare = {name: new for name in (*names, *index.aliases, *index.unreadable) if (new := _bare(name, leading)) != name}
    if not bare:
        return index
    states: dict[str, Mapping[str, TensorSpec]] = {}
    for state, table in index.states.items():
        if isinstance(table, UndecidedTable):  # its names are those of weights, or numbers
            states[state] = table.renamed(bare)
            continue
        states[state] = {bare.get(name, name): renamed(spec, bare.get(name, name)) for name, spec in table.items()}
        if len(states[state]) < len(table):
            line = f"two tensors of {state!r} have one name without the wrappers of modules: names stay as stored"
            return replace(index, problems=(*index.problems, Problem("duplicate-tensor", line)))
    return replace(
        index,
        states=states,
        aliases={bare.get(a, a): bare.get(o, o) for a, o in index.aliases.items()},
        unreadable={bare.get(name, name): reason for name, reason in index.unreadable.items()},
    )


def own_names(names: Collection[str]) -> dict[str, str]:
    """Return the model's own name for each name in a module that may be wrapped.

    >>> own_names(["module.up.weight", "module._orig_mod.up.bias"])
    {'module.up.weight': 'up.weight', 'module._orig_mod.up.bias': 'up.bias'}
    """
    leading = _leading(names)
    return {name: _bare(name, leading) for name in names}


def _leading(names: Collection[str] | Mapping[str, TensorSpec], own: str = "") -> str:
    """Return the wrappers' prefix that all names share after wrappers at any position have been removed.

    >>> _leading(["module._orig_mod.base_model.model.a", "module.base_model.model.b"])
    'module.base_model.model.'
    """
    left = [unwrapped(name) for name in names] if any_wrapped(names) else list(names)
    found = ""
    while left:
        prefix = next((p for p in _LEADING if p != own and all(n.startswith(p) and len(n) > len(p) for n in left)), "")
        if not prefix:
            break
        found += prefix
        left = [n[len(prefix) :] for n in left]
    return found


def _bare(name: str, leading: str) -> str:
    return unwrapped(name).removeprefix(leading)


# -- The state dict that an optimizer belongs to, and the names of its parameters there. Pure.

_COMMON = re.compile(r"optimi[sz]ers?|optim|opt|states?|dicts?|models?|modules?|nets?|[^a-z0-9]+")


def label(name: Any) -> str:
    """Return the part of a name that distinguishes a model or an optimizer from others; "" for generic names.

    >>> label("critic_optimizer"), label("critic"), label("optimizer_2"), label("model2"), label("optim")
    ('critic', 'critic', '2', '2', '')
    """
    return _COMMON.sub("", str(name).lower())


def owner(root: Path, tops: Iterable[str]) -> str | None:
    """Return the state dict that the optimizer at a path is named after; None if there is not exactly one.

    >>> owner(("critic_optimizer",), ["critic", "ema"]), owner(("optimizer",), ["critic", "ema"])
    ('critic', None)
    """
    wanted = "".join(label(part) for part in root)
    found = [top for top in tops if wanted and label(top) == wanted]
    return found[0] if len(found) == 1 else None


def by_names(
    listed: Sequence[str], wanted: Sequence[Wanted], shapes: Mapping[str, Shape], root: Path
) -> list[str] | None:
    """Return the model's names for the names that an optimizer received with its parameters.

    Names may differ by wrappers, or by the name of one of several models. Return None if a name or its shape does not
    exist in the model, or if two models match."""
    own, given = own_names(shapes), own_names(listed)
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
