"""Reads of many small tensors: into shared blocks of memory, by a few vectored reads of each file.

Memory for one tensor, and a system call to read it, cost several times what reading 4 KiB costs. So tensors below
`SMALL` bytes that are near each other in a file share an arena of at most 1 MiB. Each tensor has a storage of its own
size, so that saving it does not save the arena, but the arena's memory is released with the last of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...core.box import Shape
from ..pool import Task
from ..storage.base import Store, read_pieces

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

SMALL = 32 << 10  # bytes; larger tensors have memory of their own
_ARENA = 1 << 20  # bytes
_ALIGNED = 64  # bytes, as torch aligns tensors


class Small(NamedTuple):
    """A small tensor that is one run of bytes of a file."""

    path: str
    offset: int
    nbytes: int
    name: str
    dtype: torch.dtype
    shape: Shape


def small_tasks(store: Store, wanted: list[Small], found: dict[str, torch.Tensor]) -> Iterator[Task]:
    """Yield the tasks that read small tensors of one store, in the order of the files; put the tensors into ``found``,
    where they are complete when the tasks are done."""
    wanted.sort()
    start = size = 0
    for n, one in enumerate(wanted):
        if n > start and (one.path != wanted[start].path or size + one.nbytes > _ARENA):
            yield _arena(store, wanted[start:n], size, found)
            start, size = n, 0
        size += -(-one.nbytes // _ALIGNED) * _ALIGNED
    if wanted:
        yield _arena(store, wanted[start:], size, found)


def _arena(store: Store, group: list[Small], size: int, found: dict[str, torch.Tensor]) -> Task:
    arena = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()  # aligned as torch aligns memory
    memory = arena.data
    pieces = []
    at = 0
    for _, offset, nbytes, name, dtype, shape in group:
        pieces.append((offset, memory[at : at + nbytes]))
        flat = torch.frombuffer(arena, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
        found[name] = flat if len(shape) == 1 else flat.view(shape)
        at += -(-nbytes // _ALIGNED) * _ALIGNED
    return sum(one.nbytes for one in group), partial(read_pieces, store, group[0].path, pieces)
