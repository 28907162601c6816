"""Tensors as data: what files contribute to them, or how they are computed from others; and tables of them by name.

All objects are picklable, hold no handles and do no I/O.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .box import Shape
from .dtypes import DType, dtype_of
from .extents import Extent, Hole, Packed
from .placement import Part, Rank


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one file contributes to a tensor.

    Attributes
    ----------
    extent
        The bytes in the file, or a `Hole` if the file is missing or unreadable.
    local_shape
        The shape of the rank-local array, in elements.
    parts
        The blocks of the rank-local array and their positions in the tensor. None: the whole array, at the origin.
    span
        The interval of the rank-local array's C-order ravel, in elements, that the extent holds; the extent's last
        dimension then has length hi - lo, all others have length 1. None: the whole array, in the extent's shape.
    rank
        The rank that wrote the file, if known.
    axes
        For each dimension of the tensor the dimension of the rank-local array, or None for a new dimension of length 1
        (an expert among others). A dimension of the rank-local array may be left out if the parts have only one index
        of it (a layer of a stack). None: the dimensions are the same.
    """

    extent: Extent | Packed | Hole
    local_shape: Shape
    parts: tuple[Part, ...] | None = None
    span: tuple[int, int] | None = None
    rank: Rank | None = None
    axes: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor.

    Attributes
    ----------
    name
        The tensor's name.
    shape, dtype
        The tensor's shape, in elements, and its dtype.
    fragments
        What the files contribute: a tuple, or `Fragments`, which creates them on demand and so stores once what a
        thousand ranks share. Of an element that several of them hold, the first one is read.
    rule
        How the fragments form the tensor, and the evidence for it, for `explain`; empty if there was nothing to decide.
    stored_as
        The name that the tensor was saved under, if different.
    expr
        How the elements are computed from other tensors; ``fragments`` is then empty. None: the files hold them.
    """

    name: str
    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    rule: str = ""
    stored_as: str = ""
    expr: Expr | None = None

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes, as read."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor in files, as an operand of an expression.

    Attributes
    ----------
    spec
        The tensor. It has fragments, no expression.
    source
        The number of the store that has the files, among the stores of the view (io/storage/joined.py). 0 in a view of
        one checkpoint.
    """

    spec: TensorSpec
    source: int = 0

    @property
    def shape(self) -> Shape:
        """The tensor's shape, in elements."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """The tensor's dtype."""
        return self.spec.dtype


@dataclass(frozen=True, slots=True)
class Expr:
    """A tensor that is computed from others, as data. `core.expr.make` creates it.

    Attributes
    ----------
    op
        The name of the operation (core/ops).
    inputs
        The operands: tensors in files, or other expressions.
    params
        The operation's parameters: numbers, strings, dtypes, None, and tuples of them.
    shape, dtype
        The shape, in elements, and the dtype of the result.
    kept
        Results of passes over whole operands that the operation needs before it computes the first block
        (`core.expr.Op.prepare`); filled by the first read.
    """

    op: str
    inputs: tuple[Expr | Input, ...]
    params: Mapping[str, Any] = field(hash=False)
    shape: Shape
    dtype: DType
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Place(NamedTuple):
    """Where a tensor is that is one run of plain values of one file, in C order.

    Attributes
    ----------
    path
        The file's path in the store.
    offset
        The first element's position in the file, in bytes.
    shape, dtype
        The tensor's shape and dtype.
    """

    path: str
    offset: int
    shape: Shape
    dtype: DType


def renamed(spec: TensorSpec, name: str) -> TensorSpec:
    """Return the tensor under another name. ``stored_as`` keeps the first name."""
    if name == spec.name:
        return spec
    stored = spec.stored_as or spec.name  # (not by `replace`, which takes three times as long)
    return TensorSpec(name, spec.shape, spec.dtype, spec.fragments, spec.rule, stored, spec.expr)


def whole(name: str, extent: Extent, rank: Rank | None = None) -> TensorSpec:
    """Return the spec of a tensor that is stored in one piece.

    Parameters
    ----------
    name
        The tensor's name.
    extent
        The bytes of the tensor, with its dtype and shape.
    rank
        The rank that wrote the file, if known.
    """
    return TensorSpec(name, extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))


class Specs(Mapping[str, TensorSpec]):
    """Tensors that are described when they are looked up, because a checkpoint may have a million of them.

    A subclass defines `make` and `kind`. A pickled copy is a plain dict.

    Parameters
    ----------
    table
        Name -> whatever describes the tensor.
    """

    __slots__ = ("_made", "table")

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self._made: dict[str, TensorSpec] = {}  # a tensor that is looked up twice has one description

    @abstractmethod
    def make(self, name: str, entry: Any) -> TensorSpec:
        """Return the spec of an entry of the table."""

    @abstractmethod
    def kind(self, name: str) -> tuple[Shape, DType]:
        """Return the shape and the dtype of a tensor. Raises KeyError."""

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor without making its spec; None if only its spec has it. Raises KeyError."""
        return None

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        """Return the number of every tensor's shape and dtype, and add new ones to ``kinds``. Much faster than asking
        for each."""
        found = (kinds.setdefault(self.kind(name), len(kinds)) for name in self.table)
        return np.fromiter(found, np.int64, len(self.table))

    @property
    def renamed(self) -> Mapping[str, TensorSpec]:
        """The tensors that were saved under other names, by those names."""
        return {}  # usually, what is described when it is looked up has its own name

    @abstractmethod
    def of(self, table: dict[str, Any]) -> Self:
        """Return the tensors of another table of the same files."""

    def only(self, table: dict[str, Any]) -> Self:
        """Return the tensors of a part of the table."""
        part = self.of(table)
        part._made = self._made
        return part

    def __getitem__(self, name: str) -> TensorSpec:
        entry = self.table[name]
        made = self._made.get(name)
        return self._made.setdefault(name, self.make(name, entry)) if made is None else made

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def keys(self) -> KeysView[str]:
        return self.table.keys()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class Gathered(Specs):
    """The tensors of several files. ``table`` maps each name to the tensors of its file."""

    __slots__ = ()

    def __getitem__(self, name: str) -> TensorSpec:
        found: TensorSpec = self.table[name][name]
        return found

    def make(self, name: str, entry: Mapping[str, TensorSpec]) -> TensorSpec:
        return entry[name]

    def kind(self, name: str) -> tuple[Shape, DType]:
        return kind_of(self.table[name], name)

    def place(self, name: str) -> Place | None:
        return place_of(self.table[name], name)

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        files = dict(zip(map(id, self.table.values()), self.table.values(), strict=True)).values()
        if not files or sum(map(len, files)) != len(self.table):
            return super().marks(kinds)
        return np.concatenate([marks_of(specs, kinds) for specs in files])

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(table)


def kind_of(specs: Mapping[str, TensorSpec], name: str) -> tuple[Shape, DType]:
    """Return the shape and the dtype of a tensor, without a spec if there is none yet. Raises KeyError.

    Parameters
    ----------
    specs
        Name -> spec.
    name
        The tensor's name.
    """
    if isinstance(specs, Specs):
        return specs.kind(name)
    spec = specs[name]
    return spec.shape, spec.dtype


def place_of(specs: Mapping[str, TensorSpec], name: str) -> Place | None:
    """Return the place of a tensor that is one run of plain values, without making its spec. Return None if only its
    spec has the place. Raises KeyError.

    Parameters
    ----------
    specs
        Name -> spec.
    name
        The tensor's name.
    """
    return specs.place(name) if isinstance(specs, Specs) else None


def marks_of(specs: Mapping[str, TensorSpec], kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
    """Return the number of every tensor's shape and dtype, without specs if there are none yet.

    Parameters
    ----------
    specs
        Name -> spec.
    kinds
        The shapes and dtypes that have a number. New ones are added.
    """
    if isinstance(specs, Specs):
        return specs.marks(kinds)
    found = (kinds.setdefault((spec.shape, spec.dtype), len(kinds)) for spec in specs.values())
    return np.fromiter(found, np.int64, len(specs))


def some_of(specs: Mapping[str, TensorSpec], keep: Callable[[str], bool]) -> Mapping[str, TensorSpec]:
    """Return the tensors whose names are to be kept.

    Parameters
    ----------
    specs
        Name -> spec.
    keep
        Return whether to keep a name.
    """
    if isinstance(specs, Specs):
        return specs.only({name: entry for name, entry in specs.table.items() if keep(name)})
    return {name: spec for name, spec in specs.items() if keep(name)}
