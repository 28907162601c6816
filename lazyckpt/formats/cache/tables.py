"""Tables of tensors as columns: some twenty bytes and the name for each, and a document for what is not one plain run.

A tensor that is read from the cache is described when it is looked up, so the cost of opening does not depend on what
the descriptions consist of.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape, c_strides
from ...core.columns import Extents, ExtentSpecs
from ...core.dtypes import DType
from ...core.extents import Extent
from ...core.index import FileInfo
from ...core.specs import Expr, Fragment, Gathered, Place, Specs, TensorSpec, whole
from .values import Decoder, Encoder, NotKept

_DOCUMENT = -1  # in place of the number of a file: the offset is the number of a document


class _More(NamedTuple):
    """What few tensors have. ``name`` is that of the spec, if the table has another."""

    rule: str = ""
    stored_as: str = ""
    name: str | None = None


class TableEncoder:
    """Tables of tensors to columns. ``files`` are those that plain runs may be in."""

    def __init__(self, encoder: Encoder, files: Mapping[str, FileInfo]) -> None:
        self._encoder = encoder
        self._known = files
        self._paths: dict[str, int] = {}
        self._kinds: dict[tuple[Shape, DType], int] = {}
        self._more: dict[_More, int] = {_More(): 0}
        self._columns = array("i"), array("i"), array("q"), array("i")  # kind, file, offset, more
        self._rows: dict[tuple[int, str], int] = {}
        self._bases: dict[int, int] = {}
        self._tables: dict[int, Any] = {}
        self._held: list[Any] = []  # keeps ids valid

    def table(self, specs: Mapping[str, TensorSpec]) -> Any:
        """Return a table as JSON. Raises NotKept."""
        found = self._tables.get(id(specs))
        if found is None:
            if type(specs) is not dict and not isinstance(specs, Specs):
                raise NotKept(f"names that are decided on use ({type(specs).__name__})")
            rows = self._numbers(specs)
            self._held.append(specs)
            first = int(rows[0]) if len(rows) else 0
            ranged = bool((np.diff(rows) == 1).all())
            numbers = ["R", first, first + len(rows), 1] if ranged else self._encoder.value(rows)
            found = self._tables[id(specs)] = [self._encoder.texts(list(specs)), numbers]
        return found

    @property
    def columns(self) -> Any:
        """All rows as JSON."""
        value = self._encoder.value
        kinds = [[list(shape), dtype.name] for shape, dtype in self._kinds]
        columns = [value(np.frombuffer(column, np.dtype(column.typecode))) for column in self._columns]
        return [kinds, self._encoder.texts(list(self._paths)), list(map(list, self._more)), columns]

    def _numbers(self, specs: Mapping[str, TensorSpec]) -> NDArray[np.int64]:
        if isinstance(specs, ExtentSpecs):
            base = self._extents(specs.extents)
            return np.fromiter(specs.table.values(), np.int64, len(specs)) + base
        if isinstance(specs, Gathered):
            files = list(dict(zip(map(id, specs.table.values()), specs.table.values(), strict=True)).values())
            if all(isinstance(file, ExtentSpecs) for file in files):
                numbers = [self._numbers(file) for file in files]
                if sum(map(len, files)) == len(specs) and all(map(str.__eq__, specs, chain.from_iterable(files))):
                    return np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
                bases = {id(file): self._extents(file.extents) for file in files}
                found = (bases[id(file)] + file.table[name] for name, file in specs.table.items())
                return np.fromiter(found, np.int64, len(specs))
        return np.fromiter((self._row(name, spec) for name, spec in specs.items()), np.int64, len(specs))

    def _extents(self, extents: Extents) -> int:
        """Add the tensors of a file; return the row of the first one."""
        base = self._bases.get(id(extents))
        if base is None:
            if extents.path not in self._known:
                raise NotKept(f"tensors of {extents.path}, which is no file of the checkpoint")
            base = self._bases[id(extents)] = len(self._columns[0])
            self._held.append(extents)
            kinds = np.array([self._kinds.setdefault(kind, len(self._kinds)) for kind in extents.kinds], np.int32)
            count = len(extents.offsets)
            file = self._paths.setdefault(extents.path, len(self._paths))
            kind, files, offsets, more = self._columns
            kind.frombytes(kinds[np.array(extents.numbers)].astype(np.int32).tobytes() if count else b"")
            files.frombytes(np.full(count, file, np.int32).tobytes())
            offsets.frombytes(np.array(extents.offsets, np.int64).tobytes())
            more.frombytes(bytes(4 * count))
        return base

    def _row(self, name: str, spec: TensorSpec) -> int:
        key = id(spec), name
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._columns[0])
            self._held.append(spec)
            kind, files, offsets, more = self._columns
            kind.append(self._kinds.setdefault((spec.shape, spec.dtype), len(self._kinds)))
            extent = self._plain(spec)
            if extent is None:
                files.append(_DOCUMENT)
                offsets.append(self._encoder.document(spec.fragments if spec.expr is None else spec.expr))
            else:
                files.append(self._paths.setdefault(extent.path, len(self._paths)))
                offsets.append(extent.offset)
            about = _More(spec.rule, spec.stored_as, None if spec.name == name else spec.name)
            more.append(self._more.setdefault(about, len(self._more)))
        return row

    def _plain(self, spec: TensorSpec) -> Extent | None:
        """Return the extent of a tensor that `whole` describes, else None."""
        fragments = spec.fragments
        if type(fragments) is not tuple or len(fragments) != 1:
            return None
        extent = fragments[0].extent
        if type(extent) is not Extent or extent.path not in self._known:
            return None
        return extent if spec == _whole(spec, extent.path, extent.offset, spec.shape, spec.dtype) else None


def _whole(like: TensorSpec, path: str, offset: int, shape: Shape, dtype: DType) -> TensorSpec:
    extent = Extent(path, offset, dtype, shape, c_strides(shape))
    fragments = (Fragment(extent, shape),)
    return TensorSpec(like.name, shape, dtype, fragments, rule=like.rule, stored_as=like.stored_as)


class Rows:
    """The columns of all tables of an entry.

    Raises ValueError if a number in them is out of range, or a run is outside its file.
    """

    def __init__(self, decoder: Decoder, columns: Any, files: Mapping[str, FileInfo]) -> None:
        kinds, paths, more, arrays = columns
        self._decoder = decoder
        self.kinds: list[tuple[Shape, DType]] = [(tuple(shape), decoder.value(["D", name])) for shape, name in kinds]
        self._paths: Sequence[str] = decoder.value(paths)
        self._more: list[_More] = [_More(*about) for about in more]
        self.kind, self._file, self._offset, self._extra = (decoder.value(column) for column in arrays)
        self.renames = any(about.stored_as for about in self._more)
        self._check([files[path].size for path in self._paths])

    def _check(self, sizes: list[int]) -> None:
        count = len(self.kind)
        columns = (
            (self.kind, len(self.kinds), 0),
            (self._file, len(sizes), _DOCUMENT),
            (self._extra, len(self._more), 0),
        )
        for column, most, least in columns:
            if len(column) != count or (count and not (least <= column.min() and column.max() < most)):
                raise ValueError("a number in a table is out of range")
        if len(self._offset) != count or (count and self._offset.min() < 0):
            raise ValueError("an offset is negative")
        nbytes = np.array([prod(shape) * dtype.itemsize for shape, dtype in self.kinds] or [0], np.int64)
        ends = np.array([*sizes, np.iinfo(np.int64).max], np.int64)  # the last one: of documents
        plain = self._file >= 0
        if (nbytes[self.kind] > ends[self._file] - np.where(plain, self._offset, 0))[plain].any():
            raise ValueError("a tensor is outside its file")

    def __len__(self) -> int:
        return len(self.kind)

    def stored_as(self, row: int) -> str:
        """Return the name that a tensor was saved under, if different."""
        return self._more[int(self._extra[row])].stored_as

    def place(self, row: int) -> Place | None:
        """Return where the tensor of a row is; None for one that a document describes."""
        file = self._file[row]
        if file == _DOCUMENT:
            return None
        return Place(self._paths[file], int(self._offset[row]), *self.kinds[self.kind[row]])

    def spec(self, row: int, name: str) -> TensorSpec:
        """Return the tensor of a row."""
        shape, dtype = self.kinds[self.kind[row]]
        more, file, offset = self._more[self._extra[row]], self._file[row], int(self._offset[row])
        if file == _DOCUMENT:
            fragments = self._decoder.document(offset)
        else:
            fragments = whole(name, Extent(self._paths[file], offset, dtype, shape, c_strides(shape))).fragments
        own = name if more.name is None else more.name
        expr = fragments if isinstance(fragments, Expr) else None
        held = () if expr is not None else fragments
        return TensorSpec(own, shape, dtype, held, rule=more.rule, stored_as=more.stored_as, expr=expr)


class KeptSpecs(Specs):
    """Tensors of the cache. ``names`` returns their names, ``numbers`` are their rows."""

    __slots__ = ("_names", "_numbers", "_rows", "_table")

    def __init__(
        self, rows: Rows, numbers: Sequence[int] | NDArray[np.int64], names: Callable[[], Sequence[str]]
    ) -> None:
        self._rows, self._numbers = rows, numbers
        self._names: Callable[[], Sequence[str]] | None = names
        self._table: dict[str, int] = {}
        self._made = {}

    @property
    def table(self) -> dict[str, int]:  # type: ignore[override]  # made on first use
        """Name -> row."""
        names = self._names
        if names is not None:
            numbers = self._numbers
            rows = numbers if isinstance(numbers, range) else np.asarray(numbers).tolist()
            self._table = dict(zip(names(), rows, strict=True))
            self._names = None
        return self._table

    def make(self, name: str, entry: int) -> TensorSpec:
        return self._rows.spec(entry, name)

    def kind(self, name: str) -> tuple[Shape, DType]:
        return self._rows.kinds[int(self._rows.kind[self.table[name]])]

    def place(self, name: str) -> Place | None:
        return self._rows.place(self.table[name])

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        rows = np.fromiter(self.table.values(), np.int64, len(self.table))
        used, places = np.unique(self._rows.kind[rows], return_inverse=True)
        numbers = [kinds.setdefault(self._rows.kinds[n], len(kinds)) for n in used.tolist()]
        found: NDArray[np.int64] = np.array(numbers, np.int64)[places]
        return found

    @property
    def renamed(self) -> Mapping[str, TensorSpec]:
        if not self._rows.renames:
            return {}
        found = ((self._rows.stored_as(row), name) for name, row in self.table.items())
        return _Renamed(self, {stored: name for stored, name in found if stored})

    def of(self, table: dict[str, Any]) -> Self:
        part = type(self)(self._rows, (), tuple)
        part._names, part._table = None, table
        return part

    def __len__(self) -> int:
        return len(self._table) if self._names is None else len(self._numbers)


class _Renamed(Mapping[str, TensorSpec]):
    """Tensors by the names that they were saved under."""

    def __init__(self, specs: KeptSpecs, names: dict[str, str]) -> None:
        self._specs, self._names = specs, names

    def __getitem__(self, stored: str) -> TensorSpec:
        return self._specs[self._names[stored]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def specs_of(decoder: Decoder, rows: Rows, table: Any) -> KeptSpecs:
    """Return the tensors of a table. Raises ValueError if it has rows that there are not."""
    names, numbers = table
    found = decoder.value(numbers)
    if isinstance(found, np.ndarray):
        fits = found.ndim == 1 and found.dtype.kind in "iu"
        ends = (found.min(), found.max()) if fits and len(found) else ()
    else:
        fits = isinstance(found, range)
        ends = (found[0], found[-1]) if fits and len(found) else ()
    if not fits or any(not 0 <= end < len(rows) for end in ends):
        raise ValueError("a table has rows that there are not")

    def read() -> Sequence[str]:
        texts: Sequence[str] = decoder.value(names)
        if len(texts) != len(found):
            raise ValueError(f"a table has {len(found):,} rows and {len(texts):,} names")
        return texts

    return KeptSpecs(rows, found, lambda: decoder.checked(read))
