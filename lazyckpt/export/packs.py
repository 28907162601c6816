"""The small tensors of a hierarchy, packed: those of one state and dtype are one 1-d array (formats/zarr/packs.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.dtypes import DType
from ..core.packs import packed
from ..core.units import size_in_bytes
from ..formats.zarr.documents import NAMES, Contents, Json
from ..formats.zarr.packs import described, path_of
from ..io.storage.base import Store
from ..lazy import LazyArray

SMALL = 64 << 10  # tensors of up to this many bytes are packed by ``pack=True``


@dataclass(frozen=True, slots=True)
class Pack:
    """Tensors that are written as one array. ``members``: their names, shapes, and positions in the view, as the
    array's attributes list them."""

    tensor: LazyArray
    members: Json


def chooser(pack: int | str | bool | None) -> Callable[[LazyArray], bool] | None:
    """Return a function that says whether a tensor is packed; None if none is. Raises DataError for what is no size."""
    if pack is None or pack is False:
        return None
    most = SMALL if pack is True else size_in_bytes(pack)
    stores: list[Store] = []  # a pack is read from one store: that of the first tensor

    def packs(tensor: LazyArray) -> bool:
        spec = tensor.spec
        if spec.nbytes > most or spec.combine != "first" or spec.dtype not in NAMES or tensor._selection is not None:
            return False
        if not stores:
            stores.append(tensor.store)
        return tensor.store is stores[0]

    return packs


def packs(found: Contents[LazyArray]) -> dict[str, Pack]:
    """Return the packs of the small tensors, by path."""
    made = {}
    for group, small in found.small.items():
        kinds: dict[DType, list[tuple[int, str, LazyArray]]] = {}
        for entry in small:
            kinds.setdefault(entry[2].spec.dtype, []).append(entry)
        for dtype, entries in kinds.items():
            positions, names, tensors = zip(*entries, strict=True)
            specs, where = [tensor.spec for tensor in tensors], path_of(group, dtype)
            members = described(names, [spec.shape for spec in specs], positions)
            made[where] = Pack(LazyArray(tensors[0].store, packed(where, specs)), members)
    return made
