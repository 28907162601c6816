"""The tensors of one file as columns, some tens of bytes for each: those that are C-order arrays of plain values."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .box import Shape, c_strides
from .dtypes import DType
from .extents import Extent
from .specs import Place, Specs, TensorSpec, whole

Kind = tuple[Shape, DType]


class Extents(Mapping[str, Extent]):
    """The places of tensors in a file, by name. They are created on access.

    Attributes
    ----------
    path
        The file's path in the store.
    rows
        Name -> number of the tensor.
    offsets
        The position of each tensor in the file, in bytes.
    numbers
        The number of each tensor's kind.
    kinds
        The shapes and dtypes of the tensors.
    """

    __slots__ = ("kinds", "numbers", "offsets", "path", "rows")

    def __init__(
        self, path: str, rows: dict[str, int], offsets: array[int], numbers: array[int], kinds: Sequence[Kind]
    ) -> None:
        self.path, self.rows, self.offsets, self.numbers, self.kinds = path, rows, offsets, numbers, kinds

    def __getitem__(self, name: str) -> Extent:
        n = self.rows[name]
        shape, dtype = self.kinds[self.numbers[n]]
        return Extent(self.path, self.offsets[n], dtype, shape, c_strides(shape))

    def kind(self, name: str) -> Kind:
        """Return the shape and the dtype of a tensor. Raises KeyError."""
        return self.kinds[self.numbers[self.rows[name]]]

    def place(self, name: str) -> Place:
        """Return where a tensor is. Raises KeyError."""
        n = self.rows[name]
        return Place(self.path, self.offsets[n], *self.kinds[self.numbers[n]])

    def compact(self) -> None:
        """Make the names and numbers anew, next to each other. The old ones, which were made among many objects that
        are gone, keep the interpreter from giving back the memory of these."""
        joined, count = "\n".join(self.rows), len(self.rows)
        if joined.count("\n") == count - 1:
            self.rows.clear()
            self.rows.update(zip(joined.split("\n"), range(count), strict=True))

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class ExtentSpecs(Specs):
    """The tensors of a file as stored. ``table`` maps their names to their numbers in the file."""

    __slots__ = ("_extents",)

    def __init__(self, extents: Extents, table: dict[str, int] | None = None) -> None:
        super().__init__(extents.rows if table is None else table)
        self._extents = extents

    @property
    def extents(self) -> Extents:
        """The places of all tensors of the file."""
        return self._extents

    @property
    def is_whole(self) -> bool:
        """Whether these are all tensors of the file."""
        return self.table is self._extents.rows

    def make(self, name: str, entry: int) -> TensorSpec:
        return whole(name, self._extents[name])

    def kind(self, name: str) -> tuple[Shape, DType]:
        return self._extents.kind(name)

    def place(self, name: str) -> Place:
        return self._extents.place(name)

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        if len(self.table) < len(self._extents):
            return super().marks(kinds)
        numbers = np.array([kinds.setdefault(kind, len(kinds)) for kind in self._extents.kinds], np.int64)
        found: NDArray[np.int64] = numbers[np.array(self._extents.numbers)]
        return found

    def compact(self) -> None:
        """See `Extents.compact`."""
        self._extents.compact()

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(self._extents, table)
