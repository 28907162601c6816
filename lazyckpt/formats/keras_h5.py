"""Names of the tensors in Keras's files before `.keras` (``model.h5``), and the states of the optimizer by variable.

Writers: keras/src/legacy/saving/legacy_h5_format.py (`save_model_to_hdf5`) of Keras 3, and keras/saving/hdf5_format.py
of Keras 2: ``model_weights/LAYER/WEIGHT`` and ``optimizer_weights/WEIGHT``; a file of weights has the layers at its
root. The name of a weight is the path of the variable (``up/kernel``, with ``:0`` in Keras 2). That of a slot is
``adam/up_kernel_momentum`` in Keras 3, and ``training/Adam/up/kernel/m:0`` or ``Adam/m/up/kernel:0`` in Keras 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_MODEL, _OPTIMIZER = "model_weights/", "optimizer_weights/"
_LONGEST = 1024  # characters of the name of a slot
_NUMBER = re.compile(r":\d+$")


class Names(NamedTuple):
    """Weights by their path in the file, slots as path -> (state, weight), and what the names do not tell."""

    weights: dict[str, str]
    slots: dict[str, tuple[str, str]]
    unknown: list[str]


def is_old(attributes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a file's attributes are those of such a file."""
    return any("keras_version" in attributes.get(group, {}) for group in ("", _MODEL.rstrip("/")))


def names_of(paths: Iterable[str], shaped: Mapping[str, bool]) -> Names:
    """Return the names of datasets, given by path. ``shaped`` says of which the shape has dimensions: numbers of the
    optimizer (``iteration``, ``learning_rate``) belong to no variable."""
    paths = list(paths)
    start = _MODEL if any(path.startswith(_MODEL) for path in paths) else ""
    weights: dict[str, str] = {}
    slots = []
    for path in paths:
        if path.startswith(_OPTIMIZER):
            slots.append(path)
        elif path.startswith(start):
            layer, _, own = path[len(start) :].partition("/")
            weights[path] = _NUMBER.sub("", own or layer)
    dots = Counter(own.replace("/", ".") for own in weights.values())
    variables = {own: name for own in weights.values() if dots[name := own.replace("/", ".")] == 1}
    flat: dict[str, list[str]] = {}
    for own, weight in variables.items():
        flat.setdefault(own.replace("/", "_"), []).append(weight)
    named = {
        path: variables[own] if own in variables else _NUMBER.sub("", path[len(start) :]).replace("/", ".")
        for path, own in weights.items()
    }
    possible = {path: _slots(_NUMBER.sub("", path[len(_OPTIMIZER) :]), variables, flat) for path in slots}
    usual = {found[0][0] for found in possible.values() if len(found) == 1}
    decided: dict[str, tuple[str, str]] = {}
    unknown = []
    taken = set()
    for path, found in possible.items():
        fitting = found if len(found) == 1 else [one for one in found if one[0] in usual]
        if len(fitting) == 1 and fitting[0] not in taken:
            decided[path] = fitting[0]
            taken.add(fitting[0])
        elif shaped[path]:
            unknown.append(path)
    return Names(named, decided, unknown)


def _slots(name: str, variables: Mapping[str, str], flat: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return what a name may be: (state, weight). ``flat`` has the variables with "_" in place of "/"."""
    found: dict[tuple[str, str], None] = {}
    if len(name) > _LONGEST:
        return []
    parts = name.split("/")
    last = parts[-1]
    for at in (n for n, letter in enumerate(last) if letter == "_" and n + 1 < len(last)):
        found |= {(last[at + 1 :], weight): None for weight in flat.get(last[:at], ())}
    for n in range(1, len(parts)):
        before = variables.get("/".join(parts[n:-1]))
        behind = variables.get("/".join(parts[n:]))
        if before is not None:
            found[last, before] = None
        if behind is not None:
            found[parts[n - 1], behind] = None
    return list(found)
