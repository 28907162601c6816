"""Lazy tensors as Dask arrays: chunks follow the fragments, and each chunk is read where its task runs.

The graph has the tensor's description once, and each chunk's task slices it. So no bytes of tensors pass through the
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
from ..core.expr import leaves, structure
from ..core.specs import TensorSpec
from ..errors import DataError
from ..io.storage.joined import stores_of
from ..lazy import LazyArray

LEAST, MOST = 8 << 20, 64 << 20  # bytes of a chunk: smaller chunks load the scheduler, larger ones need much memory


class Readable:
    """A lazy tensor with the interface of a numpy array. Slicing it reads.

    Parameters
    ----------
    tensor
        The tensor.
    widen
        Return floats of 8 and 16 bits as float32.

    Raises
    ------
    DataError
        numpy lacks the dtype.
    """

    __slots__ = ("dtype", "kind", "ndim", "shape", "tensor")

    def __init__(self, tensor: LazyArray, widen: bool) -> None:
        self.tensor = tensor
        self.shape: Shape = tuple(tensor.shape)
        self.ndim = tensor.ndim
        own = tensor.spec.dtype
        self.dtype: np.dtype[Any] = own.numpy  # raises DataError if numpy lacks the dtype
        self.kind = widened(own) if widen else own
        self.dtype = self.kind.numpy

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        return to_numpy(self.tensor[key].to(self.kind.torch))

    def __reduce__(self) -> tuple[Any, ...]:
        return Readable, (self.tensor, self.kind is not self.tensor.spec.dtype)

    def __dask_tokenize__(self) -> object:
        return token(self.tensor), str(self.kind)


def import_dask() -> Any:
    """Import dask with its arrays, which the rest of this module does not need.

    Returns
    -------
    module
        ``dask``.

    Raises
    ------
    DataError
        dask is not installed. The message says how to install it.
    """
    try:
        import dask.array
    except ImportError as e:
        raise DataError(f"Dask arrays need dask: pip install 'lazyckpt[dask]' ({e})") from None
    return dask


def to_dask(tensor: LazyArray, chunks: Any = None, widen: bool = True) -> Any:
    """Return a tensor as a Dask array. See `LazyTensor.to_dask`.

    Parameters
    ----------
    tensor
        The tensor.
    chunks
        Chunks in any form that dask accepts. By default those of `chunks_of`.
    widen
        Convert floats of 8 and 16 bits to float32 when they are read.

    Returns
    -------
    dask.array.Array
        An array of the same shape.

    Raises
    ------
    DataError
        numpy lacks the dtype, or dask is not installed.
    """
    dask = import_dask()
    array = Readable(tensor, widen)
    grid = dask.array.core.normalize_chunks(
        chunks_of(tensor, array.kind) if chunks is None else chunks, array.shape, dtype=array.dtype
    )
    meta = np.empty((0,) * array.ndim, array.dtype)  # without it, dask would slice the tensor for the type
    return dask.array.from_array(array, grid, name=f"lazyckpt-{dask.base.tokenize(array, grid)}", meta=meta)


def chunks_of(tensor: LazyArray, dtype: DType) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of a tensor's chunks in every dimension, for chunks of 8 to 64 MiB.

    The chunks of a block of a tensor end where the tensor's own chunks end. Other parts (steps, lists) are cut into
    rows.

    Parameters
    ----------
    tensor
        The tensor.
    dtype
        The dtype of the chunks in memory.

    Returns
    -------
    tuple of tuple of int
        Elements, by dimension and chunk.
    """
    if not tensor.numel():  # the other dimensions of an empty tensor may have any length
        return tuple((n,) for n in tensor.shape)
    block, spec = tensor._block, replace(tensor.spec, dtype=dtype)
    if block is None:
        spec = TensorSpec(tensor.name, tuple(tensor.shape), dtype, ())
        return tuple(map(_cut, spec.shape, chunk_shape(spec, LEAST, MOST), (0,) * tensor.ndim))
    return tuple(map(_cut, block.shape, chunk_shape(spec, LEAST, MOST), block.start))


def token(tensor: LazyArray) -> str:
    """Return a text that is the same in every process for the same part of the same tensor in unchanged files.

    Parameters
    ----------
    tensor
        The tensor.

    Returns
    -------
    str
        A hash of the tensor's description and of the versions of its files.
    """
    spec, store, selection = tensor._held, tensor.store, tensor._sel
    axes = [axis if isinstance(axis, range) else axis.tolist() for axis in selection.axes]
    what = store.root, spec.name, spec.shape, spec.dtype, structure(spec), axes, selection.dims
    digest = blake2b(repr(what).encode(), digest_size=16)
    stores = stores_of(store)
    for one in leaves(spec):
        fragments, pins = list(one.spec.fragments), stores[one.source].pins
        digest.update(repr([(path, pins.get(path)) for path in sorted({f.extent.path for f in fragments})]).encode())
        for fragment in fragments:
            digest.update(repr(fragment).encode())
    return digest.hexdigest()


def _cut(length: int, chunk: int, start: int) -> tuple[int, ...]:
    """Cut a part of a dimension, from ``start``, into pieces that end where the whole dimension's chunks end.

    >>> _cut(10, 4, 2)
    (2, 4, 4)
    """
    edges: Sequence[int] = sorted({start, start + length, *range(-(-start // chunk) * chunk, start + length, chunk)})
    return tuple(b - a for a, b in pairwise(edges)) or (0,)
