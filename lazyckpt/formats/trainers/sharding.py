"""Folders of torch_checkpointing: a file for each item and rank, and the sharding of the items in `metadata.pkl`.

Writer: torch_checkpointing/checkpoint_writer.py; names and kinds of files: checkpoint_layout.py. By default an item is
a file of torch.save, whose DTensors describe their own layout. A safetensors file has only the rank's local arrays,
whose placement is in the metadata (distributed_metadata.py, dtensor_metadata.py, default_metadata.py).
torch_checkpointing unpickles the metadata; here it is read as data. Without a resharder there is no metadata, and
nothing identifies the folder: ``open(folder, format="torch-checkpointing")``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ...core.box import Box, Shape, fits
from ...core.extents import Hole
from ...core.index import Index
from ...core.names import natural
from ...core.placement import Part
from ...core.specs import Fragment, TensorSpec, whole
from ...errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.pickle.audit import dangers
from ...io.containers.pickle.machine import Pickle
from ...io.containers.pickle.plain import Path
from ...io.containers.pickle.records import short
from ...io.containers.safetensors import SafetensorsFile, read_safetensors
from ...io.storage.base import Store
from ...layouts.placements import Cut, Layout, MeshPlacement, Same
from ..huggingface import load_json
from ..ranks.files import Series
from ..ranks.reader import read_series
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.members import Member
from ..shared.paths import inside

_METADATA = "metadata.pkl"
_NAME = re.compile(r"(.+)_(\d{1,7})\.(pt|json|safetensors)")
_KINDS = {"TorchSerialization": "pt", "JsonSerialization": "json", "SafetensorsSerialization": "safetensors"}


class Block(NamedTuple):
    """A rank's part of a tensor: the shape of its array (None accepts the stored one), and the placement of its
    blocks."""

    local: Shape | None
    parts: tuple[Part, ...]


class Sharding(NamedTuple):
    shape: Shape
    blocks: dict[int, Block]  # by rank


@dataclass(slots=True)
class Item:
    """An item of a checkpoint. ``kind`` is "pt", "json", "safetensors" or another name of the writer's; ``files`` maps
    ranks to file names."""

    kind: str = "pt"
    files: dict[int, str] = field(default_factory=dict)
    shardings: dict[Path, Sharding] = field(default_factory=dict)


def _read(source: Source) -> Index:
    store = source.store
    problems: list[Problem] = []
    items: dict[str, Item] = {}
    world = None
    if _METADATA in source.entries:
        world, items = _metadata(store, problems)
    for name in sorted(source.entries, key=natural):
        match = _NAME.fullmatch(name)
        if match and not any(name in item.files.values() for item in items.values()) and match[1] not in items:
            items[match[1]] = Item(match[3], {})
        if match and match[1] in items and not items[match[1]].shardings and items[match[1]].kind == match[3]:
            items[match[1]].files[int(match[2])] = name
    if not items:
        raise FormatError(f"{source.where} has no files that are named as torch_checkpointing names them")

    files_of = [path for item in items.values() for path in item.files.values() if path in source.entries]
    announce(store, files_of)
    series: list[Series] = []
    more: list[tuple[Path, Member]] = []
    for name, item in items.items():
        if item.kind == "pt" and (found := _series(name, item, world, source)):
            series.append(found)
        elif item.kind == "safetensors":
            more.append(((), _safetensors(store, name, item, problems)))
        elif item.kind == "json":
            more.append(((), _json(store, name, item, problems)))
        else:
            paths = list(item.files.values())
            line = f"{name} is stored in a way that is not read ({item.kind}): {some(paths)}"
            problems.append(Problem("ignored-file", line, only_one(paths)))
    index = read_series(source, series, problems, more)
    files = dict(index.files)
    if _METADATA in source.entries:
        files[_METADATA] = store.stat(_METADATA)
    return replace(index, format="torch-checkpointing", files=files)


def _series(name: str, item: Item, world: int | None, source: Source) -> Series | None:
    """Return the files of an item as a series; None if their names differ in more than the rank."""
    rank, path = next(iter(item.files.items()))
    before, number, after = path.rpartition(str(rank))
    if not number or any(path != f"{before}{rank}{after}" for rank, path in item.files.items()):
        return None
    here = {rank: source.entries[path] for rank, path in item.files.items() if path in source.entries}
    return Series(name, world, before, 1, after, here)


def _safetensors(store: Store, name: str, item: Item, problems: list[Problem]) -> Member:
    files: dict[int, SafetensorsFile] = {}
    lost: dict[int, str] = {}
    for rank, path in item.files.items():
        try:
            files[rank] = read_safetensors(store, path)
        except LazyckptError as e:
            problems.append(cannot_read(path, e))
            lost[rank] = str(problems[-1])
    stored = {
        f"{item.files[rank]}/{key}": whole(f"{item.files[rank]}/{key}", extent)
        for rank, file in files.items()
        for key, extent in file.extents.items()
    }
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    sharded = {".".join(map(str, path)): path for path in item.shardings}
    for key, extent in ((key, extent) for file in files.values() for key, extent in file.extents.items()):
        raw = f"{name}.{key}"
        if raw in tensors:
            continue
        place = sharded.get(key)
        if place is None:  # every rank has its own tensor: read that of the lowest rank
            tensors[raw] = (name, key), whole(raw, extent)
        else:
            tensors[raw] = (name, *place), _global(store, raw, key, item.shardings[place], item, files, lost)
    infos = {item.files[rank]: file.info for rank, file in files.items()}
    return Member("", tensors, [], {}, lambda _: {}, infos, stored)


def _global(
    store: Store,
    raw: str,
    key: str,
    sharding: Sharding,
    item: Item,
    files: Mapping[int, SafetensorsFile],
    lost: Mapping[int, str],
) -> TensorSpec:
    dtype = next(file.extents[key].dtype for file in files.values() if key in file.extents)
    if not fits(sharding.shape, dtype.itemsize):
        raise CorruptError(f"{store.root}/{_METADATA}: {key!r} has the shape {sharding.shape}, which is too large")
    fragments = []
    for rank, block in sharding.blocks.items():
        if not any(prod(part.local.shape) for part in block.parts) and 0 not in sharding.shape:
            continue
        path = item.files.get(rank, f"a file of rank {rank}")
        extent = files[rank].extents.get(key) if rank in files else None
        if extent is None:
            reason = lost.get(rank, f"{path} does not hold {key!r}")
            fragments.append(Fragment(Hole(path, reason), block.local or sharding.shape, block.parts))
            continue
        if extent.dtype != dtype or (block.local is not None and extent.shape != block.local):
            raise CorruptError(
                f"{store.root}/{path}: {key!r} is {extent.dtype} of shape {extent.shape}, but {_METADATA} says "
                f"{dtype} of shape {block.local}: these files are not of one save"
            )
        if not all(Box((0,) * len(extent.shape), extent.shape) & part.local == part.local for part in block.parts):
            raise CorruptError(f"{store.root}/{path}: {key!r} of shape {extent.shape} is smaller than its parts")
        fragments.append(Fragment(extent, extent.shape, block.parts))
    return TensorSpec(raw, sharding.shape, dtype, tuple(fragments))


def _json(store: Store, name: str, item: Item, problems: list[Problem]) -> Member:
    """Read a JSON item: the lowest rank's value under the item's name, differing values under the name and rank."""
    meta: dict[str, Any] = {}
    infos = {}
    for rank in sorted(item.files):
        path = item.files[rank]
        try:
            value = load_json(store, path)
        except LazyckptError as e:
            problems.append(cannot_read(path, e))
            continue
        infos[path] = store.stat(path)
        if name not in meta:
            meta[name] = value
        elif value != meta[name]:
            meta[f"{name}_{rank}"] = value
    return Member("", {}, [(key,) for key in meta], meta, lambda _: meta, infos)


# -- metadata.pkl


def _metadata(store: Store, problems: list[Problem]) -> tuple[int | None, dict[str, Item]]:
    where = f"{store.root}/{_METADATA}"
    size = store.stat(_METADATA).size
    pickle = Pickle(bytes(store.read(_METADATA, 0, size)), where, {}, lambda _: None)
    found = dangers(pickle.globals, "load it with torch_checkpointing")
    problems += [problem.prefixed(_METADATA, _METADATA) for problem in found]
    root = pickle.value
    try:
        world = _count(root["world_size"])
        known = _Known(10_000 + 2 * size)
        return world, {_text(name): _item(name, about, world, known) for name, about in root["metadata"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as e:
        raise CorruptError(
            f"{where} is not the metadata of torch_checkpointing ({type(e).__name__}: {str(e)[:120]}): the file is "
            "damaged, or of an unknown version"
        ) from None


class _Known:
    """A cache of shardings by their metadata, because many tensors share a layout and shape."""

    def __init__(self, left: int) -> None:
        """Limit the number of visited objects to ``left``: shared references must not expand beyond the file's size."""
        self._left = left
        self._by_id: dict[int, Sharding] = {}  # ids are stable because the pickle's objects outlive this cache
        self._by_content: dict[Any, Sharding] = {}

    def sharding(self, groups: Any) -> Sharding:
        if id(groups) not in self._by_id:
            key = self._content(groups)
            if key not in self._by_content:
                self._by_content[key] = _sharding(groups)
            self._by_id[id(groups)] = self._by_content[key]
        return self._by_id[id(groups)]

    def _content(self, value: Any) -> Any:
        """Return a hashable key that is equal for equal metadata."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("its references expand to far more objects than it has bytes")
        if isinstance(value, dict):
            return tuple((self._content(k), self._content(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return tuple(map(self._content, value))
        return value if isinstance(value, str | int) else id(value)


def _item(name: str, about: Mapping[str, Any], world: int, known: _Known) -> Item:
    item = Item()
    for key, layout in about["rank_to_layout_info"].items():
        rank = _count(key)
        path = f"{name}_{rank}.pt" if layout is None else layout["file_path"]
        if rank >= world or not inside(path):
            raise ValueError(f"the file of rank {rank} is {short(path)}")
        item.files[rank] = path
        if layout is not None:
            kind = layout["serialization_format"]["type"]
            item.kind = _KINDS.get(kind, _text(kind)[:80])
    for text, groups in about["nested_path_to_metadata"].items():
        path = tuple(part if isinstance(part, int) else str(part) for part in json.loads(text))
        if item.kind == "safetensors":  # files of torch.save contain their sharding
            item.shardings[path] = known.sharding(groups)
    return item


def _sharding(groups: Any) -> Sharding:
    shape: Shape | None = None
    blocks: dict[int, Block] = {}
    for group in groups:
        packed = group["sharding_metadata"]
        about = packed["data"]
        found = tuple(map(_count, about["global_shape"]))
        if shape not in (None, found):
            raise ValueError(f"ranks say {shape} and {found}")
        shape = found
        for rank in map(_count, group["ranks"]):
            blocks[rank] = _block(packed["type"], about, found, rank)
    if shape is None:
        raise ValueError("a tensor of no rank")
    return Sharding(shape, blocks)


def _block(kind: Any, about: Mapping[str, Any], shape: Shape, rank: int) -> Block:
    if kind == "DTensorShardingMetadata":
        mesh = tuple(map(_count, about["mesh_spec"]["mesh_shape"]))
        layout = Layout(mesh, tuple(map(_placement, about["placements"])))
        at = list(about["mesh_spec"]["mesh_data"]).index(rank)
        coordinate = []
        for size in reversed(mesh):
            at, here = divmod(at, size)
            coordinate.append(here)
        place = tuple(reversed(coordinate))
        return Block(layout.local_shape(shape, place), layout.parts(shape, place))
    if kind != "default_tensor_v1":
        raise ValueError(f"shards of the kind {short(kind)}")
    parts = []
    for start, local, sizes in zip(about["global_offsets"], about["local_offsets"], about["local_sizes"], strict=True):
        a, b, n = (tuple(map(_count, value)) for value in (start, local, sizes))
        if not len(a) == len(b) == len(n) == len(shape) or any(x + k > s for x, k, s in zip(a, n, shape)):
            raise ValueError(f"a block of {n} at {a} in a tensor of {shape}")
        parts.append(Part(Box(b, tuple(x + k for x, k in zip(b, n))), a))
    return Block(None, tuple(parts))


def _placement(about: Mapping[str, Any]) -> MeshPlacement:
    kind = about["type"]
    if kind == "Replicate":
        return Same()
    if kind not in ("Shard", "StridedShard"):
        raise ValueError(f"a placement {short(kind)}")
    return Cut(_count(about["dim"]), _count(about.get("split_factor", 1)))


def _count(value: Any) -> int:
    number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    if not 0 <= number < 1 << 62:
        raise ValueError(f"{short(value)} is no number")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is {short(value)}")
    return value


def _recognises(source: Source) -> bool:
    names = source.entries
    return not source.path and _METADATA in names and any(map(_NAME.fullmatch, names))


READER = Reader(
    "torch-checkpointing", "folders of torch_checkpointing (metadata.pkl and ITEM_RANK files)", _recognises, _read
)
