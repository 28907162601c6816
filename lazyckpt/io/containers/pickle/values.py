"""Plain values of the standard library that a pickle may build: containers, dates, paths, namespaces."""

from __future__ import annotations

import argparse
import datetime
import decimal
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import CorruptError
from ...limits import Budget
from .records import Attributed, Opaque

# -- Limits on dict keys and set elements, so that hashing and finding them stays fast.

COMMON = (1 << 61) - 1  # smaller integers are their own hashes
_MOST = 100  # maximum keys of one container with the same hash
_ELEMENTS = 4096  # maximum elements of a tuple that is a key, over all levels
_LEVELS = 16


def check_key(key: Any) -> int:
    """Return the cost of hashing the key, in elementary steps.

    Hashing a tuple recurses in C and visits a shared element once per reference. Raises CorruptError for keys that no
    honest file has.
    """
    if isinstance(key, int):
        return 1 + key.bit_length() // 64
    level, seen = [key], 1
    for _ in range(_LEVELS):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, tuple | frozenset):
                seen += len(one)
                if seen > _ELEMENTS:
                    raise CorruptError("a dictionary key that expands to thousands of elements")
                inner.extend(one)
            elif isinstance(one, int):
                seen += one.bit_length() // 64
        if not inner:
            return seen
        level = inner
    raise CorruptError("a dictionary key that is nested absurdly deep")


def check_keys(keys: Iterable[Any]) -> None:
    """Raise CorruptError if hashing these keys in one container would take too long."""
    equal: dict[int, int] = {}
    for key in keys:
        kind = type(key)
        if kind is str or (kind is int and -COMMON < key < COMMON):
            continue
        check_key(key)
        found = equal[hash(key)] = equal.get(hash(key), 0) + 1
        if found > _MOST:
            raise CorruptError("hundreds of dictionary keys that have the same hash")


class Keys:
    """A check that rejects dict keys and set elements of one file that are slow to hash or to find."""

    __slots__ = ("_budget", "_equal")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._equal: dict[tuple[int, int], int] = {}  # (id of a dict or set, hash) -> number of keys with that hash

    def check(self, target: Any, keys: Iterable[Any]) -> None:
        """Charge keys that are added to ``target``. Raises CorruptError past the limit."""
        for key in keys:
            kind = type(key)
            if kind is str or (kind is int and -COMMON < key < COMMON):
                continue
            self._budget.steps(check_key(key))
            place = id(target), hash(key)
            number = self._equal[place] = self._equal.get(place, 0) + 1
            self._budget.steps(number)


# -- Constructors of plain values.

_PATH = 1 << 15  # maximum characters of a path


def listed(*args: Any) -> Sequence[Any]:
    """Return the elements for a container. Only containers from the pickle are accepted, so the size is bounded."""
    if not args:
        return []
    (values,) = args
    if not isinstance(values, list | tuple | set | frozenset | dict):
        raise TypeError("not a listed container")
    return values  # type: ignore[return-value]


def _keys(*args: Any) -> Sequence[Any]:
    """Return the elements for a container that hashes them."""
    values = listed(*args)
    check_keys(values)
    return values


def _attributed(*args: Any) -> Attributed:
    if not args:  # the common case: hooks of a tensor
        return Attributed()
    values = listed(*args)
    for pair in () if isinstance(values, dict) else values:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError("not pairs")
    check_keys(values if isinstance(values, dict) else (pair[0] for pair in values))
    return Attributed(values)


def _decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str or len(text) > 1000:  # parsing a long text takes quadratic time
        raise TypeError("not a short text")
    return decimal.Decimal(text)


def _slice(*args: Any) -> slice:
    if not all(a is None or type(a) is int for a in args):
        raise TypeError("not a slice of numbers")
    return slice(*args)


def _range(*args: Any) -> range:
    if not all(type(a) is int for a in args):
        raise TypeError("not a range of numbers")
    return range(*args)


def _getattr(thing: Any, name: Any, *default: Any) -> Opaque:
    """Resolve getattr(Outer, "Inner"), by which protocols 2 and 3 encode a nested class."""
    if not isinstance(thing, Opaque) or thing.args is not None or type(name) is not str:
        raise TypeError("not an attribute of a named thing")
    return Opaque(thing.module, f"{thing.name}.{name}")


def _reconstructor(cls: Any, base: Any, state: Any) -> Opaque:
    """Return a record of an object of a plain class, as protocols 0 and 1 encode it."""
    if not isinstance(cls, Opaque) or cls.args is not None:
        raise TypeError("not an object of a named class")
    record = Opaque(cls.module, cls.name, ())
    if isinstance(state, dict):
        record.entries = dict(state)
    elif isinstance(state, list):
        record.items = list(state)
    elif state is not None:
        record.args = (state,)
    return record


class Size(tuple[int, ...]):
    """A stand-in for torch.Size that does not need torch."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(str, self))}])"


@dataclass(frozen=True, slots=True)
class Device:
    """A stand-in for torch.device that does not need torch."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device(type={self.type!r}" + (")" if self.index is None else f", index={self.index})")


def size(*args: Any) -> Size:
    """Create a `Size` from the arguments of torch.Size. Raises TypeError."""
    sizes = listed(*args)
    for n in sizes:  # a loop: `all` takes three times as long for so few
        if type(n) is not int or abs(n) >= 1 << 63:
            raise TypeError("not sizes")
    return Size(sizes)


_DEVICES = frozenset(  # c10/core/DeviceType.cpp
    (
        "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
        "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
    )
)  # fmt: skip


def device(kind: Any, index: Any = None) -> Device:
    """Create a `Device` from the arguments of torch.device: ``"cuda:1"`` or ``"cuda", 1``. Raises TypeError,
    ValueError."""
    if type(kind) is not str or not (index is None or type(index) is int):
        raise TypeError("not a device")
    name, colon, number = kind.partition(":")
    if colon:
        if index is not None or not number.isdecimal():
            raise ValueError("not a device")
        index = int(number)
    if name not in _DEVICES or not (index is None or 0 <= index < 1 << 15):
        raise ValueError("not a device")
    return Device(name, index)


class Deque(list[Any]):
    """A list in place of a collections.deque until its depth is known: freeing nested deques recurses in C."""


def _posix_path(*args: Any) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*_segments(args))


def _windows_path(*args: Any) -> pathlib.PureWindowsPath:
    return pathlib.PureWindowsPath(*_segments(args))


def _segments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if sum(len(a) if isinstance(a, str) else 256 for a in args) > _PATH:
        raise TypeError("not a path")
    return args


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise ValueError(encoding)
    return text.encode(encoding)


def _bytearray(*args: Any) -> bytearray:
    # no size and no iterable: a few bytes of pickle must not become gigabytes
    if args and not (len(args) == 1 and isinstance(args[0], bytes | bytearray)):
        return bytearray(_encode(*args))
    return bytearray(*args)


def namespace(attributes: Mapping[str, Any]) -> argparse.Namespace:
    """Return an argparse.Namespace with attributes of a file. Its constructor would set them one by one, and fail for
    some names (``self``, ``__class__``, ``__dict__``)."""
    found = argparse.Namespace()
    vars(found).update(attributes)
    return found


class Namespace(argparse.Namespace):
    """An argparse.Namespace whose attributes are set from pickled data."""

    def set_state(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str) and k != "set_state"})


def _table() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): _attributed,
        ("collections", "defaultdict"): lambda factory=None, *args: _attributed(*args),
        ("collections", "Counter"): _attributed,
        ("collections", "deque"): lambda *args: Deque(listed(*args[:1])),
        ("argparse", "Namespace"): Namespace,
        ("_codecs", "encode"): _encode,
        ("datetime", "datetime"): datetime.datetime,
        ("datetime", "date"): datetime.date,
        ("datetime", "timedelta"): datetime.timedelta,
        ("datetime", "timezone"): datetime.timezone,
        ("copyreg", "_reconstructor"): _reconstructor,
        ("copy_reg", "_reconstructor"): _reconstructor,
        ("decimal", "Decimal"): _decimal,
    }
    for root in ("builtins", "__builtin__"):
        table[root, "set"] = lambda *args: set(_keys(*args))
        table[root, "frozenset"] = lambda *args: frozenset(_keys(*args))
        table[root, "list"] = lambda *args: list(listed(*args))
        table[root, "tuple"] = lambda *args: tuple(listed(*args))
        table[root, "dict"] = _attributed
        table[root, "bytearray"] = _bytearray
        table[root, "bytes"] = lambda *args: bytes(_bytearray(*args))
        table[root, "complex"] = complex
        table[root, "slice"] = _slice
        table[root, "range"] = _range
        table[root, "xrange"] = _range
        table[root, "getattr"] = _getattr
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "Path", "PurePath"):
            table[module, name] = _posix_path
        table[module, "WindowsPath"] = table[module, "PureWindowsPath"] = _windows_path
    return table


VALUES = _table()
