"""Tensors in memory, so that several computations read them once."""

from __future__ import annotations

from ..core.box import c_strides
from ..core.extents import Extent
from ..core.specs import whole
from ..errors import LazyckptError
from ..io.storage.in_memory import Memory
from ..io.storage.joined import stores_of
from ..io.tensors import as_bytes
from ..lazy import LazyArray

_NAME = "memory"


def is_far(t: LazyArray) -> bool:
    """Return whether a tensor is behind a network, where reading it again takes as long as the first time."""
    return any(store.joins for one in t.operands for store in stores_of(one.store))


def is_whole(t: LazyArray) -> bool:
    """Return whether all files that a tensor needs are there."""
    try:
        t._check()
    except LazyckptError:
        return False
    return True


def loaded(t: LazyArray) -> LazyArray:
    """Read a tensor into memory.

    Returns
    -------
    LazyArray
        A tensor of the same name, shape, dtype and elements. Reading it reads no file.

    Raises
    ------
    LazyckptError
        What reading raises.
    """
    shape = tuple(t.shape)
    data = as_bytes(t[...].contiguous())
    spec = whole(t.name, Extent(_NAME, 0, t.spec.dtype, shape, c_strides(shape)))
    return LazyArray(Memory(t.store, _NAME, data), spec)
