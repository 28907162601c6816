"""Lazy tensors as Dask arrays: chunks follow the fragments, and a chunk is read where its task runs.

The graph holds the tensor's description once; each chunk's task slices it. So no bytes of tensors pass through the
client, and dask's own optimization turns a slice of the array into a slice of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.box import Shape
from ..core.chunking import chunk_shape
from ..core.dtypes import DType, to_numpy, widened
from ..core.index import TensorSpec
from ..errors import DataError
from ..lazy import LazyArray

LEAST, MOST = 8 << 20, 64 << 20  # bytes of a chunk: many smaller ones keep the scheduler busy, larger ones the memory


class Readable:
    """A lazy tensor as numpy's kind of array: its dtype, and what slicing it returns. Reads when it is sliced.

    ``widen``: floats of 8 and 16 bits are given as float32.
    """

    __slots__ = ("dtype", "kind", "ndim", "shape", "tensor")

    def __init__(self, tensor: LazyArray, widen: bool) -> None:
        self.tensor = tensor
        self.shape: Shape = tuple(tensor.shape)
        self.ndim = tensor.ndim
        own = tensor.spec.dtype
        self.dtype: np.dtype[Any] = own.numpy  # raises DataError for what numpy lacks
        self.kind = widened(own) if widen else own
        self.dtype = self.kind.numpy

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        return to_numpy(self.tensor[key].to(self.kind.torch))

    def __reduce__(self) -> tuple[Any, ...]:
        return Readable, (self.tensor, self.kind is not self.tensor.spec.dtype)

    def __dask_tokenize__(self) -> object:
        return token(self.tensor), str(self.kind)


def import_dask() -> Any:
    """dask, with its arrays. Raises DataError, which says what to install. (xarray without chunks needs none, and uses
    the rest of this module.)"""
    try:
        import dask.array
    except ImportError as e:
        raise DataError(f"Dask arrays need dask: pip install 'lazyckpt[dask]' ({e})") from None
    return dask


def to_dask(tensor: LazyArray, chunks: Any = None, widen: bool = True) -> Any:
    """A `dask.array.Array`; see `LazyTensor.to_dask`."""
    dask = import_dask()
    array = Readable(tensor, widen)
    grid = dask.array.core.normalize_chunks(
        chunks_of(tensor, array.kind) if chunks is None else chunks, array.shape, dtype=array.dtype
    )
    meta = np.empty((0,) * array.ndim, array.dtype)  # else dask would slice the tensor to find out
    return dask.array.from_array(array, grid, name=f"lazyckpt-{dask.base.tokenize(array, grid)}", meta=meta)


def chunks_of(tensor: LazyArray, dtype: DType) -> tuple[tuple[int, ...], ...]:
    """The lengths of the chunks in every dimension, 8 to 64 MiB each in ``dtype``. Those of a block of a tensor are cut
    where the tensor's own are; what else was selected (steps, lists) is cut into rows."""
    if not tensor.numel():  # its other dimensions may be of any length
        return tuple((n,) for n in tensor.shape)
    block, spec = tensor._block, replace(tensor.spec, dtype=dtype)
    if block is None:
        spec = TensorSpec(tensor.name, tuple(tensor.shape), dtype, ())
        return tuple(map(_cut, spec.shape, chunk_shape(spec, LEAST, MOST), (0,) * tensor.ndim))
    return tuple(map(_cut, block.shape, chunk_shape(spec, LEAST, MOST), block.start))


def token(tensor: LazyArray) -> str:
    """The same text for the same part of the same tensor in the same, unchanged files, in every process."""
    spec, store, selection = tensor._held, tensor.store, tensor._sel
    fragments = list(spec.fragments)
    pins = [(path, store.pins.get(path)) for path in sorted({f.extent.path for f in fragments})]
    axes = [axis if isinstance(axis, range) else axis.tolist() for axis in selection.axes]
    what = store.root, spec.name, spec.shape, spec.dtype, spec.combine, pins, axes, selection.dims
    digest = blake2b(repr(what).encode(), digest_size=16)
    for fragment in fragments:
        digest.update(repr(fragment).encode())
    return digest.hexdigest()


def _cut(length: int, chunk: int, start: int) -> tuple[int, ...]:
    """A part of a dimension, from its ``start`` on, in pieces that end where the whole dimension's chunks do.

    >>> _cut(10, 4, 2)
    (2, 4, 4)
    """
    edges: Sequence[int] = sorted({start, start + length, *range(-(-start // chunk) * chunk, start + length, chunk)})
    return tuple(b - a for a, b in pairwise(edges)) or (0,)
