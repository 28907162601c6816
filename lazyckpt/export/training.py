"""What a checkpoint holds besides tensors, as objects that can be saved again by torch.save without any other package.

Records of classes that are not imported here cannot: they are left out, and told.
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

Lost = dict[str, str]  # dotted path in the metadata -> why it is not written
_GONE = object()
_DEPTH = 100


class NotLoaded(str):
    """A reason of `Lost` for what is written, and what not every program loads."""

    __slots__ = ()


def restored(value: Any, path: str, tensor: Callable[[str], Any], lost: Lost) -> Any:
    """The object without records: what holds one is left out of its dict, None stands for it in a list. Dicts become
    plain ones. ``tensor``: what stands for the tensor of a raw name. None if there is nothing left.

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
    """Whether nothing is left of a container that held something; then it is told once, not for each part."""
    if not parts or not all(part is _GONE for part in parts):
        return False
    told = [key for key in lost if key.startswith(f"{path}.")]
    for key in told:
        lost[path] = lost.pop(key)
    return True


_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, slice, range, date, time, timedelta, Decimal, PurePath,
    torch.Size, torch.dtype, torch.device, torch.layout, np.ndarray, np.generic, np.dtype,
)  # fmt: skip


# -- The options of an optimizer, by the names of the parameters they are for, as far as a checkpoint tells.

_GROUPS_DEPTH = 5
# torch/optim/adam.py, adamw.py: options that a state dict of another Adam lacks, as they are by default
_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
_WEIGHTS = ("weights", "fp32")


class Part(Protocol):
    """The tensors of a state."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> LazyArray: ...
    def items(self) -> Iterable[tuple[str, LazyArray]]: ...
    def once(self) -> tuple[Mapping[str, LazyArray], Mapping[str, str]]: ...


class Training(Protocol):
    """What is asked of a view."""

    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def states(self) -> Mapping[str, Part]: ...


def param_groups(view: Training, complete: bool = True) -> list[dict[str, Any]]:
    """The groups, ``params`` being names; [] if the checkpoint does not tell. ``complete``: an Adam's get the options
    that torch's have and others (DeepSpeed's, apex') do not.

    Numbers are names by: the flat groups of DeepSpeed (``param_shapes``), the states that were read under both, or the
    names that the optimizer was given.
    """
    made = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": names}
        for group, names in _named(view)
    ]
    if complete and "exp_avg" in view.states and "exp_avg_sq" in view.states:
        made = [{**_ADAM, **group} for group in made]
    return made


def unnamed(view: Training) -> bool:
    """Whether the optimizer has parameters besides those that `param_groups` names: numbers without states."""
    if isinstance(view.meta.get("param_shapes"), list):
        return False
    return any(len(group["params"]) > len(names) for group, names in _named(view))


def _named(view: Training) -> list[tuple[dict[str, Any], list[str]]]:
    """The groups, and the names of the parameters of each."""
    shapes, numbers = view.meta.get("param_shapes"), _numbers(view)
    for groups in _found(view.meta, 0):
        named = [(group, list(_names(group, shapes, numbers))) for group in groups]
        if any(names for _, names in named):
            return named
    return []


class Steps(NamedTuple):
    """``done``: how many an optimizer has done. ``option``: its groups tell. ``whole``: it counts them as an int."""

    done: float
    option: bool = False
    whole: bool = False


def step_of(view: Training) -> Steps | None:
    """The optimizer's count of steps where no tensor tells: an option of its groups, a number among its states, or the
    count of the training."""
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
    """Every list of groups in nested dicts and lists, the outer ones first."""
    for groups in below(value, "param_groups", depth):
        if isinstance(groups, list) and groups and all(isinstance(g, dict) and _listed(g) for g in groups):
            yield groups


def below(value: Any, key: str, depth: int) -> Iterator[Any]:
    """What stands under a key in nested dicts and lists, the outer ones first."""
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
    """Number -> name: the raw name of a state ends with "state.NUMBER.exp_avg"."""
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
