"""The zarr v3 format: a hierarchy in a folder, a zip file, or a prefix of an object store.

bfloat16 and float8 have their own data types; names, tied names, mesh and ``meta`` are attributes. A folder or zip
file is published when it is complete (a zip file temporarily needs twice its size). An object store is written in
place, with the root's document last.

`formats/zarr` determines the documents and arrays, `chunks` the content of the arrays' files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..core.box import Shape, c_strides, is_run
from ..core.chunking import chunk_shape, grid_of
from ..core.expr import leaves
from ..core.merkle import Form
from ..core.packs import Packed
from ..core.units import size_in_bytes
from ..errors import DataError
from ..formats.zarr.documents import PACKING, Contents, Part, array, contents, hierarchy
from ..io.storage.uploads import HELD, Uploads
from ..io.storage.urls import is_remote
from ..jobs.destination import Destination, Kind, Whole, Zip
from ..jobs.guard import followed, local_path
from ..jobs.places import Place
from ..jobs.plan import Chunk, Chunks, WritePlan
from ..jobs.plan import Part as Piece
from ..jobs.publish import fingerprint
from ..jobs.remote import Remote
from ..lazy import LazyArray
from . import chunks
from .chunks import Cut
from .codecs import Codec, Encoding, encoding
from .codecs import check as check_codec
from .options import WriteOptions
from .packs import chooser, packs
from .writer import NO_RANKS, Amount, Forecast, Writer, remote_place

CHUNK = 64 << 20  # maximum bytes of a chunk
IN_SHARD = 4 << 20  # maximum bytes of a chunk in a shard
SHARD = 512 << 20
_LEAST = 8  # chunks are merged until they have at least the maximum size divided by this


@dataclass(frozen=True, slots=True)
class Item:
    """An array to write, with its path and chunking."""

    tensor: LazyArray
    path: str
    cut: Cut

    @property
    def identity(self) -> tuple[Any, ...]:
        """What identifies the array in a fingerprint, beside its tensor."""
        each = [one.spec.fragments for one in leaves(self.tensor.spec)]
        return self.path, self.cut, *(fragments.digest() for fragments in each if isinstance(fragments, Packed))

    def files(self) -> Iterator[tuple[str, LazyArray, int | None]]:
        """Yield all files: key, block of the tensor, and the number of elements before it in C order, if its elements
        follow one another in the tensor and in the file."""
        t, shape = self.tensor, tuple(self.tensor.shape)
        strides, in_order = c_strides(shape), cache(partial(chunks.is_in_order, cut=self.cut))
        for key, box in self.cut.files(shape):
            begin = None
            if is_run(box.shape, strides) and in_order(box.shape):
                begin = sum(a * s for a, s in zip(box.start, strides, strict=True))
            yield f"{self.path}/{key}", (t if box.shape == t.shape else t.lazy[box.slices]), begin


@dataclass(frozen=True, slots=True)
class Plan:
    """The arrays and documents to write. ``documents`` are by key, in the order in which they are written."""

    items: list[Item]
    documents: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(item.tensor.nbytes for item in self.items)

    def room(self) -> int:
        """Return the minimum size in bytes, in which compressed arrays count as nothing."""
        files = 0
        for item in self.items:
            if item.cut.encoding.raw:
                grid = grid_of(tuple(item.tensor.shape), item.cut.file)
                files += prod(grid) * item.cut.most(item.tensor.itemsize)
        return files + sum(map(len, self.documents.values()))

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Yield the files of all arrays."""
        for item in self.items:
            memory = memory_of(item.cut, item.tensor.itemsize, place.buffers)
            t = item.tensor
            whole = Form(t.spec.dtype.name, tuple(t.shape), t.nbytes)
            for key, block, begin in item.files():
                about = place, key, block, item.cut
                work = partial(chunks.write, *about), partial(chunks.check, *about)
                part = None
                if begin is not None:
                    part = Piece(item.path, whole, begin * t.itemsize, partial(chunks.write_hashed, *about))
                yield Chunk(key, block.nbytes, memory, *work, block, part)


def _plan(
    view: Part[LazyArray],
    dest: str | os.PathLike[str],
    options: WriteOptions,
    *,
    states: Sequence[str] | None = None,
    codec: Codec | None = None,
    chunk: int | str | None = None,
    shard: int | str | bool | None = None,
    pack: int | str | bool | None = None,
) -> WritePlan:
    remote = is_remote(os.fspath(dest))
    limit = None if options["memory"] is None else size_in_bytes(options["memory"])
    plan = planned(contents(view, states, chooser(pack)), codec, chunk, shard, limit, remote)
    tensors = [item.tensor for item in plan.items]
    destination = destination_of(dest, tensors, options)
    return WritePlan(
        destination=destination,
        tensors=tensors,
        fingerprint=fingerprint([(i.tensor, i.identity) for i in plan.items], plan.documents.values()),
        chunks=Chunks(plan.nbytes, plan.chunks),
        texts=plan.documents,
        room=plan.room(),
        paths=(str(destination) if isinstance(destination, Remote) else destination.place,),
    )


def destination_of(
    dest: str | os.PathLike[str], tensors: Sequence[LazyArray], options: WriteOptions
) -> Destination | Remote:
    """Return where a hierarchy is written that is computed from these tensors."""
    place = remote_place(dest, options)
    return (
        _remote(place, tensors, options)
        if place is not None
        else _local(local_path(dest), tensors, options["overwrite"])
    )


def _forecast(view: Part[LazyArray], dest: str, options: WriteOptions, *, codec: Codec | None = None) -> Forecast:
    found = contents(view)
    limit = None if options["memory"] is None else size_in_bytes(options["memory"])
    plan = planned(found, codec, None, None, limit, is_remote(dest))
    groups = dict(zip(found.groups, found.about["states"], strict=True))
    by_state: dict[str, list[LazyArray]] = {state: [] for state in found.about["states"]}
    for path, tensor in found.arrays.items():
        by_state[groups[path.partition("/")[0]]].append(tensor)
    files = sum(prod(grid_of(tuple(i.tensor.shape), i.cut.file)) for i in plan.items) + len(plan.documents)
    packed = dest.endswith(".zip")
    room = plan.room() * (1 + packed) if codec is None else None
    return Forecast({s: Amount.of(tensors) for s, tensors in by_state.items()}, 1 if packed else files, room)


def planned(
    found: Contents[LazyArray],
    codec: Codec | None,
    chunk: int | str | None,
    shard: int | str | bool | None,
    memory: int | None,
    remote: bool,
) -> Plan:
    """Determine packs, chunking, codecs and documents. Raises DataError for unsupported combinations."""
    most = size_in_bytes(chunk) if chunk is not None else IN_SHARD if shard else CHUNK
    in_file = None if not shard else SHARD if shard is True else size_in_bytes(shard)
    if memory is not None and chunk is None and (codec is not None or remote):
        most = min(most, max(1 << 20, memory // 8))
    encodings: dict[Any, Encoding] = {}
    items, arrays = [], {}

    def add(path: str, name: str, tensor: LazyArray, shape: Shape, **attributes: Any) -> None:
        of, size = encodings.get(tensor.dtype), tensor.itemsize
        cut = Cut(shape, None, of or encoding(codec, tensor.dtype))
        if of is None:
            check_codec(cut.encoding, tensor.dtype, name, prod(shape) * size)
            encodings[tensor.dtype] = cut.encoding
        if in_file is not None and tensor.shape:
            cut = Cut(shape, _shard_shape(tuple(tensor.shape), shape, size, in_file), cut.encoding)
        _check_memory(cut, size, memory, remote, name)
        arrays[path] = array(name, tuple(tensor.shape), tensor.spec.dtype, cut.file, cut.codecs, **attributes)
        items.append(Item(tensor, path, cut))

    for path, tensor in found.arrays.items():
        shape = chunk_shape(tensor.spec, most // _LEAST, most)
        add(path, found.names[path], tensor, shape, order=found.order[path])
    made = packs(found)
    long: dict[bytes, bytes] = {}  # what stands for the members of a pack in two documents -> their JSON
    for path, together in made.items():
        tensor = together.tensor
        shape = (max(1, min(tensor.numel(), most // tensor.itemsize)),)
        mark = token_hex(16)
        long[_json(mark)] = _json(together.members)
        add(path, path, tensor, shape, packed=mark)
    about = found.about | {"layout": PACKING} if made else found.about
    documents = {
        f"{path}/zarr.json".lstrip("/"): _json(document)
        for path, document in hierarchy(arrays, about, found.groups).items()
    }
    for path in [*made, ""] if made else ():
        key = f"{path}/zarr.json".lstrip("/")
        for mark_, text in long.items():
            documents[key] = documents[key].replace(mark_, text)
    return Plan(items, documents)


def _json(document: Any) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def memory_of(cut: Cut, itemsize: int, remote: bool) -> int:
    """Return the memory in bytes that the task of one file needs."""
    whole = min(cut.most(itemsize), HELD) if remote else 0  # what is collected before it is sent
    return whole + cut.memory(itemsize)


def _check_memory(cut: Cut, itemsize: int, memory: int | None, remote: bool, name: str) -> None:
    needed = memory_of(cut, itemsize, remote)
    if memory is not None and needed > max(memory, 64 << 20):
        raise DataError(
            f"memory={memory:,} bytes are too few: one file of {name!r} takes {needed:,} bytes while it is written. "
            "Give more, or make the chunks (chunk=) or, for object stores, the shards (shard=) smaller"
        )


def _shard_shape(shape: Shape, chunk: Shape, itemsize: int, most: int) -> Shape:
    """Return the shape of a shard of whole chunks with at most ``most`` bytes, extended along the last dimensions
    first."""
    shard = list(chunk)
    for d in reversed(range(len(chunk))):
        times = max(1, most // (prod(shard) * itemsize))
        shard[d] = chunk[d] * min(times, max(1, -(-shape[d] // chunk[d])))
    return tuple(shard)


def _remote(place: Uploads, tensors: Sequence[LazyArray], options: WriteOptions) -> Remote:
    if place.name.endswith(".zip"):
        return Remote(place.beside, tensors, options["overwrite"], one=place.name, packed=True)
    return Remote(place, tensors, options["overwrite"], other=Kind("zarr hierarchy", ("zarr.json",)))


def _local(place: Path, tensors: Sequence[LazyArray], overwrite: bool) -> Destination:
    if place.suffix == ".zip":
        return Zip(place, tensors, overwrite)
    hint = ", or a file that ends with .zip"
    return Whole(followed(place), tensors, overwrite, Kind("zarr hierarchy", ("zarr.json",)), hint)


WRITER = Writer(
    name="zarr",
    what="a Zarr v3 hierarchy",
    plan=_plan,
    forecast=_forecast,
    endings=(".zarr", ".zarr.zip"),
    options=frozenset({"dtype", "stored", "codec"}),
    refused={"mesh": NO_RANKS},
)
