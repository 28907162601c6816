"""Reads of many plain tensors: in the order of the files, neighbours by one vectored read.

Memory for one tensor, and a system call to read it, cost several times what reading 4 KiB costs. So tensors below
`SMALL` bytes that are near each other in a file share arenas of at most 1 MiB. Each tensor has a storage of its own
size, so that saving it does not save the arena, but the arena's memory is released with the last of its tensors.
Larger tensors have memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ...core.box import Shape
from ...core.dtypes import DType
from ..storage.access import read_pieces
from ..storage.base import Store
from ..storage.remote import Remote
from ..tasks import Fetch, Task
from ..tensors import empty, memory_of
from .gather import run_tasks, step_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

SMALL = 32 << 10  # bytes; larger tensors have memory of their own
_ARENA = 1 << 20  # bytes
_ALIGNED = 64  # bytes, as torch aligns tensors


class Plain(NamedTuple):
    """A tensor that is one run of bytes of a file, at least one."""

    path: str
    offset: int
    nbytes: int
    name: str
    shape: Shape
    dtype: DType


def plain(name: str, path: str, offset: int, shape: Shape, dtype: DType) -> Plain:
    return Plain(path, offset, prod(shape) * dtype.itemsize, name, shape, dtype)


def plain_tasks(store: Store, wanted: list[Plain], found: dict[str, torch.Tensor]) -> Iterator[Task]:
    """Yield the tasks that read tensors of one store, in the order of the files; put the tensors into ``found``, where
    they are complete when the tasks are done."""
    wanted.sort()
    step = step_of(store)
    most = step if store.gap else _ARENA  # bytes of small tensors in one read
    start = size = small = 0
    for n, one in enumerate(wanted):
        path, _, nbytes, name, shape, dtype = one
        large = nbytes > step
        small += nbytes + _ALIGNED if nbytes < SMALL else 0
        if n > start and (large or path != wanted[start].path or size + nbytes > step or small > most):
            yield from _together(store, wanted[start:n], found)
            start, size, small = n, 0, nbytes + _ALIGNED if nbytes < SMALL else 0
        if large:
            found[name] = empty(shape, dtype.torch)
            yield from run_tasks(store, path, one.offset, found[name])
            start = n + 1
        else:
            size += nbytes
    if start < len(wanted):
        yield from _together(store, wanted[start:], found)


def _together(store: Store, group: Sequence[Plain], found: dict[str, torch.Tensor]) -> Iterator[Task]:
    """Yield the tasks that read tensors of one file that are near each other."""
    small = [one for one in group if one.nbytes < SMALL]
    pieces: list[tuple[int, memoryview]] = []
    first = size = 0
    for n, one in enumerate(small):
        if size + one.nbytes + _ALIGNED > _ARENA and n > first:
            pieces += _arena(small[first:n], found)
            first, size = n, 0
        size += one.nbytes + _ALIGNED
    if small:
        pieces += _arena(small[first:], found)
    held = []  # the tensors whose memory the pieces are
    for one in group if len(small) < len(group) else ():
        if one.nbytes >= SMALL:
            tensor = found[one.name] = empty(one.shape, one.dtype.torch)
            pieces.append((one.offset, memory_of(tensor)))
            held.append(tensor)
    if isinstance(store, Remote):
        yield from ((len(memory), Fetch.of_run(store, group[0].path, offset, memory)) for offset, memory in pieces)
        return
    if small and held:
        pieces.sort(key=lambda piece: piece[0])
    yield sum(one.nbytes for one in group), partial(_read, store, group[0].path, pieces, held)


def _read(store: Store, path: str, pieces: Sequence[tuple[int, memoryview]], held: Sequence[torch.Tensor]) -> None:
    read_pieces(store, path, pieces)


def _arena(group: Sequence[Plain], found: dict[str, torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """Make tensors in shared memory, and yield the runs of the file to read into it. Tensors that are next to each
    other in the file and in memory are one run."""
    size = sum(-(-one.nbytes // _ALIGNED) * _ALIGNED for one in group)
    arena = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()  # aligned as torch aligns memory
    memory = arena.data
    at = begin = end = 0  # where the next tensor is, and the run so far
    first = group[0].offset  # of the run, in the file
    frombuffer = torch.frombuffer
    for _, offset, nbytes, name, shape, dtype in group:
        if (at, offset) != (end, first + end - begin):
            yield first, memory[begin:end]
            begin, first = at, offset
        own = dtype.torch
        flat = frombuffer(arena, dtype=own, count=nbytes // dtype.itemsize, offset=at)
        found[name] = flat if len(shape) == 1 else flat.view(shape)
        end = at + nbytes
        at += -(-nbytes // _ALIGNED) * _ALIGNED
    yield first, memory[begin:end]
