"""TensorFlow checkpoints: `NAME.index` and `NAME.data-00000-of-00001`, of tf.train.Checkpoint and of Saver.

Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc, tensor_bundle.proto, tensor_shape.proto,
tensor_slice.proto, types.proto; core/lib/strings/ordered_code.cc and saved_tensor_slice_util.cc (keys of slices);
python/trackable/trackable_utils.py (names of objects). The index maps names to shards, offsets and sizes; the data
files hold nothing but elements. A partitioned variable has its slices under keys of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..core.box import Box, Shape, c_strides, fits
from ..core.dtypes import (
    BF16,
    BOOL,
    C64,
    C128,
    F8_E4M3FN,
    F8_E5M2,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    DType,
)  # fmt: skip
from ..core.extents import Extent, Hole
from ..core.index import FileInfo, Index
from ..core.placement import Part
from ..core.specs import Fragment, TensorSpec, renamed
from ..errors import CorruptError, FormatError, Problem, only_one, some
from ..io.containers.leveldb import read_table, varint
from ..io.storage.access import present
from ..io.storage.streams import StoreFile
from .reader import Reader, Source

_DTYPES: dict[int, DType] = {
    1: F32, 2: F64, 3: I32, 4: U8, 5: I16, 6: I8, 8: C64, 9: I64, 10: BOOL, 14: BF16, 17: U16, 18: C128, 19: F16,
    22: U32, 23: U64, 24: F8_E5M2, 25: F8_E4M3FN,
}  # fmt: skip
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT = "/.OPTIMIZER_SLOT/"
_OLD_SLOTS = ("Adam", "Adam_1", "Momentum", "RMSProp", "RMSProp_1", "Adagrad", "ExponentialMovingAverage")
_SHARDS = 100_000
_LATEST = re.compile(rb'^model_checkpoint_path: "([^"\\]+)"', re.MULTILINE)
Fields = dict[int, list[Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the index: a tensor's dtype and shape, where its elements are, and its slices (start, length) by
    dimension, with None for a whole dimension."""

    kind: int
    shape: Shape
    shard: int
    offset: int
    size: int
    slices: tuple[tuple[tuple[int, int] | None, ...], ...]


def _recognises(source: Source) -> bool:
    if source.path:
        return source.path.endswith(".index")
    return any(name.endswith(".index") and _has_data(source, name[:-6]) for name in source.entries)


def _has_data(source: Source, name: str) -> bool:
    return any(other.startswith(f"{name}.data-") for other in source.entries)


def _read(source: Source) -> Index:
    path = source.path or _chosen(source)
    file = StoreFile(source.store, path)
    header, entries = _entries(file)
    count, swapped = _number(header, 1), _number(header, 2) == 1
    if not 0 < count <= _SHARDS:
        raise CorruptError(f"{file.where}: it names {count:,} data files: damaged")
    names = [f"{path[:-6]}.data-{n:05}-of-{count:05}" for n in range(count)]
    used = sorted({entry.shard for entry in entries.values() if entry.size})
    if used and used[-1] >= count:
        raise CorruptError(f"{file.where}: a tensor in data file {used[-1]:,} of {count:,}: damaged")
    found = {names[n]: present(source.store, names[n]) for n in used}
    files: dict[str, FileInfo] = {path: file.info} | {name: info for name, info in found.items() if info is not None}
    missing = [name for name, info in found.items() if info is None]
    problems = []
    if missing:
        line = f"data files are missing: {some(missing)}. Their tensors cannot be read"
        problems.append(Problem("missing-file", line, only_one(missing)))
    bundle = _Bundle(file.where, entries, names, files, swapped, problems)
    stored = bundle.tensors()
    return Index(
        format="tensorflow",
        states=_states(stored),
        files=files,
        stored=stored,
        problems=tuple(problems),
    )


def _chosen(source: Source) -> str:
    """Return the index file of a folder. Raises FormatError if it is not certain which."""
    found = [name for name in source.entries if name.endswith(".index") and _has_data(source, name[:-6])]
    if len(found) == 1:
        return found[0]
    if "checkpoint" in source.entries:
        size = source.entries["checkpoint"].info.size
        match = _LATEST.search(bytes(source.store.read("checkpoint", 0, min(size, 1 << 16))))
        latest = match[1].decode("utf-8", "replace").rpartition("/")[2] + ".index" if match else ""
        if latest in found:
            return latest
    raise FormatError(f"{source.where} has several checkpoints: {some(sorted(found))}. Open one by its .index file")


# -- the index


def _entries(file: StoreFile) -> tuple[Fields, dict[bytes, _Entry]]:
    header: Fields | None = None
    entries: dict[bytes, _Entry] = {}
    for key, value in read_table(file):
        if not key:
            header = _fields(value, file.where)
        else:
            entries[key] = _entry(value, f"{file.where}: the entry {key!r:.60}")
    if header is None:
        raise CorruptError(f"{file.where} has no header: damaged, or no checkpoint of TensorFlow")
    return header, entries


def _entry(data: bytes, where: str) -> _Entry:
    fields = _fields(data, where)
    sizes = []
    for dim in _fields(_bytes(fields, 2, where), where).get(2, []):
        if not isinstance(dim, bytes):
            raise CorruptError(f"{where} has no shape: damaged")
        sizes.append(_number(_fields(dim, where), 1))
    slices = []
    for piece in fields.get(7, []):
        if not isinstance(piece, bytes):
            raise CorruptError(f"{where} has slices that are none: damaged")
        slices.append(tuple(_extent(one, where) for one in _fields(piece, where).get(1, [])))
    shard, offset, size = (_number(fields, n) for n in (3, 4, 5))
    if any(not 0 <= n < 1 << 62 for n in (*sizes, shard, offset, size)):
        raise CorruptError(f"{where} has a negative or huge size or offset: damaged")
    return _Entry(_number(fields, 1), tuple(sizes), shard, offset, size, tuple(slices))


def _extent(data: Any, where: str) -> tuple[int, int] | None:
    if not isinstance(data, bytes):
        raise CorruptError(f"{where} has slices that are none: damaged")
    fields = _fields(data, where)
    return (_number(fields, 1), _number(fields, 2)) if 2 in fields else None


def _fields(data: bytes, where: str) -> Fields:
    """Parse a protocol buffer: field -> values (numbers or bytes)."""
    found: Fields = {}
    at = 0
    while at < len(data):
        tag, at = varint(data, at, where)
        value: int | bytes
        if tag & 7 == 0:
            value, at = varint(data, at, where)
        elif tag & 7 == 2:
            length, at = varint(data, at, where)
            value, at = data[at : at + length], at + length
        elif tag & 7 in (1, 5):
            width = 8 if tag & 7 == 1 else 4
            value, at = int.from_bytes(data[at : at + width], "little"), at + width
        else:
            raise CorruptError(f"{where} is no protocol buffer: damaged")
        if at > len(data):
            raise CorruptError(f"{where} is cut off: damaged")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _number(fields: Fields, n: int) -> int:
    value = fields.get(n, [0])[-1]
    if not isinstance(value, int):
        return -1
    return value - (1 << 64) if value >> 63 else value


def _bytes(fields: Fields, n: int, where: str) -> bytes:
    value = fields.get(n, [b""])[-1]
    if not isinstance(value, bytes):
        raise CorruptError(f"{where} is no entry of an index: damaged")
    return value


def slice_key(name: bytes, extents: tuple[tuple[int, int] | None, ...]) -> bytes:
    """Return the key of a slice (`EncodeTensorNameSlice`), an ordered code of the name and of starts and lengths."""
    escapes = {0: b"\0\xff", 255: b"\xff\0"}
    key = b"\0" + b"".join(escapes.get(byte) or bytes((byte,)) for byte in name) + b"\0\1"
    rank = len(extents)
    key += bytes((1, rank)) if rank else b"\0"
    for extent in extents:
        start, length = extent or (0, -1)
        key += _signed(start) + _signed(length)
    return key


def _signed(value: int) -> bytes:
    """Return `OrderedCode::WriteSignedNumIncreasing`."""
    magnitude = ~value if value < 0 else value
    length = magnitude.bit_length() // 7 + 1
    if length > 8:
        raise CorruptError(f"a slice at {value:,}: damaged")
    raw = bytearray((value & (1 << 8 * length) - 1).to_bytes(length, "big"))
    raw[0] ^= (0xFF << 8 - length) & 0xFF
    return bytes(raw)


# -- tensors


@dataclass(frozen=True, slots=True)
class _Bundle:
    where: str
    entries: Mapping[bytes, _Entry]
    names: list[str]
    files: Mapping[str, FileInfo]
    swapped: bool
    problems: list[Problem]

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the tensors by the names in the index."""
        found: dict[str, TensorSpec] = {}
        others: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            if key[:1] == b"\0" or key == _GRAPH.encode():  # a slice of another entry; the graph of objects
                continue
            name = key.decode("utf-8", "backslashreplace")
            dtype = _DTYPES.get(entry.kind)
            if dtype is None:
                kind = "text" if entry.kind == 7 else f"of TensorFlow's dtype {entry.kind}"
                others.setdefault(kind, []).append(name)
                continue
            found[name] = TensorSpec(name, entry.shape, dtype, tuple(self._fragments(key, entry, dtype)))
        for kind, names in others.items():
            self.problems.append(
                Problem(
                    "unsupported-tensor", f"not in the view: {some(names)}: its elements are {kind}", only_one(names)
                )
            )
        return found

    def _fragments(self, key: bytes, entry: _Entry, dtype: DType) -> Iterator[Fragment]:
        if not entry.slices:
            yield Fragment(self._extent(key, entry, entry.shape, dtype), entry.shape)
            return
        for extents in entry.slices:
            pairs = extents or (None,) * len(entry.shape)
            if len(pairs) != len(entry.shape):
                raise CorruptError(f"{self.where}: a slice of {key!r:.60} has {len(pairs)} dimensions: damaged")
            whole = [(0, n) if pair is None else pair for pair, n in zip(pairs, entry.shape, strict=True)]
            start, sizes = tuple(a for a, _ in whole), tuple(n for _, n in whole)
            if any(a < 0 or n < 0 or a + n > m for a, n, m in zip(start, sizes, entry.shape, strict=True)):
                raise CorruptError(f"{self.where}: a slice of {key!r:.60} is outside the tensor: damaged")
            part = self.entries.get(slice_key(key, extents))
            if part is None or part.kind != entry.kind or part.shape != sizes:
                raise CorruptError(f"{self.where}: a slice of {key!r:.60} is not in the index: damaged")
            yield Fragment(self._extent(key, part, sizes, dtype), sizes, (Part(Box.of(sizes), start),))

    def _extent(self, key: bytes, entry: _Entry, shape: Shape, dtype: DType) -> Extent | Hole:
        if not fits(shape, dtype.itemsize) or prod(shape) * dtype.itemsize != entry.size:
            raise CorruptError(
                f"{self.where}: {key!r:.60} has {entry.size:,} bytes and the shape {shape!s:.60} of {dtype}: damaged"
            )
        path = self.names[entry.shard] if entry.size else self.names[0]
        info = self.files.get(path)
        if entry.size and info is None:
            return Hole(path, f"{path} is missing")
        if info is not None and entry.offset + entry.size > info.size and entry.size:
            reason = f"{path} has {info.size:,} bytes, {entry.offset + entry.size:,} are needed: truncated"
            if not any(problem.path == path for problem in self.problems):
                self.problems.append(Problem("unreadable-file", reason, path))
            return Hole(path, reason)
        swapped = self.swapped and dtype.itemsize > 1
        return Extent(path, entry.offset, dtype, shape, c_strides(shape), swapped=swapped)


def _states(stored: Mapping[str, TensorSpec]) -> dict[str, dict[str, TensorSpec]]:
    """Return the states: slots of optimizers by the variable that they belong to."""
    states: dict[str, dict[str, TensorSpec]] = {"weights": {}}
    for name, spec in stored.items():
        plain = name.removesuffix(_VALUE)
        owner, slot = plain, ""
        if _SLOT in plain:
            owner, _, rest = plain.partition(_SLOT)
            slot = rest.rpartition("/")[2]
        else:
            above, _, last = plain.rpartition("/")
            if last in _OLD_SLOTS and above in stored and stored[above].shape == spec.shape:
                owner, slot = above, last
        label = _dotted(owner)
        table = states.setdefault(slot or "weights", {})
        table[label if label not in table else name] = renamed(spec, label if label not in table else name)
    return states


def _dotted(name: str) -> str:
    """Return a path of objects as a name. In it, ".S" stands for a slash and ".." for a dot."""
    return ".".join(part.replace(".S", "/").replace("..", ".") for part in name.split("/"))


READER = Reader("tensorflow", "checkpoints of TensorFlow (.index and .data)", _recognises, _read)
