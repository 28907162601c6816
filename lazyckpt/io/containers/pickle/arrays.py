"""Records of pickled numpy dtypes, arrays and scalars, which become real numpy objects on demand.

numpy/_core/multiarray (`_reconstruct`, `scalar`), numpy/_core/numeric (`_frombuffer`), `__setstate__` of both types.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....core.box import Shape, c_strides
from ....core.dtypes import FROM_NAME, DType
from ..npy import number_of
from .records import Distant, Opaque, short

_MAX_FIELDS = 256  # maximum fields of a numpy dtype, over all levels


class NumpyDtype:
    """A pickled numpy dtype: a code, then a state with byte order and fields."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self.code, self.state = code, ()
        self._real: np.dtype[Any] | ValueError | None = None
        self._fields = 0

    def set_state(self, state: Any) -> None:
        self.state, self._real = state, None

    def real(self, budget: list[int] | None = None) -> np.dtype[Any]:
        """Return the dtype. ``budget`` limits the number of fields over all levels. Raises ValueError."""
        budget = [_MAX_FIELDS] if budget is None else budget
        if self._real is None:
            before = budget[0]
            try:
                self._real = self._made(budget)
                self._fields = before - budget[0]
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
                self._real = ValueError(f"a numpy dtype that contradicts itself: {e!s:.100}")
        else:
            budget[0] -= self._fields
            if budget[0] < 0:
                raise ValueError("a numpy dtype of hundreds of fields")
        if isinstance(self._real, ValueError):
            raise self._real
        return self._real

    def _made(self, budget: list[int]) -> np.dtype[Any]:
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError("a numpy dtype of hundreds of fields")
        if (
            not isinstance(self.code, str)
            or len(self.code) > 64
            or self.code.lstrip("<>|=")[:1] not in "?bhilqpBHILQPfdgFDGeSaUVOMmciu"
        ):
            raise ValueError(f"a numpy dtype {short(self.code)}")
        if len(self.state) > 2 and self.state[2]:  # an array in every element: (dtype, shape)
            base, shape = self.state[2]
            return np.dtype((base.real(budget), tuple(int(n) for n in shape)))
        if len(self.state) >= 5 and isinstance(self.state[4], dict) and self.state[3]:
            fields = {name: self.state[4][name] for name in self.state[3]}
            formats = [f[0].real(budget) for f in fields.values()]
            spec = {"names": list(fields), "formats": formats, "offsets": [f[1] for f in fields.values()]}
            return np.dtype({**spec, "itemsize": self.state[5]})
        code = self.code
        if code.lstrip("<>|=")[:1] in "mM" and len(self.state) > 8:  # (metadata, (unit, count, divisor, event))
            unit, count = self.state[8][1][:2]
            code = f"{code}[{int(count)}{unit.decode() if isinstance(unit, bytes) else unit}]"
        dtype = np.dtype(code)
        order = self.state[1] if len(self.state) > 1 else "|"
        if order == ">":
            return dtype.newbyteorder(">")
        return dtype.newbyteorder("<") if order == "<" else dtype

    @property
    def extension(self) -> DType | None:
        """The dtype if it is one of ml_dtypes, which numpy pickles as a class; None if not."""
        code = self.code
        found = FROM_NAME.get(code.name) if isinstance(code, Opaque) and code.module == "ml_dtypes" else None
        if found is None or not found.is_number or not isinstance(self.state, tuple) or len(self.state) < 6:
            return None
        order, itemsize = self.state[1], self.state[5]  # (version, order, None, None, None, itemsize, ...)
        return found if order != ">" and itemsize == found.itemsize else None


class Placed(NamedTuple):
    """Where the elements of an array lie in ``raw``, its bytes: strides are in elements. ``dtype`` is None if torch has
    no such elements; ``kind`` is numpy's name for them."""

    dtype: DType | None
    kind: str
    shape: Shape
    strides: Shape
    swapped: bool
    raw: bytes | bytearray | Distant


class NumpyArray:
    """A pickled numpy array: an empty array, then a state with shape, dtype and bytes."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None
        self.axes: Any = None  # numpy 2: transposition of an array that was contiguous in neither C nor F order
        self._real: Any = None
        self._held: dict[DType, tuple[Shape, bytes]] = {}

    def set_state(self, state: Any) -> None:
        self.state, self._real, self._held = state, None, {}

    def place(self) -> Placed:
        """Return where the elements lie in the bytes of the array. Raises ValueError if the record contradicts itself,
        and for an array of objects, which has no bytes."""
        state = self.state
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumpyDtype):
            raise ValueError("a numpy array without its state")
        _, shape, record, fortran, raw = state
        foreign = record.code if isinstance(record.code, Opaque) else None  # a dtype of another package
        kind = None if foreign is not None else record.real()
        if not isinstance(raw, str | bytes | bytearray | Distant) or (kind is not None and kind.hasobject):
            raise ValueError("a numpy array without its bytes")
        if type(shape) is int:
            shape = (shape,)
        if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ValueError(f"a numpy array of shape {short(shape)}")
        axes = tuple(range(len(shape))) if self.axes is None else tuple(self.axes)
        if sorted(axes) != list(range(len(shape))):
            raise ValueError(f"a numpy array whose axes are {short(axes)}")
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        nbytes = raw.state["nbytes"] if isinstance(raw, Distant) else len(raw)
        dtype = record.extension if kind is None else number_of(kind)
        name = str(kind) if foreign is None else f"{foreign.module}.{foreign.name}"
        itemsize = dtype.itemsize if dtype is not None else kind.itemsize if kind is not None else None
        if itemsize is not None and nbytes != prod(shape) * itemsize:
            raise ValueError(f"a numpy array of shape {short(shape)} in {nbytes:,} bytes")
        strides = c_strides(shape[::-1])[::-1] if fortran else c_strides(shape)
        swapped = dtype is not None and dtype.itemsize > 1 and kind is not None and kind.str.startswith(">")
        turned = tuple(shape[n] for n in axes), tuple(strides[n] for n in axes)
        return Placed(dtype, name, *turned, swapped, raw)

    def held(self, dtype: DType) -> tuple[Shape, bytes]:
        """Return the shape, and the elements converted to ``dtype`` as bytes in C order. Raises ValueError,
        TypeError."""
        if dtype not in self._held:
            array = self.real()
            if array.dtype.kind not in "biufc":
                raise TypeError("not an array of numbers")
            with np.errstate(all="ignore"):  # out-of-range values become infinite or wrap around, as in torch
                self._held[dtype] = array.shape, array.astype(dtype.numpy.newbyteorder("<")).tobytes()
        return self._held[dtype]

    def real(self) -> Any:
        """Return the array, created once; an array of objects holds the values from the pickle. Raises ValueError if
        the record contradicts itself."""
        if self._real is None:
            self._real = self._made()
        return self._real

    def _made(self) -> Any:
        _, shape, dtype, fortran, raw = self.state
        kind = dtype.real()
        if not isinstance(raw, list | tuple if kind.hasobject else str | bytes | bytearray):
            raise ValueError("a numpy array without its data")
        if kind.hasobject:
            array = np.empty(len(raw), dtype=object)
            array[:] = [None] * len(raw)
            for n, value in enumerate(raw):
                array[n] = value
        else:
            data: Any = raw.encode("latin1") if isinstance(raw, str) else raw
            array = np.frombuffer(data, dtype=kind).copy()
        # (the list of an array of objects is always in C order)
        array = array.reshape(shape, order="F" if fortran and not kind.hasobject else "C")
        return array if self.axes is None else array.transpose(self.axes)


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> NumpyArray:
    array = NumpyArray()
    if not isinstance(buffer, bytes | bytearray | Distant):
        raise TypeError("not the bytes of an array")
    array.state = (1, shape, dtype, order == "F", buffer if isinstance(buffer, Distant) else bytes(buffer))
    array.axes = axes if order == "K" else None
    return array


def _scalar(dtype: Any, raw: Any = None) -> Any:
    kind = dtype.real()
    if kind.hasobject:
        return raw
    return np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype=kind)[0]


def plain_numpy(value: Any) -> Any:
    """Convert a numpy record to the real dtype or array, or to an Opaque if it contradicts itself; return any other
    value unchanged."""
    if not isinstance(value, NumpyArray | NumpyDtype):
        return value
    try:
        return value.real()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RuntimeError):
        record = Opaque("numpy", "ndarray" if isinstance(value, NumpyArray) else "dtype")
        record.state = value.state
        return record


NUMPY: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): NumpyDtype,
    **{(f"{root}.multiarray", "_reconstruct"): NumpyArray for root in ("numpy._core", "numpy.core")},
    **{(f"{root}.multiarray", "scalar"): _scalar for root in ("numpy._core", "numpy.core")},
    **{(f"{root}.numeric", "_frombuffer"): _frombuffer for root in ("numpy._core", "numpy.core")},
}
