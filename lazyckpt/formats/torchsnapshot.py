"""Folders of torchsnapshot: `.snapshot_metadata` and the files that it names.

Writer: torchsnapshot/snapshot.py `Snapshot.take`, manifest.py, serialization.py, flatten.py, batcher.py (torchsnapshot
0.1.0). `.snapshot_metadata` is JSON, written last. Its manifest has an entry for each value of each rank's state:
``RANK/KEY/PATH``, parts of which are escaped as in URLs. A tensor is a run of raw elements (``buffer_protocol``) or a
file of torch.save, alone in a file or at a range of bytes of one that many tensors share. Large tensors are in chunks,
a ShardedTensor is in shards, each rank's in its own entry; there is no entry for the whole shape. Numbers and texts are
in the manifest, other objects in files of torch.save.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any
from urllib.parse import unquote

from ..core.box import Shape, c_strides, fits
from ..core.dtypes import FROM_NAME, DType
from ..core.extents import Extent, Hole
from ..core.index import FileInfo, Index
from ..core.names import natural
from ..core.specs import TensorSpec
from ..errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, some
from ..io.containers.pickle.audit import dangers
from ..io.containers.pickle.plain import Path, Plain
from ..io.containers.torch_file import read_torch_file
from .dcp.chunks import ChunkBytes, in_chunks, overlapping, uncovered
from .dcp.items import Item
from .huggingface import load_json
from .reader import Reader, Source
from .shared.members import Member, references_in, together
from .shared.paths import inside, paths, put
from .torch_save import specs_of

_NAME = ".snapshot_metadata"
_RAW, _SAVED = "buffer_protocol", "torch_save"
_CONTAINERS = ("list", "dict", "OrderedDict")
_SHARDED = ("ShardedTensor", "DTensor")
_OBJECTS = 1024  # maximum number of objects that are read; each is a file
_QUANTIZED = {"qint32": "int32", "qint8": "int8", "quint8": "uint8"}

Chunk = tuple[Shape, Shape, ChunkBytes]


def _read(source: Source) -> Index:
    where = f"{source.where}/{_NAME}"
    size = source.store.stat(_NAME).size
    head = bytes(source.store.read(_NAME, 0, min(size, 64))).lstrip()
    if head and not head.startswith(b"{"):
        raise FormatError(f"{where} is YAML of a torchsnapshot before 0.1: restore the snapshot and take it anew")
    table = load_json(source.store, _NAME)
    manifest = table.get("manifest")
    if not isinstance(manifest, dict):
        raise CorruptError(f"{where} has no manifest: damaged")
    reading = _Reading(source, where, manifest)
    member = reading.member()
    return together("torchsnapshot", [((), member)])


class _Reading:
    """The entries of a manifest, as tensors and objects."""

    def __init__(self, source: Source, where: str, manifest: Mapping[str, Any]) -> None:
        self.source, self.where = source, where
        self.files: dict[str, FileInfo] = {_NAME: source.entries[_NAME].info}
        self.problems: list[Problem] = []
        self.lost: dict[str, str] = {}
        self.entries: dict[str, Mapping[str, Any]] = {}
        for key, entry in manifest.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                raise CorruptError(f"{where}: the entry of {key!r:.80} has no type: damaged")
            self.entries[key] = entry
        tops = (key.split("/")[1] for key in self.entries if "/" in key)
        self.tops = {top: n for n, top in enumerate(dict.fromkeys(tops))}
        source.list_all(sorted({path.rpartition("/")[0] for path in self._locations()}))

    def _locations(self) -> Iterable[str]:
        for entry in self.entries.values():
            for one in (entry, *_shards(entry)):
                location = one.get("location")
                if isinstance(location, str) and inside(location):
                    yield location

    def member(self) -> Member:
        """Return the state that the ranks saved: of values that several ranks have, the lowest rank's."""
        found: dict[str, tuple[Path, TensorSpec]] = {}
        stored: dict[str, TensorSpec] = {}
        sharded: dict[Path, list[tuple[str, Mapping[str, Any]]]] = {}
        meta: dict[str, Any] = {}
        objects: list[tuple[str, Path, Mapping[str, Any]]] = []
        seen: set[Path] = set()
        for key in self._ordered():
            entry, path = self.entries[key], self._path(key)
            kind = entry["type"]
            if not path or kind in _CONTAINERS:
                continue
            if kind in _SHARDED:
                sharded.setdefault(path, []).append((key, entry))
                continue
            first = path not in seen
            seen.add(path)
            if kind in ("Tensor", "ChunkedTensor"):
                spec = self._tensor(key, entry)
                stored[key] = spec
                if first:
                    found[key] = path, spec
            elif first and kind == "object":
                objects.append((key, path, entry))
            elif first:
                put(meta, path, self._value(key, entry))
        for path, group in sharded.items():
            spec = self._sharded(group)
            found[group[0][0]] = path, spec
            stored[group[0][0]] = spec
        for key, path, entry in objects[:_OBJECTS]:
            self._object(key, path, entry, meta, found, stored)
        if len(objects) > _OBJECTS:
            left = [key for key, _, _ in objects[_OBJECTS:]]
            line = f"{len(left):,} objects are not read, and not in view.meta: {some(left)}"
            self.problems.append(Problem("unreadable-object", line, _NAME))
        for location, line in self.lost.items():
            self.problems.append(Problem("missing-file", line, location))

        return Member(
            format="torchsnapshot",
            tensors=found,
            objects=list(paths(meta, 4)),
            meta=meta,
            named=references_in(meta),
            files=self.files,
            stored=stored,
            problems=self.problems,
        )

    def _ordered(self) -> list[str]:
        """Return the keys by rank, in the order of the state dicts, which the numbers of optimizers follow. (The
        entries of replicated tensors are in any order.)"""
        places = {
            key: {str(name): n for n, name in enumerate(names)}
            for key, entry in self.entries.items()
            if isinstance(names := entry.get("keys"), list)
        }

        def place(key: str) -> list[Any]:
            parts = key.split("/")
            found = []
            for n in range(1, len(parts)):
                text = unquote(parts[n])
                at = places.get("/".join(parts[:n]), {}).get(text)
                found.append(at if at is not None else int(text) if text.isdecimal() and len(text) < 19 else 0)
            # the states that a rank saved have no container around them
            return [natural(parts[0]), self.tops[parts[1]] if len(parts) > 1 else 0, found[1:]]

        return sorted(self.entries, key=place)

    def _path(self, key: str) -> Path:
        """Return the path of an entry in the state: keys of dicts as text, positions in lists as numbers."""
        parts = key.split("/")
        found: list[str | int] = []
        for n in range(1, len(parts)):
            parent = self.entries.get("/".join(parts[:n]))
            text = unquote(parts[n])
            found.append(int(text) if parent is not None and parent["type"] == "list" and text.isdecimal() else text)
        return tuple(found)

    def _value(self, key: str, entry: Mapping[str, Any]) -> Any:
        """Return a number or text of the manifest. Raises CorruptError."""
        kind, text = entry["type"], entry.get("serialized_value")
        try:
            if not isinstance(text, str):
                raise ValueError(text)
            if kind == "int":
                return int(text)
            if kind == "str":
                return text
            if kind == "bool":
                return {"True": True, "False": False}[text]
            if kind == "bytes":
                return base64.b64decode(text, validate=True)
            if kind == "float":
                return struct.unpack("<d", base64.b64decode(text, validate=True))[0]
        except (ValueError, KeyError, struct.error, binascii.Error):
            raise CorruptError(f"{self.where}: {key!r:.80} has the {kind} {str(text)[:40]!r}: damaged") from None
        line = f"{key!r:.80} is of the unknown type {kind[:40]!r}, and is not read"
        self.problems.append(Problem("unreadable-object", line, _NAME))
        return None

    def _tensor(self, key: str, entry: Mapping[str, Any]) -> TensorSpec:
        """Return a tensor that one rank saved."""
        dtype, shape = self._dtype(key, entry), self._numbers(key, entry.get("shape"))
        if entry["type"] == "ChunkedTensor":
            return self._whole(key, dtype, shape, [self._chunk(key, one, dtype) for one in _parts(entry)])
        if not self._known(entry):
            return self._unreadable(key, entry, dtype, shape)
        return in_chunks(key, dtype, shape, [((0,) * len(shape), shape, self._bytes(key, entry, dtype, shape))])

    def _sharded(self, group: Sequence[tuple[str, Mapping[str, Any]]]) -> TensorSpec:
        """Return a tensor whose shards are in the entries of several ranks."""
        key = group[0][0]
        parts = [one for _, entry in group for one in _parts(entry)]
        if not parts:
            raise CorruptError(f"{self.where}: {key!r:.80} has no shards: damaged")
        inner = parts[0].get("tensor")
        dtype = self._dtype(key, inner if isinstance(inner, dict) else {})
        chunks = {chunk[:2]: chunk for chunk in (self._chunk(key, one, dtype) for one in parts)}
        shape = tuple(max(ends) for ends in zip(*(map(sum, zip(a, n, strict=True)) for a, n in chunks), strict=True))
        return self._whole(key, dtype, shape, list(chunks.values()))

    def _whole(self, key: str, dtype: DType, shape: Shape, chunks: list[Chunk]) -> TensorSpec:
        held = [(start, sizes) for start, sizes, _ in chunks]
        if any(a + n > size for start, sizes in held for a, n, size in zip(start, sizes, shape, strict=True)):
            raise CorruptError(f"{self.where}: a chunk of {key!r:.80} is outside of its shape {shape}: damaged")
        gap = uncovered(shape, held)
        if gap < 0 or (gap == 0 and overlapping(shape, held)):
            raise CorruptError(f"{self.where}: the chunks of {key!r:.80} overlap: damaged")
        if gap > 0:
            line = f"{gap:,} elements of {key!r:.80} are in no file: the shards of a rank are not in the manifest"
            self.problems.append(Problem("missing-elements", line, key))
        return in_chunks(key, dtype, shape, chunks)

    def _chunk(self, key: str, part: Mapping[str, Any], dtype: DType) -> Chunk:
        start, sizes = self._numbers(key, part.get("offsets")), self._numbers(key, part.get("sizes"))
        inner = part.get("tensor")
        if not isinstance(inner, dict) or len(start) != len(sizes) or not self._known(inner):
            raise CorruptError(f"{self.where}: a chunk of {key!r:.80} is not described: damaged")
        if self._dtype(key, inner) != dtype or self._numbers(key, inner.get("shape")) != sizes:
            raise CorruptError(f"{self.where}: a chunk of {key!r:.80} has another dtype or shape than told: damaged")
        return start, sizes, self._bytes(key, inner, dtype, sizes)

    def _known(self, entry: Mapping[str, Any]) -> bool:
        quantized = str(entry.get("dtype", "")).removeprefix("torch.") in _QUANTIZED
        return entry.get("serializer") in (_RAW, _SAVED) and not quantized

    def _unreadable(self, key: str, entry: Mapping[str, Any], dtype: DType, shape: Shape) -> TensorSpec:
        line = f"{key!r:.80} is stored as {str(entry.get('serializer'))[:40]!r}, which lazyckpt does not read"
        self.problems.append(Problem("unsupported-tensor", line, key))
        return TensorSpec(key, shape, dtype, (), rule=line)

    def _bytes(self, key: str, entry: Mapping[str, Any], dtype: DType, shape: Shape) -> ChunkBytes:
        """Return where the elements are, or a hole if the file is missing or too short. Raises CorruptError."""
        location, span = entry.get("location"), entry.get("byte_range")
        if not isinstance(location, str) or not inside(location):
            raise CorruptError(f"{self.where}: {key!r:.80} is in {str(location)[:80]!r}, outside of the folder")
        folder, _, name = location.rpartition("/")
        held = self.source.inside(folder).get(name)
        if held is None or held.is_dir:
            self.lost[location] = f"{location} is missing: its tensors are lost"
            return Hole(location, f"{location} is missing")
        bounds = (0, held.info.size) if span is None else self._numbers(key, span)
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise CorruptError(f"{self.where}: {key!r:.80} is at the bytes {str(span)[:80]}: damaged")
        lo, hi = bounds
        raw = entry["serializer"] == _RAW
        need = prod(shape) * dtype.itemsize
        if raw and span is not None and hi - lo != need:
            raise CorruptError(f"{self.where}: {key!r:.80} has {need:,} bytes, its range {hi - lo:,}: damaged")
        if (lo + need if raw else hi) > held.info.size:
            line = f"{location} has {held.info.size:,} bytes, {key!r:.80} needs those up to {lo + need:,}: truncated?"
            self.lost[location] = line
            return Hole(location, line)
        self.files[location] = held.info
        if raw:
            return Extent(location, lo, dtype, shape, c_strides(shape))
        return Item(location, lo, hi - lo)

    def _object(
        self,
        key: str,
        path: Path,
        entry: Mapping[str, Any],
        meta: dict[str, Any],
        found: dict[str, tuple[Path, TensorSpec]],
        stored: dict[str, TensorSpec],
    ) -> None:
        """Add an object of a file of torch.save to ``meta``, and its tensors to the others."""
        location = entry.get("location")
        if not isinstance(location, str) or not inside(location):
            raise CorruptError(f"{self.where}: {key!r:.80} is in {str(location)[:80]!r}, outside of the folder")
        try:
            file = read_torch_file(self.source.store, location)
            plain = Plain(file.root, f"{self.source.store.root}/{location}", file.pickle_size, f"{key}.")
            inner = dict(specs_of(file, plain, f"{key}."))
        except LazyckptError as e:
            self.problems.append(cannot_read(location, e))
            return
        self.files[location] = file.info
        self.problems += [note.prefixed(location, location) for note in (*dangers(file.globals), *plain.notes)]
        put(meta, path, plain.rest)
        stored.update(inner)
        found.update({name: ((*path, *plain.paths[name.removeprefix(f"{key}.")]), s) for name, s in inner.items()})

    def _dtype(self, key: str, entry: Mapping[str, Any]) -> DType:
        name = str(entry.get("dtype", "")).removeprefix("torch.")
        dtype = FROM_NAME.get(_QUANTIZED.get(name, name))
        if dtype is None:
            raise CorruptError(f"{self.where}: {key!r:.80} has the dtype {name[:40]!r}, which torch does not have")
        return dtype

    def _numbers(self, key: str, value: Any) -> Shape:
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
            raise CorruptError(f"{self.where}: {key!r:.80} has {str(value)[:80]} where sizes should be: damaged")
        if len(value) > 64 or not fits(value, 1):
            raise CorruptError(f"{self.where}: {key!r:.80} has the shape {str(value)[:80]}: no such tensor")
        return tuple(value)


def _parts(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the chunks or shards of an entry."""
    found = entry.get("chunks" if entry.get("type") == "ChunkedTensor" else "shards")
    return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []


def _shards(entry: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for part in _parts(entry):
        inner = part.get("tensor")
        if isinstance(inner, dict):
            yield inner


def _recognises(source: Source) -> bool:
    return not source.path and _NAME in source.entries


READER = Reader("torchsnapshot", "folders of torchsnapshot (.snapshot_metadata)", _recognises, _read)
