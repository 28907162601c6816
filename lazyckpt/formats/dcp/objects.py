"""The objects of a distributed checkpoint other than tensors; each is an embedded file of torch.save.

Writer: torch/distributed/checkpoint/planner_helpers.py `_create_write_items` (everything that is not a tensor), state
dicts flattened by _traverse.py `traverse_state_dict`. torch unpickles the objects; here they are read as data. A
checkpoint may have tens of thousands (a learning rate for each parameter), so they are read on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.dtypes import U8
from ...core.extents import Archive, Extent
from ...core.specs import TensorSpec, whole
from ...errors import CorruptError, FormatError, LazyckptError, Problem
from ...io.containers.pickle.audit import dangers
from ...io.containers.pickle.plain import Path, Plain, TensorRef
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import Pickles, read_torch_file
from ...io.pool import each
from ...io.reading.packed import unpack
from ...io.storage.base import Store
from ...io.storage.in_memory import Memory
from ..shared.announce import announce_ranges
from ..shared.paths import put
from .items import Item

_ROOM = 64 << 20  # a packed object may unpack to _ROOM bytes plus _TIMES its packed size
_TIMES = 100
_FEW = 16  # objects of an item that an overview reads


class Object(NamedTuple):
    """An object that has been read: the object without its tensors, the tensors by raw name, and its problems."""

    rest: Any
    tensors: dict[str, TensorSpec]
    notes: list[Problem]


class Objects:
    """All objects of a checkpoint. ``items`` maps each key to its path in the state dict and its bytes."""

    def __init__(self, store: Store, items: Mapping[str, tuple[Path, Item]]) -> None:
        self.items = dict(items)
        self._store = store
        self._read: dict[str, Object] = {}
        self._pickles = Pickles()

    @property
    def store(self) -> Store:
        """The store that the objects are read from."""
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        return {"items": self.items, "_store": self._store, "_read": self._read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pickles = Pickles()

    def __getitem__(self, key: str) -> Object:
        """Return the object of a key. Raises CorruptError, DataError (unknown codec), and the errors of reading."""
        found = self._read.get(key)
        if found is None:
            found = self._read[key] = self._load(key)
        return found

    def whole(self, key: str) -> Any:
        """Return an object with a `TensorRef` in place of each tensor. Raises as `__getitem__`."""
        return self._load(key, lambda inner, _: TensorRef(f"{key}.{inner}" if inner else key)).rest

    def _load(self, key: str, keep: Callable[[str, StoredTensor], Any] | None = None) -> Object:
        item = self.items[key][1]
        within = None
        store, window = self._store, (item.offset, item.length)
        if item.codecs:
            room = _ROOM + _TIMES * item.length
            within = Archive(item.path, item.offset, item.length, U8, (room,), item.codecs)
            data = unpack(store, within)
            store, window = Memory(store, item.path, data), (0, len(data))
        try:
            file = read_torch_file(store, item.path, self._pickles, window)
            plain = Plain(file.root, f"{self._store.root}/{item.path}", file.pickle_size, f"{key}.", keep)
            tensors = {}
            for inner, tensor in plain.tensors.items():
                name = f"{key}.{inner}" if inner else key
                if tensor.storage is None:
                    tensors[name] = TensorSpec(name, tensor.shape, tensor.dtype, (), rule=tensor.note)
                else:
                    tensors[name] = whole(name, _moved(file.extent(tensor, name), within))
        except (CorruptError, FormatError) as e:
            raise CorruptError(f"{key!r}, the object at byte {item.offset:,} of {item.path}: {e}") from None
        notes = [*dangers(file.globals, "load this checkpoint with torch"), *plain.notes]
        return Object(plain.meta, tensors, [n.prefixed(f"{item.path}: {key!r}", item.path) for n in notes])

    def check(self, keys: Collection[str] | None = None) -> list[Problem]:
        """Read all objects (those of ``keys``) that have not been read, remove those that cannot be read, and return
        the problems."""
        failed: dict[str, LazyckptError] = {}
        wanted = {k: self.items[k][1] for k in (self.items if keys is None else keys) if k not in self._read}

        def read(key: str) -> None:
            try:
                self[key]
            except LazyckptError as e:
                failed[key] = e

        announce_ranges(self._store, ((item.path, item.offset, item.length) for item in wanted.values()))
        each(read, [key for key, item in wanted.items() if not item.codecs])
        for key in [key for key, item in wanted.items() if item.codecs]:
            read(key)  # one at a time, because their unpacked sizes are unknown
        problems: list[Problem] = []
        for key in wanted:
            if key in failed:
                path = self.items.pop(key)[1].path
                line = f"an object cannot be read and is not in view.meta: {failed[key]}"
                problems.append(Problem("unreadable-object", line, path))
            else:
                problems += self[key].notes
        return problems

    @property
    def tensors(self) -> Iterator[tuple[str, Path, TensorSpec]]:
        """The tensors inside objects as (raw name, path, spec). Reads all objects that have not been read yet."""
        for key, (path, _) in self.items.items():
            for name, spec in self[key].tensors.items():
                inner = name[len(key) + 1 :]
                yield name, (*path, inner) if inner else path, spec


def _moved(extent: Extent, within: Archive | None) -> Extent:
    return extent if within is None else replace(extent, within=within)


class Meta(Mapping[str, Any]):
    """The objects as the nested dicts and lists that were saved. Each top-level item is read on first use.

    ``tensors`` are (raw name, path) pairs of tensors that appear as `TensorRef`. ``paths`` has the paths of all keys of
    the checkpoint in the saved state dict, those of tensors and of objects."""

    def __init__(
        self,
        objects: Objects,
        tensors: Iterable[tuple[str, Path]] = (),
        paths: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self.paths = dict(paths)
        self._objects = objects
        self._below: dict[str, list[tuple[Path, str]]] = {}
        self._made: dict[str, Any] = {}
        self._convert: Callable[[Any], Any] | None = None
        for path, key in [*((path, key) for key, (path, _) in objects.items.items()), *((p, k) for k, p in tensors)]:
            self._below.setdefault(str(path[0]), []).append((path, key))

    def __getitem__(self, top: str) -> Any:
        if top not in self._made:
            root: dict[Any, Any] = {}
            for path, key in self._below[top]:
                value = self._objects[key].rest if key in self._objects.items else TensorRef(key)
                put(root, (top, *path[1:]), value)
            self._made[top] = self._given(root.get(top))
        return self._made[top]

    @property
    def parts(self) -> tuple[Objects, Mapping[str, list[tuple[Path, str]]], Mapping[str, Path]]:
        """What `of` makes an equal mapping from; nothing of it has been read."""
        return self._objects, self._below, self.paths

    @staticmethod
    def of(objects: Objects, below: dict[str, list[tuple[Path, str]]], paths: Mapping[str, Path]) -> Meta:
        """Return the mapping of `parts`."""
        meta = Meta(objects, (), paths)
        meta._below = below
        return meta

    def outline(self) -> dict[str, Any]:
        """Return the top-level items that consist of few objects each: what is quick to read for an overview."""
        return {top: self[top] for top, below in self._below.items() if len(below) <= _FEW}

    def check(self) -> list[Problem]:
        """Read the objects of `outline`, remove those that cannot be read, and return the problems. (A mapping that is
        made of the same objects later lacks what was removed.)"""
        few = [key for below in self._below.values() if len(below) <= _FEW for _, key in below]
        return self._objects.check([key for key in few if key in self._objects.items])

    @property
    def objects(self) -> Collection[str]:
        """The keys of objects other than tensors."""
        return self._objects.items.keys()

    def object(self, key: str) -> Any:
        """Return the object of a raw key, with a `TensorRef` in place of each tensor."""
        return self._given(self._objects.whole(key))

    def _given(self, value: Any) -> Any:
        return value if self._convert is None else self._convert(value)

    def converted(self, convert: Callable[[Any], Any]) -> Meta:
        """Return a mapping of the same objects that applies ``convert`` to each when it is read."""
        meta = Meta.of(self._objects, self._below, self.paths)
        meta._convert = convert
        return meta

    def __iter__(self) -> Iterator[str]:
        return iter(self._below)

    def __len__(self) -> int:
        return len(self._below)

    def __repr__(self) -> str:
        return f"<meta: {', '.join(self)}>"


class Stored(Mapping[str, TensorSpec]):
    """The raw namespace: the tensors of the checkpoint and those inside its objects. Listing it reads the objects."""

    def __init__(self, tensors: Mapping[str, TensorSpec], objects: Objects) -> None:
        self._tensors = tensors
        self._objects = objects
        self._whole: Mapping[str, TensorSpec] | None = None

    @property
    def parts(self) -> tuple[Mapping[str, TensorSpec], Objects]:
        """The arguments that make an equal mapping."""
        return self._tensors, self._objects

    def _all(self) -> Mapping[str, TensorSpec]:
        if self._whole is None:
            self._whole = {**{name: spec for name, _, spec in self._objects.tensors}, **self._tensors}
        return self._whole

    def __getitem__(self, name: str) -> TensorSpec:
        return self._tensors[name] if name in self._tensors else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
