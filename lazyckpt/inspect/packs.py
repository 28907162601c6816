"""Small tensors that a fold visits together: those of one file, dtype and size are read into one matrix, a row each.

A task for each of 100,000 tensors of a kilobyte, and a call of each function of numpy and torch for each of them, takes
more time than reading and computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.dtypes import DType
from ..errors import LazyckptError
from ..io.storage.access import read_pieces
from ..io.storage.base import Store
from ..io.storage.local import LocalStore
from ..io.tensors import as_bytes
from ..lazy import LazyArray

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

SMALL = 16 << 10  # bytes of the largest tensor that is read with others
_ROWS, _BYTES = 512, 2 << 20  # limits of a pack


@dataclass(slots=True)
class Pack:
    """Tensors of one file, dtype and number of elements, each in one piece.

    Attributes
    ----------
    store, path
        The file.
    dtype, numel
        Those of each tensor.
    tensors, offsets
        The tensors, and where each begins in the file, in bytes.
    numbers
        What the tensors are for the caller.
    """

    store: Store
    path: str
    dtype: DType
    numel: int
    tensors: list[LazyArray] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return len(self.tensors) * self.numel * self.dtype.itemsize

    @property
    def is_full(self) -> bool:
        """Whether no tensor is to be added."""
        return len(self.tensors) >= _ROWS or self.nbytes >= _BYTES

    def read(self) -> torch.Tensor:
        """Read all tensors as the rows of a matrix. Neighbours in the file are read together. Raises what reading one
        of them raises."""
        size = self.numel * self.dtype.itemsize
        found = torch.empty(len(self.offsets) * size, dtype=torch.uint8, device="cpu")
        memory = as_bytes(found)
        pieces: list[tuple[int, memoryview]] = []
        first = 0
        for n in range(1, len(self.offsets) + 1):
            if n == len(self.offsets) or self.offsets[n] != self.offsets[n - 1] + size:
                pieces.append((self.offsets[first], memory[first * size : n * size]))
                first = n
        read_pieces(self.store, self.path, pieces)
        return found.view(self.dtype.torch).view(len(self.offsets), self.numel)


class Packs:
    """Packs that are being filled. A tensor may have others beside it that are visited with it, each in a pack of its
    own: as the tensors of two checkpoints that are compared."""

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], tuple[Pack, ...]] = {}

    def add(self, number: int, *tensors: LazyArray) -> Sequence[Pack] | None:
        """Add tensors that are visited together.

        Returns
        -------
        sequence of Pack or None
            A pack for each of the tensors if these packs are full now, else an empty one. None if the tensors have to
            be read apart: one is empty, too large, not a single run of bytes, or not in a local file.
        """
        key: list[object] = []
        extents = []
        for t in tensors:
            store = t.store
            if not 0 < t.nbytes <= SMALL or not isinstance(store, LocalStore) or store.gap:
                return None
            try:
                extent = t._plain
            except (LazyckptError, OSError):  # reading it reports the error
                return None
            if extent is None:
                return None
            extents.append(extent)
            key += (id(store), extent.path, extent.dtype.name, t.numel())
        packs = self._open.get(tuple(key))
        if packs is None:
            found = (Pack(t.store, e.path, e.dtype, t.numel()) for t, e in zip(tensors, extents, strict=True))
            packs = self._open[tuple(key)] = tuple(found)
        for pack, t, extent in zip(packs, tensors, extents, strict=True):
            pack.tensors.append(t)
            pack.offsets.append(extent.offset)
            pack.numbers.append(number)
        return self._open.pop(tuple(key)) if any(pack.is_full for pack in packs) else ()

    def rest(self) -> Iterator[tuple[Pack, ...]]:
        """Yield the packs that are not full."""
        yield from self._open.values()
        self._open.clear()
