"""Separation of a saved object into tensors with dotted names and the remaining plain objects.

``{"model": {"w": tensor}, "step": 3}`` becomes the tensor ``model.w`` and the rest ``{"step": 3}``. A name joins the
``str`` of dict keys, the positions of list items and the names of attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from ....core.dtypes import U8
from ....core.names import free
from ....errors import CorruptError, Problem, some
from ...limits import Budget
from .arrays import NumpyArray, NumpyDtype, plain_numpy
from .composites import Whole
from .rebuild import Composite, StoredStorage, StoredTensor, TensorSubclass
from .records import Attributed, Opaque, short
from .values import Deque, Namespace, namespace

Path = tuple[str | int, ...]  # keys as text, positions in lists as numbers

ATTRIBUTES = "tensor_attributes"  # the entry of `meta` that holds attributes of tensors
_SHARED = 2  # levels of dicts whose values several saved objects may share
_MAX_DEPTH = 100  # the walk recurses; honest checkpoints are about ten levels deep
_GONE = object()  # result of a part that contains only tensors


class TensorRef(NamedTuple):
    """A placeholder in ``meta`` for the tensor of this name."""

    name: str

    def __repr__(self) -> str:
        return f"<tensor {self.name!r}>"


class _Part(NamedTuple):
    """What the walk of one value of a dict has found and charged."""

    value: Any
    depth: int
    rest: Any
    tensors: dict[str, StoredTensor]
    paths: dict[str, Path]
    cost: tuple[int, int, int, int]


Parts = dict[Path, _Part]  # the last walk at each place that several saved objects may share


class Plain:
    """A saved object, separated into its tensors and the rest.

    Attributes
    ----------
    tensors
        Dotted name -> record, in the order of the file.
    paths
        Dotted name -> path of the tensor in the object (keys and list positions).
    rest
        The object without its tensors.
    notes
        Problems with tensors that are not read as they were saved.
    attributes
        Dotted name of a tensor -> its attributes. Tensors among the attributes are also in ``tensors``, after all
        others.
    inner
        Names of the tensors that are attributes of other tensors.
    taken
        Dotted name -> record, for records that the caller reads itself (see ``take``).
    subclasses
        Name of a Tensor subclass -> dotted names of the tensors of that class.
    wholes
        Dotted name of a sparse tensor -> what it is, and the names of its parts, by their keys. They are also in
        ``tensors``.
    parts
        Names of the tensors that are parts of others (see ``compose``).
    pieces
        Maps the dotted name of a tensor in the object to the name of the part or tensor whose values it has.
    """

    def __init__(
        self,
        value: Any,
        where: str,
        size: int,
        prefix: str = "",
        keep: Callable[[str, StoredTensor], Any] | None = None,
        take: Callable[[Opaque], bool] | None = None,
        parts: Parts | None = None,
        array: Callable[[NumpyArray, str], StoredTensor | None] | None = None,
        compose: Callable[[Composite], Whole | Sequence[StoredTensor] | None] | None = None,
    ) -> None:
        """Separate ``value``, the content of a pickle of ``size`` bytes (which limits how far shared parts expand).

        References to tensors in the rest have ``prefix`` before the name. ``keep`` returns the object that replaces a
        tensor in the rest, from its name and record; by default tensors are removed from the rest. ``take`` returns
        whether a record is a tensor that the caller reads itself; such a record is removed and not searched. ``parts``
        are those of the last object: what is the same object at the same place is not walked again. The rest must then
        not be modified. ``array`` returns the tensor that an array of numpy with this name is, or None if the array is
        to stay in the rest. ``compose`` returns what a tensor of several parts is as a whole: the result of an
        operation, or several tensors; or None, if it is its parts."""
        self.tensors: dict[str, StoredTensor] = {}
        self.taken: dict[str, Opaque] = {}
        self.paths: dict[str, Path] = {}
        self.notes: list[Problem] = []
        self.attributes: dict[str, Any] = {}
        self._given: list[tuple[str, Path, Any]] = []  # name, path and attributes of tensors with attributes
        self._having: set[int] = set()  # ids of the records of these tensors
        self.subclasses: dict[str, list[str]] = {}
        self.wholes: dict[str, tuple[Whole, dict[str, str]]] = {}
        self.parts: list[str] = []
        self.pieces: dict[str, str] = {}
        self._where = where
        self._budget = Budget(where, size)
        self._arrays: dict[int, Any] = {}  # by the id of the record, so that a shared array is created once
        self._open: set[int] = set()
        self._prefix = prefix
        self._keep = keep
        self._take = take
        self._parts = parts
        self._array = array
        self._compose = compose
        try:
            rest = self._walk(value, (), 0)
            self.inner = self._add_attributes()
        except RecursionError:  # the caller's own stack was deep already
            raise CorruptError(f"{where}: objects are nested too deep: the file is hostile or damaged") from None
        self.rest = {} if rest is _GONE else rest
        for kind, names in self.subclasses.items():
            shown = some(map(repr, names))
            each = f"{shown} is a {kind}: the tensors inside it have names below its own"
            many = f"{len(names):,} tensors ({shown}) are {kind}: the tensors inside them have names below theirs"
            self.notes.append(Problem("nested-tensor", each if len(names) == 1 else many))
        if self.inner:
            shown = some(map(repr, self.inner))
            line = f"{len(self.inner):,} tensors are attributes of other tensors: {shown} (in view.stored)"
            self.notes.append(Problem("nested-tensor", line))

    @property
    def meta(self) -> Any:
        """``rest``, with an additional entry for the attributes of tensors if there are any."""
        if not self.attributes:
            return self.rest
        rest = self.rest if isinstance(self.rest, dict) else {"": self.rest}
        return {**rest, free(ATTRIBUTES, rest): self.attributes}

    def _add_attributes(self) -> list[str]:
        """Separate the attributes of tensors, after everything else; return the names of the tensors among them."""
        before, wholes = len(self.tensors), len(self.wholes)
        for key, path, state in self._given:  # the list grows: tensors among the attributes may have attributes
            self.attributes[free(key, self.attributes)] = self._state(state, path, 0)
        return [*list(self.tensors)[before:], *list(self.wholes)[wholes:]]

    def _give(self, value: StoredTensor | Composite, key: str, path: Path) -> None:
        """Record the attributes of a tensor, once even if the tensor has several names."""
        state = value.state
        if id(value) not in self._having and not (isinstance(state, tuple) and not any(state)):
            self._having.add(id(value))
            self._given.append((key, path, state))

    def _walk(self, value: Any, path: Path, depth: int) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return self._leaf(value)
        if kind is StoredTensor:
            return self._tensor(value, path)
        if kind is StoredStorage:
            return self._tensor(StoredTensor(value, value.dtype or U8, 0, (value.numel,), (1,)), path)
        self._budget.objects()
        if isinstance(value, dict | list | tuple):
            self._budget.steps(len(value))
        if depth > _MAX_DEPTH:
            raise CorruptError(
                f"{self._where}: objects are nested deeper than {_MAX_DEPTH} levels: the file is hostile or damaged"
            )
        if id(value) in self._open:
            return f"<the same object as further up, seen again at {self._name(path)!r}>"
        self._open.add(id(value))
        try:
            return self._container(value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _part(self, value: Any, path: Path, depth: int, parts: Parts) -> Any:
        """Walk a value of a dict, unless the object before this one has had it at this place."""
        if len(path) > _SHARED:
            return self._walk(value, path, depth)
        known = parts.get(path)
        if (
            known is not None
            and known.value is value
            and known.depth == depth
            and known.tensors.keys().isdisjoint(self.tensors)
        ):
            self._budget.charge(known.cost)
            self.tensors.update(known.tensors)
            self.paths.update(known.paths)
            return known.rest
        count, left = len(self.tensors), self._budget.left
        rest = self._walk(value, path, depth)
        if not (self.notes or self._given or self.taken or self._arrays or self.subclasses):
            now = self._budget.left
            cost = (left[0] - now[0], left[1] - now[1], left[2] - now[2], left[3] - now[3])
            tensors = dict(islice(self.tensors.items(), count, None))
            paths = dict(islice(self.paths.items(), count, None))
            parts[path] = _Part(value, depth, rest, tensors, paths, cost)
        return rest

    def _leaf(self, value: Any) -> Any:
        """Charge a text or number and return it. An int that is too long to print becomes a record."""
        if type(value) in _TEXTS:
            self._budget.characters(len(value))
        elif type(value) is int and value.bit_length() > _WIDE:
            self._budget.characters(weight(value))
            if value.bit_length() > _UNPRINTABLE:
                return Opaque("builtins", "int", (hex(value), 16))
        elif type(value) in _BOUNDED:
            bounds = (value.start, value.stop, value.step)
            if weight(bounds) > _WIDE:
                return Opaque("builtins", type(value).__name__, tuple(map(self._leaf, bounds)))
        return value

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
            return self._composite(value, path, depth)
        if isinstance(value, list | tuple):
            kinds = set(map(type, value))
            if _LEAVES.issuperset(kinds):  # long lists of numbers are common
                if not _TEXTS.isdisjoint(kinds):
                    self._budget.characters(sum(len(v) for v in value if type(v) in _TEXTS))
                wide = (int in kinds and _has_large(value, kinds)) or not _BOUNDED.isdisjoint(kinds)
                return _plain_list(value, list(map(self._leaf, value) if wide else value))
            items = [self._walk(v, (*path, n), depth) for n, v in enumerate(value)]
            if items and all(v is _GONE for v in items):
                return _GONE
            items = [TensorRef(self._prefix + self._name((*path, n))) if v is _GONE else v for n, v in enumerate(items)]
            return _plain_list(value, items)
        if isinstance(value, Namespace):
            inner = self._dict(vars(value), path, depth)
            return namespace({} if inner is _GONE else inner)
        if isinstance(value, Opaque):
            if self._take is not None and self._take(value):
                self.taken[self._key(path)] = value
                return _GONE
            return self._opaque(value, path, depth)
        if isinstance(value, NumpyArray) and self._array is not None:
            tensor = self._array(value, self._name(path))
            if tensor is not None:
                return self._tensor(tensor, path)
        if isinstance(value, NumpyArray | NumpyDtype):
            return self._numpy(value, path, depth)
        weighs = weight(value)
        self._budget.characters(weighs)
        if isinstance(value, set | frozenset) and weighs > _UNPRINTABLE // 4:
            return type(value)(map(_key, value))
        return value

    def _composite(self, value: Composite, path: Path, depth: int) -> Any:
        made = None if self._compose is None else self._compose(value)
        name = self._name(path)
        if made is None:
            line = f"{name!r} is a {value.kind} tensor: its parts are tensors of their own, with names below its own"
        elif isinstance(made, Whole):
            name = self._key(path)
            line = f"{name!r} is a {value.kind} tensor: it is read as a dense one; its parts are in view.stored"
        else:
            line = (
                f"{name!r} is a {value.kind} tensor: the {len(made):,} tensors in it have names below its own; its "
                "parts are in view.stored"
            )
        self.notes.append(Problem("nested-tensor", line, name))
        if value.state:
            self._give(value, name, path)
        if made is None:
            begin = len(self.tensors)
            rest = self._dict(value.parts, path, depth)
            self._of_one(begin, name)
            return rest
        names: dict[str, str] = {}
        for part, tensor in value.parts.items():
            before = len(self.tensors)
            self._walk(tensor, (*path, part), depth)
            self.parts += islice(reversed(self.tensors), len(self.tensors) - before)  # the last ones
            if isinstance(tensor, StoredTensor):
                names[part] = self.parts[-1]
        if isinstance(made, Whole):
            self.wholes[name] = made, names
        else:
            begin = len(self.tensors)
            for n, tensor in enumerate(made):
                self._tensor(tensor, (*path, n))
            self._of_one(begin, name)
        return _GONE

    def _of_one(self, begin: int, name: str) -> None:
        """Note that the tensors from a number on are what a tensor consists of."""
        self.pieces |= dict.fromkeys(islice(reversed(self.tensors), len(self.tensors) - begin), name)

    def _numpy(self, value: NumpyArray | NumpyDtype, path: Path, depth: int) -> Any:
        found = self._arrays.get(id(value))
        if found is None:
            found = plain_numpy(value)
            if isinstance(found, Opaque):  # the numpy record contradicts itself
                found = self._opaque(found, path, depth)
            elif isinstance(found, np.ndarray):
                self._budget.inflated(found.nbytes)
                if found.dtype.hasobject:
                    found = self._objects(found, path, depth)
            self._arrays[id(value)] = found
        if isinstance(found, np.ndarray):
            self._budget.characters(12 * min(found.size, 1000))  # numpy prints at most 1000 elements
        return found

    def _objects(self, array: np.ndarray[Any, Any], path: Path, depth: int) -> np.ndarray[Any, Any]:
        """Separate an array of objects like a list; return an array of the rest."""
        self._budget.steps(array.size)
        plain = np.empty(array.size, object)
        for n, value in enumerate(array.reshape(-1)):
            plain[n] = self._named(value, (*path, n), depth)
        return plain.reshape(array.shape)

    def _dict(self, value: dict[Any, Any], path: Path, depth: int) -> Any:
        plain: dict[Any, Any] = {}
        characters = 0
        for k, v in value.items():
            key = k
            if type(k) is str:
                characters += len(k)
            else:
                weighs = weight(k)
                characters += weighs
                if weighs > _UNPRINTABLE // 4:
                    key = _key(k)
                elif type(k) not in _LEAVES and type(k) is not tuple:
                    key = plain_numpy(k)
            kind = type(v)
            if kind is str:
                characters += len(v)
                plain[key] = v
            elif kind in _NUMBERS and (kind is not int or -_LARGE < v < _LARGE) and kind not in _BOUNDED:
                plain[key] = v
            else:
                inner = (*path, text(k))
                item = self._walk(v, inner, depth) if self._parts is None else self._part(v, inner, depth, self._parts)
                if item is not _GONE:
                    plain[key] = item
        self._budget.characters(characters)
        return plain if plain or not value else _GONE

    def _opaque(self, value: Opaque, path: Path, depth: int) -> Opaque:
        """Copy a record with tensors replaced by references, so that it can be kept without the file."""
        if isinstance(value, TensorSubclass):
            self.subclasses.setdefault(f"{value.module}.{value.name}", []).append(self._name(path))
        record = Opaque(value.module, value.name)
        if value.args:
            record.args = tuple(self._named(v, (*path, n), depth) for n, v in enumerate(value.args))
        else:
            record.args = value.args
        record.kwargs = None if value.kwargs is None else self._named(value.kwargs, path, depth)
        record.state = self._state(value.state, path, depth)
        self._budget.steps(len(value._items or ()) + len(value._entries or ()) + len(value.args or ()))
        record.items = [self._named(v, (*path, n), depth) for n, v in enumerate(value._items or ())]
        record.entries = self._attributes(value._entries or {}, path, depth)
        return record

    def _state(self, state: Any, path: Path, depth: int) -> Any:
        if isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state):
            return tuple(self._attributes(s, path, depth) for s in state)  # (attributes, attributes in slots)
        return self._attributes(state, path, depth)

    def _attributes(self, state: Any, path: Path, depth: int) -> Any:
        if isinstance(state, dict):
            self._budget.steps(len(state))
            self._budget.characters(sum(len(k) if type(k) is str else weight(k) for k in state))
            return {k if type(k) is str else _key(k): self._named(v, (*path, text(k)), depth) for k, v in state.items()}
        return self._named(state, path, depth)

    def _named(self, value: Any, path: Path, depth: int) -> Any:
        item = self._walk(value, path, depth)
        return TensorRef(self._prefix + self._name(path)) if item is _GONE else item

    def _tensor(self, tensor: StoredTensor, path: Path) -> Any:
        key = self._key(path)
        self.tensors[key] = tensor
        if tensor.note:
            self._budget.characters(len(key) + len(tensor.note))
            self.notes.append(Problem("unsupported-tensor", f"{key!r} {tensor.note}", key))
        if tensor.state:
            self._give(tensor, key, path)
        return _GONE if self._keep is None else self._keep(key, tensor)

    def _key(self, path: Path) -> str:
        """Return a unique name for the tensor at this path."""
        key = self._name(path)
        self._budget.objects(_TENSOR)
        if key in self.paths:
            self._budget.characters(3 * len(key))
            other = free(key, self.paths)
            line = f"two tensors have the dotted name {key!r}: the second is {other!r}"
            self.notes.append(Problem("duplicate-tensor", line, other))
            key = other
        self.paths[key] = path
        return key

    def _name(self, path: Path) -> str:
        """Return the dotted name of a path, charged to the budget."""
        name = ".".join(map(str, path))
        self._budget.characters(len(name) + 1)
        return name


_NUMBERS = frozenset({type(None), bool, int, float, complex, range, slice})
_BOUNDED = frozenset({range, slice})
_TEXTS = frozenset({str, bytes, bytearray})
_LEAVES = _NUMBERS | _TEXTS
_WIDE = 256  # bits; a longer int is charged like a text
_LARGE = 1 << _WIDE
_UNPRINTABLE = 10_000  # bits; a longer int is kept as a text (Python refuses to print more than 14,283 bits)
_TENSOR = 8  # objects charged for a tensor, which takes about a kilobyte
_LONG = 1000  # maximum characters of the name of a key that is not a string


def _key(key: Any) -> Any:
    """Convert a key or set element; ints that are too long to print become texts."""
    if type(key) is int and key.bit_length() > _UNPRINTABLE:
        return hex(key)
    if type(key) in (tuple, frozenset):
        return type(key)(map(_key, key))
    return key if type(key) in _LEAVES else plain_numpy(key)


def _has_large(values: Sequence[Any], kinds: set[type]) -> bool:
    """Return whether one of the ints among the values has more than _WIDE bits."""
    ints = values if kinds == {int} else [v for v in values if type(v) is int]
    return bool(max(ints) >= _LARGE or min(ints) <= -_LARGE)


def text(key: Any) -> str:
    """Format a dict key as a part of a dotted name."""
    if type(key) is str:
        return key
    if weight(key) > _LONG:  # also because Python refuses to print ints of thousands of digits
        return short(key)
    return str(key)


def weight(value: Any) -> int:
    """Estimate the number of characters needed to write a key or set element, with everything that it refers to."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str | bytes | bytearray):
            total += len(one)
        elif isinstance(one, tuple | frozenset | set):
            left.extend(one)
        elif isinstance(one, int):
            total += one.bit_length() // 3
        elif isinstance(one, range):
            left.extend((one.start, one.stop, one.step))
        elif isinstance(one, PurePath):
            total += len(str(one))
        elif isinstance(one, Opaque):
            total += 200
        total += 2
    return total


def _plain_list(original: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(original, Deque):
        return deque(items)
    return items if isinstance(original, list) else _tuple(original, items)


def _tuple(original: tuple[Any, ...], items: list[Any]) -> Any:
    """Keep a Size of ints unchanged; convert any other tuple to a plain tuple."""
    return original if type(original) is not tuple and all(type(i) is int for i in items) else tuple(items)
