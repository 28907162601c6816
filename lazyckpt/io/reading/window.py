"""Slices of a plain tensor through a mapping of its file: torch indexes the mapped tensor and copies the result.

All slices whose bytes are in memory already are read like this, from one element to `LARGE` bytes, with any key of
torch. It takes one call of torch for a row or a few of them, two for other keys, and one gather for a list of rows or a
mask. `Window.read` returns None for anything else; a planned read (gather.py) then reads the bytes from the file, or
raises an error about the key.
"""

from __future__ import annotations

from math import prod
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...core.box import Shape
from ...core.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8
from ..storage.base import Store
from ..storage.mapping import Mapped
from ..tensors import empty

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

LARGE = 32 << 20  # bytes above which reads on several threads are faster than a mapping
SMALL = 8 << 10  # bytes up to which page faults cost less than a planned read, even on uncached pages
_HUGE = 16 << 20  # bytes from which huge pages pay here: the C library reuses the memory of smaller tensors
ONE_CALL = 128 << 10  # bytes up to which torch copies a range of rows fastest on one thread
_SHARED = 0.05  # seconds for which several threads count as readers after one has taken turns with another
_CACHED = 1 << 14  # windows whose tensors a mapping caches
NEAR = 64 << 20  # bytes; a view whose elements are further apart is planned: finding out what is resident takes long
FAR = 1 << 31  # larger steps of slices are planned: torch multiplies them by strides without a check of overflow
_SPARSE = 32  # finding out whether this many bytes are resident takes as long as copying one byte
_RESIDENT, _PARTIAL = 1.0, 0.1  # seconds for which a tensor counts as resident, or as partly resident, after a check

Arrays: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # a mapped tensor, and its ravel


class Window:
    """A tensor that is one contiguous run of raw bytes of one file, read through a mapping of the file."""

    __slots__ = (
        "_dtype", "_flat", "_key", "_length", "_nbytes", "_offset", "_partial_until", "_path", "_rank",
        "_resident_until", "_row", "_shape", "_size", "_store",
    )  # fmt: skip

    def __init__(self, store: Store, path: str, offset: int, dtype: torch.dtype, shape: Shape) -> None:
        self._store, self._path, self._offset, self._dtype, self._shape = store, path, offset, dtype, shape
        self._rank = len(shape)
        self._key = object()  # of the cached arrays (not this object: it refers to the store, which has the mappings)
        self._length = shape[0] if shape else 1
        self._row = prod(shape[1:])  # elements of a row
        self._size = self._row * dtype.itemsize  # bytes of a row
        self._nbytes = self._length * self._size
        self._resident_until = self._partial_until = 0.0
        self._flat = len(shape) == 2 and self._size <= SMALL  # whether a row is one range of the raveled tensor

    def read(self, key: Any) -> torch.Tensor | None:
        """Read the indexed elements; None if a planned read is better or has to raise an error."""
        begun = monotonic()
        mapped = self._store.maps.get(self._path) or self._store.map(self._path)
        if mapped is None:
            return None
        arrays = mapped.arrays.get(self._key) or self._arrays(mapped)
        if arrays is None:
            return None
        kind = type(key)
        try:
            if kind is int and self._flat and -self._length <= key < self._length:
                at = (key if key >= 0 else key + self._length) * self._row
                found = arrays[1].narrow_copy(0, at, self._row)
            elif kind is slice and self._rank and key.step in (None, 1):
                start, stop, _ = key.indices(self._length)
                nbytes = (stop - start) * self._size
                if (
                    nbytes > SMALL
                    and begun > self._resident_until
                    and (nbytes > LARGE or not self._is_resident(mapped, start * self._size, nbytes, begun))
                ):
                    return None
                if nbytes <= ONE_CALL or (nbytes < _HUGE and _shared(begun)):
                    found = arrays[0].narrow_copy(0, start, max(0, stop - start))
                elif nbytes < _HUGE:
                    found = arrays[0][key].clone()
                else:
                    found = copied(arrays[0][key], nbytes)
            elif kind is tuple and len(key) == 2 == self._rank and type(key[0]) is type(key[1]) is int:
                found = self._element(mapped, *key)
            elif kind in _ATOMS or (kind is tuple and _ATOMS.issuperset(map(type, key))):
                found = self._viewed(mapped, arrays, key, begun)
            else:
                found = self._gathered(mapped, arrays[0], key if kind is tuple else (key,), begun)
        except (IndexError, ValueError, TypeError):  # a planned read supports the key, or raises a better error
            return None
        if found is not None and not mapped.in_burst(begun):
            self._store.confirm(self._path, mapped)
        return found

    def _element(self, mapped: Mapped, row: int, column: int) -> torch.Tensor | None:
        """Read one element of a matrix."""
        row, column = row if row >= 0 else row + self._length, column if column >= 0 else column + self._row
        if not (0 <= row < self._length and 0 <= column < self._row):
            return None
        size = self._dtype.itemsize
        start = self._offset + row * self._size + column * size
        return torch.frombuffer(bytearray(mapped.buffer[start : start + size]), dtype=self._dtype).squeeze(0)

    def _viewed(self, mapped: Mapped, arrays: Arrays, key: Any, now: float) -> torch.Tensor | None:
        """Read the elements of a key of ints, slices, None and Ellipsis."""
        array = arrays[0]
        if type(key) is tuple:
            if key.count(Ellipsis) > 1 or any(map(is_far, key)):
                return None
        elif is_far(key):
            return None
        try:
            view, flips = array[key], _NO_FLIPS
        except ValueError:  # torch refuses negative steps
            key, flips = _ascending(key, self._shape)
            view = array[key]
        nbytes = view.nbytes
        if nbytes > LARGE:
            return None
        if now > self._resident_until:
            span = span_of(view)
            if span > NEAR:
                return None
            if span > SMALL and not self._is_resident(mapped, view.data_ptr() - array.data_ptr(), span, now):
                return None
        return view.flip(flips) if flips else copied(view, nbytes)

    def _is_resident(self, mapped: Mapped, start: int, nbytes: int, now: float) -> bool:
        """Return whether a range of the tensor's bytes is in memory; check the whole tensor first, once a second."""
        if self._nbytes <= NEAR and now > self._partial_until:
            if mapped.resident(self._offset, self._offset + self._nbytes):
                self._resident_until = now + _RESIDENT
                return True
            self._partial_until = now + _PARTIAL
        found = mapped.resident(self._offset + start, self._offset + start + nbytes)
        if found and nbytes == self._nbytes:
            self._resident_until = now + _RESIDENT
        return found

    def _arrays(self, mapped: Mapped) -> Arrays | None:
        """Return the mapped tensor and its ravel; None if the file has become too short."""
        if self._offset + self._nbytes > len(mapped.buffer):
            return None
        flat = torch.frombuffer(mapped.buffer, dtype=self._dtype, count=prod(self._shape), offset=self._offset)
        if len(mapped.arrays) >= _CACHED:
            mapped.arrays.clear()
        arrays = mapped.arrays[self._key] = flat.view(self._shape), flat
        return arrays

    def _gathered(self, mapped: Mapped, array: torch.Tensor, key: tuple[Any, ...], now: float) -> torch.Tensor | None:
        """Read the elements of a key with one list, array or mask; None for any other key."""
        others = [n for n, item in enumerate(key) if type(item) not in _ATOMS]
        at = others[0]
        if len(others) > 1 or any(item is Ellipsis for item in key[:at] + key[at + 1 :]):
            return None
        if any(map(is_far, key)):
            return None
        index = indices_of(key[at])
        if index is None or index.ndim != 1:
            return None
        rest = tuple(slice(None) if n == at else item for n, item in enumerate(key))
        view = array[rest] if len(key) > 1 else array
        dim = sum(type(item) is not int for item in key[:at])
        length = view.shape[dim]
        if index.dtype == np.bool_:
            if len(index) != length:
                return None
            index = np.flatnonzero(index)
        elif index.size:
            low, high = index.min(), index.max()
            if low < -length or high >= length:
                return None  # a planned read raises the error
            if low < 0:
                index = np.where(index < 0, index + length, index)
        wanted = prod(view.shape) // max(length, 1) * len(index) * self._dtype.itemsize
        if wanted > LARGE or (
            now > self._resident_until and not self._rows_resident(mapped, array, view, dim, index, wanted, now)
        ):
            return None
        return view.index_select(dim, torch.from_numpy(index))

    def _rows_resident(
        self,
        mapped: Mapped,
        array: torch.Tensor,
        view: torch.Tensor,
        dim: int,
        index: np.ndarray[Any, Any],
        wanted: int,
        now: float,
    ) -> bool:
        """Return whether all elements at the indices, ``wanted`` bytes, are in memory."""
        if not view.numel() or not len(index):
            return True
        start = view.data_ptr() - array.data_ptr()
        span = span_of(view)
        if span <= max(NEAR, _SPARSE * wanted) and self._is_resident(mapped, start, span, now):
            return True
        if span <= NEAR:
            return False
        start += self._offset
        step = view.stride(dim) * self._dtype.itemsize
        inner = span - (view.shape[dim] - 1) * step
        if inner > SMALL or len(index) * SMALL > NEAR:
            return False
        return all(mapped.resident(start + n * step, start + n * step + inner) for n in index.tolist())


# dtypes whose bytes torch can index and copy in every way (of a bool it copies the value: a byte of 2 becomes 1)
CLONABLE = frozenset((F32, F64, F16, BF16, I64, I32, I16, I8, U8))
_NO_FLIPS: tuple[int, ...] = ()
_ATOMS = {int, slice, type(None), type(Ellipsis)}


def _ascending(key: Any, shape: Shape) -> tuple[Any, tuple[int, ...]]:
    """Return a key with ascending slices for one with negative steps, and the dimensions of its result to flip.

    Raises ValueError for a key that `_viewed` leaves to a planned read.
    """
    items = list(key) if type(key) is tuple else [key]
    flips = []
    dim = at = 0  # of the result, and of the tensor
    for n, item in enumerate(items):
        if item is Ellipsis or at >= len(shape):
            raise ValueError
        if type(item) is slice and item.step is not None and item.step < 0:
            chosen = range(*item.indices(shape[at]))[::-1]
            items[n] = slice(chosen.start, chosen.stop, chosen.step) if chosen else slice(0, 0)
            flips.append(dim)
        dim += type(item) is not int
        at += item is not None
    return tuple(items), tuple(flips)


_reader = 0  # the thread that read last
_shared_until = 0.0


def _shared(now: float) -> bool:
    """Return whether several threads read: then each copies on one thread. (torch would copy on all cores for each of
    them; measured with 64 threads on 2 cores, that takes twice as long.)"""
    global _reader, _shared_until
    me = get_ident()
    if me != _reader:
        _reader, _shared_until = me, now + _SHARED
    return now < _shared_until


def span_of(view: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element."""
    if not view.numel():
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))) * view.itemsize


def copied(view: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a contiguous copy, in huge pages if it is large."""
    if nbytes >= _HUGE:
        return empty(view.shape, view.dtype).copy_(view)
    if view.is_contiguous():
        return view.clone()
    return view.contiguous()


def is_far(item: Any) -> bool:
    """Return whether an item of a key is a slice with a step that torch may multiply beyond 64 bits."""
    return type(item) is slice and item.step is not None and not -FAR < item.step < FAR


def indices_of(item: Any) -> np.ndarray[Any, Any] | None:
    """Return a list, array or tensor as an array of 64-bit indices or bools; None if it is something else."""
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy() if item.dtype in (torch.int64, torch.int32, torch.bool) else None
    if not isinstance(item, list | np.ndarray):
        return None
    array = np.asarray(item)
    if array.dtype == np.bool_:
        return array
    return array.astype(np.int64, copy=False) if array.dtype in (np.int64, np.int32) else None
