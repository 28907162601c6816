"""Inert records of the classes and functions that a pickle names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from ....core.dtypes import DType
from ....errors import CorruptError


class Opaque:
    """An inert record of a class or function that a pickle names, or of an object that unpickling would create with it.

    The keys of ``state`` are readable as attributes of the record.

    Parameters
    ----------
    module, name
        Where the class or function is, as the pickle spells it.
    args
        Positional arguments of the call; None if the pickle only names the class or function.
    kwargs
        Keyword arguments of the call as a dict; None if there are none.
    """

    __slots__ = ("_entries", "_items", "args", "kwargs", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[Any, ...] | None = None, kwargs: Any = None) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self._items: list[Any] | None = None  # created on demand: a file may contain a million records without items
        self._entries: dict[Any, Any] | None = None

    @property
    def items(self) -> list[Any]:
        """The elements that unpickling would append to the object."""
        if self._items is None:
            self._items = []
        return self._items

    @items.setter
    def items(self, values: list[Any]) -> None:
        self._items = values or None

    @property
    def entries(self) -> dict[Any, Any]:
        """The keys and values that unpickling would set on the object."""
        if self._entries is None:
            self._entries = {}
        return self._entries

    @entries.setter
    def entries(self, values: dict[Any, Any]) -> None:
        self._entries = values or None

    @property
    def attributes(self) -> dict[str, Any]:
        """The state as attribute names and values, including the part of a class with slots."""
        found: dict[str, Any] = {}
        for part in self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,):
            if isinstance(part, dict):
                found.update((k, v) for k, v in part.items() if isinstance(k, str))
        return found

    def __getattr__(self, key: str) -> Any:
        if not key.startswith("_"):
            try:
                return self.attributes[key]
            except (KeyError, AttributeError):
                pass
        raise AttributeError(f"{key!r} is not in the state of the record of {self.module}.{self.name}")

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, slot) for slot in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for slot, value in zip(self.__slots__, state, strict=True):
            object.__setattr__(self, slot, value)

    def __repr__(self) -> str:
        parts = []
        if self.args:
            parts.append(f"args={short(self.args)}")
        for label, value in (("state", self.state), ("items", self._items), ("entries", self._entries)):
            if value:
                parts.append(f"{label}={short(value)}")
        return f"<{_word(self.module)}.{_word(self.name)}{' ' if parts else ''}{', '.join(parts)}>"


class Distant(Opaque):
    """A byte string that was left in the file: ``nbytes`` bytes from byte ``offset`` on."""

    __slots__ = ()

    def __init__(self, offset: int, nbytes: int, mutable: bool = False) -> None:
        super().__init__("builtins", "bytearray" if mutable else "bytes", ())
        self.state = {"offset": offset, "nbytes": nbytes}


class Attributed(dict[Any, Any]):
    """A dict with attributes from the pickle (such as ``_metadata`` of an OrderedDict) in ``state``."""

    __slots__ = ("state",)
    state: Any


def through_partial(what: Opaque) -> Opaque | None:
    """Resolve the call functools.partial(cls.__new__, cls, ...), by which protocols 2 and 3 encode __new__ with
    keywords."""
    state = what.state
    if (what.module, what.name) != ("functools", "partial") or not isinstance(state, tuple) or len(state) < 3:
        return None
    func, args, kwargs = state[:3]
    if not isinstance(func, Opaque) or not func.name.endswith("__new__") or not isinstance(args, tuple) or not args:
        return None
    cls = args[0]
    return Opaque(cls.module, cls.name, args[1:], kwargs or None) if isinstance(cls, Opaque) else None


def extend(target: Any, items: Iterable[Any]) -> None:
    if isinstance(target, Opaque) and target.args is not None:  # an instance, not a class or function
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise CorruptError(f"items are appended to a {type(target).__name__}")


def build(target: Any, state: Any) -> None:
    """Set the state of a record, with `set_state` if it has that method."""
    if isinstance(target, Opaque | Attributed):
        target.state = state
        return
    take = getattr(target, "set_state", None)
    if take is None:
        raise CorruptError(f"a state is given to a {type(target).__name__}")
    take(state)


def short(value: Any) -> str:
    """Format any value from a pickle on one line, quickly: at most four items of a container, two levels deep."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_leaf(k)}: {_leaf(v)}" for k, v in islice(value.items(), 4))
        return "{" + inner + (", ..." if len(value) > 4 else "") + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_leaf, value[:4])) + (", ..." if len(value) > 4 else "") + ")"
    return _leaf(value)


def _word(name: str) -> str:
    """Return a name from a pickle as a short word without control characters."""
    return repr(name[:100])[1:-1] + ("..." if len(name) > 100 else "")


def _leaf(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"<{_word(value.module)}.{_word(value.name)}>"
    if isinstance(value, int) and value.bit_length() > 256:  # printing a huge int takes quadratic time
        return f"int of {value.bit_length()} bits"
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if value is None or type(value) in (bool, int, float, complex, DType):
        return repr(value)
    size = f" of {len(value)}" if isinstance(value, dict | list | tuple | set | frozenset) else ""
    return f"{type(value).__name__}{size}"


def content_of(value: Any) -> bytes | None:
    """Return the bytes in a pickled `io.BytesIO`; None if the value is no such object, or holds none."""
    if not isinstance(value, Opaque) or (value.module.lstrip("_"), value.name) != ("io", "BytesIO"):
        return None
    parts = (*(value.args or ()), *(value.state if isinstance(value.state, tuple) else ()))
    return next((part for part in parts if isinstance(part, bytes)), None)
