"""A view as a zarr v3 hierarchy: in a folder, a zip file, or a prefix of an object store.

`formats/zarr` says what stands where, `chunks` what is in the files, `job` does the work, `staging` makes it appear.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ..core.box import Shape
from ..core.chunking import chunk_shape, grid_of
from ..core.units import size_in_bytes
from ..errors import DataError, DestinationError
from ..formats.zarr.documents import JOB, Contents, array, hierarchy
from ..io.storage.fsspec import is_url
from ..jobs.destination import check_apart, check_room, check_unchanged, local_path
from ..jobs.executor import Done, Task, run, shares_memory
from ..jobs.guard import followed
from ..jobs.places import PART, Bucket, Folder, Place
from ..jobs.progress import Bar
from ..jobs.publish import Finished, check_replaceable, fingerprint, reveal, staged, uploaded
from ..lazy import LazyArray
from . import chunks
from .chunks import Cut
from .codecs import Codec, Encoding, encoding
from .codecs import check as check_codec

CHUNK = 64 << 20  # bytes of a chunk, at most
IN_SHARD = 4 << 20  # the same for chunks that are many in a file
SHARD = 512 << 20
_LEAST = 8  # chunks are joined until they have the most bytes divided by this
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """An array to write: where, and how it is cut."""

    tensor: LazyArray
    path: str
    cut: Cut

    def files(self) -> Iterator[tuple[str, LazyArray]]:
        """(key, the block of the tensor) of all files."""
        t = self.tensor
        for key, box in self.cut.files(tuple(t.shape)):
            yield f"{self.path}/{key}", (t if box.shape == t.shape else t.lazy[box.slices])


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be written. ``documents``: key -> text, in the order in which they are written."""

    items: list[Item]
    documents: dict[str, bytes]
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(item.tensor.nbytes for item in self.items)

    def room(self) -> int:
        """Bytes that it takes at least: what is compressed may take next to nothing."""
        files = 0
        for item in self.items:
            if item.cut.encoding.raw:
                grid = grid_of(tuple(item.tensor.shape), item.cut.file)
                files += prod(grid) * item.cut.most(item.tensor.itemsize)
        return files + sum(map(len, self.documents.values()))


def export_zarr(
    found: Contents[LazyArray],
    dest: str | os.PathLike[str],
    *,
    codec: Codec | None,
    chunk: int | str | None,
    shard: int | str | bool | None,
    memory: int | str | None,
    executor: Executor | None,
    overwrite: bool,
    verify: bool,
    progress: bool | None,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """See `lazyckpt.CheckpointView.to_zarr`."""
    url = os.fspath(dest)
    remote = is_url(url) and not url.startswith("file://")
    limit = None if memory is None else size_in_bytes(memory)
    plan = planned(found, codec, chunk, shard, limit, remote)
    if remote:
        target = _remote(url, storage_options, executor)
    else:
        place = local_path(url.removeprefix("file://"))
        if not _is_zip(place):
            place = followed(place)
        _check_local(place, plan, overwrite)
    for item in plan.items:
        item.tensor.check()

    def do(where: Place, there: Finished, label: str) -> None:
        with Bar(plan.nbytes * (1 + verify), label, progress) as bar:
            moved: Done = lambda task, _: bar.add(task.nbytes)  # noqa: E731
            run(_tasks(plan, where, chunks.write, there, bar), moved, executor, limit)
            for key, text in list(plan.documents.items())[:-1]:
                where.put(key, [text])
            if verify:
                run(_tasks(plan, where, chunks.check, {}, bar), moved, executor, limit)
        check_unchanged(item.tensor for item in plan.items)

    last, text = list(plan.documents.items())[-1]  # the root: without it there is no hierarchy
    if remote:
        with uploaded(target, plan.fingerprint, overwrite) as (bucket, there):
            do(bucket, there, url.rpartition("/")[2])
            bucket.put(last, [text])
        return
    with staged(place, plan.fingerprint) as staging:
        folder = replace(staging, sums=True)
        folder.check_distinct(plan.documents)
        there = folder.verified()
        check_room(Path(folder.root), max(0, plan.room() * (1 + _is_zip(place)) - sum(there.values())))
        do(folder, there, place.name)
        folder.put(last, [text])
        _check_local(place, plan, overwrite)  # somebody may have written there meanwhile
        if _is_zip(place):
            _pack(folder, place)
        else:
            reveal(folder, place)


def planned(
    found: Contents[LazyArray],
    codec: Codec | None,
    chunk: int | str | None,
    shard: int | str | bool | None,
    memory: int | None,
    remote: bool,
) -> Plan:
    """Decide everything, and find what cannot be done. Raises DataError."""
    most = size_in_bytes(chunk) if chunk is not None else IN_SHARD if shard else CHUNK
    in_file = None if not shard else SHARD if shard is True else size_in_bytes(shard)
    if memory is not None and chunk is None and (codec is not None or remote):
        most = min(most, max(1 << 20, memory // 8))
    encodings: dict[Any, Encoding] = {}
    items, arrays = [], {}
    for n, (path, tensor) in enumerate(found.arrays.items()):
        of = encodings.get(tensor.dtype)
        shape, size = chunk_shape(tensor.spec, most // _LEAST, most), tensor.itemsize
        cut = Cut(shape, None, of or encoding(codec, tensor.dtype))
        if of is None:
            check_codec(cut.encoding, tensor.dtype, found.names[path], prod(shape) * size)
            encodings[tensor.dtype] = cut.encoding
        if in_file is not None and tensor.shape:
            cut = Cut(shape, _shard_shape(tuple(tensor.shape), shape, size, in_file), cut.encoding)
        _check_memory(cut, size, memory, remote, found.names[path])
        arrays[path] = array(found.names[path], tuple(tensor.shape), tensor.spec.dtype, cut.file, cut.codecs, order=n)
        items.append(Item(tensor, path, cut))
    documents = {
        f"{path}/zarr.json".lstrip("/"): json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        for path, document in hierarchy(arrays, found.about, found.groups).items()
    }
    return Plan(items, documents, fingerprint([(i.tensor, (i.path, i.cut)) for i in items], documents.values()))


def memory_of(cut: Cut, itemsize: int, remote: bool) -> int:
    """Bytes that the task of one file holds."""
    whole = 2 * cut.most(itemsize) if remote else 0  # in pieces, and then together
    return whole + cut.memory(itemsize)


def _check_memory(cut: Cut, itemsize: int, memory: int | None, remote: bool, name: str) -> None:
    needed = memory_of(cut, itemsize, remote)
    if memory is not None and needed > max(memory, 64 << 20):
        raise DataError(
            f"memory={memory:,} bytes are too few: one file of {name!r} takes {needed:,} bytes while it is written. "
            "Give more, or make the chunks (chunk=) or, for object stores, the shards (shard=) smaller"
        )


def _shard_shape(shape: Shape, chunk: Shape, itemsize: int, most: int) -> Shape:
    """Whole chunks, as many as there are in ``most`` bytes, along the last dimensions first."""
    shard = list(chunk)
    for d in reversed(range(len(chunk))):
        times = max(1, most // (prod(shard) * itemsize))
        shard[d] = chunk[d] * min(times, max(1, -(-shape[d] // chunk[d])))
    return tuple(shard)


def _tasks(plan: Plan, place: Place, do: Any, there: Finished, bar: Bar) -> Iterator[Task]:
    """One for each file that is not there."""
    for item in plan.items:
        memory = memory_of(item.cut, item.tensor.itemsize, place.buffers)
        for key, block in item.files():
            if key in there:
                bar.add(block.nbytes)
            else:
                yield Task(block.nbytes, memory, partial(do, place, key, block, item.cut))


def _remote(url: str, options: Mapping[str, Any] | None, executor: Executor | None) -> Bucket:
    if url.startswith("memory://") and not shares_memory(executor):
        raise DestinationError(f"{url} is memory of this process, where other processes cannot write: use threads")
    if url.endswith(".zip"):
        raise DestinationError(f"{url}: a zip file is written to a local path only: write it there and upload it")
    return Bucket(url.rstrip("/"), dict(options or {}))


def _is_zip(dest: Path) -> bool:
    return dest.suffix == ".zip"


def _check_local(dest: Path, plan: Plan, overwrite: bool) -> None:
    """Raises DestinationError if the hierarchy must not appear there."""
    check_apart(dest, (item.tensor for item in plan.items))
    if not _is_zip(dest):
        check_replaceable(dest)
    if not dest.exists():
        return
    if _is_zip(dest):
        if dest.is_dir():
            raise DestinationError(f"{dest} is a folder: choose another name")
        if not overwrite:
            raise DestinationError(f"{dest} exists already: remove it, choose another place, or pass overwrite=True")
        return
    if not dest.is_dir():
        raise DestinationError(f"{dest} is a file: name a folder, or a file that ends with .zip")
    if any(dest.iterdir()):
        if not (dest / "zarr.json").is_file():
            raise DestinationError(f"{dest} is not empty, and no zarr hierarchy: choose another folder")
        if not overwrite:
            raise DestinationError(f"{dest} exists already: remove it, choose another place, or pass overwrite=True")


def _pack(folder: Folder, dest: Path) -> None:
    """A zip file of what is in the folder, not compressed, as zarr's ZipStore reads it."""
    complete = {key: size for key, size in folder.find().items() if not key.endswith(JOB)}
    packed = f"packed{PART}"
    with (
        open(folder.open(packed, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for key in sorted(complete):
            info = zipfile.ZipInfo(key, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.file_size = complete[key]  # decides whether it needs zip64
            with open(folder.open(key, os.O_RDONLY), "rb") as source, archive.open(info, "w") as target:
                shutil.copyfileobj(source, target, _PIECE)
    folder.move(packed, dest)
