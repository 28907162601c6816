"""The file ``checkpoint`` of older versions: the whole tree as msgpack, with small leaves, and placeholders for others.

A leaf is an array with its bytes, a number, a text, or ``PLACEHOLDER://NAME`` (``AGGREGATED://NAME``), the name of an
array in a folder. The bytes of arrays are skipped, not read.
Writer: orbax/checkpoint/msgpack_utils.py, after flax/serialization.py; orbax/checkpoint/utils.py `leaf_placeholder`
(orbax-checkpoint 0.12.8 reads it; versions before 0.2 wrote it).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...core.box import Shape, c_strides, fits
from ...core.dtypes import DTYPES, DType
from ...core.extents import Extent
from ...errors import CorruptError
from ...io.limits import Budget
from ...io.storage.base import Store
from ...io.storage.streams import StoreFile
from .trees import Key

NAME = "checkpoint"
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_BLOCK = 1 << 16  # bytes that are read at a time
_LONGEST = 1 << 24  # bytes of a text
_DEPTH = 64
_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4  # types of extensions
_DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES if dtype.is_number}


class Stored(NamedTuple):
    """An array in the file."""

    dtype: DType
    shape: Shape
    offset: int
    scalar: bool


class _Scanner:
    """A file of msgpack that is read from its start, block by block."""

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        self.at = 0
        self._block = b""
        self._start = 0
        self._budget = Budget(file.where, file.size)

    def take(self, count: int) -> bytes:
        at = self.at - self._start
        if not 0 <= at <= at + count <= len(self._block):
            size = min(max(count, _BLOCK), self.file.size - self.at)
            if count > size:
                raise self.damaged("it ends too early")
            self._block, self._start, at = self.file.at(self.at, size), self.at, 0
        self.at += count
        return self._block[at : at + count]

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > self.file.size:
            raise self.damaged("it ends too early")

    def damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self.file.where} is damaged at byte {self.at:,}: {why}. Copy it again from its source")

    def number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self.take(struct.calcsize(form)))[0]

    def text(self, count: int) -> str:
        if count > _LONGEST:
            raise self.damaged(f"a text of {count:,} bytes")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise self.damaged("a text is not UTF-8") from None

    def value(self, depth: int = 0) -> Any:
        """Read a value. Bytes are skipped: (offset, length) stands for them."""
        if depth > _DEPTH:
            raise self.damaged(f"more than {_DEPTH} levels")
        self._budget.objects()
        kind = self.take(1)[0]
        if kind < 0x80 or kind >= 0xE0:
            return kind if kind < 0x80 else kind - 0x100
        if kind < 0x90:
            return self._map(kind & 15, depth)
        if kind < 0xA0:
            return self._list(kind & 15, depth)
        if kind < 0xC0:
            return self.text(kind & 31)
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if 0xC4 <= kind <= 0xC6:
            count = self.number("BHI"[kind - 0xC4])
            offset = self.at
            self.skip(count)
            return offset, count
        if 0xC7 <= kind <= 0xC9:
            return self._extension(self.number("BHI"[kind - 0xC7]), depth)
        if 0xCA <= kind <= 0xD3:
            return self.number("fdBHIQbhiq"[kind - 0xCA])
        if 0xD4 <= kind <= 0xD8:
            return self._extension(1 << (kind - 0xD4), depth)
        if 0xD9 <= kind <= 0xDB:
            return self.text(self.number("BHI"[kind - 0xD9]))
        if kind in (0xDC, 0xDD):
            return self._list(self.number("HI"[kind - 0xDC]), depth)
        if kind in (0xDE, 0xDF):
            return self._map(self.number("HI"[kind - 0xDE]), depth)
        raise self.damaged(f"0x{kind:02x} begins no value of msgpack")

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int) or str(key) in found:
                raise self.damaged(f"the key {key!r:.40}, which is no text or is there twice")
            found[str(key)] = self.value(depth + 1)
        return found

    def _extension(self, count: int, depth: int) -> Any:
        kind = self.number("b")
        end = self.at + count
        if kind in (_ARRAY, _SCALAR):
            found = self.value(depth + 1)
            value: Any = self._array(found, kind == _SCALAR)
        elif kind == _COMPLEX:
            parts = self.value(depth + 1)
            value = complex(*parts) if isinstance(parts, list) and len(parts) == 2 else None
        elif kind == _TUPLE:
            value = self.value(depth + 1)
        else:
            raise self.damaged(f"an extension of type {kind}, which Flax does not write")
        if self.at != end:
            raise self.damaged(f"an extension of type {kind} has another length than its value")
        return value

    def _array(self, found: Any, scalar: bool) -> Stored:
        if not isinstance(found, list) or len(found) != 3 or not isinstance(found[2], tuple):
            raise self.damaged("an array is not its shape, its dtype and its bytes")
        shape, name, (offset, count) = found
        if isinstance(name, tuple):  # bytes, of older versions
            name = self.file.at(*name).decode("ascii", "replace") if name[1] < 64 else ""
        dtype = _DTYPES.get(str(name))
        sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if dtype is None or not sizes or not fits(shape, dtype.itemsize):
            raise self.damaged(f"an array of dtype {name!r:.40} and shape {shape!r:.60}")
        length = dtype.itemsize
        for n in shape:
            length *= n
        if length != count:
            raise self.damaged(f"an array of {dtype} and shape {shape!s:.60} has {count:,} bytes")
        return Stored(dtype, tuple(shape), offset, scalar)


class Aggregate(NamedTuple):
    """The leaves of the tree in a file: arrays and other values with their keys, and the names of other arrays."""

    arrays: dict[Key, Stored]
    values: dict[Key, Any]
    names: dict[str, Key]


def read_aggregate(store: Store, path: str) -> Aggregate:
    """Read the tree of a file. Raises CorruptError."""
    scanner = _Scanner(StoreFile(store, path))
    tree = scanner.value()
    if not isinstance(tree, dict) or scanner.at != scanner.file.size:
        raise CorruptError(f"{scanner.file.where} is no tree of Flax in msgpack: damaged, or another kind of file")
    found = Aggregate({}, {}, {})
    for key, leaf in _leaves(tree, ()):
        if isinstance(leaf, Stored):
            found.arrays[key] = leaf
        elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDERS):
            found.names[leaf.partition("://")[2]] = key
        else:
            found.values[key] = leaf
    return found


def _leaves(tree: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(tree, dict | list) and tree:
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, (*key, str(name)))
    else:
        yield key, tree


def extent_of(path: str, array: Stored) -> Extent:
    """Return the bytes of an array in the file."""
    return Extent(path, array.offset, array.dtype, array.shape, c_strides(array.shape))
