"""The loop that moves tensors into a file: piece by piece, on several threads, each with one buffer.

Memory is bounded by the number of threads, not by the size of a tensor: a piece of PIECE bytes is read into a buffer
and written to its place. Pieces are planned when their turn comes, so a million fragments are no list of a million.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from ..io.memory import as_bytes
from ..io.pool import Task, run
from .crc import combined
from .held import Writable

PIECE = 4 << 20  # bytes; a buffer of this size stays in the processor's cache between read and write


class Placed(NamedTuple):
    """A tensor, and the byte of the file where its elements begin, in C order."""

    offset: int
    tensor: Writable


def write(fd: int, placed: Iterable[Placed], done: Callable[[int], None], checksums: bool = False) -> list[int]:
    """Write the elements of all tensors to the open file. ``done`` is called with the bytes of each piece, from any
    thread but one at a time. Returns the CRC-32 of every tensor's bytes if ``checksums``, else an empty list.

    Raises what reading raises, and OSError of the file.
    """
    placed = list(placed)
    found: list[dict[int, tuple[int, int]]] = [{} for _ in placed]  # tensor -> byte -> (CRC-32, bytes) of a piece
    buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
    lock = threading.Lock()

    def move(n: int, offset: int, piece: Any) -> None:
        try:
            buffer = buffers.get_nowait()
        except Empty:
            buffer = torch.empty(PIECE, dtype=torch.uint8)
        nbytes = piece.nbytes
        memory = as_bytes(piece.read_into(buffer[:nbytes].view(piece.dtype).view(piece.shape)))
        write_at(fd, memory, offset)
        if checksums:
            found[n][offset] = zlib.crc32(memory), nbytes
        del memory
        buffers.put(buffer)
        with lock:
            done(nbytes)

    def tasks() -> Iterator[Task]:
        for n, (offset, tensor) in enumerate(placed):
            for ahead, piece in tensor.pieces(PIECE):
                at = offset + ahead * tensor.itemsize
                yield piece.nbytes, lambda n=n, at=at, piece=piece: move(n, at, piece)  # type: ignore[misc]

    run(tasks())
    return [combined(crc for _, crc in sorted(pieces.items())) for pieces in found] if checksums else []


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of ``data``, from byte ``offset`` of the file on."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count
