"""A single file of torch.save: a state dict, or a whole training checkpoint with its model and optimizers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from math import prod
from typing import Any, Self

from ..core.box import Shape, hull
from ..core.columns import ExtentSpecs
from ..core.dtypes import DType
from ..core.index import Index
from ..core.specs import Specs, TensorSpec, some_of, whole
from ..errors import Problem
from ..io.containers.pickle.audit import dangers
from ..io.containers.pickle.plain import Plain
from ..io.containers.pickle.rebuild import StoredTensor
from ..io.containers.torch_file import Pickles, TorchFile, is_torch_file, read_torch_file
from ..io.containers.zip_directory import Record, sizes_of
from ..io.storage.base import Store
from .reader import Reader, Source
from .shared.announce import announce, looking_ahead
from .shared.composites import composed, tied_wholes, wholes_of
from .shared.members import Member, references_in, together
from .shared.paths import paths

_KEPT = 4 << 20  # bytes of pickles whose contents are kept for the raw namespace
_BLOAT = 1 << 20  # bytes; less than that is mostly alignment and not worth a problem


class FileSpecs(Specs):
    """The tensors of a file as stored. ``table`` maps their names to their records."""

    __slots__ = ("_file",)

    def __init__(self, file: TorchFile, table: dict[str, StoredTensor]) -> None:
        super().__init__(table)
        self._file = file

    def make(self, name: str, entry: StoredTensor) -> TensorSpec:
        return spec_of(self._file, entry, name)

    def kind(self, name: str) -> tuple[Shape, DType]:
        tensor = self.table[name]
        return tensor.shape, tensor.dtype

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(self._file, table)


def specs_of(file: TorchFile, plain: Plain, prefix: str = "") -> Specs:
    """Return the specs of all tensors of a file as stored. Raises CorruptError for a tensor beyond the file's bytes."""
    table = {prefix + key: tensor for key, tensor in plain.tensors.items()} if prefix else plain.tensors
    extents = file.extents(table)
    return FileSpecs(file, table) if extents is None else ExtentSpecs(extents)


def spec_of(file: TorchFile, tensor: StoredTensor, name: str) -> TensorSpec:
    """Return the spec of a tensor of a file as stored. Raises CorruptError if the tensor exceeds the file's bytes."""
    if tensor.storage is None:
        return TensorSpec(name, tensor.shape, tensor.dtype, (), rule=tensor.note)
    return whole(name, file.extent(tensor, name))


def ties(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the names whose tensors share all their memory with an earlier tensor: later name -> first name."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, t in tensors.items():
        if t.storage is None or 0 in t.shape:
            continue
        owner = first.setdefault((t.storage.key, t.offset, t.shape, t.strides, t.dtype, t.conj, t.neg), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def crc_of(records: Mapping[str, Record], tensor: StoredTensor) -> int | None:
    """Return the CRC-32 of a tensor's bytes; None unless the tensor is its whole storage."""
    key = whole_storage(records, tensor)
    return None if key is None else records[key].crc


def whole_storage(records: Mapping[str, Record], tensor: StoredTensor) -> str | None:
    """Return the key of the storage that a tensor is the whole of; None if there is none."""
    if tensor.storage is None:
        return None
    record = records.get(tensor.storage.key)
    if record is None or record.nbytes != prod(tensor.shape) * tensor.dtype.itemsize:
        return None
    return tensor.storage.key


def warnings(path: str, file: TorchFile, plain: Plain) -> list[Problem]:
    """Return the problems of a file: dangerous globals of its pickle, tensors that are not stored plainly, bloat."""
    notes = [*dangers(file.globals), *plain.notes]
    return [*(note.prefixed(path, path) for note in notes), *bloat(path, file, used_bytes(plain))]


def used_bytes(plain: Plain) -> dict[str, int]:
    """Return an upper limit of the bytes of each storage that tensors use, by storage key."""
    used: dict[str, int] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for t in plain.tensors.values():
        if t.storage is not None:
            kind = t.shape, t.strides, t.dtype
            size = sizes.get(kind)
            if size is None:
                size = sizes[kind] = min(hull(t.shape, t.strides), prod(t.shape)) * t.dtype.itemsize
            key = t.storage.key
            used[key] = used.get(key, 0) + size
    return used


def bloat(path: str, file: TorchFile, used: Mapping[str, int]) -> list[Problem]:
    """Return a problem if tensors use little of a file: torch.save writes whole storages, even for small views."""
    sizes = sizes_of(file.records)
    held = sum(sizes)
    needed = sum(map(min, map(used.get, file.records, repeat(0)), sizes))
    if held - needed < max(_BLOAT, held // 10):
        return []
    line = (
        f"{path}: its storages hold {held:,} bytes, its tensors use {needed:,} of them: it was saved from views of "
        "larger tensors (clone them before torch.save)"
    )
    return [Problem("oversized-file", line, path)]


def member(store: Store, path: str, prefix: str = "") -> Member:
    """Return the content of one file, whose raw names start with ``prefix``. Raises the errors of `read_torch_file`."""
    file = read_torch_file(store, path)
    return _member(store, path, file, _plain(store, file, prefix), prefix)


def _plain(store: Store, file: TorchFile, prefix: str = "") -> Plain:
    compose = partial(composed, store, file)
    return Plain(file.root, f"{store.root}/{file.path}", file.pickle_size, prefix, compose=compose)


def _member(store: Store, path: str, file: TorchFile, plain: Plain, prefix: str = "") -> Member:
    rest = plain.rest if isinstance(plain.rest, dict) else {"": plain.rest}
    meta = plain.meta if plain.attributes else rest

    specs = specs_of(file, plain, prefix)
    inner = {prefix + key for key in (*plain.inner, *plain.parts)}
    wholes = wholes_of(plain, specs, prefix)
    keys = {prefix + key: path for key, path in plain.paths.items()}
    same = ties(plain.tensors)
    return Member(
        format="torch",
        tensors={key: (path, wholes.get(key) or specs[key]) for key, path in keys.items() if key not in inner},
        objects=list(paths(rest, 4)),
        meta=meta,
        named=references_in(meta),
        files={path: file.info},
        stored=specs if inner else None,
        aliases={prefix + alias: prefix + owner for alias, owner in (same | tied_wholes(plain, same)).items()},
        problems=warnings(path, file, plain) + shards(store, path, plain),
    )


def shards(store: Store, path: str, plain: Plain) -> list[Problem]:
    """Return a problem if a file holds one rank's shards of tensors, which formats/ranks merges."""
    kinds = [kind.rpartition(".") for kind in plain.subclasses]
    if not any(m.startswith("torch.distributed.") and name in ("DTensor", "ShardedTensor") for m, _, name in kinds):
        return []
    line = f"{path}: it holds one rank's shards of tensors: open its folder, {store.root}, for the whole ones"
    return [Problem("part-of-checkpoint", line, path)]


def _read(source: Source) -> Index:
    store, path = source.store, source.path
    file = read_torch_file(store, path)
    plain = _plain(store, file)
    if not _is_flat(plain):
        return together("torch", [((), _member(store, path, file, plain))])
    stored, aliases = specs_of(file, plain), ties(plain.tensors)
    index = Index(
        format="torch",
        states={"weights": some_of(stored, lambda name: name not in aliases) if aliases else stored},
        files={path: file.info},
        stored=stored,
        aliases=aliases,
        meta=plain.meta if plain.attributes or isinstance(plain.rest, dict) else {"": plain.rest},
        problems=(*warnings(path, file, plain), *shards(store, path, plain)),
    )
    if isinstance(stored, ExtentSpecs) and not aliases:
        del file, plain  # most of the memory of opening
        stored.compact()
    return index


def _is_flat(plain: Plain) -> bool:
    """Return whether a file is a plain state dict, the most common kind: `sort` would rename and move nothing."""
    if plain.inner or plain.parts or not all(len(path) == 1 and path[0] == name for name, path in plain.paths.items()):
        return False
    return not any(str(path[0]).startswith("param_groups") for path in paths(plain.rest, 4))


def _recognises(source: Source) -> bool:
    # files of other kinds with these endings are read here, too: the error then says what they are
    return bool(source.path) and (is_torch_file(source.head) or _like_torch(source))


def _like_torch(source: Source) -> bool:
    return source.path.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pt2")) or source.head[:1] == b"\x80"


READER = Reader("torch", "files of torch.save (.pt, .pth, .bin, .ckpt)", _recognises, _read)


# -- The raw namespace of formats with many rank files: all tensors of all files, under the names of their files.


_RANK_FILE = re.compile(r"\.(ckpt|pt(-[0-9]+\.[0-9]+)?)$")  # FastPersist appends which of how many ranks wrote the file


def stored_specs(store: Store, index: Index) -> dict[str, TensorSpec]:
    """Return the tensors of all torch.save files of a checkpoint: ``file/dotted.path`` -> spec. Reads the pickles that
    the index has not kept."""
    # a Megatron rank is a folder; other writers put all files of a tag into one, except for universal checkpoints
    least = 2 if index.format in ("megatron", "megatron-nemo") else 1
    names = _distinct_ends([path for path in index.files if _RANK_FILE.search(path)], least)
    return _read_stored(store, names, index.indexed)


def _distinct_ends(paths: Sequence[str], least: int) -> dict[str, str]:
    """Shorten each path to its last parts: as many as make it unique, but at least ``least``.

    >>> _distinct_ends(["t/zero/a/fp32.pt", "t/zero/b/fp32.pt", "t/model.pt"], 1)
    {'t/model.pt': 'model.pt', 't/zero/a/fp32.pt': 'a/fp32.pt', 't/zero/b/fp32.pt': 'b/fp32.pt'}
    """
    names: dict[str, str] = {}
    left, parts = list(paths), least
    while left:
        ends = {path: "/".join(path.split("/")[-parts:]) for path in left}
        counts = Counter(ends.values())
        names |= {path: end for path, end in ends.items() if counts[end] == 1 or end == path}
        left, parts = [path for path in left if path not in names], parts + 1
    return names


class Indexed(dict[str, TorchFile]):
    """Rank files by path, as they were read for the index, so that the raw namespace does not read them again.

    Only the first 4 MiB of pickles are kept. A pickled copy is empty."""

    def __init__(self) -> None:
        self._roots: set[int] = set()  # ranks with equal pickles share their content
        self._left = _KEPT

    def keep(self, file: TorchFile) -> None:
        """Add a file if there is room for the content of its pickle."""
        if id(file.root) not in self._roots:
            if file.pickle_size > self._left:
                return
            self._left -= file.pickle_size
            self._roots.add(id(file.root))
        self[file.path] = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Indexed, ()


def _read_stored(store: Store, names: Mapping[str, str], indexed: Mapping[str, TorchFile]) -> dict[str, TensorSpec]:
    """Read the tensors of files; ``names`` maps each path to the prefix of the names of its tensors."""
    specs: dict[str, TensorSpec] = {}
    pickles = Pickles()
    with looking_ahead(store) as store:
        announce(store, [path for path in names if path not in indexed])
        for path, name in names.items():
            file = indexed.get(path) or read_torch_file(store, path, pickles)
            specs |= specs_of(file, Plain(file.root, path, file.pickle_size), f"{name}/")
    return specs


class RankStored(Mapping[str, TensorSpec]):
    """The raw namespace of some files as a mapping that is computed on first use."""

    def __init__(self, store: Store, paths: tuple[str, ...], indexed: Indexed) -> None:
        self._store = store
        self._paths = paths
        self._indexed = indexed
        self._known: dict[str, TensorSpec] | None = None

    @property
    def parts(self) -> tuple[Store, tuple[str, ...]]:
        """The store and the files."""
        return self._store, self._paths

    def _all(self) -> dict[str, TensorSpec]:
        if self._known is None:
            self._known = _read_stored(self._store, {path: path for path in self._paths}, self._indexed)
        return self._known

    def __getitem__(self, name: str) -> TensorSpec:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
