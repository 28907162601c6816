"""OCDBT databases: the keys of the newest version, and where the value of each is.

A database is a folder with ``manifest.ocdbt`` and data files, which hold values and the nodes of a B+tree. Orbax writes
one for each process (``ocdbt.process_N/``) and, when all are finished, one over all of them, whose nodes refer to the
values of the others. Opening reads the manifest and all nodes, no values.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.index import FileInfo
from ...errors import CorruptError, MissingFileError
from ...io.containers.needs import WHOLE
from ...io.pool import each
from ...io.storage.access import present
from ...io.storage.base import Entry, Store
from ..shared.announce import announce, announce_folders, announce_ranges, listing
from .nodes import Interior, Leaf, Ref, manifest, node

MANIFEST = "manifest.ocdbt"
_LONGEST = 1 << 26  # bytes of a manifest
_NODE = 1 << 30  # bytes of a node
_DEPTH = 32  # maximum height of a tree
_MANY = 1 << 26  # maximum number of keys


class Place(NamedTuple):
    """Where a value is in a file."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Database:
    """The keys of a database, in order, and their values as columns."""

    folder: str
    keys: list[str]
    lengths: NDArray[np.int64]
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    inline: dict[int, bytes]
    files: list[str]
    nodes: dict[int, str]
    """For each key with a value in a node, the number of the key -> the file of the node."""
    paths: frozenset[str]
    """The files of the manifest and the nodes."""

    def __post_init__(self) -> None:
        count, numbers = len(self.keys), self.numbers
        if not len(self.lengths) == len(numbers) == len(self.offsets) == count:
            raise ValueError("the columns of a database are of different lengths")
        if count and not (numbers.min() >= -1 and numbers.max() < len(self.files)):
            raise ValueError("a value of a database is in a file that there is not")
        if not self.inline.keys() >= set(np.flatnonzero(numbers < 0).tolist()):
            raise ValueError("a database lacks values")

    def value(self, at: int) -> Place | bytes:
        """Return the value of a key, by its number, or where it is."""
        number = int(self.numbers[at])
        if number < 0:
            return self.inline[at]
        return Place(self.files[number], int(self.offsets[at]), int(self.lengths[at]))

    def part(self, first: int, last: int) -> Database:
        """Return a database with some of the keys, and only what describes their values."""
        numbers = self.numbers[first:last]
        used = [n for n in np.unique(numbers).tolist() if n >= 0]
        table = np.full(len(self.files) + 1, -1, np.int64)
        table[used] = np.arange(len(used))
        inside = range(first, last)
        return Database(
            self.folder,
            self.keys[first:last],
            self.lengths[first:last],
            table[numbers],
            self.offsets[first:last],
            {n - first: self.inline[n] for n in inside if n in self.inline},
            [self.files[n] for n in used],
            {n - first: self.nodes[n] for n in inside if n in self.nodes},
            frozenset(sorted(self.paths)[:1]),
        )

    def below(self, folder: str) -> tuple[int, int]:
        """Return the first and the last number, plus one, of the keys in a folder ("" for all)."""
        if not folder:
            return 0, len(self.keys)
        return bisect_left(self.keys, f"{folder}/"), bisect_left(self.keys, f"{folder}0")  # "0" follows "/"


_FEW = 64  # values of an array, up to which a set is faster than numpy


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The values of the keys in one folder of a database, by the rest of their keys."""

    database: Database
    folder: str
    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= len(self.database.keys):
            raise ValueError("a database does not have these keys")

    @classmethod
    def of(cls, database: Database, folder: str) -> Values:
        """Return the values below a folder."""
        return cls(database, folder, *database.below(folder))

    def get(self, key: str) -> Place | bytes | None:
        """Return the value of a key, or where it is; None if there is no such key."""
        at = self._at(key)
        return None if at is None else self.database.value(at)

    def node(self, key: str) -> str:
        """Return the file of the node that has the value of a key."""
        at = self._at(key)
        return "" if at is None else self.database.nodes.get(at, "")

    def __reduce__(self) -> tuple[Any, ...]:
        return Values, (self.database.part(self.first, self.last), self.folder, 0, self.last - self.first)

    def _at(self, key: str) -> int | None:
        full = f"{self.folder}/{key}" if self.folder else key
        keys = self.database.keys
        at = bisect_left(keys, full, self.first, self.last)
        return at if at < self.last and keys[at] == full else None

    def __iter__(self) -> Iterator[str]:
        skip = len(self.folder) + 1 if self.folder else 0
        for key in self.database.keys[self.first : self.last]:
            yield key[skip:]

    def paths(self) -> set[str]:
        """Return the files that hold values."""
        part = self.database.numbers[self.first : self.last]
        used = set(part.tolist()) if len(part) <= _FEW else np.unique(part).tolist()
        return {self.database.files[n] for n in used if n >= 0}


def read_database(store: Store, folder: str) -> Database:
    """Read the keys of the newest version of a database.

    Parameters
    ----------
    store
        The store of the checkpoint.
    folder
        The database's folder.

    Raises
    ------
    MissingFileError
        The manifest, or the file of a node, is not there.
    CorruptError
        They are damaged.
    FormatError
        They are of an unknown version.
    """
    path = posixpath.join(folder, MANIFEST)
    read = {path}
    found = manifest(_whole(store, path), f"{store.root}/{path}")
    if found.numbered:
        names = sorted(name for name in listing(store, folder) if name.startswith("manifest.0"))
        if not names:
            raise MissingFileError(
                f"{store.root}/{path} refers to numbered manifests, and there are none: copied whole?"
            )
        path = posixpath.join(folder, names[-1])
        read.add(path)
        found = manifest(_whole(store, path), f"{store.root}/{path}")
    if not found.versions:
        raise CorruptError(f"{store.root}/{path} has no version: damaged")
    newest = found.versions[-1]
    leaves = [] if newest.node is None else _leaves(store, folder, newest.node, newest.height, read)
    return _joined(folder, leaves, frozenset(read), f"{store.root}/{path}")


def _whole(store: Store, path: str) -> bytes:
    info = present(store, path)
    if info is None:
        raise MissingFileError(f"{store.root}/{path} is not there: is the whole checkpoint here?")
    if info.size > _LONGEST:
        raise CorruptError(f"{store.root}/{path} has {info.size:,} bytes: no manifest is so large")
    return bytes(store.read(path, 0, info.size))


def _leaves(store: Store, folder: str, root: Ref, height: int, read: set[str]) -> list[tuple[bytes, str, Leaf]]:
    """Return the leaves of a tree in order, each with the prefix of its keys and its file; add files to ``read``."""
    if height > _DEPTH:
        raise CorruptError(f"{store.root}/{folder}: a B+tree of height {height}: damaged")
    level: list[tuple[bytes, Ref]] = [(b"", root)]
    while True:
        places = [(posixpath.join(folder, ref.path), ref) for _, ref in level]
        _look(store, {posixpath.dirname(path) for path, _ in places})
        announce_ranges(store, [(path, ref.offset, ref.length) for path, ref in places])
        read.update(path for path, _ in places)
        decoded: dict[int, Leaf | Interior] = {}

        def one(
            n: int, places: list[tuple[str, Ref]] = places, h: int = height, to: dict[int, Leaf | Interior] = decoded
        ) -> None:
            path, ref = places[n]
            where = f"{store.root}/{path}, the node of the B+tree at byte {ref.offset:,},"
            info = present(store, path)
            if info is None:
                raise MissingFileError(
                    f"{store.root}/{path} is not there: it has a node of the B+tree of this checkpoint"
                )
            if ref.length > _NODE or ref.offset + ref.length > info.size:
                raise CorruptError(f"{where} is beyond the end of the file ({info.size:,} bytes): truncated")
            to[n] = node(bytes(store.read(path, ref.offset, ref.length)), h, ref.base, where)

        each(one, range(len(level)))
        below: list[tuple[bytes, Ref]] = []
        found: list[tuple[bytes, str, Leaf]] = []
        for n, (prefix, _) in enumerate(level):
            part = decoded[n]
            if isinstance(part, Leaf):
                found.append((prefix, places[n][0], part))
                continue
            for key, shared, child in zip(part.keys, part.shared, part.children, strict=True):
                below.append((prefix + key[:shared], child))
        if not height:
            return found
        if len(below) > _MANY:
            raise CorruptError(f"{store.root}/{folder}: a B+tree of more than {_MANY:,} nodes: damaged")
        level, height = below, height - 1


def _look(store: Store, folders: set[str]) -> None:
    """List folders behind a network: one request tells the states of all files in a folder."""
    if isinstance(store, Store) and store.is_remote and store.listable:
        announce_folders(store, sorted(folders))
        for folder in sorted(folders):
            listing(store, folder)


def _joined(folder: str, leaves: list[tuple[bytes, str, Leaf]], read: frozenset[str], where: str) -> Database:
    keys: list[str] = []
    files: dict[str, int] = {}
    inline: dict[int, bytes] = {}
    nodes: dict[int, str] = {}
    columns: list[tuple[NDArray[np.int64], ...]] = []
    for prefix, path, leaf in leaves:
        base = len(keys)
        try:
            start = prefix.decode()
            keys += [start + key.decode() for key in leaf.keys]
        except UnicodeDecodeError:
            raise CorruptError(f"{where}: a key of its B+tree is no text: damaged, or not written by Orbax") from None
        own = [files.setdefault(posixpath.join(folder, file), len(files)) for file in leaf.files]
        table = np.array([*own, -1], np.int64)  # the last is that of number -1
        columns.append((leaf.lengths, table[leaf.numbers], leaf.offsets))
        inline |= {base + n: value for n, value in leaf.inline.items()}
        nodes |= dict.fromkeys((base + n for n in leaf.inline), path)
    if any(a >= b for a, b in pairwise(keys)):  # code points have the order of their UTF-8 bytes
        raise CorruptError(f"{where}: the keys of its B+tree are not in order: damaged")
    none = np.zeros(0, np.int64)
    lengths, numbers, offsets = map(np.concatenate, zip(*columns, strict=True)) if columns else (none, none, none)
    return Database(folder, keys, lengths, numbers, offsets, inline, list(files), nodes, read)


def joined(folder: str, databases: list[Database]) -> Database:
    """Return one database with the keys of those of several processes, which share no chunk; of documents that several
    have, one is kept. The keys of a folder are those of the processes, in order."""
    found: dict[str, tuple[int, int]] = {}
    for number, database in enumerate(databases):
        for at, key in enumerate(database.keys):
            found.setdefault(key, (number, at))
    files: dict[str, int] = {}
    keys = sorted(found)
    lengths, numbers, offsets = (np.zeros(len(keys), np.int64) for _ in range(3))
    inline: dict[int, bytes] = {}
    nodes: dict[int, str] = {}
    for n, key in enumerate(keys):
        number, at = found[key]
        database = databases[number]
        value = database.value(at)
        if isinstance(value, bytes):
            numbers[n], lengths[n], inline[n], nodes[n] = -1, len(value), value, database.nodes[at]
        else:
            numbers[n], offsets[n], lengths[n] = files.setdefault(value.path, len(files)), value.offset, value.length
    paths = frozenset().union(*(database.paths for database in databases))
    return Database(folder, keys, lengths, numbers, offsets, inline, list(files), nodes, paths)


def states_of(store: Store, paths: set[str]) -> dict[str, FileInfo | None]:
    """Return the state of each file, from listings where there are some; None for a file that is not there."""
    if not store.listable:
        announce(store, sorted(paths), WHOLE)
    _look(store, {posixpath.dirname(path) for path in paths})
    listed: dict[str, Mapping[str, Entry]] = {}
    for path in paths:
        folder = posixpath.dirname(path)
        if store.listable and folder not in listed:
            listed[folder] = listing(store, folder)
    found: dict[str, FileInfo | None] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        if store.listable:
            entry = listed[folder].get(name)
            found[path] = None if entry is None or entry.is_dir else entry.info
        else:
            found[path] = present(store, path)
    return found
