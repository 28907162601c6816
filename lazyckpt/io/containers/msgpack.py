"""A msgpack document with arrays, as flax writes it: the objects, and where each array's elements lie.

Format: msgpack's spec.md (2013, with ext types); flax/serialization.py `_MsgpackExtType`: 1 an array, 2 a complex
number, 3 a scalar of numpy. An array is [shape, name of the dtype, bytes]. The bytes are skipped, not read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.box import Shape, fits
from ...core.dtypes import DTYPES, DType
from ...errors import CorruptError
from ..limits import LEVELS, Budget
from ..storage.streams import StoreFile
from .pickle.records import short

_NEAR, _FAR = 4 << 10, 256 << 10  # bytes that are read at a time of a local file, and of one behind a network
_TEXT = 1 << 20  # bytes of a text or of bytes that are no array
_DTYPES = {dtype.name: dtype for dtype in DTYPES if dtype.is_number and dtype._numpy}
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_EXTS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
ARRAY, COMPLEX, SCALAR = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Stored:
    """An array: the offset of its elements in the file. ``dtype`` is None if torch has none of the name ``kind``."""

    offset: int
    dtype: DType | None
    shape: Shape
    kind: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """An object of another ext type."""

    code: int
    nbytes: int


def read_msgpack(file: StoreFile) -> Any:
    """Return the document, with `Stored` for arrays. Raises CorruptError."""
    parser = _Parser(file)
    root = parser.value(0)
    if parser.at != file.size:
        raise CorruptError(f"{file.where}: {file.size - parser.at:,} bytes follow the document: damaged")
    return root


class _Parser:
    def __init__(self, file: StoreFile) -> None:
        self.file, self.at = file, 0
        self._window, self._start = b"", 0
        self._step = _FAR if file.store.gap else _NEAR
        self._budget = Budget(file.where, file.size)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        at = self.at - self._start
        if at < 0 or at + size > len(self._window):
            if self.at + size > self.file.size:
                raise CorruptError(f"{self.file.where}: it ends at byte {self.file.size:,} within an object: truncated")
            self._start = self.at
            self._window = self.file.at(self.at, min(max(size, self._step), self.file.size - self.at))
            at = 0
        self.at += size
        return self._window[at : at + size]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def value(self, depth: int) -> Any:
        """Parse the next object."""
        if depth > LEVELS:
            raise CorruptError(f"{self.file.where}: nested deeper than {LEVELS} levels: damaged or hostile")
        self._budget.objects()
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self.map(first & 15, depth)
        if first < 0xA0:
            return self.list(first & 15, depth)
        if first < 0xC0:
            return self.text(first & 31)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            code = _NUMBERS[first]
            return struct.unpack(code, self.take(struct.calcsize(code)))[0]
        if first in _BYTES:
            return self.small(self.number(_BYTES[first]))
        if first in _TEXTS:
            return self.text(self.number(_TEXTS[first]))
        if first in _LISTS:
            return self.list(self.number(_LISTS[first]), depth)
        if first in _MAPS:
            return self.map(self.number(_MAPS[first]), depth)
        if first in _EXTS or first in _FIXED_EXTS:
            return self.ext(_FIXED_EXTS.get(first) or self.number(_EXTS[first]), depth)
        raise CorruptError(f"{self.file.where}: byte {self.at - 1:,} begins no object: damaged")

    def small(self, size: int) -> bytes:
        if size > _TEXT:
            raise CorruptError(f"{self.file.where}: {size:,} bytes at {self.at:,} that are no array: damaged")
        self._budget.characters(size)
        return self.take(size)

    def text(self, size: int) -> str:
        try:
            return self.small(size).decode()
        except UnicodeDecodeError:
            raise CorruptError(f"{self.file.where}: a text before byte {self.at:,} is not UTF-8: damaged") from None

    def list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int | bytes):
                raise CorruptError(f"{self.file.where}: a key before byte {self.at:,} is no text: damaged")
            if key in found:
                raise CorruptError(f"{self.file.where}: the key {short(key)} is there twice: damaged")
            found[key] = self.value(depth + 1)
        return found

    def ext(self, size: int, depth: int) -> Any:
        code = struct.unpack("b", self.take(1))[0]
        end = self.at + size
        if end > self.file.size:
            raise CorruptError(f"{self.file.where}: an object of {size:,} bytes at {self.at:,}: truncated")
        if code in (ARRAY, SCALAR):
            found: Any = self.array(end)
        elif code == COMPLEX:
            parts = self.value(depth + 1)
            if not isinstance(parts, list) or [type(x) for x in parts] != [float, float]:
                raise CorruptError(f"{self.file.where}: a complex number before byte {self.at:,}: damaged")
            found = complex(*parts)
        else:
            found = Unknown(code, size)
            self.at = end
        if self.at != end:
            raise CorruptError(f"{self.file.where}: an object ends at byte {self.at:,} instead of {end:,}: damaged")
        return found

    def array(self, end: int) -> Stored:
        """Parse [shape, dtype, bytes], and skip the bytes."""
        where = f"{self.file.where}: the array before byte {end:,}"
        if self.take(1) != b"\x93":
            raise CorruptError(f"{where} does not consist of shape, dtype and bytes: damaged")
        shape, kind, marker = self.value(LEVELS - 1), self.value(LEVELS), self.take(1)[0]
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise CorruptError(f"{where} has the shape {shape!s:.60}: damaged")
        kind = kind.decode("latin-1") if isinstance(kind, bytes) else kind
        if not isinstance(kind, str) or marker not in _BYTES:
            raise CorruptError(f"{where} does not consist of shape, dtype and bytes: damaged")
        nbytes = self.number(_BYTES[marker])
        dtype, sizes = _DTYPES.get(kind), tuple(shape)
        if dtype is not None and (not fits(sizes, dtype.itemsize) or prod(sizes) * dtype.itemsize != nbytes):
            raise CorruptError(f"{where} has {nbytes:,} bytes, and the shape {sizes!s:.60} of {kind}: damaged")
        found = Stored(self.at, dtype, sizes, kind)
        self.at += nbytes
        return found
