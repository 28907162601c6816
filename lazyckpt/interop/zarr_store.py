"""A checkpoint as a virtual zarr v3 hierarchy: documents and chunks are made on demand.

    store = ViewStore(lazyckpt.open("checkpoint"))
    zarr.open_group(store, mode="r")["weights/layers/3/mlp/up/weight"][:100]
    xarray.open_datatree(store, engine="zarr", chunks={})

A chunk is a block of a lazy tensor. Chunks follow the fragments, so that a slice reads only the files that hold it. A
chunk that cannot be read raises lazyckpt's error; zarr never treats it as a missing chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from ..core.box import Shape
from ..core.chunking import chunk_box, chunk_shape, grid_of
from ..core.dtypes import bits_of
from ..formats.zarr import documents
from ..formats.zarr.documents import NAMES, Part, contents
from ..lazy import LazyArray
from . import zarr_dtypes as zarr_dtypes  # zarr lacks bfloat16

_MOST = 4 << 20  # largest chunk in bytes
_PIECES = 64  # least number of chunks of a tensor if they cannot follow the fragments, so that each needs few of them
_DOCUMENT = "zarr.json"
_known: WeakValueDictionary[str, ViewStore] = WeakValueDictionary()  # by the digest of the pickled view
_CHUNK = re.compile(r"(.*)/c((?:/(?:0|[1-9][0-9]{0,18}))*)", re.DOTALL)


class ViewStore(Store):
    """A read-only zarr store over the tensors of a view.

    Groups follow the dotted names. The attributes of the root have format, mesh, aliases, metadata and problems, those
    of an array its name. Tensors whose dtype zarr lacks are left out, with a line in the root's problems. The store can
    be pickled, and any number of threads may read it. Reading a chunk raises what reading a lazy tensor raises.

    Parameters
    ----------
    view
        The view. One of the checkpoint's default state shows the same part of all states, each in a group ("weights/",
        "fp32/", "exp_avg/"); one of another state shows only that state.

    Raises
    ------
    DataError
        The checkpoint's metadata has objects that are not plain.
    """

    supports_writes: ClassVar[bool] = False
    supports_deletes: ClassVar[bool] = False
    supports_listing: ClassVar[bool] = True
    # consolidating would gain nothing: documents are made in memory
    supports_consolidated_metadata: ClassVar[bool] = False

    def __init__(self, view: Part[LazyArray]) -> None:
        super().__init__(read_only=True)
        self._view = view
        what = contents(view)
        self._arrays = {path: t for path, t in what.arrays.items() if t.spec.dtype in NAMES}
        self._names = what.names
        lacking = [path for path in what.arrays if path not in self._arrays]
        problems = [f"{path}: zarr has no {what.arrays[path].dtype}: left out" for path in lacking]
        about = what.about | {"layout": documents.LAYOUT, "problems": [*what.about["problems"], *problems]}
        self._about = {documents.ATTRIBUTE: about}
        self._inside: dict[str, dict[str, None]] = {"": {}}  # group -> the names in it
        for path in (*what.groups, *documents.groups_of(self._arrays)):
            self._inside.setdefault(path, {})
        for path in (*what.groups, *self._arrays):  # in the order of the view's names
            while path:
                parent, _, name = path.rpartition("/")
                self._inside[parent][name] = None
                path = parent
        self._pickled: bytes | None = None
        self._digest = ""
        self._documents: dict[str, bytes] = {}
        self._chunks: dict[str, Shape] = {}

    # -- what it is

    @property
    def view(self) -> Part[LazyArray]:
        """The view that the store shows."""
        return self._view

    def __repr__(self) -> str:
        return f"ViewStore({self._root!r}, {self._view.state!r}, {len(self._arrays):,} arrays)"

    @property
    def _root(self) -> str:
        return next((t.store.root for t in self._arrays.values()), "")

    def __eq__(self, other: object) -> bool:
        """Return whether two stores show the same tensors of the same files in the same versions."""
        if not isinstance(other, ViewStore):
            return NotImplemented
        if self._view is other._view:
            return True
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash((self._root, self._view.state, len(self._arrays)))

    @property
    def _identity(self) -> tuple[Any, ...]:
        pins = next((dict(t.store.pins) for t in self._arrays.values()), {})
        return self._root, self._view.state, self._view.format, pins, self._names

    @cached_property
    def version(self) -> str:
        """A digest that identifies the tensors that the store shows and the versions of their files."""
        return hashlib.sha256(repr(self._identity).encode("utf-8", "surrogatepass")).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # pickling the index of a large checkpoint is slow, and Dask pickles the store with every array
        if self._pickled is None:
            self._pickled = pickle.dumps(self._view)
            self._digest = hashlib.sha256(self._pickled).hexdigest()
            _known[self._digest] = self
        return _restored, (self._digest, self._pickled)

    def __dask_tokenize__(self) -> tuple[str, str]:
        self.__reduce__()
        return "lazyckpt.ViewStore", self._digest

    def with_read_only(self, read_only: bool = False) -> ViewStore:
        if not read_only:
            self._check_writable()
        return ViewStore(self._view)

    # -- reading

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data: bytes | memoryview | None = self._document(key)
        if data is None:
            found = self._chunk(key)
            if found is None:
                return None
            data = await asyncio.to_thread(_read_chunk, *found)  # so that chunks are read concurrently
        return prototype.buffer.from_bytes(data[_slice(byte_range, len(data))])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        return self._document(key) is not None or self._chunk(key) is not None

    async def getsize(self, key: str) -> int:
        document = self._document(key)
        if document is not None:
            return len(document)
        found = chunk_of(self, key)
        if found is None:
            raise FileNotFoundError(key)
        return found[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The paths of all groups and arrays; that of the root is ""."""
        return (*self._inside, *self._arrays)

    def _document(self, key: str) -> bytes | None:
        """Return the bytes of a node's document; None if the key is not that of a document."""
        path, slash, name = key.rpartition("/")
        if name != _DOCUMENT or (slash and not path):  # "/zarr.json" is not a key
            return None
        return self.document(path)

    def document(self, path: str) -> bytes | None:
        """Return the ``zarr.json`` of a node.

        Parameters
        ----------
        path
            The path of the group or array; "" for the root.

        Returns
        -------
        bytes or None
            The document; None if there is no such node.
        """
        data = self._documents.get(path)
        if data is None:
            document: documents.Json
            if path in self._arrays:
                tensor = self._arrays[path]
                document = documents.array(
                    self._names[path], tuple(tensor.shape), tensor.spec.dtype, self._chunk_shape(path)
                )
            elif path in self._inside:
                document = documents.group(self._about if not path else None)
            else:
                return None
            data = self._documents[path] = json.dumps(document).encode()
        return data

    def _chunk(self, key: str) -> tuple[LazyArray, Shape, Shape] | None:
        """Return (tensor, place in the grid, shape of its chunks); None if the key is not that of a chunk."""
        match = _CHUNK.fullmatch(key)
        tensor = self._arrays.get(match[1]) if match else None
        if match is None or tensor is None:
            return None
        chunk = self._chunk_shape(match[1])
        place = tuple(map(int, match[2].split("/")[1:]))
        grid = grid_of(tensor.shape, chunk)
        if len(place) != len(grid) or any(p >= n for p, n in zip(place, grid, strict=True)):
            return None
        return tensor, place, chunk

    def _chunk_shape(self, path: str) -> Shape:
        chunk = self._chunks.get(path)
        if chunk is None:
            chunk = self._chunks[path] = chunk_shape(self._arrays[path].spec, 1, _MOST, _PIECES)
        return chunk

    # -- listing

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for path in (*self._inside, *self._arrays):
            start = f"{path}/" if path else ""
            if f"{start}{_DOCUMENT}".startswith(prefix):
                yield f"{start}{_DOCUMENT}"
            if path in self._arrays and (start.startswith(prefix) or prefix.startswith(start)):
                for key in self._chunk_keys(path):
                    if key.startswith(prefix):
                        yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        path = prefix.strip("/")
        if path in self._inside:
            for name in (_DOCUMENT, *self._inside[path]):
                yield name
        elif path in self._arrays:
            yield _DOCUMENT
            if prod(self._arrays[path].shape):
                yield "c"
        else:
            match = _CHUNK.fullmatch(path)
            tensor = self._arrays.get(match[1]) if match else None
            if match is None or tensor is None:
                return
            place = tuple(map(int, match[2].split("/")[1:]))
            grid = grid_of(tensor.shape, self._chunk_shape(match[1]))
            if prod(grid) and len(place) < len(grid) and all(p < n for p, n in zip(place, grid, strict=False)):
                for n in range(grid[len(place)]):
                    yield str(n)

    def _chunk_keys(self, path: str) -> Iterator[str]:
        grid = grid_of(self._arrays[path].shape, self._chunk_shape(path))
        for place in product(*map(range, grid)):
            yield "/".join((path, "c", *map(str, place)))

    # -- writing is refused

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse()

    async def delete(self, key: str) -> None:
        self._refuse()

    async def delete_dir(self, prefix: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            "a view is for reading only (store was opened in read-only mode and does not support writing): "
            "view.to_zarr(dest) writes a copy"
        )


def _restored(digest: str, pickled: bytes) -> ViewStore:
    """Return the store of a pickled view, or the same store if this process has one."""
    store = _known.get(digest)
    if store is None:
        store = ViewStore(pickle.loads(pickled))
        store._pickled, store._digest = pickled, digest
        store = _known.setdefault(digest, store)
    return store


def chunk_of(store: ViewStore, key: str) -> tuple[int, LazyArray | None, Callable[[], memoryview]] | None:
    """Return the size of a chunk, the part of a tensor that it is, and a function that reads it.

    Parameters
    ----------
    store
        The store.
    key
        The key of the chunk: "weights/layers/3/mlp/up/weight/c/0/1".

    Returns
    -------
    tuple or None
        The size in bytes; a lazy tensor with the chunk's bytes, None for a chunk that is padded; and the function.
        None if there is no such chunk.
    """
    found = store._chunk(key)
    if found is None:
        return None
    tensor, place, chunk = found
    box = chunk_box(place, tensor.shape, chunk)
    part = None if box.shape != chunk else tensor.lazy[box.slices] if place else tensor
    return prod(chunk) * tensor.itemsize, part, partial(_read_chunk, *found)


def _read_chunk(tensor: LazyArray, place: Shape, chunk: Shape) -> memoryview:
    """Read the bytes of a chunk, padded with zeros at the end of the tensor."""
    box = chunk_box(place, tensor.shape, chunk)
    data = tensor[box.slices if place else ...]
    bits = data.contiguous().view(bits_of(tensor.itemsize))
    if box.shape != chunk:
        full = torch.zeros(chunk, dtype=bits.dtype, device="cpu")
        full[tuple(slice(0, n) for n in box.shape)] = bits
        bits = full
    return memoryview(bits.numpy().reshape(-1).view("u1").data)


def _slice(wanted: ByteRequest | None, size: int) -> slice:
    match wanted:
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(max(0, size - suffix), None)
        case None:
            return slice(None)
        case _:
            raise TypeError(f"Unexpected byte_range, got {wanted!r}.")  # the message of zarr's own stores
