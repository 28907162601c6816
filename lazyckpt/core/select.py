"""Index expressions as selections: `t[1:5, ::2]`, `t[..., 0]`, `t[[3, 1]]`, `t[mask]`, and their compositions.

A `Selection` holds the selected indices of every dimension of the tensor, in order, and how these *axes* become the
dimensions of the result. Composing selections is arithmetic on indices: nothing is read.
"""

from __future__ import annotations

import ast
import operator
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SelectionError
from .box import Axis, Box, Shape
from .box import Selection as Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Selected elements of a tensor, and the dimensions of the result.

    ``axes`` holds the selected indices of every dimension of the tensor (``rank`` of them), then those of the
    dimensions that None added. ``dims`` holds the axis of each dimension of the result; an axis that is not in
    ``dims`` was indexed by an int.
    """

    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    rank: int

    @classmethod
    def all(cls, shape: Sequence[int]) -> Selection:
        """Return the selection of all elements of a tensor of this shape."""
        return cls(tuple(range(n) for n in shape), tuple(range(len(shape))), len(shape))

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return tuple(len(self.axes[d]) for d in self.dims)

    @property
    def block(self) -> Box | None:
        """The selected block; None if the selection is not one block with the dimensions of the tensor.

        >>> Selection.all((4, 6))[1:, :3].block
        Box(start=(1, 0), stop=(4, 3))
        """
        ranges = [a for a in self.axes if isinstance(a, range) and (a.step == 1 or len(a) < 2)]
        if self.dims != tuple(range(self.rank)) or not len(ranges) == len(self.axes) == self.rank:
            return None
        return Box(tuple(r.start for r in ranges), tuple(r.start + len(r) for r in ranges))

    @property
    def hull(self) -> Box:
        """The bounding box of the selected elements; an empty box if the selection is empty.

        >>> Selection.all((4, 6))[1:, [4, 1]].hull
        Box(start=(1, 1), stop=(4, 5))
        """
        axes = self.axes[: self.rank]
        if any(not len(a) for a in axes):
            return Box((0,) * self.rank, (0,) * self.rank)
        ends = [(min(a[0], a[-1]), max(a[0], a[-1])) if isinstance(a, range) else (a.min(), a.max()) for a in axes]
        return Box(tuple(int(low) for low, _ in ends), tuple(int(high) + 1 for _, high in ends))

    def __getitem__(self, key: Any) -> Selection:
        """Return the selection of ``key`` within this one. Raises SelectionError if it does not fit.

        >>> Selection.all((4, 6))[1:, ::2][..., -1].shape
        (3,)
        """
        items = _spread(key, self.shape)
        axes = list(self.axes)
        dims: list[int] = []
        position = arrays = 0
        for item in items:
            if item is None:
                dims.append(len(axes))
                axes.append(range(1))
                continue
            d = self.dims[position]
            position += 1
            axes[d], keep = _pick(axes[d], item, position - 1)
            arrays += isinstance(item, np.ndarray)
            if keep:
                dims.append(d)
        if arrays > 1:
            raise SelectionError("one list, array or mask at most in an index: index once more for the second")
        return Selection(tuple(axes), tuple(dims), self.rank)

    def reads(self) -> Reads:
        """Return how to read the selection: what to read, and the steps that follow in memory."""
        want: list[Axis] = []
        flips: list[int] = []
        orders: list[tuple[int, NDArray[np.int64]]] = []
        for n, axis in enumerate(self.axes[: self.rank]):
            if isinstance(axis, range):
                if axis.step < 0:
                    flips.append(n)
                    axis = axis[::-1]
                want.append(axis)
                continue
            if (np.diff(axis) > 0).all():
                want.append(axis)
                continue
            unique, inverse = np.unique(axis, return_inverse=True)
            want.append(_as_range(unique))
            orders.append((n, inverse))
        added = tuple(n for n, d in enumerate(self.dims) if d >= self.rank)
        return Reads(tuple(want), tuple(flips), tuple(orders), self.shape, added)


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """How to read a selection.

    ``want`` holds the ascending indices to read along each axis. `io.reading.gather.finish` turns the array of shape
    ``shape`` into one of shape ``result``; ``added`` holds the dimensions of the result that the array does not have.
    """

    want: Ranges
    flips: tuple[int, ...]
    orders: tuple[tuple[int, NDArray[np.int64]], ...]
    result: Shape
    added: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the array to read into, with one dimension per axis."""
        return tuple(map(len, self.want))

    @property
    def in_place(self) -> bool:
        """Whether the array that was read is the result, without further steps."""
        return not (self.flips or self.orders or self.added) and self.shape == self.result

    @property
    def moves(self) -> bool:
        """Whether elements move after they were read; otherwise the result is a view of the array that was read."""
        return bool(self.flips or self.orders) or any(self.result[n] != 1 for n in self.added)


def _spread(key: Any, shape: Shape) -> list[Any]:
    """Return the key with one item per dimension: lists as arrays, Ellipsis and missing items as full slices."""
    items = [_item(k) for k in (key if isinstance(key, tuple) else (key,))]
    used = sum(k is not None and k is not Ellipsis for k in items)
    dots = sum(k is Ellipsis for k in items)
    if dots > 1:
        raise SelectionError("an index can have one Ellipsis (...) at most")
    if used > len(shape):
        raise SelectionError(f"too many indices: {used} for a tensor of shape {tuple(shape)}")
    rest = [slice(None)] * (len(shape) - used)
    at = next((i for i, k in enumerate(items) if k is Ellipsis), len(items))
    return items[:at] + rest + items[at + dots :]


def _item(k: Any) -> Any:
    if k is None or k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, bool | np.bool_):
        raise SelectionError("a single bool is no index: use an int, a slice, or a mask of the dimension's length")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(k, torch.Tensor):
        k = k.detach().cpu().numpy()
    try:
        return operator.index(k)
    except TypeError:
        pass
    try:
        array = np.asarray(k)
    except ValueError:  # a ragged list
        array = np.empty((0, 0))
    if array.size == 0 and not isinstance(k, np.ndarray):
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise SelectionError(
            f"index {_short(k)} is not understood: ints, slices, None, ..., one 1-d list of ints, or one 1-d mask"
        )
    return array


def _pick(axis: Axis, item: Any, dim: int) -> tuple[Axis, bool]:
    """Return the selected indices of an axis, and whether it stays a dimension of the result."""
    n = len(axis)
    if isinstance(item, slice):
        try:
            found = axis[item]
            if isinstance(found, range) and len(found) < 2:  # the step of a single index may be of any size
                found = range(found[0], found[0] + 1) if found else range(0)
            return found, True
        except (TypeError, ValueError) as e:  # a bound that is not an integer, or a step of 0
            raise SelectionError(f"slice {item} of dimension {dim}: {e}") from None
    if isinstance(item, int):
        if not -n <= item < n:
            raise SelectionError(f"index {item} is out of range for dimension {dim} of length {n}")
        value = int(axis[item])
        return range(value, value + 1), False
    if item.dtype.kind == "b":
        if len(item) != n:
            raise SelectionError(f"the mask has {len(item)} elements, dimension {dim} has {n}")
        wanted = np.flatnonzero(item)
    else:
        wanted = item.astype(np.int64)
        bad = wanted[(wanted < -n) | (wanted >= n)]
        if bad.size:
            raise SelectionError(f"index {bad[0]} is out of range for dimension {dim} of length {n}")
        wanted = np.where(wanted < 0, wanted + n, wanted)
    if isinstance(axis, range):
        wanted = axis.start + axis.step * wanted
    else:
        wanted = axis[wanted]
    return _as_range(wanted), True


def _as_range(wanted: NDArray[np.int64]) -> Axis:
    """Return the indices as a range if they are evenly spaced."""
    if len(wanted) < 2:
        return range(int(wanted[0]), int(wanted[0]) + 1) if len(wanted) else range(0)
    step = int(wanted[1]) - int(wanted[0])
    if step and (np.diff(wanted) == step).all():
        return range(int(wanted[0]), int(wanted[-1]) + (1 if step > 0 else -1), step)
    return wanted


def _short(k: Any) -> str:
    text = repr(k)
    return text if len(text) <= 60 else text[:57] + "..."


# -- Indices as text, as Python writes them: parsed, never evaluated.


def parse_index(text: str) -> Any:
    """Return the key that ``t[text]`` indexes with, without evaluating code. Raises SelectionError except for literals.

    >>> parse_index("0:4, ::-8")
    (slice(0, 4, None), slice(None, None, -8))
    >>> parse_index("..., [3, 1], None")
    (Ellipsis, [3, 1], None)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(f"_[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise SelectionError(_not_understood(text))
    return _index_item(tree.slice, text)


def _index_item(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Tuple(elts):
            return tuple(_index_item(e, text) for e in elts)
        case ast.List(elts):
            return [_literal(e, text) for e in elts]
        case ast.Slice(lower, upper, step):
            return slice(*(None if e is None else _literal(e, text) for e in (lower, upper, step)))
        case ast.Constant(value) if value is Ellipsis:
            return value
    return _literal(node, text)


def _literal(node: ast.expr, text: str) -> int | None:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, int):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
    raise SelectionError(_not_understood(text))


def _not_understood(text: str) -> str:
    return f"the index [{text}] is not understood: it takes ints, slices, ..., None and one list of ints"
