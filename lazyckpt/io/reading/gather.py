"""Runs a plan: fills an output array with the bytes that its copies name, and reads no others.

A copy whose elements are one run in the file and in the output is read straight into place. Everything else goes
through a window of the file: a dense one is read into a small buffer, a sparse one is touched through a mapping; where
a store cannot map, it is split until what lies between two wanted runs is at most the store's gap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

from ...core.box import Box, c_strides, hull, is_run
from ...core.dtypes import bits_of
from ...core.index import Extent, Inline, Packed, TensorSpec
from ...core.plan import Copy, Selection, overlaps, plan
from ...core.select import Reads
from ...errors import decoding, foreign, undecodable
from ..pool import Task, run, run_here
from ..storage.base import Store, check
from ..storage.mapping import Mapped
from ..tensors import as_bytes, empty
from .packed import locate, locate_all, located, unpacked, unpacked_into

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

BLOCK = 8 << 20  # bytes that one read asks for at most, and that a buffer holds
_RUN = 32 << 10  # runs this long are worth a read of their own
_own = threading.local()
P = ParamSpec("P")


def _decodes(read: Callable[P, None]) -> Callable[P, None]:
    """What reads a copy, raising CorruptError for elements that cannot be what the file says that they are."""

    @wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            read(*args, **kwargs)
        except Exception as e:
            if not foreign(e):
                raise
            copy = next((arg for arg in args if isinstance(arg, Copy)), None)
            raise undecodable(copy.extent.path if copy else "the file", "reading its elements", e) from e

    return guarded


class Run(NamedTuple):
    """Bytes of a file that follow each other."""

    path: str
    offset: int
    nbytes: int


def read(store: Store, spec: TensorSpec, reads: Reads) -> torch.Tensor:
    """What ``reads`` asks of a tensor, as a new CPU tensor. Errors as `core.plan.plan` and the store's reads."""
    out = empty(reads.shape, spec.dtype.torch)
    run(tasks(store, spec, reads, out))
    return finish(reads, out)


def finish(reads: Reads, array: torch.Tensor) -> torch.Tensor:
    """What was asked for, from the array that was read for it: reversed, reordered and reshaped where it takes that."""
    if reads.in_place:
        return array
    if reads.flips or reads.orders:
        bits = array.view(bits_of(array.itemsize))
        bits = bits.flip(reads.flips) if reads.flips else bits
        for n, order in reads.orders:
            bits = bits.index_select(n, torch.from_numpy(order).to(array.device))
        array = bits.view(array.dtype)
    array = array.reshape(tuple(1 if n in reads.added else length for n, length in enumerate(reads.result)))
    for n in reads.added:
        length = reads.result[n]  # 1, unless it was indexed since
        if length != 1:
            array = array.narrow(n, 0, 0) if length == 0 else array.repeat_interleave(length, n)
    return array


def tasks(store: Store, spec: TensorSpec, reads: Reads, out: torch.Tensor) -> Iterator[Task]:
    """The work that fills ``out``, of shape ``reads.shape``, contiguous, on the CPU."""
    for at, want in reads.blocks():
        box = Box(at, tuple(a + len(r) for a, r in zip(at, want, strict=True)))
        yield from _block_tasks(store, spec, want, out[box.slices] if at else out)


def agree(store: Store, spec: TensorSpec, want: Selection) -> bool:
    """Whether all fragments that hold the same elements of the selection hold the same bytes. Reads those only."""
    for pair in overlaps(spec, want, lambda archive: locate(store, archive, spec.name)):
        first, second = (_alone(store, copy) for copy in pair)
        if not torch.equal(first, second):
            return False
    return True


def _alone(store: Store, copy: Copy) -> torch.Tensor:
    """The elements of one copy, as bytes."""
    out = empty(copy.shape, copy.extent.dtype.torch)
    run_here(_copy_tasks(store, copy, out))
    return out.view(-1).view(torch.uint8)


def _block_tasks(store: Store, spec: TensorSpec, want: Selection, out: torch.Tensor) -> Iterator[Task]:
    copies = planned(store, spec, want)
    if spec.combine == "mean":
        yield out.nbytes, partial(_mean, store, copies, out)
        return
    for copy in copies:
        yield from _copy_tasks(store, copy, out[copy.slices] if copy.at else out)


def planned(store: Store, spec: TensorSpec, want: Selection) -> list[Copy]:
    """The plan, with all archives looked up that it needs."""
    unknown: list[tuple[Packed, str]] = []

    def find(archive: Packed) -> Extent:
        extent = located(store, archive, spec.name)
        if extent is None:
            unknown.append((archive, spec.name))
        return extent or archive.as_told

    copies = plan(spec, want, find)
    if not unknown:
        return copies
    with decoding(store.root, f"looking for {spec.name!r:.80}"):
        locate_all(store, unknown)
    return plan(spec, want, lambda archive: locate(store, archive, spec.name))


def runs(store: Store, spec: TensorSpec, want: Selection) -> list[Run] | None:
    """The bytes of the selection in C order, as they stand in files; None if they do not, or not in such an order."""
    if spec.combine == "mean":
        return None
    strides = c_strides([len(r) for r in want])
    found: list[tuple[int, Run]] = []
    for copy in planned(store, spec, want):
        extent, size = copy.extent, copy.extent.dtype.itemsize
        as_they_are = extent.raw and extent.dtype is spec.dtype
        if not (as_they_are and is_run(copy.shape, copy.strides) and is_run(copy.shape, strides)):
            return None
        at = sum(a * s for a, s in zip(copy.at, strides, strict=True))
        found.append((at, Run(extent.path, extent.offset + copy.start * size, prod(copy.shape) * size)))
    return [run for _, run in sorted(found)]


def _mean(store: Store, copies: list[Copy], out: torch.Tensor) -> None:
    """Every element is the mean of the copies that hold it, summed in float32 (float64 for float64)."""
    own = copies[0].extent.dtype.torch if copies else out.dtype  # what it is read as, whatever it is converted to then
    wide = torch.float64 if own == torch.float64 else torch.float32
    total = torch.zeros(out.shape, dtype=wide, device="cpu")
    count = torch.zeros(out.shape, dtype=wide, device="cpu")
    for copy in copies:
        one = torch.empty(copy.shape, dtype=copy.extent.dtype.torch, device="cpu")
        run_here(_copy_tasks(store, copy, one))
        total[copy.slices] += one
        count[copy.slices] += 1
    out.copy_((total / count).to(own))


def _copy_tasks(store: Store, copy: Copy, target: torch.Tensor) -> Iterator[Task]:
    extent = copy.extent
    if extent.within is not None:
        return iter([(target.nbytes, partial(_unpack, store, extent.within, copy, target))])
    dtype = extent.dtype.torch
    if extent.raw and dtype == target.dtype:  # only bits move
        bits = bits_of(dtype.itemsize)
        return _cut(store, copy, target.view(bits), bits)
    return _cut(store, copy, target, dtype)


@_decodes
def _unpack(store: Store, archive: Packed | Inline, copy: Copy, target: torch.Tensor) -> None:
    plain = copy._replace(extent=replace(copy.extent, within=None))
    as_it_lies = plain.extent.raw and copy.extent.dtype.torch == target.dtype and is_run(copy.shape, copy.strides)
    as_it_lies = as_it_lies and copy.start == copy.extent.offset == 0 and target.is_contiguous()
    if as_it_lies and unpacked_into(store, archive, as_bytes(target)):
        return
    run_here(_copy_tasks(unpacked(store, archive), plain, target))


def _cut(store: Store, copy: Copy, target: torch.Tensor, dtype: torch.dtype) -> Iterator[Task]:
    """The tasks of a copy whose elements are taken from the file as ``dtype``, cut until each is one read."""
    extent, size = copy.extent, dtype.itemsize
    plain = extent.raw and dtype == target.dtype
    if plain and is_run(copy.shape, copy.strides) and target.is_contiguous():
        yield from run_tasks(store, extent.path, extent.offset + copy.start * size, target)
        return

    span = hull(copy.shape, copy.strides) * size
    wanted = target.numel() * size
    if span <= wanted or _largest_gap(copy) * size <= store.gap:
        if span <= BLOCK:
            yield span, partial(_through_buffer, store, copy, span, target, dtype)
        else:
            yield from _split(store, copy, target, dtype, BLOCK)
        return
    mapped = store.map(extent.path) if plain and _inner_run(copy) * size < _RUN else None
    if mapped is None or extent.offset + copy.start * size + span > len(mapped.buffer):  # reading tells of truncation
        yield from _split(store, copy, target, dtype, 0)
    elif span > 4 * BLOCK:
        yield from _split(store, copy, target, dtype, 4 * BLOCK)
    else:
        check(store, extent.path, extent.offset + copy.start * size, span)
        yield span, partial(_through_mapping, store, mapped, copy, span, target)


def _split(store: Store, copy: Copy, target: torch.Tensor, dtype: torch.dtype, limit: int) -> Iterator[Task]:
    """Cut along the dimension with the largest stride, into pieces that span at most ``limit`` bytes."""
    d = max(range(len(copy.shape)), key=lambda d: (copy.shape[d] > 1, copy.strides[d]))
    stride, length = copy.strides[d], copy.shape[d]
    inner = hull((*copy.shape[:d], 1, *copy.shape[d + 1 :]), copy.strides)
    many = max(1, min((limit // dtype.itemsize - inner) // stride + 1, length // 2))
    for at in range(0, length, many):
        n = min(many, length - at)
        shape = (*copy.shape[:d], n, *copy.shape[d + 1 :])
        piece = copy._replace(start=copy.start + at * stride, shape=shape)
        yield from _cut(store, piece, target.narrow(d, at, n), dtype)


def run_tasks(store: Store, path: str, offset: int, target: torch.Tensor) -> Iterator[Task]:
    """Fill a contiguous array with one run of a file's bytes."""
    memory = as_bytes(target)
    for at in range(0, len(memory), BLOCK):
        piece = memory[at : at + BLOCK]
        yield len(piece), partial(store.read_into, path, offset + at, piece)


@_decodes
def _through_buffer(store: Store, copy: Copy, span: int, target: torch.Tensor, dtype: torch.dtype) -> None:
    extent = copy.extent
    buffer = _scratch(span)
    store.read_into(extent.path, extent.offset + copy.start * dtype.itemsize, as_bytes(buffer))
    if extent.swapped:
        unit = dtype.itemsize // (2 if dtype.is_complex else 1)
        buffer = buffer.view(-1, unit).flip(1).view(-1)
    target.copy_(_resolved(extent, buffer.view(dtype).as_strided(copy.shape, copy.strides)))


def _scratch(nbytes: int) -> torch.Tensor:
    """Memory of this thread's own, until it asks again. (New memory each time would be most of the cost, and the C
    library keeps up to 64 MiB of it for every thread.)"""
    buffer: torch.Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _own.buffer = torch.empty(max(nbytes, _RUN), dtype=torch.uint8, device="cpu")
    return buffer[:nbytes]


@_decodes
def _through_mapping(store: Store, mapped: Mapped, copy: Copy, span: int, target: torch.Tensor) -> None:
    size = target.itemsize
    offset = copy.extent.offset + copy.start * size
    if offset % size == 0:
        source = torch.frombuffer(mapped.buffer, dtype=target.dtype, count=span // size, offset=offset)
        target.copy_(source.as_strided(copy.shape, copy.strides))
    else:  # vectorised kernels may rely on alignment: move bytes
        source = torch.frombuffer(mapped.buffer, dtype=torch.uint8, count=span, offset=offset)
        _as_byte_array(target).copy_(source.as_strided((*copy.shape, size), (*(s * size for s in copy.strides), 1)))
    if span > BLOCK:
        mapped.let_go(offset, offset + span)
    store.confirm(copy.extent.path, mapped)


def _as_byte_array(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with one more dimension, of bytes, whatever the strides."""
    size = tensor.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    strides = (*(s * size for s in tensor.stride()), 1)
    return flat.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)


def _resolved(extent: Extent, source: torch.Tensor) -> torch.Tensor:
    if extent.conj:
        source = source.conj()
    return -source if extent.neg else source


def _inner_run(copy: Copy) -> int:
    """Elements that follow each other in the file before a jump, along the innermost dimensions."""
    run_length = 1
    for n, s in sorted(zip(copy.shape, copy.strides, strict=True), key=lambda ns: ns[1]):
        if n == 1:
            continue
        if s != run_length:
            break
        run_length *= n
    return run_length


def _largest_gap(copy: Copy) -> int:
    """Elements between one wanted run and the next, at most."""
    gap, reach = 0, 1
    for n, s in sorted(zip(copy.shape, copy.strides, strict=True), key=lambda ns: ns[1]):
        if n > 1:
            gap = max(gap, s - reach)
            reach += (n - 1) * s
    return gap


class Range(NamedTuple):
    """Where a copy reads: ``times`` runs of ``nbytes`` bytes, the first at ``start``; ``in_all``: bytes, with what
    lies between runs so near to each other that the store reads them as one."""

    path: str
    start: int
    nbytes: int
    times: int
    in_all: int


def ranges(store: Store, copies: Sequence[Copy]) -> Iterator[tuple[Copy, Range]]:
    """Where copies read; what touches is told as one."""
    for copy in copies:
        size = copy.extent.dtype.itemsize
        length = _inner_run(copy)
        count, pieces, span = 1, 1, 1
        for n, s in sorted(zip(copy.shape, copy.strides, strict=True), key=lambda ns: ns[1]):
            if n > 1 and s >= length:
                count *= n
            if pieces == 1 and (s - span) * size <= store.gap:
                span += (n - 1) * s
            else:
                pieces *= n
        start = copy.extent.offset + copy.start * size
        yield copy, Range(copy.extent.path, start, length * size, count, span * pieces * size)
