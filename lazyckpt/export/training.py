"""Conversion of a checkpoint's metadata and optimizer options to objects that torch.save can write without other
packages.

Records of classes that are not imported cannot be written: they are left out and reported.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..io.containers.pickle.plain import TensorRef
from ..io.containers.pickle.records import Opaque
from ..lazy import LazyArray

Lost = dict[str, str]  # dotted path in the metadata -> reason why it is not written
_GONE = object()
_DEPTH = 100


class NotLoaded(str):
    """A reason in `Lost` for a part that is written but that not every program loads."""

    __slots__ = ()


def restored(value: Any, path: str, tensor: Callable[[str], Any], lost: Lost) -> Any:
    """Copy an object without records, which are removed from dicts and replaced by None in lists; return None if
    nothing is left. Mappings become plain dicts. ``tensor`` returns the replacement for the tensor of a raw name.

    >>> lost = {}
    >>> restored({"a": [1, Opaque("some.module", "Class")], "b": 2}, "top", lambda name: None, lost), lost
    ({'a': [1, None], 'b': 2}, {'top.a.1': 'a some.module.Class, which cannot be written without importing it'})
    """
    made = _made(value, path, tensor, lost, 0)
    return None if made is _GONE else made


def _made(value: Any, path: str, tensor: Callable[[str], Any], lost: Lost, depth: int) -> Any:
    def inner(key: object, part: Any) -> Any:
        return _made(part, f"{path}.{key}" if path else str(key), tensor, lost, depth + 1)

    if depth > _DEPTH:
        lost[path] = "nested too deep"
        return _GONE
    if isinstance(value, TensorRef):
        return tensor(value.name)
    if isinstance(value, Mapping):
        found = {key: inner(key, part) for key, part in value.items()}
        if _all_gone(found.values(), path, lost):
            return _GONE
        return {key: part for key, part in found.items() if part is not _GONE}
    if isinstance(value, argparse.Namespace):
        found = {key: inner(key, part) for key, part in vars(value).items()}
        return argparse.Namespace(**{key: part for key, part in found.items() if part is not _GONE})
    if type(value) in (list, tuple, set, frozenset):
        parts = [inner(n, part) for n, part in enumerate(value)]
        if _all_gone(parts, path, lost):
            return _GONE
        return type(value)(None if part is _GONE else part for part in parts)
    if isinstance(value, deque):
        parts = [inner(n, part) for n, part in enumerate(value)]
        return deque((None if part is _GONE else part for part in parts), value.maxlen)
    if isinstance(value, Opaque):
        lost[path] = f"a {value.module}.{value.name}, which cannot be written without importing it"
        return _GONE
    if value is None or isinstance(value, _PLAIN):
        return value
    lost[path] = f"a {type(value).__name__}, which is not known to be plain data"
    return _GONE


def _all_gone(parts: Collection[Any], path: str, lost: Lost) -> bool:
    """Return whether nothing is left of a non-empty container; report such a container once, not each of its parts."""
    if not parts or not all(part is _GONE for part in parts):
        return False
    reported = [key for key in lost if key.startswith(f"{path}.")]
    for key in reported:
        lost[path] = lost.pop(key)
    return True


_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, slice, range, date, time, timedelta, Decimal, PurePath,
    torch.Size, torch.dtype, torch.device, torch.layout, np.ndarray, np.generic, np.dtype,
)  # fmt: skip


# -- Optimizer options by parameter names, as far as the checkpoint has them.

_GROUPS_DEPTH = 5
# torch/optim/adam.py, adamw.py: defaults of options that state dicts of other Adam implementations lack
_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
_WEIGHTS = ("weights", "fp32")


class Part(Protocol):
    """The tensors of one state of a view."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> LazyArray: ...
    def items(self) -> Iterable[tuple[str, LazyArray]]: ...
    def once(self) -> tuple[Mapping[str, LazyArray], Mapping[str, str]]: ...


class Training(Protocol):
    """The part of a view that this module uses."""

    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def states(self) -> Mapping[str, Part]: ...


def param_groups(view: Training, complete: bool = True) -> list[dict[str, Any]]:
    """Return the parameter groups with names in ``params``; [] if the checkpoint does not have them. ``complete`` adds
    the options of torch's Adam that other implementations (DeepSpeed's, apex') lack.

    Parameter numbers are resolved to names with DeepSpeed's flat groups (``param_shapes``), with states that have both
    a number and a name, or with the names that the optimizer was given.
    """
    made = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": names}
        for group, names in _named(view)
    ]
    if complete and "exp_avg" in view.states and "exp_avg_sq" in view.states:
        made = [{**_ADAM, **group} for group in made]
    return made


def unnamed(view: Training) -> bool:
    """Return whether the optimizer has parameters that `param_groups` cannot name: numbers without states."""
    if isinstance(view.meta.get("param_shapes"), list):
        return False
    return any(len(group["params"]) > len(names) for group, names in _named(view))


def _named(view: Training) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the groups, each with the names of its parameters."""
    shapes, numbers = view.meta.get("param_shapes"), _numbers(view)
    for groups in _found(view.meta, 0):
        named = [(group, list(_names(group, shapes, numbers))) for group in groups]
        if any(names for _, names in named):
            return named
    return []


class Steps(NamedTuple):
    """An optimizer's step count: ``done`` steps. ``option`` says whether the count is in the groups, ``whole`` whether
    it is an int."""

    done: float
    option: bool = False
    whole: bool = False


def step_of(view: Training) -> Steps | None:
    """Return the optimizer's step count if it is not a tensor: from an option of its groups, a number among its states,
    or the training's step count."""
    for groups in _found(view.meta, 0):
        for group in groups:
            step = group.get("step")
            if isinstance(step, int | float):
                return Steps(float(step), option=True)
    for state in below(view.meta, "state", 0):
        for entry in state.values() if isinstance(state, Mapping) else ():
            step = entry.get("step") if isinstance(entry, Mapping) else None
            if isinstance(step, int | float):
                return Steps(float(step), whole=isinstance(step, int))
    step = view.meta.get("step")
    return Steps(float(step)) if type(step) is int else None


def _found(value: Any, depth: int) -> Iterator[list[dict[str, Any]]]:
    """Yield every list of groups in nested dicts and lists, outer ones first."""
    for groups in below(value, "param_groups", depth):
        if isinstance(groups, list) and groups and all(isinstance(g, dict) and _listed(g) for g in groups):
            yield groups


def below(value: Any, key: str, depth: int) -> Iterator[Any]:
    """Yield the values of a key in nested dicts and lists, outer ones first."""
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        if key in value:
            yield value[key]
        inner = value.values()
    elif isinstance(value, list):
        inner = value[:8]
    if depth < _GROUPS_DEPTH:
        for part in inner:
            yield from below(part, key, depth + 1)


def _listed(group: Mapping[str, Any]) -> bool:
    return isinstance(group.get("params"), list)


def _names(group: Mapping[str, Any], shapes: Any, numbers: Mapping[str, str]) -> Iterator[str]:
    given = group.get("param_names")
    names = given if isinstance(given, list) and len(given) == len(group["params"]) else [None] * len(group["params"])
    for param, name in zip(group["params"], names, strict=True):
        if type(param) is str:
            yield param
        elif isinstance(shapes, list) and type(param) is int and param < len(shapes):
            flat = shapes[param]
            yield from map(str, flat if isinstance(flat, Mapping) else ())
        elif str(param) in numbers:
            yield numbers[str(param)]
        elif type(name) is str:
            yield name


def _numbers(view: Training) -> dict[str, str]:
    """Return number -> name, from raw names of states that end like "state.NUMBER.exp_avg"."""
    found: dict[str, str] = {}
    for state, tensors in view.states.items():
        if state in _WEIGHTS:
            continue
        for name, tensor in tensors.items():
            raw = (tensor.spec.stored_as or "").removesuffix(f".{state}")
            head, _, number = raw.rpartition(".")
            if number.isdecimal() and head.endswith("state"):
                found.setdefault(number, name)
    return found
