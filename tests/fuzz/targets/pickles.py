"""The pickle machine. Its shortcuts and its shared items give what the machine alone gives, and what it reads of plain
data is what Python's own unpickler reads."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

from lazyckpt import LazyckptError
from lazyckpt.io.containers.pickle.arrays import plain_numpy
from lazyckpt.io.containers.pickle.machine import Pickle
from lazyckpt.io.containers.pickle.memo import Items
from lazyckpt.io.containers.pickle.plain import Plain
from lazyckpt.io.containers.pickle.rebuild import REBUILD, persistent_storage
from lazyckpt.io.plain_json import decode, encode

from ... import handmade
from ..contract import DifferenceError, Target
from .torch_files import archives

_PAIRS = 20_000  # pairs of values that are compared


def _data_pickles() -> list[bytes]:
    """Pickles of torch files, as they are in the archives."""
    found = []
    for data in archives():
        start = data.find(b"\x80\x02")
        found.append(data[start : data.rfind(b".PK") + 1] if start >= 0 else b"\x80\x02}.")
    return found


def _values() -> list[bytes]:
    import datetime
    import decimal
    import pathlib

    import numpy as np

    value = {
        "array": np.arange(6, dtype=">i2").reshape(2, 3), "objects": np.array([1, "a", None], dtype=object),
        "fields": np.zeros(2, [("a", "<f4"), ("b", "S3", 2)]), "scalar": np.float64(2.5), "dtype": np.dtype("M8[ms]"),
        "fortran": np.asfortranarray(np.ones((2, 3))), "date": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "delta": datetime.timedelta(1), "decimal": decimal.Decimal("1.5"), "path": pathlib.PurePosixPath("a/b"),
        "set": {1, (2, "x")}, "frozen": frozenset({3}), "bytes": b"xyz", "array of bytes": bytearray(b"abc"),
        "complex": 1 + 2j, "range": range(3), "slice": slice(1, None), "ordered": OrderedDict(a=1), "long": 1 << 80,
        "list": [1.5, None, True, "\ud800"],
    }  # fmt: skip
    return [pickle.dumps(value, protocol) for protocol in range(6)]


def _hand() -> list[bytes]:
    return [
        handmade.program(handmade.dict_of(handmade.text("w"), handmade.tensor())),
        handmade.program(handmade.laughs(6, 4)), handmade.program(handmade.nested(30, "tuple")),
        handmade.program(handmade.call(handmade.named("os", "system"), handmade.text("true"))),
    ]  # fmt: skip


def seeds() -> list[bytes]:
    return [*_data_pickles(), *_values(), *_hand()]


def _data() -> list[bytes]:
    value = [1, {"a": (2.5, "b"), 3: None}, {4}, frozenset({5}), b"six", True, 1 << 70, "\u00e9"]
    return [*(pickle.dumps(value, protocol) for protocol in range(6)), *_hand()]


def _outcome(data: bytes, persistent: Any, known: Items | None = None) -> Pickle | str:
    try:
        return Pickle(data, "fuzz.pt", REBUILD, persistent, known=known)
    except LazyckptError as e:
        return type(e).__name__


def machine(data: bytes) -> None:
    """Parse a pickle in all ways, and separate it into tensors and the rest."""
    alone = _outcome(data, lambda pid: persistent_storage(pid))  # another function: without the shortcut for tensors
    known = Items()
    for found in (
        _outcome(data, persistent_storage), _outcome(data, persistent_storage, known),
        _outcome(data, persistent_storage, known),
    ):  # fmt: skip
        if isinstance(found, str) or isinstance(alone, str):
            if found != alone:
                raise DifferenceError(f"the machine alone: {alone!r:.200}, with its shortcuts: {found!r:.200}")
        elif found.end != alone.end or found.globals != alone.globals:
            raise DifferenceError(f"{found.end}, {found.globals} instead of {alone.end}, {alone.globals}")
        else:
            same(alone.value, found.value)
    if isinstance(alone, Pickle):
        plain = Plain(alone.value, "fuzz.pt", len(data))
        repr(plain.meta), list(plain.tensors)
        decode(encode(plain.rest))


class _Reader(pickle._Unpickler):  # type: ignore[name-defined,misc]
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("a name")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id")


def plain_data(data: bytes) -> None:
    """Compare pickles without names with what Python's own unpickler, in Python, makes of them."""
    ours = _outcome(data, persistent_storage)
    if isinstance(ours, str) or ours.globals:
        return
    try:
        theirs = _Reader(io.BytesIO(data)).load()
    except Exception:  # whatever Python refuses
        return
    same(ours.value, theirs)


def same(a: Any, b: Any) -> None:
    """Compare two values that may be shared, deep or cyclic. Raises DifferenceError."""
    left, seen = [(a, b)], set[tuple[int, int]]()
    while left and len(seen) < _PAIRS:
        a, b = left.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            raise DifferenceError(f"{type(a).__name__} and {type(b).__name__}: {a!r:.100} {b!r:.100}")
        if isinstance(a, dict):
            if len(a) != len(b):
                raise DifferenceError(f"dicts of {len(a)} and {len(b)} items")
            left.extend(zip(a.keys(), b.keys(), strict=True))
            left.extend(zip(a.values(), b.values(), strict=True))
        elif isinstance(a, list | tuple):
            if len(a) != len(b):
                raise DifferenceError(f"{len(a)} and {len(b)} elements: {a!r:.100} {b!r:.100}")
            left.extend(zip(a, b, strict=True))
        elif isinstance(a, set | frozenset):
            if len(a) != len(b):
                raise DifferenceError(f"sets of {len(a)} and {len(b)}")
        elif isinstance(a, float | complex):
            if repr(a) != repr(b):
                raise DifferenceError(f"{a!r} and {b!r}")
        elif isinstance(a, int | str | bytes | bytearray | bool):
            if a != b:
                raise DifferenceError(f"{a!r:.100} and {b!r:.100}")
        else:
            names = getattr(type(a), "__slots__", None) or getattr(a, "__dict__", ())
            left.extend((getattr(a, name, None), getattr(b, name, None)) for name in names)


def arrays(data: bytes) -> None:
    """Make the numpy objects of a pickle."""
    found = _outcome(data, persistent_storage)
    if isinstance(found, Pickle) and isinstance(found.value, dict):
        for value in found.value.values():
            repr(plain_numpy(value))


TARGETS = (
    Target("pickle.machine", machine, seeds, "pickle"),
    Target("pickle.data", plain_data, _data, "pickle"),
    Target("pickle.numpy", arrays, _values, "pickle"),
)
