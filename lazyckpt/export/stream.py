"""Moves tensors into files: tasks that each write a run of a tensor to its place, piece by piece, with one buffer.

Memory is bounded by the number of tasks in flight, not by the size of a tensor. Runs are planned when their turn comes,
so a million fragments are no list of a million.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError
from ..io.memory import as_bytes
from .crc import combined, crc32
from .held import Writable
from .job import OVERHEAD, Run, Task

PIECE = 4 << 20  # bytes; a buffer of this size stays in the processor's cache between read and write
_NEAR = 1 << 20  # the same for what is only copied, if its store has no price for a request: fits a core's own cache
RUN = 16 << 20  # bytes that a task moves, at most
_own = threading.local()


class Placed(NamedTuple):
    """A tensor, and the byte of the file where its elements begin, in C order."""

    offset: int
    tensor: Writable


class Layout(NamedTuple):
    """A file in which everything stands but the tensors' elements. ``finish``: what is to be done with the CRC-32s of
    all tensors' bytes when they stand there; None if nobody asks for them."""

    path: str
    placed: Sequence[Placed]
    finish: Callable[[list[int]], None] | None = None


def fill(layouts: Sequence[Layout], run: Run, moved: Callable[[int], None]) -> None:
    """Write the elements of all tensors. ``moved`` is called with the bytes that each task has moved.

    Raises what reading raises, and OSError of the files.
    """
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (file, tensor) -> (byte, CRC-32, bytes) of each run

    def tasks() -> Iterator[Task]:
        for f, layout in enumerate(layouts):
            for n, offset, part in _runs(layout):
                do = partial(_move, layout.path, offset, part, (f, n) if layout.finish else None)
                yield Task(part.nbytes, PIECE + OVERHEAD, do)

    def done(task: Task, result: Any) -> None:
        if result is not None:
            key, offset, crc = result
            found.setdefault(key, []).append((offset, crc, task.nbytes))
        moved(task.nbytes)

    run(tasks(), done)
    for f, layout in enumerate(layouts):
        if layout.finish is not None:
            runs = (sorted(found.get((f, n), [])) for n in range(len(layout.placed)))
            layout.finish([combined((crc, nbytes) for _, crc, nbytes in of_one) for of_one in runs])


def compare(layouts: Sequence[Layout], run: Run, moved: Callable[[int], None]) -> None:
    """Read what `fill` has written, from the disk, and the source again. Raises CorruptError if they differ."""
    for layout in layouts:
        with open(layout.path, "rb") as file:
            forget(file.fileno())

    def tasks() -> Iterator[Task]:
        for layout in layouts:
            for _, offset, part in _runs(layout):
                yield Task(part.nbytes, 2 * PIECE + OVERHEAD, partial(_compare, layout.path, offset, part))

    run(tasks(), lambda task, _: moved(task.nbytes))


def _runs(layout: Layout) -> Iterator[tuple[int, int, Any]]:
    """(which tensor, byte of the file, a run of its elements) of all."""
    for n, (offset, tensor) in enumerate(layout.placed):
        for ahead, part in tensor.pieces(max(RUN, PIECE)):
            yield n, offset + ahead * tensor.itemsize, part


def _move(path: str, offset: int, tensor: Any, key: tuple[int, int] | None) -> tuple[tuple[int, int], int, int] | None:
    """One run, into a file that is there. Returns its key, offset and CRC-32, if it has a key."""
    crc = 0
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for at, memory in _contents(tensor):
            write_at(fd, memory, offset + at)
            if key is not None:
                crc = crc32(memory, crc)
    finally:
        os.close(fd)
    return None if key is None else (key, offset, crc)


def _contents(tensor: Any) -> Iterator[tuple[int, memoryview]]:
    """(byte of the tensor, the bytes from there on), in order, in memory of this thread's until the next are asked
    for."""
    runs = tensor.runs()
    if runs is None:
        for ahead, piece in tensor.pieces(PIECE):
            yield ahead * tensor.itemsize, read_piece(piece)
        return
    store = tensor.store
    memory = as_bytes(scratch(PIECE if store.gap else _NEAR))
    at = filled = 0
    for path, offset, nbytes in runs:
        while nbytes:
            part = memory[filled : filled + nbytes]
            store.read_into(path, offset, part)
            filled, offset, nbytes = filled + len(part), offset + len(part), nbytes - len(part)
            if filled == len(memory):
                yield at, memory
                at, filled = at + filled, 0
    if filled:
        yield at, memory[:filled]


def _compare(path: str, offset: int, tensor: Any) -> None:
    with open(path, "rb", buffering=0) as file:
        for ahead, piece in tensor.pieces(PIECE):
            at = offset + ahead * tensor.itemsize
            written = os.pread(file.fileno(), piece.nbytes, at)
            if written != bytes(read_piece(piece)):
                raise differs(path, f"bytes {at:,} to {at + piece.nbytes:,}")


def differs(path: str, where: str) -> CorruptError:
    return CorruptError(
        f"{path}: {where} do not hold what the source holds: the disk or the memory is faulty, or something else wrote "
        "there. It is not kept"
    )


def read_piece(piece: Any) -> memoryview:
    """The elements of a piece of at most PIECE bytes (or one element), in memory of this thread's, until it asks
    again."""
    return as_bytes(piece.read_into(scratch(piece.nbytes).view(piece.dtype).view(piece.shape)))


def scratch(nbytes: int) -> torch.Tensor:
    """Bytes of this thread's, until it asks again."""
    buffer: torch.Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _own.buffer = torch.empty(max(nbytes, PIECE), dtype=torch.uint8)
    return buffer[:nbytes]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of ``data``, from byte ``offset`` of the file on."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def forget(fd: int) -> None:
    """Bring a file to the disk and out of the system's cache, so that what is read next is what stands there."""
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
