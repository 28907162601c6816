"""`.metadata` of torch.distributed.checkpoint: the files and byte ranges of all chunks of tensors.

Writer: torch/distributed/checkpoint/filesystem.py `_FileSystemWriter.finish` (a plain pickle of metadata.py's
`Metadata`), default_planner.py (`planner_data`: the path of each key in the state dict). torch 2.3 writes only three of
its attributes.
torch unpickles the file; here its classes are plain records, and their content is validated.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.box import Shape, c_strides, fits
from ...core.dtypes import DType
from ...errors import CorruptError
from ...io.containers.pickle.machine import Pickle
from ...io.containers.pickle.memo import Changes
from ...io.containers.pickle.plain import Path
from ...io.containers.pickle.rebuild import REBUILD
from ...io.containers.pickle.records import short
from ...io.storage.base import Store
from ..shared.paths import inside
from .columns import Columns, Ints, Run
from .items import Item, objects_of, repeats, table_of

_MODULE = "torch.distributed.checkpoint"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. ``chunks`` has the offset and the shape of each chunk, in any order; chunks may be empty. ``repeated``
    counts the chunks whose offset is that of an earlier one."""

    dtype: DType
    shape: Shape
    chunks: Sequence[tuple[Shape, Shape]]
    repeated: int = 0


FEW = 16  # chunks of a tensor, up to which lists are faster than numpy


class Chunks(Sequence[tuple[Shape, Shape]]):
    """The offsets and shapes of chunks as arrays [chunks, dimensions]. No chunk is empty, no offset is there twice."""

    __slots__ = ("sizes", "starts")

    def __init__(self, starts: Ints, sizes: Ints) -> None:
        self.starts, self.sizes = starts, sizes

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return Chunks(self.starts[n], self.sizes[n])
        return tuple(self.starts[n].tolist()), tuple(self.sizes[n].tolist())

    def follow(self, shape: Shape) -> bool:
        """Return whether the few chunks are rows of the tensor, one behind the other from the first to the last."""
        if len(self.starts) > FEW or not shape:
            return False
        at, (_, *rest), (_, *zeros) = 0, shape, [0] * len(shape)
        for (start, *others), (count, *sizes) in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            if start != at or sizes != rest or others != zeros:
                return False
            at += count
        return bool(at == shape[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunks):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.sizes, other.sizes)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of `.metadata`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    """Keys of all objects other than tensors."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Key -> path in the saved state dict, in the order of the state dict."""
    items: Mapping[tuple[str, Shape | None], Item] = field(default_factory=dict)
    """(key, offset of the chunk; None for an object) -> its bytes."""
    globals: dict[tuple[str, str], bool] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    """Keys with an item that is listed twice; the last one counts, as in torch's dict."""
    reshaped: dict[str, Shape] = field(default_factory=dict)
    """Key -> original shape of a tensor that megatron-core reshaped for saving (its `mcore_data`)."""
    files: set[str] = field(default_factory=set)
    """All files with items, including items that another file has, too."""


class _Record:
    """An object of a known class, represented by its pickled state."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _Properties(_Record):
    __slots__ = ()


class _Chunk(_Record):
    __slots__ = ()


class _Key(_Record):
    __slots__ = ()


class _Item(_Record):
    __slots__ = ()


_CLASSES = REBUILD | {
    (f"{_MODULE}.metadata", "Metadata"): _Metadata,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,  # until torch 2.2
    (f"{_MODULE}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_MODULE}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_MODULE}.metadata", "TensorProperties"): _Properties,
    (f"{_MODULE}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_MODULE}.metadata", "MetadataIndex"): _Key,
    (f"{_MODULE}.filesystem", "_StorageInfo"): _Item,
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): _Item,  # the same fields
}


def read_metadata(store: Store, names: Iterable[str]) -> Metadata:
    """Read `.metadata`, or merge the ranks' files of ``use_collectives=False``, each of which lists the rank's chunks.

    Raises CorruptError for damaged or inconsistent files, and MissingFileError.
    """
    names = list(names)
    if len(names) == 1 and not posixpath.dirname(names[0]):
        return _read(store, names[0], columns=True)
    whole = Metadata()
    items: dict[tuple[str, Shape | None], Item] = {}
    for name in names:
        part = _read(store, name)
        folder = posixpath.dirname(name)
        where = f"{store.root}/{name}"
        for key, tensor in part.tensors.items():
            known = whole.tensors.setdefault(key, tensor)
            if known is tensor:
                continue
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(
                    f"{where}: {key!r} is {tensor.dtype} of shape {tensor.shape}, another rank says {known.dtype} of "
                    f"shape {known.shape}: these files are not of one save"
                )
            listed = {start for start, _ in known.chunks}
            added = [chunk for chunk in tensor.chunks if chunk[0] not in listed]
            whole.tensors[key] = replace(known, chunks=[*known.chunks, *added])
        listed_others = set(whole.others)
        whole.others.extend(key for key in part.others if key not in listed_others)
        for index, item in part.items.items():
            placed = item._replace(path=f"{folder}/{item.path}") if folder else item
            items.setdefault(index, placed)
            whole.files.add(placed.path)
        for key, path in part.paths.items():
            whole.paths.setdefault(key, path)
        whole.globals.update(part.globals)
        whole.repeated.update(part.repeated)
        whole.reshaped.update(part.reshaped)
    return replace(whole, items=items)


_LARGE = 1 << 16  # bytes of a pickle whose chunks are read as columns


def _read(store: Store, name: str, columns: bool = False) -> Metadata:
    where = f"{store.root}/{name}"
    size = store.stat(name).size
    if not size:
        raise CorruptError(f"{where} is empty (0 bytes): the save was not finished, or the file is damaged")
    data = bytes(store.read(name, 0, size))
    if columns and size >= _LARGE:
        found = _in_columns(data, where, size)
        if found is not None:
            return found
    pickle = Pickle(data, where, _CLASSES, _no_persistent)
    root = pickle.value
    if not isinstance(root, _Metadata) or not isinstance(root.state, dict):
        raise CorruptError(f"{where} holds {short(root)}, not the metadata of a distributed checkpoint")
    try:
        return _checked(root.state, pickle, size)
    except CorruptError as e:
        raise CorruptError(f"{where}: {e}: the file is damaged or hostile") from None


def _in_columns(data: bytes, where: str, size: int) -> Metadata | None:
    """Return the metadata with its chunks as columns; None if it has to be parsed without, also to raise an error."""
    columns = Columns(data, _Chunk, _Key, _Item)
    try:
        pickle = Pickle(data, where, _CLASSES, _no_persistent, runs=columns)
        root = pickle.value
        if pickle.runs is None or not isinstance(root, _Metadata) or not isinstance(root.state, dict):
            return None
        return _checked(root.state, pickle, size, columns)
    except (Changes, CorruptError):
        return None
    finally:
        columns.close()


def _no_persistent(pid: Any) -> Any:
    raise CorruptError("it refers to a storage outside itself")


def _checked(state: dict[str, Any], pickle: Pickle, size: int, columns: Columns | None = None) -> Metadata:
    budget = size  # limit of the number of chunks: shared lists must not expand beyond the file's size
    found = Metadata(globals=pickle.globals)
    entries, storage = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptError("it lacks state_dict_metadata or storage_data")
    if columns is not None:
        columns.check(list(_runs(entries, storage)))
    for key, entry in entries.items():
        if type(key) is not str:
            raise CorruptError(f"a key is {short(key)}")
        if isinstance(entry, _Tensor):
            listed = _attributes(entry, repr(key)).get("chunks")
            if isinstance(listed, list):
                here = [chunk for chunk in listed if type(chunk) is Run]
                budget -= len(listed) + sum(map(len, here)) - len(here)
            if budget < 0:
                raise CorruptError(f"{key!r} and those before it list more chunks than the file has bytes")
            found.tensors[key] = _tensor(key, entry, columns)
        elif isinstance(entry, _Bytes):
            found.others.append(key)
        else:
            raise CorruptError(f"{key!r} is described by {short(entry)}")
    normal: dict[str, str] = {}  # path -> normalised path; a hundred thousand items have only a few paths
    items: dict[tuple[str, Shape | None], Item] = {}
    of_items = False
    for index, item in storage.items():
        if type(index) is Run and index is item and columns is not None and index.table is not columns.chunks:
            of_items = of_items or index.table is columns.pairs
            continue
        if not isinstance(index, _Key) or not isinstance(item, _Item):
            raise CorruptError(f"an item is {short(index)}: {short(item)}")
        about = _attributes(index, "an item")
        key, offset = about.get("fqn"), about.get("offset")
        if type(key) is not str:
            raise CorruptError(f"an item is of {short(key)}")
        place = key, None if offset is None else _sizes(offset, key)  # (an object has no offset)
        if place in items:
            found.repeated.add(key)
        items[place] = _bytes_of(key, item, normal)
    if columns is not None:
        objects = objects_of(columns, normal)
        if not objects.keys().isdisjoint(items):
            raise Changes
        items |= objects
    files = {item.path for item in items.values()}
    if columns is not None and of_items:
        table = table_of(columns, items, normal)
        found = replace(found, items=table, files=files.union(table.names))
    else:
        found = replace(found, items=items, files=files)
    for key, about in _dict(state.get("mcore_data")).items():
        shape = _dict(about).get("nd_reformulated_orig_global_shape")
        if key in found.tensors and shape is not None:
            found.reshaped[key] = _sizes(shape, key)
    found.paths.update(_paths(state.get("planner_data"), entries, 1_000_000 + 64 * size))
    return found


def _runs(entries: dict[Any, Any], storage: dict[Any, Any]) -> Iterator[Run]:
    """Yield the runs of chunks and of items."""
    for entry in entries.values():
        listed = entry.state.get("chunks") if isinstance(entry, _Tensor) and isinstance(entry.state, dict) else None
        yield from (chunk for chunk in listed if type(chunk) is Run) if isinstance(listed, list) else ()
    yield from (index for index in storage if type(index) is Run)


def _attributes(record: _Record, what: str) -> Mapping[str, Any]:
    if not isinstance(record.state, dict):
        raise CorruptError(f"{what} has no attributes")
    return record.state


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _tensor(key: str, entry: _Tensor, columns: Columns | None = None) -> Tensor:
    about = _attributes(entry, repr(key))
    properties = about.get("properties")
    dtype = None
    if isinstance(properties, _Properties):
        held = properties.state
        dtype = held[0] if isinstance(held, tuple) and held else held.get("dtype") if isinstance(held, dict) else None
    if not isinstance(dtype, DType):
        raise CorruptError(f"{key!r} has the dtype {short(dtype)}")
    shape = _sizes(about.get("size"), key)
    if not fits(shape, dtype.itemsize):
        raise CorruptError(f"{key!r} has the shape {short(shape)}, which is too large")
    listed = about.get("chunks")
    if not isinstance(listed, list):
        raise CorruptError(f"{key!r} has the chunks {short(listed)}")
    if columns is not None and any(type(chunk) is Run for chunk in listed):
        return Tensor(dtype, shape, _chunks(columns, key, shape, listed))
    chunks: dict[Shape, Shape] = {}
    repeated = 0
    for chunk in listed:
        start, sizes = _chunk(key, chunk)
        if len(start) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {start}")
        if any(a + n > m for a, n, m in zip(start, sizes, shape, strict=True)):
            raise CorruptError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {start}, which is outside")
        repeated += 0 not in sizes and 0 not in chunks.get(start, (0,))
        if 0 not in sizes or start not in chunks:  # an empty chunk may have the offset of another chunk
            chunks[start] = sizes
    return Tensor(dtype, shape, list(chunks.items()), repeated)


def _chunk(key: str, chunk: Any) -> tuple[Shape, Shape]:
    if not isinstance(chunk, _Chunk):
        raise CorruptError(f"{key!r} has the chunk {short(chunk)}")
    box = _attributes(chunk, f"a chunk of {key!r}")
    return _sizes(box.get("offsets"), key), _sizes(box.get("sizes"), key)


def _chunks(columns: Columns, key: str, shape: Shape, listed: list[Any]) -> Chunks:
    """Return the chunks of a list with runs. Raises Changes if they have to be looked at one by one."""
    dims = len(shape)
    starts: list[Ints] = []
    sizes: list[Ints] = []
    for chunk in listed:
        if type(chunk) is Run:
            table, part = columns.chunks, chunk.rows
            if chunk.table is not table or not _all(table["offset_dims"][part], dims):
                raise Changes
            if not _all(table["size_dims"][part], dims):
                raise Changes
            starts.append(table["offset"][part, :dims])
            sizes.append(table["size"][part, :dims])
        else:
            start, size = _chunk(key, chunk)
            if len(start) != dims or len(size) != dims:
                raise Changes
            starts.append(np.array([start], np.int64))
            sizes.append(np.array([size], np.int64))
    found = Chunks(
        starts[0] if len(starts) == 1 else np.concatenate(starts),
        sizes[0] if len(sizes) == 1 else np.concatenate(sizes),
    )
    if len(found) <= FEW:
        _check_few(found, shape)
        return found
    whole = np.array(shape, np.int64)
    if not found.sizes.all() or (found.starts > whole).any() or (found.sizes > whole - found.starts).any():
        raise Changes
    places = found.starts @ np.array(c_strides(shape), np.int64)
    if repeats(places):
        raise Changes
    return found


def _all(values: Ints, wanted: int) -> bool:
    """Return whether all values are the wanted one."""
    return bool((values == wanted).all()) if len(values) > FEW else values.tolist() == [wanted] * len(values)


def _check_few(found: Chunks, shape: Shape) -> None:
    """Raise Changes if one of a few chunks is empty or outside of the tensor, or if two have one offset."""
    starts = found.starts.tolist()
    for start, sizes in zip(starts, found.sizes.tolist(), strict=True):
        for at, count, whole in zip(start, sizes, shape, strict=True):
            if not count or at > whole or count > whole - at:
                raise Changes
    if len(set(map(tuple, starts))) < len(starts):
        raise Changes


def _bytes_of(key: str, record: _Item, normal: dict[str, str]) -> Item:
    about = _attributes(record, f"the item of {key!r}")
    path, offset, length = about.get("relative_path"), about.get("offset"), about.get("length")
    codecs = about.get("transform_descriptors") or ()
    if type(path) is not str or path not in normal:
        if type(path) is not str or not inside(path):
            raise CorruptError(f"the item of {key!r} is in {short(path)}, outside its folder: not followed")
        normal[path] = posixpath.normpath(path)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, length)):
        raise CorruptError(f"the item of {key!r} takes {short(length)} bytes at {short(offset)}")
    if not isinstance(codecs, list | tuple) or len(codecs) > 8 or not all(type(c) is str for c in codecs):
        raise CorruptError(f"the item of {key!r} is packed with {short(codecs)}")
    return Item(normal[path], offset, length, tuple(codecs))  # type: ignore[arg-type]


def _sizes(value: Any, key: str) -> Shape:
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise CorruptError(f"{key!r} has sizes or offsets {short(value)}")
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 62:
            raise CorruptError(f"{key!r} has sizes or offsets {short(value)}")
    return tuple(value)


def _paths(planned: Any, entries: Mapping[str, Any], letters: int) -> dict[str, Path]:
    """Return the path of each key, in the order of the state dict; a key without a valid path is its own path."""
    found: dict[str, Path] = {}
    for key, path in planned.items() if isinstance(planned, dict) else ():
        if key in entries and isinstance(path, tuple) and 0 < len(path) < 100:
            letters -= sum(len(p) if type(p) is str else 20 for p in path)
            if letters < 0:
                break
            if all(type(p) is str or (type(p) is int and 0 <= p < 1 << 20) for p in path):
                found[key] = path if ".".join(map(str, path)) == key else (key,)
    for key in entries:
        found.setdefault(key, (key,))
    return found
