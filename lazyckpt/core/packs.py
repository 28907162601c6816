"""Many small tensors as one: a 1-d tensor that consists of their ravels, one after the other. No I/O.

Of tensors that lie in one piece only a few numbers are kept, from which plans are made: a hundred thousand tensors of
one file are read as few runs.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, overload

import numpy as np

from .box import Selection, Shape, c_strides
from .columns import Extents
from .dtypes import DType
from .extents import Extent
from .flat import Flat, interval, joined, plain
from .fragments import Find, fragments_of
from .specs import Fragment, TensorSpec, whole
from .table import Ints, Table


def packed(name: str, specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the tensor that consists of the ravels of ``specs``, of one dtype and combined by "first", in order."""
    ends = np.zeros(len(specs) + 1, np.int64)
    np.cumsum([spec.numel for spec in specs], out=ends[1:])
    shape, dtype = (int(ends[-1]),), specs[0].dtype
    columns = _columns(specs, ends)
    if columns is not None:
        return TensorSpec(name, shape, dtype, InOnePiece(shape, columns))
    fragments: list[Fragment] = []
    firsts = [0]
    for at, spec in zip(ends.tolist(), specs, strict=False):
        if spec.numel:
            fragments += joined(spec, shape, [(at, interval(spec, 0, spec.numel))]).fragments
        firsts.append(len(fragments))
    return TensorSpec(name, shape, dtype, Pack(shape, fragments, ends, np.array(firsts)))


def packed_rows(name: str, extents: Extents, rows: Ints) -> TensorSpec:
    """Return what `packed` does for tensors of one file and one dtype, given their numbers."""
    kinds = np.array(extents.numbers, np.int64)[rows]
    counts = np.array([prod(shape) for shape, _ in extents.kinds], np.int64)[kinds]
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    shape, dtype = (int(ends[-1]),), extents.kinds[int(kinds[0])][1]
    held = counts > 0
    if not held.any():
        return TensorSpec(name, shape, dtype, Pack(shape, [], ends, np.zeros(len(ends), np.int64)))
    offsets, starts, stops = np.array(extents.offsets, np.int64)[rows][held], ends[:-1][held], ends[1:][held]
    strides = np.ones((len(offsets), 1), np.int64)
    files = np.zeros(len(offsets), np.int64)
    table = Table([extents.path], files, offsets, starts.reshape(-1, 1), stops.reshape(-1, 1), strides, dtype)
    return TensorSpec(name, shape, dtype, InOnePiece(shape, table))


class Packed(Flat):
    """The fragments of a pack."""

    __slots__ = ()

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of where the fragments are."""

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    @abstractmethod
    def __getitem__(self, n: Any) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pack(Packed):
    """The fragments of tensors of any kind.

    ``ends`` has the first element of each tensor, and the number of all elements; ``firsts`` the number of the first
    fragment of each tensor, and the number of all fragments.
    """

    shape: Shape = field()  # (else its default would be the property of the base class)
    fragments: list[Fragment]
    ends: Ints
    firsts: Ints

    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        """Yield the fragments of those tensors that have elements lo to hi."""
        if lo < hi:
            first = int(np.searchsorted(self.ends, lo, "right")) - 1
            last = int(np.searchsorted(self.ends, hi, "left"))
            yield from self.fragments[int(self.firsts[first]) : int(self.firsts[last])]

    def digest(self) -> str:
        return hashlib.sha256(repr(self.fragments).encode("utf-8", "surrogatepass")).hexdigest()

    def __len__(self) -> int:
        return len(self.fragments)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        return self.fragments[n]


@dataclass(frozen=True, slots=True, eq=False)
class InOnePiece(Packed):
    """The fragments of tensors that are each raw elements in one piece: a row of ``columns`` for each, in order."""

    shape: Shape = field()  # (else its default would be the property of the base class)
    columns: Table

    def _rows(self, lo: int, hi: int) -> range:
        """Return the rows of the tensors that have elements lo to hi."""
        if lo >= hi:
            return range(0)
        stops = self.columns.stops[:, 0]
        return range(int(np.searchsorted(stops, lo, "right")), int(np.searchsorted(stops, hi, "left")) + 1)

    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        return map(self._fragment, self._rows(lo, hi))

    def _fragment(self, n: int) -> Fragment:
        table = self.columns
        start, stop = int(table.starts[n, 0]), int(table.stops[n, 0])
        extent = Extent(
            table.paths[int(table.files[n])], int(table.offsets[n]), table.dtype, (stop - start,), (1,)
        )  # fmt: skip
        return Fragment(extent, self.shape, span=(start, stop))

    def table(self, want: Selection, find: Find | None = None) -> Table | None:
        rows = self._rows(int(want[0][0]), int(want[0][-1]) + 1)
        return self.columns.rows(slice(rows.start, rows.stop))

    def digest(self) -> str:
        table = self.columns
        found = hashlib.sha256(repr((table.paths, table.dtype)).encode("utf-8", "surrogatepass"))
        for column in (table.files, table.offsets, table.stops):
            found.update(column.tobytes())
        return found.hexdigest()

    def file_paths(self) -> set[str]:
        return set(self.columns.paths)

    @property
    def intact(self) -> bool:
        """True: there are no holes."""
        return True

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        rows = range(len(self))[n]
        return [self._fragment(row) for row in rows] if isinstance(rows, range) else self._fragment(rows)


def _columns(specs: Sequence[TensorSpec], ends: Ints) -> Table | None:
    """Return the places of tensors, without the empty ones; None if one of them is not raw elements in one piece, or
    if they differ in dtype."""
    numbers: dict[str, int] = {}
    files, offsets = [], []
    kinds: set[DType] = set()
    for spec in specs:
        if not spec.numel:
            continue
        extent = plain(spec.fragments)
        if extent is None or not extent.raw:
            return None
        kinds.add(extent.dtype)
        files.append(numbers.setdefault(extent.path, len(numbers)))
        offsets.append(extent.offset)
    if len(kinds) != 1:
        return None
    counts = np.diff(ends)
    stops = ends[1:][counts > 0].reshape(-1, 1)
    starts = ends[:-1][counts > 0].reshape(-1, 1)
    found = np.array(files, np.int64), np.array(offsets, np.int64)
    return Table(list(numbers), *found, starts, stops, np.ones_like(starts), kinds.pop())


def member(name: str, pack: TensorSpec, lo: int, shape: Shape, rule: str) -> TensorSpec:
    """Return the tensor of this shape whose ravel begins at element ``lo`` of a pack."""
    hi = lo + prod(shape)
    if lo == hi:
        return TensorSpec(name, shape, pack.dtype, (), rule=rule)
    near = tuple(fragments_of(pack.fragments).meeting((range(lo, hi),)))
    if len(near) == 1:
        fragment = near[0]
        start = fragment.parts[0].start[0] if fragment.parts is not None else 0
        extent = fragment.extent
        if isinstance(extent, Extent) and extent.raw and extent.strides == (1,):
            offset = extent.offset + (lo - start) * extent.dtype.itemsize
            extent = replace(extent, offset=offset, shape=shape, strides=c_strides(shape))
            return replace(whole(name, extent), rule=rule)
    part = interval(replace(pack, fragments=near), lo, hi)
    return replace(joined(pack, shape, [(0, part)]), name=name, rule=rule)
