"""Reader of Orbax checkpoints: steps of a `CheckpointManager`, and the folders of a `Checkpointer`.

The arrays of a tree are Zarr arrays, of version 2 or 3: the values of an OCDBT database, or files in folders. Opening
reads the documents of the tree, the database's manifest and nodes, and the documents of the arrays.
Writer: orbax/checkpoint/_src/handlers/base_pytree_checkpoint_handler.py, serialization/jax_array_handlers.py and
serialization/tensorstore_utils.py (orbax-checkpoint 0.12.8, tensorstore 0.1.86).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.index import FileInfo, Index
from ...core.specs import TensorSpec, renamed, whole
from ...errors import CorruptError, LazyckptError, MissingFileError, Problem, cannot_read, only_one, some
from ...io.containers.needs import WHOLE
from ...io.pool import each
from ...io.storage.base import Entry
from ..reader import Reader, Source
from ..shared.announce import announce, announce_folders, announce_ranges
from ..zarr.grid import Array, ChunkFiles, GridFragments, spec_of
from ..zarr.keys import Keys
from ..zarr.listing import listed
from ..zarr.metadata import array_v2, array_v3
from ..zarr.packing import NoTensorError, unknown_codecs
from ..zarr.tree import Folder, nodes
from .aggregate import NAME as AGGREGATE
from .aggregate import extent_of, read_aggregate
from .chunks import HERE, ValueFragments, scalar
from .items import json_item, of_step, other_items
from .layout import PROCESS, document, is_tree, items, recognises
from .metadata import ARRAYS, SHARDING, STEP, STRINGS, TREE, Documents, Tree, mesh_of, parsed, read_tree
from .ocdbt import MANIFEST, Database, Place, Values, joined, read_database, states_of
from .trees import WEIGHTS, Key, named

_DOCUMENTS = {".zarray": 2, "zarr.json": 3}
_FEW = 1 << 20  # bytes of the document of an array, at most
_WRAPPER = "default"  # the item of a manager that was not told names


@dataclass(slots=True)
class _Item:
    """A tree of arrays in a folder of the step, "" for the step's own. ``base`` is put in front of its names."""

    folder: str
    base: tuple[str, ...]
    names: Mapping[str, Entry]
    tree: Tree
    database: Database | None = None


class _Folders(Folder):
    """The folders of arrays. What listings do not have is not asked for."""

    def document(self, path: str) -> bytes | None:
        """Read a document; return None if it does not exist. Raises CorruptError if it is too large."""
        folder, name = posixpath.split(path)
        return super().document(path) if name in self.listed(folder) else None


class _Building:
    """Collects the tensors of a checkpoint, the files, and what is wrong."""

    def __init__(self, source: Source) -> None:
        self.source, self.store = source, source.store
        self.documents = Documents(source.store)
        self.problems: list[Problem] = []
        self.unreadable: dict[str, str] = {}
        self.stored: dict[str, TensorSpec] = {}
        self.keys: dict[str, Key] = {}
        self.grids: dict[str, GridFragments] = {}  # of arrays in folders
        self.scalars: dict[Key, Any] = {}
        self.others: dict[str, list[str]] = {}  # reason -> arrays that are no tensors
        self.files: dict[str, FileInfo | None] = {}

    # -- items

    def item(self, folder: str, names: Mapping[str, Entry], base: tuple[str, ...]) -> _Item:
        tree = read_tree(self.documents, folder, names, self.problems)
        item = _Item(folder, base, names, tree)
        if AGGREGATE in names and not names[AGGREGATE].is_dir:
            self.aggregate(item)
        processes = sorted(filter(PROCESS.fullmatch, names))
        if MANIFEST in names:
            item.database = read_database(self.store, folder)
        elif processes:
            found = [read_database(self.store, posixpath.join(folder, name)) for name in processes]
            item.database = joined(folder, found)
            line = (
                f"{folder or 'the checkpoint'} has no {MANIFEST}, which is written last: the save was not finished. "
                f"What {len(processes):,} processes wrote ({some(processes)}) is read"
            )
            self.problems.append(Problem("unfinished-save", line, folder or None))
        return item

    def aggregate(self, item: _Item) -> None:
        """Add the leaves that are in the file of the tree."""
        path = posixpath.join(item.folder, AGGREGATE)
        found = read_aggregate(self.store, path)
        self.documents.files[path] = self.store.stat(path)
        for folder, key in found.names.items():
            item.tree.keys.setdefault(folder, key)
        item.tree.described = True
        for key, array in found.arrays.items():
            folder = ".".join(key)
            item.tree.keys.setdefault(folder, key)
            name = self._name(item, folder)
            self.stored[name] = replace(whole(name, extent_of(path, array)), rule=f"an array in {path}")
            self.keys[name] = (*item.base, *key)
        for key, value in found.values.items():
            if value is None or value in ({}, []):
                item.tree.types[key] = "None" if value is None else "Dict" if value == {} else "List"
            elif isinstance(value, str):
                item.tree.strings[".".join(key)] = value
            else:
                self.scalars[*item.base, *key] = value
                item.tree.values[".".join(key)] = value

    # -- arrays that are values of a database

    def values(self, item: _Item, database: Database) -> None:
        found: list[tuple[str, int, int]] = []  # folder of the array, version, number of its document
        for n, key in enumerate(database.keys):
            folder, _, name = key.rpartition("/")
            if name in _DOCUMENTS:
                found.append((folder, _DOCUMENTS[name], n))
        places = {n: value for _, _, n in found if isinstance(value := database.value(n), Place)}
        used = database.paths | {database.files[n] for n in set(database.numbers.tolist()) if n >= 0}
        self.files |= states_of(self.store, set(used))
        there = {n: place for n, place in places.items() if self._is_there(place)}
        announce_ranges(self.store, list(there.values()))
        texts: dict[int, bytes] = {}

        def one(n: int) -> None:
            place = there[n]
            texts[n] = bytes(self.store.read(place.path, place.offset, place.length))

        each(one, list(there))
        lost: dict[str, list[str]] = {}
        known: dict[tuple[bytes, int], Array] = {}
        for folder, version, n in found:
            where = f"{self.store.root}/{posixpath.join(item.folder, folder)} (a value of {MANIFEST})"
            name = self._name(item, folder)
            value = database.value(n)
            text = value if isinstance(value, bytes) else texts.get(n)
            if text is None:
                assert isinstance(value, Place)
                self.unreadable[name] = f"{self.store.root}/{value.path} lacks its document: truncated, or not copied"
                lost.setdefault(self.unreadable[name], []).append(name)
                continue
            array = known.get((text, version))  # (many arrays are alike)
            if array is None:
                array = self._array(parsed(text, where), version, where, name)
                if array is None:
                    continue
                if not unknown_codecs(array.packing):
                    known[text, version] = array
            held = Values.of(database, folder)
            grid = ValueFragments(
                array, folder, item.tree.whole, values=held, files={p: self.files[p] for p in held.paths()},
                root=posixpath.join(self.store.root, item.folder) if item.folder else self.store.root,
            )  # fmt: skip
            reason = grid.lacking()
            if reason:
                lost.setdefault(reason, []).append(name)
            self._add(item, folder, name, grid)
            number = scalar(array, grid)
            if number is not None:
                self.scalars[self.keys[name]] = number
        for reason, arrays in lost.items():
            line = f"{some(arrays)} cannot be read whole: {reason}"
            if reason.endswith(HERE):
                self.problems.append(Problem("missing-file", line, only_one(arrays)))
            else:
                self.problems.append(Problem("missing-elements", line, only_one(arrays)))

    def _is_there(self, place: Place) -> bool:
        info = self.files.get(place.path)
        return info is not None and place.length <= _FEW and place.offset + place.length <= info.size

    # -- arrays in folders

    def folders(self, plain: list[_Item]) -> None:
        tree = _Folders(self.store)
        found = nodes(tree)
        self.documents.files |= tree.documents
        for path, why in found.damaged.items():
            owner = self._owner(path, plain)
            if owner is not None:
                name = self._name(owner[0], owner[1])
                self.unreadable[name] = why
                self.problems.append(Problem("unreadable-file", why, path))
        for path, (version, about, _, at) in found.arrays.items():
            owner = self._owner(path, plain)
            if owner is None:
                continue
            item, folder = owner
            name = self._name(item, folder)
            array = self._array(about, version, tree.where(at), name)
            if array is None:
                continue
            keys = Keys(self.store, path, array.prefix, array.separator, len(array.shape))
            self.grids[path] = grid = GridFragments(array, path, item.tree.whole, keys=keys)
            self._add(item, folder, name, grid)

    @staticmethod
    def _owner(path: str, plain: list[_Item]) -> tuple[_Item, str] | None:
        for item in plain:
            if not item.folder:
                return item, path
            if path.startswith(f"{item.folder}/"):
                return item, path[len(item.folder) + 1 :]
        return None

    # -- both

    def _name(self, item: _Item, folder: str) -> str:
        return ".".join((*item.base, folder))

    def _array(self, about: Any, version: int, where: str, name: str) -> Array | None:
        """Parse the document of an array; None if it is no tensor or damaged, with a problem."""
        try:
            if not isinstance(about, dict):
                raise CorruptError(f"{where} is no document of an array: damaged")
            array = array_v3(about, where) if version == 3 else array_v2(about, where)
        except NoTensorError as e:
            self.others.setdefault(f"not in the view because of their {e.kind}", []).append(name)
            return None
        except CorruptError as e:
            self.unreadable[name] = str(e)
            self.problems.append(Problem("unreadable-file", str(e), name))
            return None
        for codec in unknown_codecs(array.packing):
            self.others.setdefault(f"cannot be read, because lazyckpt lacks their codec {codec!r:.60}", []).append(name)
        return array

    def _add(self, item: _Item, folder: str, name: str, grid: GridFragments) -> None:
        key = item.tree.keys.get(folder)
        axes = item.tree.partitions.get(folder)
        how = f"an array of Orbax, sharded over ({axes})" if axes is not None else "an array of Orbax"
        try:
            self.stored[name] = spec_of(name, grid, how)
        except LazyckptError as e:
            self.unreadable[name] = str(e)
            self.problems.append(Problem("unreadable-file", str(e), name))
            return
        self.keys[name] = (*item.base, *(key if key is not None else folder.split(".")))


def _read(source: Source) -> Index:
    building = _Building(source)
    store, problems = source.store, building.problems
    meta: dict[str, Any] = {}
    if is_tree(source.entries):
        found = {"": source.entries}
    else:
        found = items(source)
    if not any(map(is_tree, found.values())):
        raise MissingFileError(_empty(source))
    names = (TREE, MANIFEST, SHARDING, STRINGS)
    wanted = [posixpath.join(item, name) for item, listed_ in found.items() for name in names if name in listed_]
    announce(store, [*wanted, *([STEP] if STEP in source.entries else [])], WHOLE)
    folders = [posixpath.join(item, ARRAYS) for item, listed_ in found.items() if ARRAYS in listed_]
    announce_folders(store, folders)
    trees = [name for name, entries in found.items() if is_tree(entries)]
    handlers = of_step(source, building.documents, meta, problems)
    held: list[_Item] = []
    for folder in trees:
        base = (folder,) if len(trees) > 1 else ()
        try:
            held.append(building.item(folder, found[folder], base))
        except (CorruptError, MissingFileError) as e:
            if len(trees) == 1:
                raise
            problems.append(cannot_read(folder, e, ", its tensors are lost"))
            building.unreadable[folder] = str(e)
    for item in held:
        if item.database is not None:
            building.values(item, item.database)
    plain = [item for item in held if item.database is None]
    if plain:
        building.folders(plain)
    for folder in found.keys() - set(trees):
        json_item(building.documents, posixpath.join(folder, document(folder, found[folder])), meta, problems)
    other_items(source, building.documents, [name for name in handlers if name not in found], meta, problems)
    return _index(building, held, meta)


def _empty(source: Source) -> str:
    return (
        f"{source.where} is a folder of Orbax without a tree of arrays ({TREE}, {MANIFEST}): the save was not "
        "finished, or the checkpoint was not copied whole"
    )


def _index(building: _Building, held: list[_Item], meta: dict[str, Any]) -> Index:
    stored, problems = building.stored, building.problems
    order = {".".join((*i.base, k)): n for n, (i, k) in enumerate((i, k) for i in held for k in i.tree.keys)}
    stored = {name: stored[name] for name in sorted(stored, key=lambda name: (order.get(name, len(order)), name))}
    names = {building.keys[name]: name for name in stored}
    # what is listed and lost tells where the weights are, too
    found = named(dict.fromkeys([*((*i.base, *key) for i in held for key in i.tree.keys.values()), *names]))
    problems += found.problems
    states = {
        state: {name: renamed(stored[names[key]], name) for name, key in table.items() if key in names}
        for state, table in found.states.items()
        if state == WEIGHTS or any(key in names for key in table.values())
    }
    _described(building, held, meta)
    unread = _unread(building, found.prefix)
    steps = {value for key, value in building.scalars.items() if "step" in key[-2:]}
    step = steps.pop() if len(steps) == 1 else None
    if type(step) is int and step >= 0:
        meta.setdefault("step", step)
    axes = [mesh for item in held for mesh in item.tree.axes]
    axes = [mesh for n, mesh in enumerate(axes) if mesh not in axes[:n]]
    if axes:
        meta["axes"] = axes[0] if len(axes) == 1 else axes
    problems += [
        Problem("unsupported-tensor", f"{len(arrays):,} arrays {reason}: {some(arrays)}", only_one(arrays))
        for reason, arrays in building.others.items()
    ]
    files: Mapping[str, FileInfo] = {
        **building.documents.files,
        **{path: info for path, info in building.files.items() if info is not None},
    }
    index = Index(
        format="orbax",
        states=states,
        files=files,
        stored=stored,
        meta=meta,
        mesh=mesh_of(axes[0]) if len(axes) == 1 else Index("", {}, {}).mesh,
        problems=tuple(problems),
        unreadable=unread,
    )
    if not building.grids:
        return index
    chunks = listed(building.store, files, building.grids)
    many = ChunkFiles(building.store, files, chunks, list(building.grids.values()))
    return replace(index, files=many, watched=files, listed=chunks)


def _described(building: _Building, held: list[_Item], meta: dict[str, Any]) -> None:
    """Add what the documents say of leaves that are no tensors, and compare the tree with the arrays."""
    empty: dict[str, str] = {}
    strings: dict[str, str] = {}
    random: dict[str, str] = {}
    for item in held:
        start = "".join(f"{part}." for part in item.base)
        if item.tree.values:
            meta.setdefault("values", {}).update({start + name: value for name, value in item.tree.values.items()})
        strings |= {start + name: text for name, text in item.tree.strings.items()}
        random |= {start + name: how for name, how in item.tree.random.items()}
        empty |= {start + ".".join(key): kind for key, kind in item.tree.types.items() if kind != "string"}
        if item.tree.custom:
            meta.setdefault("custom_metadata", item.tree.custom)
        there = {name.removeprefix(start) for name in (*building.stored, *building.unreadable)}
        others = {name.removeprefix(start) for names in building.others.values() for name in names}
        lost = [start + name for name in item.tree.keys if name not in there and name not in others]
        if lost:
            line = f"{TREE} lists {some(lost)}, and there is no such array: not finished, or not copied whole"
            building.problems.append(Problem("missing-tensor", line, only_one(lost)))
            for name in lost:
                building.unreadable[name] = f"{building.source.where} has no array {name}, which {TREE} lists"
        if not item.tree.described:
            line = f"there is no {TREE}: the names of the arrays are those of their folders, split at dots"
            building.problems.append(Problem("missing-metadata", line, item.folder or None))
    if strings:
        meta["strings"] = strings
    if empty:
        meta["empty"] = empty
    if random:
        meta["random_keys"] = random


def _unread(building: _Building, prefix: Key) -> dict[str, str]:
    """Return the names that cannot be read, those of weights as the view has them."""
    start = "".join(f"{part}." for part in prefix)
    return {name.removeprefix(start): why for name, why in building.unreadable.items()}


READER = Reader("orbax", "Orbax checkpoints of JAX (OCDBT, or Zarr arrays in folders)", recognises, _read)
