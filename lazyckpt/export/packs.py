"""The small tensors of a hierarchy, packed: those of one state and dtype are one 1-d array (formats/zarr/packs.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from math import prod

import numpy as np

from ..core.box import Shape
from ..core.dtypes import DType
from ..core.packs import packed, packed_rows
from ..core.table import Ints
from ..core.units import size_in_bytes
from ..formats.zarr.documents import NAMES, Contents, Json, Part, Small
from ..formats.zarr.packs import described, listed, path_of
from ..io.storage.base import Store
from ..lazy import LazyArray
from ..namespace import columns_of

SMALL = 64 << 10  # tensors of up to this many bytes are packed by ``pack=True``


@dataclass(frozen=True, slots=True)
class Pack:
    """Tensors that are written as one array. ``members``: their names, shapes, and positions in the view, as the
    array's attributes list them."""

    tensor: LazyArray
    members: Json


class Choice:
    """The choice of the tensors that are packed: those of up to ``most`` bytes, of one store."""

    __slots__ = ("_most", "_stores")

    def __init__(self, most: int) -> None:
        self._most = most
        self._stores: list[Store] = []  # a pack is read from one store: that of the first tensor

    def __call__(self, tensor: LazyArray) -> bool:
        """Return whether a tensor is packed."""
        spec = tensor.spec
        if spec.expr is not None or tensor._selection is not None or not self._fits(spec.shape, spec.dtype):
            return False
        return self._is_of(tensor.store)

    def rows(self, part: Part[LazyArray]) -> Ints | None:
        """Return the positions of the packed tensors of a part, without looking at each; None if that cannot be."""
        columns = columns_of(part)
        if columns is None or not len(columns):
            return None
        fits = np.array([self._fits(shape, dtype) for shape, dtype in columns.kinds], bool)
        rows: Ints = np.flatnonzero(fits[np.array(columns.numbers)])
        return rows if not len(rows) or self._is_of(part[next(iter(part))].store) else rows[:0]

    def _fits(self, shape: Shape, dtype: DType) -> bool:
        return dtype in NAMES and prod(shape) * dtype.itemsize <= self._most

    def _is_of(self, store: Store) -> bool:
        if not self._stores:
            self._stores.append(store)
        return store is self._stores[0]


def chooser(pack: int | str | bool | None) -> Choice | None:
    """Return the choice of the tensors that are packed; None if none is. Raises DataError for what is no size."""
    if pack is None or pack is False:
        return None
    return Choice(SMALL if pack is True else size_in_bytes(pack))


def packs(found: Contents[LazyArray]) -> dict[str, Pack]:
    """Return the packs of the small tensors, by path."""
    made = {}
    for group, small in found.small.items():
        for pack in _of_rows(group, small, small.rows) if small.rows is not None else _of_tensors(group, small):
            made[pack.tensor.spec.name] = pack
    return made


def _of_tensors(group: str, small: Small[LazyArray]) -> Iterator[Pack]:
    kinds: dict[DType, list[tuple[int, str, LazyArray]]] = {}
    for entry in zip(small.positions, small.names, small.tensors, strict=True):
        kinds.setdefault(entry[2].spec.dtype, []).append(entry)
    for dtype, entries in kinds.items():
        positions, names, tensors = zip(*entries, strict=True)
        specs, where = [tensor.spec for tensor in tensors], path_of(group, dtype)
        members = described(names, [spec.shape for spec in specs], positions)
        yield Pack(LazyArray(tensors[0].store, packed(where, specs)), members)


def _of_rows(group: str, small: Small[LazyArray], rows: Ints) -> Iterator[Pack]:
    """Yield the same packs from the columns of one file; no tensor is looked at by itself."""
    columns = columns_of(small.part)
    if columns is None or not len(rows):
        return
    store = small.part[small.names[0]].store
    kinds = np.array(columns.numbers, np.int64)[rows]
    present, firsts = np.unique(kinds, return_index=True)
    shapes: dict[DType, dict[Shape, int]] = {}  # dtype -> its shapes and their numbers, in order
    number = np.zeros(len(columns.kinds), np.int64)  # of the shape, by kind
    for kind in present[np.argsort(firsts)].tolist():
        shape, dtype = columns.kinds[kind]
        of = shapes.setdefault(dtype, {})
        number[kind] = of.setdefault(shape, len(of))
    for dtype, of in shapes.items():
        here = np.array([kind[1] is dtype for kind in columns.kinds], bool)[kinds]
        names, positions = small.names, small.positions
        if not here.all():
            names, positions = list(compress(names, here.tolist())), list(compress(positions, here.tolist()))
        members = listed(names, list(of), number[kinds[here]].tolist(), positions)
        where = path_of(group, dtype)
        yield Pack(LazyArray(store, packed_rows(where, columns, rows[here])), members)
