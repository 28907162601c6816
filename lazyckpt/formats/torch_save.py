"""A single file of torch.save: a state dict, or a whole training checkpoint with its model and optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ..core.box import hull
from ..core.index import Index, TensorSpec, whole
from ..errors import Problem
from ..io.containers.pickle.audit import dangers
from ..io.containers.pickle.plain import Path, Plain, TensorRef
from ..io.containers.pickle.rebuild import StoredTensor
from ..io.containers.torch_file import Pickles, TorchFile, is_torch_file, read_torch_file
from ..io.containers.zip_directory import Record
from ..io.storage.base import Store
from .reader import Reader, Source
from .shared.members import Member, together
from .shared.paths import paths, put

_KEPT = 4 << 20  # bytes of pickles whose contents are kept for the raw namespace
_BLOAT = 1 << 20  # bytes; what is less is alignment, and not worth a line


def specs_of(file: TorchFile, plain: Plain, prefix: str = "") -> dict[str, TensorSpec]:
    """Every tensor of a file as it is stored. Raises CorruptError if the file cannot hold one of them."""
    return {prefix + key: spec_of(file, tensor, prefix + key) for key, tensor in plain.tensors.items()}


def spec_of(file: TorchFile, tensor: StoredTensor, name: str) -> TensorSpec:
    """One tensor of a file as it is stored. Raises CorruptError if the file cannot hold it."""
    if tensor.storage is None:
        return TensorSpec(name, tensor.shape, tensor.dtype, (), rule=tensor.note)
    return whole(name, file.extent(tensor, name))


def ties(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Names whose tensors are one and the same memory: later name -> first name."""
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
    """The checksum of a tensor's bytes, where it is all of its storage."""
    if tensor.storage is None:
        return None
    record = records.get(tensor.storage.key)
    if record is None or record.nbytes != prod(tensor.shape) * tensor.dtype.itemsize:
        return None
    return record.crc


def warnings(path: str, file: TorchFile, plain: Plain) -> list[Problem]:
    """What a user should know of a file: harm that its pickle names, tensors that are not what they seem."""
    notes = [*dangers(file.globals), *plain.notes]
    return [*(note.prefixed(path, path) for note in notes), *bloat(path, file, used_bytes(plain))]


def used_bytes(plain: Plain) -> dict[str, int]:
    """Storage key -> bytes of it that tensors use, at most."""
    used: dict[str, int] = {}
    for t in plain.tensors.values():
        if t.storage is not None:
            key = t.storage.key
            used[key] = used.get(key, 0) + min(hull(t.shape, t.strides), prod(t.shape)) * t.dtype.itemsize
    return used


def bloat(path: str, file: TorchFile, used: Mapping[str, int]) -> list[Problem]:
    """A problem if no tensor uses much of a file: torch.save writes whole storages, also for a small view."""
    held = sum(record.nbytes for record in file.records.values())
    needed = sum(min(used.get(key, 0), record.nbytes) for key, record in file.records.items())
    if held - needed < max(_BLOAT, held // 10):
        return []
    line = (
        f"{path}: its storages hold {held:,} bytes, its tensors use {needed:,} of them: it was saved from views of "
        "larger tensors (clone them before torch.save)"
    )
    return [Problem("oversized-file", line, path)]


def member(store: Store, path: str, prefix: str = "") -> Member:
    """What one file holds; ``prefix`` stands before its raw names. Raises as `read_torch_file`."""
    file = read_torch_file(store, path)
    plain = Plain(file.root, f"{store.root}/{path}", file.pickle_size, prefix)
    rest = plain.rest if isinstance(plain.rest, dict) else {"": plain.rest}
    meta = plain.meta if plain.attributes else rest

    def named(rest: Sequence[tuple[Path, str]]) -> Mapping[str, Any]:
        for place, key in rest:
            put(meta, place, TensorRef(key))
        return meta

    specs = specs_of(file, plain, prefix)
    inner = {prefix + key for key in plain.inner}
    return Member(
        format="torch",
        tensors={key: (plain.paths[key.removeprefix(prefix)], spec) for key, spec in specs.items() if key not in inner},
        objects=list(paths(rest, 4)),
        meta=meta,
        named=named,
        files={path: file.info},
        stored=specs if inner else None,
        aliases={prefix + alias: prefix + owner for alias, owner in ties(plain.tensors).items()},
        problems=warnings(path, file, plain) + shards(store, path, plain),
    )


def shards(store: Store, path: str, plain: Plain) -> list[Problem]:
    """A problem if a file holds one rank's pieces of tensors (formats/ranks)."""
    kinds = [kind.rpartition(".") for kind in plain.subclasses]
    if not any(m.startswith("torch.distributed.") and name in ("DTensor", "ShardedTensor") for m, _, name in kinds):
        return []
    line = f"{path}: it holds one rank's shards of tensors: open its folder, {store.root}, for the whole ones"
    return [Problem("part-of-checkpoint", line, path)]


def _read(source: Source) -> Index:
    return together("torch", [((), member(source.store, source.path))])


def _recognises(source: Source) -> bool:
    # every other kind of file ends here too: its error says what it is
    return bool(source.path) and (is_torch_file(source.head) or _like_torch(source))


def _like_torch(source: Source) -> bool:
    return source.path.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pt2")) or source.head[:1] == b"\x80"


READER = Reader("torch", "files of torch.save (.pt, .pth, .bin, .ckpt)", _recognises, _read)


# -- The raw namespace of formats that are made of many rank files: every tensor of every file, under the file's
# name.


def stored_specs(store: Store, index: Index) -> dict[str, TensorSpec]:
    """``file/dotted.path`` -> spec, for all files of torch.save that the checkpoint consists of. Reads the pickles of
    those that the index has not kept."""
    # a rank of Megatron's is a folder; others keep the files of a tag side by side, but for universal checkpoints
    least = 2 if index.format == "megatron" else 1
    names = _told_apart([path for path in index.files if path.endswith(".pt")], least)
    return _read_stored(store, names, index.indexed)


def _told_apart(paths: Sequence[str], least: int) -> dict[str, str]:
    """Path -> as many of its last parts as no other path has, at least so many.

    >>> _told_apart(["t/zero/a/fp32.pt", "t/zero/b/fp32.pt", "t/model.pt"], 1)
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
    """Rank files by path as they were indexed, so that the raw namespace takes no second look at them. Of many large
    pickles only the first are kept, and a copy in another process has none."""

    def __init__(self) -> None:
        self._roots: set[int] = set()  # ranks whose pickles are the same share what is in them
        self._left = _KEPT

    def keep(self, file: TorchFile) -> None:
        """Add a file, if there is room for what is in its pickle."""
        if id(file.root) not in self._roots:
            if file.pickle_size > self._left:
                return
            self._left -= file.pickle_size
            self._roots.add(id(file.root))
        self[file.path] = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Indexed, ()


def _read_stored(store: Store, names: Mapping[str, str], indexed: Mapping[str, TorchFile]) -> dict[str, TensorSpec]:
    """``names``: path -> what the file's tensors stand under."""
    specs: dict[str, TensorSpec] = {}
    pickles = Pickles()
    for path, name in names.items():
        file = indexed.get(path) or read_torch_file(store, path, pickles)
        specs |= specs_of(file, Plain(file.root, path, file.pickle_size), f"{name}/")
    return specs


class RankStored(Mapping[str, TensorSpec]):
    """The same of some files only, made when it is first looked into."""

    def __init__(self, store: Store, paths: tuple[str, ...], indexed: Indexed) -> None:
        self._store = store
        self._paths = paths
        self._indexed = indexed
        self._known: dict[str, TensorSpec] | None = None

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
