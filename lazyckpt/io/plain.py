"""A saved object, taken apart: its tensors under dotted names, and everything else as plain objects.

``{"model": {"w": tensor}, "step": 3}`` gives the tensor ``model.w`` and the rest ``{"step": 3}``. Keys are joined as
`str` gives them, list items by position, attributes of records by name.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError
from .rebuild import Composite, Deque, Namespace, StoredStorage, StoredTensor, TensorSubclass, plain_numpy
from .records import Attributed, Opaque, short

Path = tuple[str | int, ...]  # keys as text, places in lists as numbers

_MAX_DEPTH = 100  # the walk recurses; honest checkpoints are some ten levels deep
_GONE = object()  # stands for "there were only tensors here"


class TensorRef(NamedTuple):
    """In ``meta``: here, among other things, stood the tensor of this name."""

    name: str

    def __repr__(self) -> str:
        return f"<tensor {self.name!r}>"


class Plain:
    """``tensors``: dotted name -> record, in the order of the file; ``paths``: dotted name -> where that stood (names,
    places in lists); ``rest``: the object without its tensors; ``notes``: lines about tensors that are not what they
    seem. ``taken``: dotted name -> the record that stood there, of those that the caller reads itself."""

    def __init__(
        self,
        value: Any,
        where: str,
        size: int,
        prefix: str = "",
        keep: Callable[[str, StoredTensor], Any] | None = None,
        take: Callable[[Opaque], bool] | None = None,
    ) -> None:
        """``size``: bytes of the pickle, which bounds how much its shared references may expand to. ``prefix``: what
        stands before a tensor's name where the rest refers to it. ``keep``: gives what stands in the rest where a
        tensor was, from its name and record; by default tensors leave the rest. ``take``: whether a record stands for
        a tensor that the caller knows: it leaves the rest too, and nothing is looked for in it."""
        self.tensors: dict[str, StoredTensor] = {}
        self.taken: dict[str, Opaque] = {}
        self.paths: dict[str, Path] = {}
        self.notes: list[str] = []
        self._subclasses: dict[str, list[str]] = {}
        self._where = where
        self._left = 10_000 + 2 * size  # objects; then characters of tensor names
        self._letters = 1_000_000 + 64 * size
        self._open: set[int] = set()
        self._prefix = prefix
        self._keep = keep
        self._take = take
        try:
            rest = self._walk(value, (), 0)
        except RecursionError:  # the caller's own stack was deep already
            raise CorruptError(f"{where}: objects are nested too deep: the file is hostile or damaged") from None
        self.rest = {} if rest is _GONE else rest
        for kind, names in self._subclasses.items():
            some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
            each = f"{some} is a {kind}: the tensors inside it stand under its name"
            many = f"{len(names):,} tensors ({some}) are {kind}: the tensors inside them stand under their names"
            self.notes.append(each if len(names) == 1 else many)

    def _walk(self, value: Any, path: Path, depth: int) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        if kind is StoredTensor:
            return self._tensor(value, path)
        if kind is StoredStorage:
            return self._tensor(StoredTensor(value, value.dtype or torch.uint8, 0, (value.numel,), (1,)), path)
        self._left -= 1 + (len(value) if isinstance(value, dict | list | tuple) else 0)
        if self._left < 0:
            raise CorruptError(
                f"{self._where}: its references expand to far more objects than it has bytes: "
                "the file is hostile or damaged"
            )
        if depth > _MAX_DEPTH:
            raise CorruptError(
                f"{self._where}: objects are nested deeper than {_MAX_DEPTH} levels: the file is hostile or damaged"
            )
        if id(value) in self._open:
            return f"<the same object as further up, seen again at {_dotted(path)!r}>"
        self._open.add(id(value))
        try:
            return self._container(value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: Path, depth: int) -> Any:
        if isinstance(value, dict):
            plain = self._dict(value, path, depth)
            if isinstance(value, Attributed) and hasattr(value, "state"):
                state = self._walk(value.state, path, depth)
                if isinstance(state, dict) and state:
                    plain = {} if plain is _GONE else plain
                    for k, v in state.items():
                        plain.setdefault(k, v)
            return plain
        if isinstance(value, Composite):
            self.notes.append(
                f"{_dotted(path)!r} is a {value.kind} tensor: its parts are tensors of their own, under its name"
            )
            return self._dict(value.parts, path, depth)
        if isinstance(value, list | tuple):
            if _LEAVES.issuperset(map(type, value)):  # long lists of numbers are common
                return _plain_list(value, list(value))
            items = [v if type(v) in _LEAVES else self._walk(v, (*path, n), depth) for n, v in enumerate(value)]
            if items and all(v is _GONE for v in items):
                return _GONE
            items = [TensorRef(self._prefix + _dotted((*path, n))) if v is _GONE else v for n, v in enumerate(items)]
            return _plain_list(value, items)
        if isinstance(value, Namespace):
            inner = self._dict(vars(value), path, depth)
            return argparse.Namespace(**({} if inner is _GONE else inner))
        if isinstance(value, Opaque):
            if self._take is not None and self._take(value):
                self.taken[self._key(path)] = value
                return _GONE
            return self._opaque(value, path, depth)
        return plain_numpy(value)

    def _dict(self, value: dict[Any, Any], path: Path, depth: int) -> Any:
        plain = {}
        for k, v in value.items():
            item = v if type(v) in _LEAVES else self._walk(v, (*path, _text(k)), depth)
            if item is not _GONE:
                plain[k if type(k) in _LEAVES or type(k) is tuple else plain_numpy(k)] = item
        return plain if plain or not value else _GONE

    def _opaque(self, value: Opaque, path: Path, depth: int) -> Opaque:
        """A copy of a record in which tensors are only named, so that it can be kept without the file."""
        if isinstance(value, TensorSubclass):
            self._subclasses.setdefault(f"{value.module}.{value.name}", []).append(_dotted(path))
        record = Opaque(value.module, value.name)
        if value.args:
            record.args = tuple(self._named(v, (*path, n), depth) for n, v in enumerate(value.args))
        else:
            record.args = value.args
        record.kwargs = None if value.kwargs is None else self._named(value.kwargs, path, depth)
        state = value.state
        if isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state):
            record.state = tuple(self._attributes(s, path, depth) for s in state)
        else:
            record.state = self._attributes(state, path, depth)
        record.items = [self._named(v, (*path, n), depth) for n, v in enumerate(value._items or ())]
        record.entries = {k: self._named(v, (*path, _text(k)), depth) for k, v in (value._entries or {}).items()}
        return record

    def _attributes(self, state: Any, path: Path, depth: int) -> Any:
        if isinstance(state, dict):
            return {k: self._named(v, (*path, _text(k)), depth) for k, v in state.items()}
        return self._named(state, path, depth)

    def _named(self, value: Any, path: Path, depth: int) -> Any:
        item = self._walk(value, path, depth)
        return TensorRef(self._prefix + _dotted(path)) if item is _GONE else item

    def _tensor(self, tensor: StoredTensor, path: Path) -> Any:
        key = self._key(path)
        self.tensors[key] = tensor
        if tensor.note:
            self.notes.append(f"{key!r} {tensor.note}")
        return _GONE if self._keep is None else self._keep(key, tensor)

    def _key(self, path: Path) -> str:
        """The name of a tensor that stands there; it is no other's."""
        key = _dotted(path)
        self._left -= 1
        self._letters -= len(key)
        if self._left < 0 or self._letters < 0:
            raise CorruptError(
                f"{self._where}: its references expand to far more tensors than it has bytes: "
                "the file is hostile or damaged"
            )
        if key in self.paths:
            number = 2
            while f"{key}#{number}" in self.paths:
                number += 1
            self.notes.append(f"two tensors have the dotted name {key!r}: the second is {key + '#' + str(number)!r}")
            key = f"{key}#{number}"
        self.paths[key] = path
        return key


_LEAVES = {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice}


def _text(key: Any) -> str:
    if type(key) is str:
        return key
    if isinstance(key, int) and key.bit_length() > 4096:  # Python refuses to print it
        return short(key)
    return str(key)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _plain_list(original: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(original, Deque):
        return deque(items)
    return items if isinstance(original, list) else _tuple(original, items)


def _tuple(original: tuple[Any, ...], items: list[Any]) -> Any:
    """torch.Size stays one; any other tuple is a plain tuple."""
    return original if type(original) is not tuple and all(type(i) is int for i in items) else tuple(items)
