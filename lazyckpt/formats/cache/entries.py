"""Indexes as the payload of an entry, and back: documents, columns, and a description."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from ...core.dtypes import FROM_SAFETENSORS
from ...core.index import FileInfo, Index
from ...core.placement import Mesh
from ...core.specs import TensorSpec
from ...errors import LazyckptError, restored
from ...io.containers.safetensors import read_safetensors
from ...io.containers.zip_headers import HeaderGuard
from ...io.storage.base import Store
from ...io.storage.in_memory import Memory
from ...io.storage.local import LocalStore
from ...io.user_folder import Refused
from ..dcp.objects import Meta, Objects, Stored
from ..megatron.extra_states import ExtraMeta
from ..torch_save import Indexed, RankStored
from .tables import Rows, TableEncoder, specs_of
from .values import Decoder, Encoder, NotKept, inside

Json = dict[str, Any]
_SECTIONS = ("ends", "columns", "documents")
# what reading a damaged entry, or a checkpoint that is not as it was, may raise
FAILURES = (
    Refused, NotKept, OSError, LazyckptError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


def payload(about: Json, index: Index | None = None, store: Store | None = None) -> bytes:
    """Return the bytes of an entry: a safetensors file. Without an index, it has the description only.

    Raises NotKept if the index cannot be represented exactly."""
    sections: list[tuple[str, str, bytes]] = []
    if index is not None and store is not None:
        encoder = Encoder()
        about = {**about, "root": _EncodedIndex(encoder, index, store).root}
        ends = np.cumsum([len(document) for document in encoder.documents], dtype=np.int64)
        data = ends.tobytes(), encoder.columns, b"".join(encoder.documents)
        sections = list(zip(_SECTIONS, ("I64", "U8", "U8"), data, strict=True))
    return packed(about, sections)


def packed(about: Json, sections: Sequence[tuple[str, str, bytes]]) -> bytes:
    """Return a description and sections (name, dtype, elements) as a safetensors file."""
    header: Json = {"__metadata__": {"about": json.dumps(about)}}
    at = 0
    for name, dtype, part in sections:
        size = len(part) // FROM_SAFETENSORS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + len(part)]}
        at += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(part for _, _, part in sections)))


def described(data: memoryview, name: str, folder: str) -> tuple[Json, dict[str, memoryview]]:
    """Return the description and the sections of the payload of an entry in a folder. Raises ValueError if it is
    damaged."""
    try:
        file = read_safetensors(Memory(LocalStore(folder), name, data), name)
    except LazyckptError as e:
        raise ValueError(str(e)) from e
    found = {}
    for section, extent in file.extents.items():
        found[section] = data[extent.offset : extent.offset + extent.shape[0] * extent.dtype.itemsize]
    about = json.loads(file.metadata["about"])
    if not isinstance(about, dict):
        raise ValueError("the description is not an object")
    return about, found


class _EncodedIndex:
    """The documents of an index."""

    def __init__(self, encoder: Encoder, index: Index, store: Store) -> None:
        if type(index.files) is not dict or index.watched is not None:
            raise NotKept("its files are looked at on use")
        if index.open_problems is not None or index.layout is not None:
            raise NotKept("some names are decided on use")
        if not all(type(guard) is HeaderGuard for guard in index.guards.values()):
            raise NotKept("its reads are checked in a special way")
        if not all(inside(path) for path in index.files):
            raise NotKept("a path outside the checkpoint's folder")
        self._encoder, self._index, self._store = encoder, index, store
        self._known: dict[int, int] = {}
        self._tables = TableEncoder(encoder, index.files)
        encoder.known, encoder.lazy = index.files, True
        states = [[state, self._tables.table(specs)] for state, specs in index.states.items()]
        stored = self._mapping(index.stored)
        encoder.lazy = False
        document = {
            "format": index.format,
            "files": self._files(index.files),
            "states": states,
            "stored": stored,
            "meta": self._mapping(index.meta, tables=False),
            "aliases": encoder.value(dict(index.aliases)),
            "mesh": list(astuple(index.mesh)),
            "problems": [[problem.code, str(problem), problem.path] for problem in index.problems],
            "unreadable": encoder.value(dict(index.unreadable)),
            "ruled": encoder.value(index.ruled),
            "guards": list(index.guards),
        }
        document |= {"rows": self._tables.columns, "paths": encoder.files}
        self.root = encoder.document({})  # replaced, because a plain dict has no tag
        encoder.documents[self.root] = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    def _files(self, files: Mapping[str, FileInfo]) -> Any:
        infos = files.values()
        versions = [info.version for info in infos]
        return [
            self._encoder.texts(list(files)),
            self._encoder.value(np.array([info.size for info in infos], np.int64)),
            self._encoder.value(np.array([info.mtime_ns for info in infos], np.int64)),
            self._encoder.texts(versions) if any(versions) else None,
        ]

    def _mapping(self, mapping: Any, tables: bool = True) -> Any:
        """Return ``stored`` or ``meta``, which may read files on use."""
        if mapping is None:
            return None
        if isinstance(mapping, ChainMap):
            return ["chain", *(self._mapping(part, tables) for part in mapping.maps)]
        if isinstance(mapping, RankStored):
            store, paths = mapping.parts
            return ["ranks", self._pins(store), self._encoder.value(paths)]
        if isinstance(mapping, Stored):
            specs, objects = mapping.parts
            return ["tensors and objects", self._tables.table(specs), self._objects(objects)]
        if isinstance(mapping, ExtraMeta):
            return ["extra states", self._objects(mapping.states.objects)]
        if isinstance(mapping, Meta):
            objects, below, places = mapping.parts
            return ["objects", self._objects(objects), self._encoder.value(below), self._encoder.value(dict(places))]
        if tables:
            return ["table", self._tables.table(mapping)]
        if type(mapping) is not dict:
            raise NotKept(f"metadata of the kind {type(mapping).__name__}")
        return ["values", self._encoder.value(mapping)]

    def _objects(self, objects: Objects) -> Any:
        number = self._known.get(id(objects))
        if number is not None:
            return number
        self._known[id(objects)] = len(self._known)
        lazy, self._encoder.lazy = self._encoder.lazy, False
        found = [self._pins(objects.store), self._encoder.value(objects.items)]
        self._encoder.lazy = lazy
        return found

    def _pins(self, store: Store) -> Any:
        """Return what makes a store of the same files."""
        if type(store) is not type(self._store) or store.root != self._store.root:
            raise NotKept("it reads from several folders")
        if any(self._index.files.get(path) != info for path, info in store.pins.items()):
            raise NotKept("it reads from files that are not its own")
        return None if len(store.pins) == len(self._index.files) else self._encoder.texts(list(store.pins))


def index_of(about: Json, sections: Mapping[str, memoryview], store: Store) -> Index:
    """Return the index of an entry. Raises ValueError, LookupError, TypeError or CorruptError if it is damaged."""
    ends, columns, text = (sections[name] for name in _SECTIONS)
    ended = np.frombuffer(ends, np.int64)
    if len(ended) and (ended[0] < 0 or (np.diff(ended) < 0).any() or ended[-1] != len(text)):
        raise ValueError("the documents are not where they are said to be")
    decoder = Decoder(text, ended.tolist(), columns)
    return _DecodedIndex(decoder, decoder.raw(about["root"]), store).index


class _DecodedIndex:
    def __init__(self, decoder: Decoder, document: Json, store: Store) -> None:
        self._decoder, self._store = decoder, store
        self._made: list[Objects] = []
        self._guards = {path: HeaderGuard() for path in document["guards"]}
        self._files = self._infos(document["files"])
        decoder.files = decoder.value(document["paths"])
        if not self._files.keys() >= set(decoder.files):
            raise ValueError("fragments are in files that are not those of the checkpoint")
        self._rows = Rows(decoder, document["rows"], self._files)
        states = {state: specs_of(decoder, self._rows, table) for state, table in document["states"]}
        if document["stored"] is not None and document["stored"][0] == "table":
            same = [specs for specs, (_, table) in zip(states.values(), document["states"], strict=True)
                    if table == document["stored"][1]]  # fmt: skip
            stored: Any = same[0] if same else self._mapping(document["stored"])
        else:
            stored = self._mapping(document["stored"])
        decoder.copies = True
        meta = self._mapping(document["meta"])
        aliases, unreadable, ruled = (decoder.value(document[key]) for key in ("aliases", "unreadable", "ruled"))
        decoder.copies = False
        self.index = Index(
            format=document["format"],
            states=states,
            files=self._files,
            stored=stored,
            indexed=Indexed(),
            aliases=aliases,
            meta=meta,
            mesh=Mesh(*document["mesh"]),
            problems=tuple(restored(*problem) for problem in document["problems"]),
            unreadable=unreadable,
            ruled=ruled,
            guards=self._guards,
        )

    def _infos(self, columns: Any) -> dict[str, FileInfo]:
        paths, sizes, times, versions = columns
        names: Sequence[str] = self._decoder.value(paths)
        if not all(map(inside, names)):
            raise ValueError("a path outside the checkpoint's folder")
        numbers = (self._decoder.value(column).tolist() for column in (sizes, times))
        said = self._decoder.value(versions) if versions else [""] * len(names)
        return dict(zip(names, map(FileInfo, *numbers, said), strict=True))

    def _mapping(self, value: Any) -> Any:
        if value is None:
            return None
        kind, *rest = value
        decode = self._decoder.value
        match kind:
            case "chain":
                return ChainMap(*map(self._mapping, rest))
            case "ranks":
                return RankStored(self._pinned(rest[0]), decode(rest[1]), Indexed())
            case "tensors and objects":
                specs: Mapping[str, TensorSpec] = specs_of(self._decoder, self._rows, rest[0])
                return Stored(specs, self._objects(rest[1]))
            case "objects":
                return Meta.of(self._objects(rest[0]), decode(rest[1]), decode(rest[2]))
            case "extra states":
                return ExtraMeta(self._objects(rest[0]))
            case "table":
                return specs_of(self._decoder, self._rows, rest[0])
            case "values":
                return decode(rest[0])
        raise ValueError(f"an unknown kind {kind!r}")

    def _objects(self, value: Any) -> Objects:
        if type(value) is int:
            return self._made[value]
        pins, items = value
        self._made.append(Objects(self._pinned(pins), self._decoder.value(items)))
        return self._made[-1]

    def _pinned(self, paths: Any) -> Store:
        known = self._files
        store = self._store.pinned(
            known if paths is None else {path: known[path] for path in self._decoder.value(paths)}
        )
        store.guards = dict(self._guards)
        return store
