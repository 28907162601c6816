"""Small tensors of an export that are packed into one 1-d array, and the attributes of that array which list them.

    weights/%packed/float32    attributes.lazyckpt.packed:
        names     the tensors' names
        shapes    their different shapes
        shape     for each tensor the number of its shape in ``shapes``
        order     for each tensor its position in the view

The tensors follow one another in the order of ``names``, each in C order. lazyckpt defined this; there is no standard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from ...core.box import Shape, fits
from ...core.dtypes import DType
from ...core.packs import member
from ...core.specs import Specs, TensorSpec
from ...errors import CorruptError
from .documents import NAMES, Json

PACKED = "%packed"  # the group of a state's packs; no part of a name is escaped to this text
_KEYS = ("names", "shapes", "shape", "order")


def path_of(group: str, dtype: DType) -> str:
    """Return the path of the pack of a dtype in the group of a state."""
    return f"{group}/{PACKED}/{NAMES.get(dtype, dtype.name)}"


def described(names: Sequence[str], shapes: Sequence[Shape], order: Sequence[int]) -> Json:
    """Return what the attributes of a pack say about its tensors.

    >>> described(["a", "b", "c"], [(2, 3), (2,), (2, 3)], [0, 1, 4])
    {'names': ['a', 'b', 'c'], 'shapes': [[2, 3], [2]], 'shape': [0, 1, 0], 'order': [0, 1, 4]}
    """
    numbers: dict[Shape, int] = {}
    found = [numbers.setdefault(shape, len(numbers)) for shape in shapes]
    return listed(names, list(numbers), found, order)


def listed(names: Sequence[str], shapes: Sequence[Shape], numbers: Sequence[int], order: Sequence[int]) -> Json:
    """Return the same as `described`, given the different shapes and the number of each tensor's shape."""
    return {"names": list(names), "shapes": list(map(list, shapes)), "shape": list(numbers), "order": list(order)}


@dataclass(frozen=True, slots=True)
class Members:
    """The tensors of a pack, as its attributes list them. ``begins`` has the first element of each."""

    names: list[str]
    shapes: list[Shape]
    numbers: list[int]
    order: list[int]
    begins: list[int]


def members(about: Any, size: int, itemsize: int, where: str) -> Members:
    """Return the tensors of a pack of ``size`` elements. Raises CorruptError if its attributes do not describe it."""
    if not isinstance(about, dict) or any(not isinstance(about.get(key), list) for key in _KEYS):
        raise CorruptError(f"{where}: its attributes do not list the tensors that are packed in it: damaged")
    names, shapes, numbers, order = (about[key] for key in _KEYS)
    valid = len(names) == len(numbers) == len(order)
    valid = valid and all(type(name) is str for name in names) and all(type(n) is int for n in order)
    valid = valid and all(type(n) is int and 0 <= n < len(shapes) for n in numbers)
    valid = valid and all(
        type(shape) is list and all(type(n) is int and n >= 0 for n in shape) and fits(shape, itemsize)
        for shape in shapes
    )
    if not valid:
        raise CorruptError(f"{where}: its attributes do not list the tensors that are packed in it: damaged")
    sizes = list(map(prod, shapes))
    begins, end = [], 0
    for n in numbers:
        begins.append(end)
        end += sizes[n]
    if end != size:
        raise CorruptError(f"{where}: it has {size:,} elements, the tensors that are packed in it {end:,}: damaged")
    return Members(names, list(map(tuple, shapes)), numbers, order, begins)


class PackedSpecs(Specs):
    """The tensors of a state. ``table`` maps a name to its spec or, of a packed one, to (number of its pack, number in
    the pack)."""

    __slots__ = ("_packs", "_rule")

    def __init__(
        self, table: dict[str, TensorSpec | tuple[int, int]], packs: Sequence[tuple[TensorSpec, Members]], rule: str
    ) -> None:
        super().__init__(table)
        self._packs, self._rule = packs, rule

    def make(self, name: str, entry: TensorSpec | tuple[int, int]) -> TensorSpec:
        if isinstance(entry, TensorSpec):
            return entry
        pack, listed = self._packs[entry[0]]
        n = entry[1]
        return member(name, pack, listed.begins[n], listed.shapes[listed.numbers[n]], self._rule)

    def kind(self, name: str) -> tuple[Shape, DType]:
        entry = self.table[name]
        if isinstance(entry, TensorSpec):
            return entry.shape, entry.dtype
        pack, listed = self._packs[entry[0]]
        return listed.shapes[listed.numbers[entry[1]]], pack.dtype

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(table, self._packs, self._rule)
