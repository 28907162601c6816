"""The index of a GGUF file, from its header: metadata, then the names, types, shapes and offsets of the tensors.

Layout: docs/gguf.md of ggml-org/ggml; gguf 0.19, gguf_reader.py and constants.py. All three versions are read, in both
byte orders: version 1 has lengths of 32 bits, versions 2 and 3 of 64 bits; version 3 may be big-endian. Files of the
formats before GGUF (ggml, ggmf, ggjt) are refused.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...core.box import Shape, c_strides, fits
from ...core.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8, DType
from ...core.extents import Extent
from ...core.index import FileInfo
from ...errors import CorruptError, FormatError, Problem
from ..limits import Budget
from ..storage.base import Store
from ..storage.streams import StoreFile

MAGIC = b"GGUF"
_OLD = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt"}  # the formats before GGUF, by their first bytes
_ALIGNMENT = "general.alignment"
_STEP = 1 << 18  # bytes of the first read; the next ones are twice as large each, up to _MOST
_MOST = 1 << 23
_DEEP = 8  # levels of arrays in arrays; the writers have one

PLAIN: dict[int, DType] = {0: F32, 1: F16, 24: I8, 25: I16, 26: I32, 27: I64, 28: F64, 30: BF16}
# Number -> name, elements of a block, bytes of a block. The numbers 4, 5, 31 to 33 and 36 to 38 had other layouts in
# versions of llama.cpp that removed them; 31 to 33 are Q4_0 with the rows of several blocks interleaved.
BLOCKS: dict[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18), 33: ("Q4_0_8_8", 32, 18), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

# Number of a metadata type -> its code in struct. 8 is a string, 9 an array.
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufFile(NamedTuple):
    """The index of one file.

    Attributes
    ----------
    path, info
        The file.
    version
        1, 2 or 3.
    swapped
        Whether the file is big-endian.
    metadata
        The metadata: an array of numbers is a list, of bytes a `bytes`; text that is not UTF-8 is a `bytes`.
    extents
        Name -> the tensor, in the order of the file. Blocks are uint8, [..., bytes of a row].
    types
        Name -> the name of the type, for tensors of blocks.
    unreadable
        Name -> why the tensor cannot be read: it is of an unknown type, or behind the end of the file.
    notes
        The problems of the file.
    """

    path: str
    info: FileInfo
    version: int
    swapped: bool
    metadata: dict[str, Any]
    extents: dict[str, Extent]
    types: dict[str, str]
    unreadable: dict[str, str]
    notes: list[Problem]


def read_gguf(store: Store, path: str) -> GgufFile:
    """Index a GGUF file. Raises CorruptError, FormatError and MissingFileError."""
    file = StoreFile(store, path)
    where = file.where
    if file.size < 24:
        raise CorruptError(f"{where}: {file.size} bytes, a GGUF file begins with 24 or more: truncated?")
    header = _Header(file)
    magic = bytes(header.take(4))
    if magic != MAGIC:
        file.refuse_pointer(magic + file.at(4, min(file.size, 64) - 4))
        if magic in _OLD:
            raise FormatError(
                f"{where} is a {_OLD[magic]} file, a format before GGUF that lazyckpt does not read. "
                "Convert it with convert_llama_ggml_to_gguf.py of llama.cpp"
            )
        raise CorruptError(f"{where} does not begin with {MAGIC.decode()}: it is no GGUF file, or damaged")
    version = header.number("I")
    if version & 0xFFFF == 0:  # as gguf_reader.py: no version is that large
        header.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (1, 2, 3):
        raise FormatError(f"{where} is of version {version} of GGUF; lazyckpt reads versions 1 to 3")
    header.length = "I" if version == 1 else "Q"
    tensors, keys = header.number(header.length), header.number(header.length)
    header.affords(keys, 8 if version == 1 else 13, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = header.name("a metadata key")
        value = header.value(header.number("I"))
        if key in metadata:
            raise CorruptError(f"{where}: the metadata has {key!r:.80} twice: the file is damaged")
        metadata[key] = value
    header.affords(tensors, 16 if version == 1 else 24, "tensors")
    entries = [_entry(header) for _ in range(tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CorruptError(f"{where}: {_ALIGNMENT} is {alignment!r:.40}, not a power of two: the file is damaged")
    start = -(-header.at // alignment) * alignment
    return _placed(file, version, header.order == ">", metadata, entries, start)


class _Entry(NamedTuple):
    name: str
    shape: Shape
    type: int
    offset: int


def _entry(header: _Header) -> _Entry:
    name = header.name("a tensor's name")
    count = header.number("I")
    if count > 64:
        raise CorruptError(f"{header.where}: {name!r:.80} has {count:,} dimensions: the file is damaged")
    shape = tuple(header.number(header.length) for _ in range(count))[::-1]
    return _Entry(name, shape, header.number("I"), header.number("Q"))


def _placed(
    file: StoreFile, version: int, swapped: bool, metadata: dict[str, Any], entries: list[_Entry], start: int
) -> GgufFile:
    """Return the index of a file whose data begin at byte ``start``. Raises CorruptError for overlaps."""
    where = file.where
    found = GgufFile(file.path, file.info, version, swapped, metadata, {}, {}, {}, [])
    spans: list[tuple[int, int, str]] = []
    cut: list[str] = []
    for name, shape, kind, offset in entries:
        if name in found.extents or name in found.unreadable:
            raise CorruptError(f"{where}: {name!r:.80} is there twice: the file is damaged")
        if kind in PLAIN:
            dtype, stored = PLAIN[kind], shape
        elif kind in BLOCKS:
            word, size, nbytes = BLOCKS[kind]
            if not shape or shape[-1] % size:
                raise CorruptError(
                    f"{where}: {name!r:.80} is {word} of shape {str(shape)[:80]}, and rows of {word} are blocks of "
                    f"{size} elements: the file is damaged"
                )
            dtype, stored = U8, (*shape[:-1], shape[-1] // size * nbytes)
            found.types[name] = word
        else:
            line = f"{name!r} is of the GGUF type {kind}, which this version of lazyckpt does not know"
            found.unreadable[name] = line
            found.notes.append(Problem("unsupported-tensor", line, name))
            continue
        if not fits(stored, dtype.itemsize) or offset >= 1 << 62:
            raise CorruptError(f"{where}: {name!r:.80} has the shape {str(shape)[:80]} at {offset:,}: no such tensor")
        begin, end = start + offset, start + offset + prod(stored) * dtype.itemsize
        if end > file.size:
            cut.append(name)
            found.types.pop(name, None)
            found.unreadable[name] = f"{where} ends at byte {file.size:,}, and {name!r} at {end:,}: truncated"
            continue
        spans.append((begin, end, name))
        found.extents[name] = Extent(
            file.path, begin, dtype, stored, c_strides(stored), swapped=swapped and dtype.itemsize > 1
        )
    if cut:
        line = f"the file is truncated: {len(cut):,} of its {len(entries):,} tensors end behind the end of the file"
        found.notes.append(Problem("missing-tensor", line, file.path))
    last = (0, "")
    for begin, end, name in sorted(spans):
        if begin < min(end, last[0]):
            raise CorruptError(
                f"{where}: {last[1]!r:.80} and {name!r:.80} overlap at byte {begin:,}: the file is damaged"
            )
        last = max(last, (end, name))
    return found


class _Header:
    """The header as a stream, which is read in pieces, and whose values cost no more than its bytes."""

    def __init__(self, file: StoreFile) -> None:
        self.file, self.where = file, file.where
        self.order = "<"
        self.length = "Q"
        self.budget = Budget(file.where, file.size)
        self._data = memoryview(b"")
        self._start = 0  # of the data, in the file
        self._at = 0  # in the data
        self._step = _STEP

    @property
    def at(self) -> int:
        """The position in the file."""
        return self._start + self._at

    def take(self, size: int) -> memoryview:
        """Return the next bytes. Raises CorruptError past the end of the file."""
        end = self._at + size
        if end > len(self._data):
            have = self.file.size - self.at
            if size > have:
                raise CorruptError(
                    f"{self.where}: its header goes on behind the file's {self.file.size:,} bytes: truncated"
                )
            start, known = self.at, bytes(self._data[self._at :])
            more = min(max(size, self._step), have)
            self._data = memoryview(known + self.file.at(start + len(known), more - len(known)))
            self._start, self._at, end = start, 0, size
            self._step = min(2 * self._step, _MOST)
        found = self._data[self._at : end]
        self._at = end
        return found

    def number(self, code: str) -> Any:
        """Return the next number, of a type as struct names it."""
        (found,) = struct.unpack(self.order + code, self.take(struct.calcsize("<" + code)))
        return found

    def affords(self, count: int, nbytes: int, what: str) -> None:
        """Raise CorruptError if so many things, of that many bytes at least, are not in the rest of the file."""
        if count * nbytes > self.file.size - self.at:
            raise CorruptError(
                f"{self.where}: its header claims {count:,} {what}, more than its {self.file.size:,} bytes can hold: "
                "truncated or damaged"
            )

    def name(self, what: str) -> str:
        """Return the next string. Raises CorruptError if it is not UTF-8."""
        found = self.text()
        if isinstance(found, bytes):
            raise CorruptError(f"{self.where}: {what}, {found[:40]!r}, is not UTF-8: the file is damaged")
        return found

    def text(self) -> str | bytes:
        """Return the next string; its bytes if they are not UTF-8."""
        raw = bytes(self.take(self.number(self.length)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw

    def value(self, kind: int, deep: int = 0) -> Any:
        """Return the next value of a type. Raises CorruptError for unknown types."""
        if kind in _VALUES:
            return self.number(_VALUES[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or deep == _DEEP:
            raise CorruptError(f"{self.where}: metadata of the type {kind} at byte {self.at:,}: the file is damaged")
        inner, count = self.number("I"), self.number(self.length)
        if inner in _VALUES:
            code = _VALUES[inner]
            self.affords(count, struct.calcsize("<" + code), "numbers")
            raw = self.take(count * struct.calcsize("<" + code))
            if code == "B":
                return bytes(raw)
            self.budget.objects(count)
            return np.frombuffer(raw, self.order + code).tolist()
        self.affords(count, 4 if self.length == "I" else 8, "texts and arrays")
        self.budget.objects(count)
        if inner == _STRING:
            return self._texts(count)
        return [self.value(inner, deep + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[str | bytes]:
        """Return an array of strings: the words of a vocabulary, of which there are some hundred thousand."""
        length = struct.Struct(self.order + self.length)
        found: list[str | bytes] = []
        while len(found) < count:
            found.append(self.text())  # which reads on where the data at hand end
            data, at = bytes(self._data), self._at
            while len(found) < count and at + length.size <= len(data):
                end = at + length.size + length.unpack_from(data, at)[0]
                if end > len(data):
                    break
                raw = data[at + length.size : end]
                try:
                    found.append(raw.decode("utf-8"))
                except UnicodeDecodeError:
                    found.append(raw)
                at = end
            self._at = at
        return found
