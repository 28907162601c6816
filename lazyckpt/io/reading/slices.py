"""What small slices of a tensor are read through, and after how many of them it pays to set it up."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from ...core.box import Shape, is_run
from ...core.extents import Extent, Hole, Packed
from ...core.fragments import fragments_of
from ...core.specs import TensorSpec
from ...errors import LazyckptError
from ..storage.access import check
from ..storage.base import Store
from .gather import plan_unread
from .mosaic import Mosaic
from .packed import locate
from .window import CLONABLE, Window

_PLANNED = 64  # fragments for each slice that is planned by itself before a plan of all is kept


def plain_run(store: Store, spec: TensorSpec) -> Extent | None:
    """Return the extent of a tensor that is one contiguous run of raw bytes of one file; None for others."""
    if spec.expr is not None:
        return None
    fragments = spec.fragments
    fragment = fragments[0] if type(fragments) is tuple and len(fragments) == 1 else fragments_of(fragments).only()
    if fragment is None:
        return None
    extent = fragment.extent
    if (
        fragment.parts is not None
        or fragment.axes is not None
        or isinstance(extent, Hole)
        or extent.dtype is not spec.dtype
    ):
        return None
    if fragment.span not in (None, (0, spec.numel)) or fragment.local_shape != spec.shape:
        return None
    if isinstance(extent, Packed):  # callers are about to read, so locating the bytes is no extra work
        extent = locate(store, extent, spec.name)
    return extent if extent.raw and is_run(extent.shape, extent.strides) else None


def planned_apart(spec: TensorSpec) -> int:
    """Return how many slices of a tensor are planned one by one before a window or a mosaic pays."""
    return len(spec.fragments) // _PLANNED


def weight_of(key: Any, spec: TensorSpec) -> int:
    """Return how many slices reading ``t[key]`` counts as, in the unit of `planned_apart`."""
    most = planned_apart(spec)
    return 1 + ceil(most * _share(key, spec.shape)) if most else 1


def window_of(store: Store, spec: TensorSpec) -> Window | Mosaic | None:
    """Return the window or the mosaic that small slices of a tensor are read through; None for tensors without."""
    if not spec.numel or not isinstance(store, Store) or not store.maps_files or spec.expr is not None:
        return None
    fragments = fragments_of(spec.fragments)
    try:
        extent = None if fragments.packed() and len(fragments) > 1 else plain_run(store, spec)
        if extent is None or extent.offset % extent.dtype.itemsize:
            return Mosaic.of(store, spec, plan_unread(store, spec))
    except LazyckptError:  # slices may not need what is missing
        return None
    if extent.dtype not in CLONABLE:
        return None
    check(store, extent.path, extent.offset, spec.nbytes)
    return Window(store, extent.path, extent.offset, extent.dtype.torch, spec.shape)


def _share(key: Any, shape: Shape) -> float:
    """Return about which part of the rows a key spans."""
    first = key[0] if type(key) is tuple and key else key
    if isinstance(first, int) or not shape or not shape[0]:
        return 0.0
    if not isinstance(first, slice):
        return min(1.0, len(first) / shape[0]) if isinstance(first, list | np.ndarray) else 1.0
    try:
        rows = range(*first.indices(shape[0]))
    except (TypeError, ValueError):  # the key is refused later
        return 0.0
    return (abs(rows[-1] - rows[0]) + 1) / shape[0] if rows else 0.0
