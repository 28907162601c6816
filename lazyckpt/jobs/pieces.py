"""The bytes of tensors in pieces that fit into the caches of a core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError
from ..io.reading.gather import BLOCK
from ..io.storage.access import read_pieces
from ..io.tensors import as_bytes
from .places import PIECE

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_NEAR = 1 << 20  # bytes of a piece that is copied unchanged from a local store: fits into a core's private cache
_own = threading.local()


def contents(tensor: Any) -> Iterator[tuple[int, memoryview]]:
    """Yield a tensor's bytes in order: (byte offset, bytes). The memory is valid until the next item."""
    runs = tensor._runs()
    if runs is None:
        for ahead, piece in tensor.pieces(PIECE):
            yield ahead * tensor.itemsize, read_piece(piece)
        return
    store = tensor.store
    memory = as_bytes(scratch(min(tensor.nbytes, BLOCK) if store.gap else _NEAR))
    at = filled = 0
    pieces: list[tuple[int, memoryview]] = []  # of one file, that are read together
    last = ""

    def read() -> None:
        if pieces:
            read_pieces(store, last, pieces)
            pieces.clear()

    for path, offset, nbytes in runs:
        if path != last:
            read()
            last = path
        while nbytes:
            part = memory[filled : filled + nbytes]
            pieces.append((offset, part))
            filled, offset, nbytes = filled + len(part), offset + len(part), nbytes - len(part)
            if filled == len(memory):
                read()
                yield at, memory
                at, filled = at + filled, 0
    if filled:
        read()
        yield at, memory[:filled]


def read_piece(piece: Any) -> memoryview:
    """Read a piece of at most PIECE bytes (or one element) into scratch memory, valid until the thread's next call."""
    return as_bytes(piece.read_into(scratch(piece.nbytes).view(piece.dtype).view(piece.shape)))


def scratch(nbytes: int) -> torch.Tensor:
    """Return scratch memory of this thread, valid until its next call."""
    buffer: torch.Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _own.buffer = torch.empty(max(nbytes, PIECE), dtype=torch.uint8, device="cpu")
    return buffer[:nbytes]


def drop_scratch() -> None:
    """Release the scratch memory of this thread."""
    _own.buffer = None


def differs(path: str, where: str) -> CorruptError:
    return CorruptError(
        f"{path}: {where} do not hold what the source holds: the disk or the memory is faulty, or another program "
        "wrote there. The file is not kept: export again"
    )
