"""Folders of torch.distributed.checkpoint: `.metadata` and `__RANK_NUMBER.distcp`.

Writer: torch/distributed/checkpoint/filesystem.py `FileSystemWriter`. A rank's file is a sequence of items. Either each
item is a file of torch.save (see core/extents.py `Archive`), or all tensors are in one safetensors file after the other
items.
`.metadata` is written last, under a temporary name, and renamed: a folder without it is an unfinished save.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from ...core.extents import Hole
from ...core.index import FileInfo, Index
from ...core.names import natural
from ...core.specs import TensorSpec
from ...errors import CorruptError, FormatError, LazyckptError, MissingFileError, Problem, cannot_read, only_one, some
from ...io.containers.needs import WHOLE
from ...io.containers.pickle.audit import dangers
from ...io.containers.pickle.plain import Path
from ...io.reading.packed import CODECS
from ...io.storage.announced import SMALL
from ...io.storage.base import Entry, Store
from ..megatron.fsdp_names import in_model_names, is_fsdp
from ..reader import Reader, Source
from ..shared.announce import announce, announce_ranges, listing
from ..shared.members import Member, together
from .chunks import ChunkBytes, ShardFile, in_chunks, in_rows, overlapping, read_shard_file, uncovered
from .columns import Ints
from .items import Item, Items
from .metadata import Chunks, Metadata, Tensor, read_metadata
from .objects import Meta, Objects, Stored

_WHOLE = ".metadata"
_RANKS = re.compile(r"__\d+\.metadata")
_UNKNOWN = -2  # size of a file that nobody has looked for
_FRAME = 256  # bytes that contain the empty frame of a codec and the start of the safetensors file behind it
_FEW = 256  # up to this many objects are read on opening, so that their problems are reported


def _read(source: Source) -> Index:
    if source.path.endswith(".distcp"):
        raise FormatError(
            f"{source.where} is one file of a distributed checkpoint: open its folder, {source.store.root}"
        )
    return read_folder(source.store)


def read_folder(store: Store, folder: str = "") -> Index:
    """Index a folder; what Megatron-FSDP saved under the names of its model. Raises what `in_folder` does."""
    member = in_folder(store, folder)
    return in_model_names(member) if is_fsdp(member) else together(member.format, [((), member)])


def in_folder(store: Store, folder: str = "", wanted: Callable[[str], bool] = lambda key: True) -> Member:
    """Return the content of a folder: all tensors, and the objects whose keys are ``wanted``.

    Raises MissingFileError if the save was not finished, and CorruptError."""
    listed = listing(store, folder)
    names = [_WHOLE] if _WHOLE in listed else sorted(filter(_RANKS.fullmatch, listed), key=natural)
    if not names:
        raise MissingFileError(_unfinished(posixpath.join(store.root, folder), listed))
    names = [posixpath.join(folder, name) for name in names]
    announce(store, names, WHOLE)
    metadata = read_metadata(store, names)
    problems = [p.prefixed(names[0], names[0]) for p in dangers(metadata.globals, "load it with torch")]
    building = _Building(store, metadata, problems)
    building.announce()
    tensors = {key: building.tensor(key, tensor) for key, tensor in metadata.tensors.items()}
    items = building.objects()
    others = {key: item for key, item in items.items() if wanted(key)}
    objects = Objects(store.pinned(building.files), others)
    building.tell(listed, folder)
    few = len(objects.items) <= _FEW
    if few:
        problems += objects.check()

    found: dict[str, tuple[Path, TensorSpec]] = {}
    for key, path in metadata.paths.items():
        if key in tensors:
            found[key] = path, tensors[key]
    if few:  # a state dict that was not flattened is an object with tensors inside
        found |= {name: (path, spec) for name, path, spec in objects.tensors if name not in found}
    return Member(
        format="dcp-safetensors" if building.shards else "dcp",
        tensors=found,
        objects=[path for path, _ in objects.items.values()],
        meta=Meta(objects, (), metadata.paths),
        named=lambda rest: Meta(objects, [(key, path) for path, key in rest if key in tensors], metadata.paths),
        files={name: listed[posixpath.basename(name)].info for name in names} | building.files,
        aliases={} if building.shards else _ties(metadata),
        reshaped=metadata.reshaped,
        stored={key: spec for key, (_, spec) in found.items()} if few else Stored(tensors, objects),
        unwanted={key: item for key, item in items.items() if key not in others},
        problems=problems,
    )


def _ties(metadata: Metadata) -> dict[str, str]:
    """Return keys whose chunks are all the same bytes as those of an earlier key: later key -> first.

    torch writes a tied tensor twice, but reads one that was written once."""
    found: dict[str, str] = {}
    if isinstance(metadata.items, Items) and metadata.items.places_differ():
        return found
    first: dict[Item, str] = {}
    for key in filter(metadata.tensors.__contains__, metadata.paths):
        tensor = metadata.tensors[key]
        start = next((start for start, sizes in tensor.chunks if 0 not in sizes), None)
        item = None if start is None else metadata.items.get((key, start))
        if item is None:
            continue
        other = first.setdefault(item, key)
        same = metadata.tensors[other]
        alike = (same.dtype, same.shape, same.chunks) == (tensor.dtype, tensor.shape, tensor.chunks)
        items = metadata.items
        if other != key and alike and all(items.get((key, at)) == items.get((other, at)) for at, _ in tensor.chunks):
            found[key] = other
    return found


def _unfinished(root: str, listed: Mapping[str, Entry]) -> str:
    count = sum(name.endswith(".distcp") for name in listed)
    left = " (.metadata.tmp is there)" if ".metadata.tmp" in listed else ""
    return (
        f"{root} has {count:,} .distcp files but no .metadata{left}: the save was not finished, or it was copied "
        "without hidden files. Nothing else says which bytes belong to which tensor."
    )


class _Building:
    """Builder of the tensors of a checkpoint. It locates pieces in the existing files and collects what is lost."""

    def __init__(self, store: Store, metadata: Metadata, problems: list[Problem]) -> None:
        self.files: dict[str, FileInfo] = {}
        self.shards: dict[tuple[str, int], ShardFile | None] = {}
        self._store = store
        self._metadata = metadata
        self._problems = problems
        self._folders: dict[str, Mapping[str, Entry]] = {}
        self._lost: dict[Problem, dict[str, int]] = {}  # reason -> keys that are partly or wholly lost
        self._gaps: dict[str, int] = {}
        self._twice: list[str] = []  # tensors whose chunks overlap
        self._last: dict[str, int] = {}  # file -> offset of the last item of a tensor
        self._blobs: dict[str, int | None] = {}
        self._sizes: Ints | None = None  # of the files, by the numbers of their paths in the columns

    def announce(self) -> None:
        """Announce the reads of safetensors files within the files, at whose start the metadata places all tensors."""
        items = self._metadata.items
        places: set[tuple[str, int]] = set()
        if isinstance(items, Items):  # of a large checkpoint, whose items are in files of torch
            return
        for (key, start), item in items.items():
            tensor = self._metadata.tensors.get(key)
            if start is None or tensor is None or item.codecs:
                continue
            sizes = next((sizes for at, sizes in tensor.chunks if at == start), None)
            if sizes is not None and item.length == prod(sizes) * tensor.dtype.itemsize and self._info(item.path):
                places.add((item.path, item.offset))
        sizes_of = {path: self.files[path].size for path, _ in places}
        announce_ranges(self._store, [(path, at, min(SMALL, sizes_of[path] - at)) for path, at in places])

    def tensor(self, key: str, tensor: Tensor) -> TensorSpec:
        items = self._metadata.items
        found = in_rows(key, tensor, items, self._size) if isinstance(items, Items) else None
        if found is not None:
            self._count(key, tensor)
            return found
        chunks = [
            (start, sizes, self._piece(key, tensor, start, sizes)) for start, sizes in tensor.chunks if 0 not in sizes
        ]
        self._count(key, tensor)
        return in_chunks(key, tensor.dtype, tensor.shape, chunks)

    def _count(self, key: str, tensor: Tensor) -> None:
        """Note elements that are in no chunk, and tensors with elements in several chunks."""
        if isinstance(tensor.chunks, Chunks) and tensor.chunks.follow(tensor.shape):
            return
        left = uncovered(tensor.shape, tensor.chunks)
        if left > 0:
            self._gaps[key] = left
        if left < 0 or tensor.repeated or (not left and overlapping(tensor.shape, tensor.chunks)):
            self._twice.append(key)

    def _size(self, numbers: Ints) -> Ints:
        """Return the sizes of files by their numbers in the columns of the items; -1 for a missing file."""
        items = self._metadata.items
        assert isinstance(items, Items)
        if self._sizes is None:
            self._sizes = np.full(len(items.names), _UNKNOWN, np.int64)
        found: Ints = self._sizes[numbers]
        if (found == _UNKNOWN).any():
            for n in np.unique(numbers[found == _UNKNOWN]).tolist():
                info = self._info(items.names[n])
                self._sizes[n] = -1 if info is None else info.size
            found = self._sizes[numbers]
        return found

    def objects(self) -> dict[str, tuple[Path, Item]]:
        found = {}
        others = set(self._metadata.others)
        for key in filter(others.__contains__, self._metadata.paths):
            item = self._metadata.items.get((key, None))
            where = self._present(key, item)
            if isinstance(where, Item):
                self._codecs(key, where)
                found[key] = self._metadata.paths[key], where
        return found

    def tell(self, listed: Mapping[str, Entry], folder: str) -> None:
        """Add the problems of lost data and of left-over files in the folder."""
        for reason, keys in self._lost.items():
            count = f"{len(keys):,} {'keys' if len(keys) > 1 else 'key'}"
            line = f"{reason}: it affects {count} ({some(keys)})"
            self._problems.append(Problem(reason.code, line, reason.path))
        if self._gaps:
            lost = sum(self._gaps.values())
            line = f"{lost:,} elements of {len(self._gaps):,} tensors are in no chunk of any file: {some(self._gaps)}"
            self._problems.append(Problem("missing-elements", line))
        if self._twice:
            line = f"chunks of {len(self._twice):,} tensors overlap, one is read: {some(self._twice)}"
            self._problems.append(Problem("inconsistent-metadata", line, only_one(self._twice)))
        if twice := sorted(self._metadata.repeated):
            line = f"the places of {len(twice):,} keys are listed twice, the last is read: {some(twice)}"
            self._problems.append(Problem("inconsistent-metadata", line, only_one(twice)))
        used = self._metadata.files
        extra = sorted(  # an empty file belongs to a rank that had nothing to write
            path
            for n, entry in listed.items()
            if n.endswith(".distcp") and entry.info.size and (path := posixpath.join(folder, n)) not in used
        )
        if extra:
            line = f"{len(extra):,} files are not part of the checkpoint, left over from another save: {some(extra)}"
            self._problems.append(Problem("left-over-file", line, only_one(extra)))
        if ".metadata.tmp" in listed:
            line = ".metadata.tmp is there too: a later save into this folder was not finished"
            self._problems.append(Problem("unfinished-save", line, posixpath.join(folder, ".metadata.tmp")))

    def _piece(self, key: str, tensor: Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkBytes:
        item = self._metadata.items.get((key, start))
        piece = self._present(key, item)
        if not isinstance(piece, Item):
            return piece
        # an archive is longer than its tensor; a tensor in a safetensors file is listed with its exact length
        if piece.length == prod(sizes) * tensor.dtype.itemsize:
            at = self._behind_frames(piece.path) if piece.codecs else piece.offset
            if at is not None:
                return self._in_safetensors(key, piece._replace(offset=at), tensor, start, sizes)
        self._codecs(key, piece)
        return piece

    def _present(self, key: str, item: Item | None) -> Item | Hole:
        """Return the item if its file exists and is long enough, and else a hole."""
        if item is None:
            line = "the metadata does not say where all chunks are"
            return self._hole(_WHOLE, key, Problem("inconsistent-metadata", line))
        path = item.path
        info = self._info(path)
        if info is None:
            return self._hole(path, key, Problem("missing-file", f"{path} is missing", path))
        if item.offset + item.length > info.size:
            line = f"{path} has {info.size:,} bytes and should have more: truncated"
            return self._hole(path, key, Problem("unreadable-file", line, path))
        return item

    def _info(self, path: str) -> FileInfo | None:
        """Return a file's info, from the listing of its folder; None if the file is missing."""
        info = self.files.get(path)
        if info is None:
            folder = posixpath.dirname(path)
            if folder not in self._folders:
                self._folders[folder] = listing(self._store, folder)
            entry = self._folders[folder].get(posixpath.basename(path))
            if entry is not None and not entry.is_dir:
                info = self.files[path] = entry.info
        return info

    def _codecs(self, key: str, item: Item) -> None:
        for codec in item.codecs:
            if codec not in CODECS:
                reason = (
                    f"items are packed with {codec[:60]!r}, which lazyckpt cannot unpack (it can: {', '.join(CODECS)})"
                )
                self._lost.setdefault(Problem("unsupported-tensor", reason), {})[key] = 1

    def _behind_frames(self, path: str) -> int | None:
        """Return the offset of the safetensors file in a file of packed items; None if there is none.

        torch does not pack the safetensors file: it packs zero bytes for each tensor, and the safetensors file follows
        the last of these empty frames."""
        if not self._last:
            for (_, start), item in self._metadata.items.items():
                if start is not None:
                    self._last[item.path] = max(item.offset, self._last.get(item.path, 0))
        if path not in self._blobs:
            last, size = self._last[path], self.files[path].size
            head = bytes(self._store.read(path, last, min(_FRAME, size - last)))
            at = head.find(b'{"')
            length = int.from_bytes(head[at - 8 : at], "little") if at >= 8 else size
            self._blobs[path] = last + at - 8 if last + at + length <= size else None
        return self._blobs[path]

    def _in_safetensors(
        self, key: str, item: Item, tensor: Tensor, start: tuple[int, ...], sizes: tuple[int, ...]
    ) -> ChunkBytes:
        """Locate a chunk in the safetensors file that contains all tensors of a rank's file.

        The positions are in the header of the safetensors file; the metadata has the same offset for all tensors."""
        at = item.path, item.offset
        if at not in self.shards:
            try:
                self.shards[at] = read_shard_file(self._store, *at)
            except LazyckptError as e:
                self.shards[at] = None
                self._problems.append(cannot_read(item.path, e, ", its tensors are lost"))
        shard = self.shards[at]
        if shard is None:
            return Hole(item.path, f"{item.path} is damaged")
        offsets, extent = shard.chunks.get(key, (None, None))
        if extent is None or offsets != start:
            line = f"{item.path} lacks chunks: torch keeps one of each tensor in a file of this kind"
            return self._hole(item.path, key, Problem("missing-elements", line, item.path))
        if (extent.dtype, extent.shape) != (tensor.dtype, sizes):
            raise CorruptError(
                f"{self._store.root}/{item.path}: {key!r} is {extent.dtype} of shape {extent.shape}, the metadata says "
                f"{tensor.dtype} of shape {sizes}: one of the two is damaged"
            )
        return extent

    def _hole(self, path: str, key: str, reason: Problem) -> Hole:
        self._lost.setdefault(reason, {})[key] = 1
        return Hole(path, str(reason))


def _recognises(source: Source) -> bool:
    if source.path:
        name = source.path
        return name == _WHOLE or _RANKS.fullmatch(name) is not None or name.endswith(".distcp")
    return _WHOLE in source.entries or any(n.endswith(".distcp") or _RANKS.fullmatch(n) for n in source.entries)


READER = Reader("dcp", "folders of torch.distributed.checkpoint (.metadata and *.distcp)", _recognises, _read)
