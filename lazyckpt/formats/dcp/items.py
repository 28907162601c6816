"""The items of `.metadata`: where the bytes of each chunk and object are.

The items of a large file come as runs of columns (columns.py), without an object for each.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...core.box import Shape
from ...io.containers.pickle.memo import Changes
from ..shared.paths import inside
from .columns import DIMS, Columns, Ints, Texts


class Item(NamedTuple):
    """``length`` bytes of a file at ``offset``, packed with ``codecs``, which are listed in the order of unpacking."""

    path: str
    offset: int
    length: int
    codecs: tuple[str, ...] = ()


class Items(Mapping[tuple[str, Shape | None], Item]):
    """The items of a checkpoint: a dict of ``others``, and the items of chunks as columns.

    ``bounds`` has the rows of each key; ``starts`` are the offsets of the chunks in the tensor, ``paths`` the numbers
    of the files, ``offsets`` and ``lengths`` the bytes in them, and ``names`` the paths by number.
    """

    def __init__(
        self,
        others: dict[tuple[str, Shape | None], Item],
        bounds: Mapping[str, tuple[int, int]],
        starts: Ints,
        dims: Ints,
        paths: Ints,
        offsets: Ints,
        lengths: Ints,
        names: list[str],
    ) -> None:
        self.others, self.bounds, self.names = others, bounds, names
        self.starts, self.dims, self.paths, self.offsets, self.lengths = starts, dims, paths, offsets, lengths

    def row(self, n: int) -> Item:
        """Return the item of a row."""
        return Item(self.names[int(self.paths[n])], int(self.offsets[n]), int(self.lengths[n]))

    def places_differ(self) -> bool:
        """Return whether all items begin at bytes of their own."""
        others = {(item.path, item.offset) for (_, start), item in self.others.items() if start is not None}
        rows = np.lexsort((self.offsets, self.paths))
        paths, offsets = self.paths[rows], self.offsets[rows]
        return not others and not ((paths[1:] == paths[:-1]) & (offsets[1:] == offsets[:-1])).any()

    def __getitem__(self, index: tuple[str, Shape | None]) -> Item:
        key, start = index
        if index in self.others or start is None or key not in self.bounds:
            return self.others[index]
        first, stop = self.bounds[key]
        here = slice(first, stop)
        dims = self.starts.shape[1]
        if len(start) > dims:
            raise KeyError(index)
        wanted = (*start, *[0] * dims)[:dims]
        same = (self.dims[here] == len(start)) & (self.starts[here] == np.array(wanted, np.int64)).all(1)
        found = np.flatnonzero(same)  # of equal keys the last one counts, as in torch's dict
        if not len(found):
            raise KeyError(index)
        return self.row(first + int(found[-1]))

    def __iter__(self) -> Iterator[tuple[str, Shape | None]]:
        yield from self.others
        for key, (first, stop) in self.bounds.items():
            rows = zip(self.starts[first:stop].tolist(), self.dims[first:stop].tolist(), strict=True)
            yield from {(key, tuple(start[:dims])): None for start, dims in rows}

    def __len__(self) -> int:
        return sum(1 for _ in self)


_MIX = np.array(
    [0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85], np.int64
)


def table_of(columns: Columns, others: dict[tuple[str, Shape | None], Item], normal: dict[str, str]) -> Items:
    """Return the items of runs as columns. Those of ``others`` that have a row of their own are moved there."""
    numbers, texts = Texts(), Texts()
    paths: dict[str, int] = {}
    single = [
        (numbers.of(key), start, paths.setdefault(item.path, len(paths)), item)
        for (key, start), item in others.items()
        if start is not None and 0 < len(start) <= DIMS and not item.codecs
    ]
    count = len(single)
    moved = list(paths)
    pairs, used = columns.pairs, columns.pairs.memo >= 0
    keys, files = columns.texts(pairs, "key", numbers), columns.texts(pairs, "path", texts)
    starts, dims, offsets, lengths = (
        np.concatenate([np.array(own, np.int64).reshape(count, *pairs[name].shape[1:]), pairs[name][used]])
        for name, own in (
            ("start_of", [(*start, *[0] * DIMS)[:DIMS] for _, start, _, _ in single]),
            ("start_of_dims", [len(start) for _, start, _, _ in single]),
            ("offset", [item.offset for *_, item in single]),
            ("length", [item.length for *_, item in single]),
        )
    )
    keys = np.append(np.array([n for n, _, _, _ in single], np.int64), keys)
    files = np.append(np.array([n for _, _, n, _ in single], np.int64), files + len(moved))
    for path in texts.numbers:
        if not inside(path):
            raise Changes
        normal.setdefault(path, posixpath.normpath(path))
    with np.errstate(over="ignore"):  # a hash of key and offset: of equal items only the machine finds the last one
        mixed = (keys * _MIX[0]) ^ (starts * _MIX[1:]).sum(1)
    if repeats(mixed):
        raise Changes
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    edges = [*np.flatnonzero(np.append(True, keys[1:] != keys[:-1])).tolist(), len(keys)]
    texts_of = list(numbers.numbers)
    bounds = {texts_of[int(keys[a])]: (a, b) for a, b in pairwise(edges)}
    rest = {
        (key, start): item
        for (key, start), item in others.items()
        if start is None or item.codecs or not 0 < len(start) <= DIMS
    }
    if any(start is not None and key in bounds for key, start in rest):
        raise Changes
    names = [*moved, *(normal[path] for path in texts.numbers)]
    return Items(
        rest, bounds, starts[order, : int(dims.max())], dims[order].astype(np.int8), files[order].astype(np.int32),
        offsets[order], lengths[order], names,
    )  # fmt: skip


def objects_of(columns: Columns, normal: dict[str, str]) -> dict[tuple[str, Shape | None], Item]:
    """Return the items of runs that are objects. Raises Changes if a key is there twice, or a path leads outside."""
    table, keys, paths = columns.objects, Texts(), Texts()
    numbers = [columns.texts(table, "key", keys).tolist(), columns.texts(table, "path", paths).tolist()]
    names, files = list(keys.numbers), list(paths.numbers)
    for path in files:
        if not inside(path):
            raise Changes
        normal.setdefault(path, posixpath.normpath(path))
    used = table.memo >= 0
    rows = zip(*numbers, table["offset"][used].tolist(), table["length"][used].tolist(), strict=True)
    found: dict[tuple[str, Shape | None], Item] = {
        (names[key], None): Item(normal[files[path]], offset, length) for key, path, offset, length in rows
    }
    if len(found) < used.sum():  # (of equal keys only the machine finds the last one)
        raise Changes
    return found


def repeats(values: Ints) -> bool:
    """Return whether two values are equal."""
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())
