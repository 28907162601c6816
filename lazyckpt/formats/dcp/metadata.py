"""`.metadata` of torch.distributed.checkpoint: the files and byte ranges of all chunks of tensors.

Writer: torch/distributed/checkpoint/filesystem.py `_FileSystemWriter.finish` (a plain pickle of metadata.py's
`Metadata`), default_planner.py (`planner_data`: the path of each key in the state dict). torch 2.3 writes only three of
its attributes.
torch unpickles the file; here its classes are plain records, and their content is validated.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...core.box import Shape, fits
from ...core.dtypes import DType
from ...errors import CorruptError
from ...io.containers.pickle.machine import Pickle
from ...io.containers.pickle.plain import Path
from ...io.containers.pickle.rebuild import REBUILD
from ...io.containers.pickle.records import short
from ...io.storage.base import Store
from ..shared.paths import inside

_MODULE = "torch.distributed.checkpoint"


class Item(NamedTuple):
    """``length`` bytes of a file at ``offset``, packed with ``codecs``, which are listed in the order of unpacking."""

    path: str
    offset: int
    length: int
    codecs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. ``chunks`` has the offset and the shape of each chunk, in any order; chunks may be empty."""

    dtype: DType
    shape: Shape
    chunks: list[tuple[Shape, Shape]]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of `.metadata`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    """Keys of all objects other than tensors."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Key -> path in the saved state dict, in the order of the state dict."""
    items: dict[tuple[str, Shape | None], Item] = field(default_factory=dict)
    """(key, offset of the chunk; None for an object) -> its bytes."""
    globals: dict[tuple[str, str], bool] = field(default_factory=dict)
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
}


def read_metadata(store: Store, names: Iterable[str]) -> Metadata:
    """Read `.metadata`, or merge the ranks' files of ``use_collectives=False``, each of which lists the rank's chunks.

    Raises CorruptError for damaged or inconsistent files, and MissingFileError.
    """
    whole = Metadata()
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
            known.chunks.extend(chunk for chunk in tensor.chunks if chunk[0] not in listed)
        listed_others = set(whole.others)
        whole.others.extend(key for key in part.others if key not in listed_others)
        for index, item in part.items.items():
            placed = item._replace(path=f"{folder}/{item.path}") if folder else item
            whole.items.setdefault(index, placed)
            whole.files.add(placed.path)
        for key, path in part.paths.items():
            whole.paths.setdefault(key, path)
        whole.globals.update(part.globals)
        whole.reshaped.update(part.reshaped)
    return whole


def _read(store: Store, name: str) -> Metadata:
    where = f"{store.root}/{name}"
    size = store.stat(name).size
    if not size:
        raise CorruptError(f"{where} is empty (0 bytes): the save was not finished, or the file is damaged")
    pickle = Pickle(bytes(store.read(name, 0, size)), where, _CLASSES, _no_persistent)
    root = pickle.value
    if not isinstance(root, _Metadata) or not isinstance(root.state, dict):
        raise CorruptError(f"{where} holds {short(root)}, not the metadata of a distributed checkpoint")
    try:
        return _checked(root.state, pickle, size)
    except CorruptError as e:
        raise CorruptError(f"{where}: {e}: the file is damaged or hostile") from None


def _no_persistent(pid: Any) -> Any:
    raise CorruptError("it refers to a storage outside itself")


def _checked(state: dict[str, Any], pickle: Pickle, size: int) -> Metadata:
    budget = size  # limit of the number of chunks: shared lists must not expand beyond the file's size
    found = Metadata(globals=pickle.globals)
    entries, storage = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptError("it lacks state_dict_metadata or storage_data")
    for key, entry in entries.items():
        if type(key) is not str:
            raise CorruptError(f"a key is {short(key)}")
        if isinstance(entry, _Tensor):
            listed = _attributes(entry, repr(key)).get("chunks")
            budget -= len(listed) if isinstance(listed, list) else 0
            if budget < 0:
                raise CorruptError(f"{key!r} and those before it list more chunks than the file has bytes")
            found.tensors[key] = _tensor(key, entry)
        elif isinstance(entry, _Bytes):
            found.others.append(key)
        else:
            raise CorruptError(f"{key!r} is described by {short(entry)}")
    normal: dict[str, str] = {}  # path -> normalised path; a hundred thousand items have only a few paths
    for index, item in storage.items():
        if not isinstance(index, _Key) or not isinstance(item, _Item):
            raise CorruptError(f"an item is {short(index)}: {short(item)}")
        about = _attributes(index, "an item")
        key, offset = about.get("fqn"), about.get("offset")
        if type(key) is not str:
            raise CorruptError(f"an item is of {short(key)}")
        # (an object has no offset; of equal keys the last one counts, as in torch's dict)
        found.items[key, None if offset is None else _sizes(offset, key)] = _bytes_of(key, item, normal)
    for key, about in _dict(state.get("mcore_data")).items():
        shape = _dict(about).get("nd_reformulated_orig_global_shape")
        if key in found.tensors and shape is not None:
            found.reshaped[key] = _sizes(shape, key)
    found.paths.update(_paths(state.get("planner_data"), entries, 1_000_000 + 64 * size))
    return found


def _attributes(record: _Record, what: str) -> Mapping[str, Any]:
    if not isinstance(record.state, dict):
        raise CorruptError(f"{what} has no attributes")
    return record.state


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _tensor(key: str, entry: _Tensor) -> Tensor:
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
    chunks: dict[Shape, Shape] = {}
    for chunk in listed:
        if not isinstance(chunk, _Chunk):
            raise CorruptError(f"{key!r} has the chunk {short(chunk)}")
        box = _attributes(chunk, f"a chunk of {key!r}")
        start, sizes = _sizes(box.get("offsets"), key), _sizes(box.get("sizes"), key)
        if len(start) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {start}")
        if any(a + n > m for a, n, m in zip(start, sizes, shape, strict=True)):
            raise CorruptError(f"{key!r} of shape {shape} has a chunk of shape {sizes} at {start}, which is outside")
        if 0 not in sizes or start not in chunks:  # an empty chunk may have the offset of another chunk
            chunks[start] = sizes
    return Tensor(dtype, shape, list(chunks.items()))


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
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
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
