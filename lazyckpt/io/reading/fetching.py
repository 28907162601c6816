"""Copies of a plan as runs of bytes to ask a server for.

The wanted runs of a copy go to memory one after the other, whatever lies between them in the file; from there the
elements go to the output. Runs that are closer than the headers of a request are long are one run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...core.box import c_strides
from ...core.copies import Copy
from ...core.dtypes import bits_of
from ...core.extents import Extent
from ...core.requests import NEAR, Ints
from ...core.rounding import convert, negated
from ...errors import foreign, undecodable
from ..storage.remote import Remote
from ..tasks import Fetch
from ..tensors import as_bytes

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Layout(NamedTuple):
    """How a copy becomes runs: elements of a run, where runs start (in elements, ascending), and the stride of each
    dimension of the copy in the memory where the runs are one after the other."""

    reach: int
    starts: Ints
    strides: tuple[int, ...]


def fetch_of(store: Remote, copy: Copy, target: torch.Tensor, dtype: torch.dtype, most: int) -> Fetch | None:
    """Return the task that fills ``target`` with a copy whose elements have ``dtype`` in the file; None if it needs
    more than ``most`` bytes of memory between, and can be split."""
    size = dtype.itemsize
    reach, starts, strides = layout_of(copy, size)
    offsets = copy.extent.offset + (copy.start + starts) * size
    nbytes = len(starts) * reach * size
    lengths = np.full(len(starts), reach * size, np.int64)
    at = np.arange(len(starts), dtype=np.int64) * (reach * size)
    plain = copy.extent.raw and dtype == target.dtype and target.is_contiguous()
    if plain and nbytes == target.nbytes and _same(strides, copy.shape):
        return Fetch(store, copy.extent.path, offsets, lengths, at, as_bytes(target))
    if nbytes > most and target.numel() > 1:
        return None
    done = partial(_place, copy, strides, target, dtype)
    return Fetch(store, copy.extent.path, offsets, lengths, at, nbytes, done)


def resolved(extent: Extent, source: torch.Tensor) -> torch.Tensor:
    """Return elements with the conjugation and the sign that an extent asks for."""
    if extent.conj:
        source = source.conj()
    return negated(source) if extent.neg else source


def layout_of(copy: Copy, size: int) -> Layout:
    """Return the runs of a copy whose elements have ``size`` bytes."""
    lists = copy.lists or (None,) * len(copy.shape)
    strides = [0] * len(copy.shape)
    moving = [d for d, n in enumerate(copy.shape) if n > 1 and copy.strides[d]]
    moving.sort(key=lambda d: copy.strides[d])
    reach, inside = 1, 0
    for d in moving:  # the dimensions within a run
        if lists[d] is not None or (copy.strides[d] - reach) * size >= NEAR:
            break
        strides[d] = copy.strides[d]
        reach += (copy.shape[d] - 1) * copy.strides[d]
        inside += 1
    starts = np.zeros(1, np.int64)
    apart = reach
    for d in moving[inside:]:  # from the smallest stride to the largest, so the largest is the slowest
        positions = lists[d]
        steps = np.arange(copy.shape[d]) if positions is None else positions
        starts = (steps[:, None] * copy.strides[d] + starts).ravel()
        strides[d] = apart
        apart *= copy.shape[d]
    return Layout(reach, starts, tuple(strides))


def _same(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether elements with these strides are in C order."""
    return all(n < 2 or a == b for n, a, b in zip(shape, strides, c_strides(shape), strict=True))


def _place(copy: Copy, strides: tuple[int, ...], target: torch.Tensor, dtype: torch.dtype, memory: memoryview) -> None:
    """Copy elements from the memory of the runs to the target."""
    extent = copy.extent
    try:
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if extent.swapped:
            unit = dtype.itemsize // (2 if dtype.is_complex else 1)
            buffer = buffer.view(-1, unit).flip(1).view(-1)
        elements = buffer.view(bits_of(dtype.itemsize)).as_strided(copy.shape, strides)
        convert(resolved(extent, elements.view(dtype)), target.dtype, target)
    except Exception as e:
        if not foreign(e):
            raise
        raise undecodable(extent.path, "reading its elements", e) from e
