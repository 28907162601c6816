"""Look up keys of a running state dict in a checkpoint: each is a tensor, a plain value, or missing.

`torch.distributed.checkpoint` joins the path to a value in the state dict by dots (_nested_dict.py): ``model.FQN``,
``optim.state.FQN.exp_avg``, ``optim.param_groups.0.lr``. A distributed checkpoint records such keys. For all other
checkpoints, and for keys that it does not record, they are derived from the view's names, states and meta.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import TensorNotFoundError
from ..formats.dcp.objects import Meta
from ..io.containers.pickle.plain import Path, TensorRef
from ..lazy import named
from ..tensor import LazyTensor
from ..view import CheckpointView

_WEIGHT = re.compile(r"(?:app\.)?(?:model|module|state_dict)\.(.+)")
_OPTIMIZER = re.compile(r"(?:app\.)?(?:(?:optim|optimizer)\.)?(state|param_groups)\.(.+)")
_FULL = ("weights", "fp32")
_DEPTH = 5  # levels of nested dicts that are searched for param_groups


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is not a tensor. ``read`` returns it as in `CheckpointView.meta`."""

    read: Callable[[], Any]


class Kept:
    """An option of the optimizer that the checkpoint lacks: the running optimizer keeps its value."""


def _value(value: Any) -> Value:
    return Value(lambda: value)


Found = LazyTensor | Value | Kept


class Keys:
    """The keys of a checkpoint (`listed`), and lookup of all other keys that its parts can have (`find`)."""

    def __init__(self, view: Mapping[str, LazyTensor]) -> None:
        self.view = view
        self.states: dict[str, CheckpointView] = {}
        self.meta: Mapping[str, Any] = {}
        self._raw: Meta | None = None
        self._stored: Mapping[str, LazyTensor] = {}  # empty if the raw names would have to be searched in many files
        if isinstance(view, CheckpointView):
            self.meta = view.meta
            self.states = {name: state for name, state in view.states.items() if name not in _FULL}
            if view.whole and isinstance(view.meta, Meta):
                self._raw = view.meta
            if view.whole and view._index.stored is not None:
                self._stored = view.stored
        self._groups: list[Mapping[str, Any]] | None = None

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The optimizer's param_groups, without lists of parameters by number."""
        if self._groups is None:
            self._groups = [
                {option: value for option, value in group.items() if _named(option, value)}
                for group in _param_groups(self.meta, _DEPTH) or []
            ]
        return self._groups

    def listed(self) -> Iterator[tuple[str, Path, Found]]:
        """Yield the keys of the whole checkpoint: (key, path in the state dict, tensor or value)."""
        if self._raw is not None:
            assert isinstance(self.view, CheckpointView)
            stored, objects = self.view.stored, self._raw.objects
            for key, raw in self._raw.paths.items():
                if key in objects:
                    yield key, raw, Value(partial(self._raw.object, key))
                elif key in stored.specs:
                    yield key, raw, stored[key]
            return
        nested = bool(self.states)
        taken = set()
        for name in self.view:
            path: Path = ("model", name) if nested else (name,)
            taken.add(path[0])
            yield ".".join(map(str, path)), path, self.view[name]
        for state, tensors in self.states.items():
            taken.add("optim")
            for name in tensors:
                yield f"optim.state.{name}.{state}", ("optim", "state", name, state), tensors[name]
        for n, group in enumerate(self.groups if nested else ()):
            for option, value in group.items():
                yield f"optim.param_groups.{n}.{option}", ("optim", "param_groups", n, option), _value(value)
        for where, value in _leaves(self.meta, ()):
            key = ".".join(where)
            if where[0] not in taken and named(self.view, key) is None:
                yield key, where, _value(value)

    def check(self, key: str) -> None:
        """Raise TensorNotFoundError if a listed key may mean two different tensors."""
        if self._raw is None:
            self._weight(key)

    def find(self, key: str) -> Found | None:
        """Look up a key that is not listed; None if the checkpoint has nothing for it.

        Raises TensorNotFoundError if the key may mean two different tensors.
        """
        weight = self._weight(key)
        if weight is not None:
            return weight
        match = _OPTIMIZER.fullmatch(key)
        if match and match[1] == "state":
            for state, tensors in self.states.items():
                name = match[2].removesuffix(f".{state}")
                found = named(tensors, name) if name != match[2] else None
                if found is not None:
                    return found
        elif match:
            return self._option(match[2])
        return _at(self.meta, key.split(".")) or named(self._stored, key)

    def _weight(self, key: str) -> LazyTensor | None:
        match = _WEIGHT.fullmatch(key)
        found = {name: named(self.view, name) for name in (key, match[1] if match else key)}
        there = {name: tensor for name, tensor in found.items() if tensor is not None}
        if len({tensor.spec.name for tensor in there.values()}) > 1:
            raise TensorNotFoundError(
                f"{key!r} may be {' or '.join(map(repr, there))} of the checkpoint: load from the part of the view "
                "that is meant, or from a selection"
            )
        return next(iter(there.values()), None)

    def _option(self, rest: str) -> Found:
        """Look up an option by ``0.lr``, or by ``FQN.lr`` as in flattened optimizers."""
        number, _, option = rest.partition(".")
        if number.isdecimal() and int(number) < len(self.groups) and option in self.groups[int(number)]:
            return _value(self.groups[int(number)][option])
        name, _, option = rest.rpartition(".")
        for group in self.groups:
            if name in group.get("params", ()) and option in group:
                return _value(group[option])
        return Kept()

    def plain(self, value: Value) -> Any:
        """Return a value with its tensors, which are read."""
        return self._with_tensors(value.read())

    def _with_tensors(self, rest: Any) -> Any:
        if isinstance(rest, TensorRef):
            assert isinstance(self.view, CheckpointView)
            return self.view.stored[rest.name][...]
        if isinstance(rest, dict):
            return {key: self._with_tensors(item) for key, item in rest.items()}
        if type(rest) in (list, tuple):
            return type(rest)(self._with_tensors(item) for item in rest)
        return rest


def _leaves(value: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for the values of nested dicts. A list is one value."""
    for key, item in value.items():
        here = (*path, str(key))
        if isinstance(item, Mapping):
            yield from _leaves(item, here)
        else:
            yield here, item


def _at(value: Any, parts: list[str]) -> Value | None:
    """Return the value at a dotted key, whose parts may have dots themselves."""
    if not parts:
        return _value(value)
    if isinstance(value, list | tuple):
        number = parts[0]
        return _at(value[int(number)], parts[1:]) if number.isdecimal() and int(number) < len(value) else None
    if isinstance(value, Mapping):
        for n in range(len(parts), 0, -1):
            name = ".".join(parts[:n])
            for key in (name, int(name)) if name.isdecimal() and len(name) < 19 else (name,):
                if key in value and (found := _at(value[key], parts[n:])) is not None:
                    return found
    return None


def _param_groups(value: Any, depth: int) -> list[Mapping[str, Any]] | None:
    """Return the first param_groups in nested dicts."""
    if not isinstance(value, Mapping):
        return None
    groups = value.get("param_groups")
    if isinstance(groups, list) and groups and all(isinstance(group, Mapping) for group in groups):
        return groups
    inner = (_param_groups(item, depth - 1) for item in value.values()) if depth else iter(())
    return next((found for found in inner if found is not None), None)


def _named(option: str, value: Any) -> bool:
    """Return whether an option of a param_group is meaningful outside the checkpoint: numbers of parameters are not."""
    return option != "params" or (isinstance(value, list) and all(isinstance(name, str) for name in value))
