"""Execution of a plan: fill an output array with the bytes of its copies.

A copy that is one contiguous run both in the file and in the output is read directly into the output. Any other copy
picks its elements from a mapping of the file, after a request for the pages that are not in memory. If the store cannot
map the file, or the elements are converted, it reads a window of the file through a small buffer; a sparse window is
split until the gaps between wanted runs are at most the store's ``gap``.

Elements are converted while they are copied: to the dtype that the output has, from that of their extent, and by the
extent's byte order and its conj and neg bits. These differ between fragments of one tensor, and those of an archive are
known only here, so they are not operations of core/expr.py; `core.rounding` has the functions for both.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

import numpy as np
from numpy.typing import NDArray

from ...core.box import Selection, c_strides, hull, is_run
from ...core.copies import Copy, even
from ...core.dtypes import bits_of
from ...core.extents import Extent, Inline, Packed
from ...core.fragments import Find, fragments_of
from ...core.plan import overlaps
from ...core.plan import plan as planned_by
from ...core.rounding import convert
from ...core.select import Reads
from ...core.specs import TensorSpec
from ...core.table import Copies, Runs
from ...errors import MissingFileError, decoding, foreign, undecodable
from ..pool import run, run_here
from ..storage.access import check, lost, read_pieces
from ..storage.base import Store
from ..storage.mapping import Mapped
from ..storage.remote import Remote
from ..tasks import Fetch, Task, Wait
from ..tensors import as_bytes, empty
from .fetching import fetch_of, resolved
from .keeping import reads_once
from .packed import locate, locate_all, located, unpacked, unpacked_into, unread

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

BLOCK = 8 << 20  # maximum bytes of one read, and of a buffer
_STEP = 2 << 20  # bytes; see `step_of`
_RUN = 1 << 20  # bytes; longer runs are worth a separate read
_SCRATCH = 32 << 10  # bytes; least size of the scratch memory
_WINDOW = 32 << 20  # bytes of a mapping that one task picks elements from
_ONCE = 4 << 20  # the same where the pages are let go afterwards
_own = threading.local()
P = ParamSpec("P")


def _decodes(read: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function that reads a copy: convert errors about the elements to CorruptError."""

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
    """A contiguous range of bytes of a file."""

    path: str
    offset: int
    nbytes: int


def read(store: Store, spec: TensorSpec, reads: Reads) -> torch.Tensor:
    """Read the elements that ``reads`` selects into a new CPU tensor. Raises what `core.plan.plan` and the store's
    reads raise."""
    out = empty(reads.shape, spec.dtype.torch)
    run(tasks(store, spec, reads, out))
    return finish(reads, out)


def finish(reads: Reads, array: torch.Tensor) -> torch.Tensor:
    """Flip, reorder and reshape an array that was read, so that it is the result of the selection."""
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
        length = reads.result[n]  # 1, unless a later index changed it
        if length != 1:
            array = array.narrow(n, 0, 0) if length == 0 else array.repeat_interleave(length, n)
    return array


def tasks(store: Store, spec: TensorSpec, reads: Reads, out: torch.Tensor) -> Iterator[Task]:
    """Yield the tasks that fill ``out``, a contiguous CPU tensor of shape ``reads.shape``."""
    copies = planned(store, spec, reads.want)
    if isinstance(copies, Copies) and copies.table.dtype is spec.dtype and copies.table.packed is None:
        runs = copies.runs(reads.shape)
        yield from _many_runs(store, copies.table.paths, runs, as_bytes(out))
        copies = [copies[n] for n in runs.rest.tolist()]
    for copy in copies:
        yield from _copy_tasks(store, copy, out[copy.slices] if copy.at else out)


def _many_runs(store: Store, paths: Sequence[str], runs: Runs, memory: memoryview) -> Iterator[Task]:
    """Yield the tasks that read runs of bytes, each of one file."""
    if isinstance(store, Remote):
        files, first = np.unique(runs.files, return_index=True)
        for number, begin, end in zip(files.tolist(), first.tolist(), [*first[1:].tolist(), len(runs.files)]):
            part = slice(begin, end)
            fetch = Fetch(store, paths[number], runs.offsets[part], runs.nbytes[part], runs.at[part], memory)
            yield int(runs.nbytes[part].sum()), fetch
        return
    pieces: list[tuple[int, memoryview]] = []
    size, last, step = 0, -1, step_of(store)
    for number, offset, at, nbytes in zip(*(column.tolist() for column in runs[:4]), strict=True):
        if pieces and (number != last or size >= step):
            yield size, partial(read_pieces, store, paths[last], pieces)
            pieces, size = [], 0
        last = number
        for ahead in range(0, nbytes, step):
            length = min(step, nbytes - ahead)
            pieces.append((offset + ahead, memory[at + ahead : at + ahead + length]))
            size += length
            if size >= step:
                yield size, partial(read_pieces, store, paths[number], pieces)
                pieces, size = [], 0
    if pieces:
        yield size, partial(read_pieces, store, paths[last], pieces)


def agree(store: Store, spec: TensorSpec, want: Selection) -> bool:
    """Return whether fragments that overlap within the selection hold the same bytes. Reads only the overlaps."""
    for pair in overlaps(spec, want, lambda archive: locate(store, archive, spec.name)):
        first, second = (alone(store, copy).view(-1).view(torch.uint8) for copy in pair)
        if not torch.equal(first, second):
            return False
    return True


def alone(store: Store, copy: Copy) -> torch.Tensor:
    """Read the elements of one copy."""
    out = empty(copy.shape, copy.extent.dtype.torch)
    run_here(_copy_tasks(store, copy, out))
    return out


def plan(store: Store, spec: TensorSpec, want: Selection, find: Find | None = None) -> Sequence[Copy]:
    """Return the result of `core.plan.plan`. Raises what that raises, and ChangedFileError in place of MissingFileError
    if files were replaced while the checkpoint was opened."""
    try:
        return planned_by(spec, want, find)
    except MissingFileError as e:
        raise lost(store, e) from None


def planned(store: Store, spec: TensorSpec, want: Selection) -> Sequence[Copy]:
    """Plan the selection after looking up all archives and chunks that it needs."""
    unknown: list[tuple[Packed, str]] = []

    def find(archive: Packed) -> Extent:
        extent = located(store, archive, spec.name)
        if extent is None:
            unknown.append((archive, spec.name))
        return extent or archive.as_told

    if all(map(len, want)):
        fragments_of(spec.fragments).table(want, find)  # cheaper than a plan, and finds what is unknown
    copies = [] if unknown else plan(store, spec, want, find)
    if not unknown:
        return copies
    with decoding(store.root, f"looking for {spec.name!r:.80}"):
        locate_all(store, unknown)
    return plan(store, spec, want, lambda archive: locate(store, archive, spec.name))


def plan_unread(store: Store, spec: TensorSpec) -> Sequence[Copy]:
    """Plan the whole tensor without reading anything: archives that are not located yet are at unknown positions.

    Raises what `core.plan.plan` raises.
    """

    def find(archive: Packed) -> Extent:
        return located(store, archive, spec.name) or archive.as_told

    want = tuple(map(range, spec.shape))
    quick = fragments_of(spec.fragments).table(want) is not None
    return plan(store, spec, want, None if quick else find)


def runs(store: Store, spec: TensorSpec, want: Selection) -> list[Run] | None:
    """Return the file ranges that hold the selection's bytes in C order; None if files do not hold them like that."""
    shape = tuple(map(len, want))
    copies = planned(store, spec, want)
    if isinstance(copies, Copies) and copies.table.packed is None:
        if copies.table.dtype is not spec.dtype:
            return None
        columns, paths = copies.runs(shape), copies.table.paths
        if len(columns.rest):
            return None
        order = np.argsort(columns.at)
        places = (column[order].tolist() for column in (columns.files, columns.offsets, columns.nbytes))
        return [Run(paths[n], offset, nbytes) for n, offset, nbytes in zip(*places, strict=True)]
    strides = c_strides(shape)
    found: list[tuple[int, Run]] = []
    for copy in copies:
        extent, size = copy.extent, copy.extent.dtype.itemsize
        unconverted = extent.raw and extent.dtype is spec.dtype
        if copy.sparse or not (unconverted and is_run(copy.shape, copy.strides) and is_run(copy.shape, strides)):
            return None
        at = sum(a * s for a, s in zip(copy.at, strides, strict=True))
        found.append((at, Run(extent.path, extent.offset + copy.start * size, prod(copy.shape) * size)))
    return [run for _, run in sorted(found)]


def _copy_tasks(store: Store, copy: Copy, target: torch.Tensor) -> Iterator[Task]:
    extent = copy.extent
    if extent.within is not None:
        unpack = partial(_unpack, store, extent.within, copy, target)
        if not isinstance(store, Remote):
            return iter([(target.nbytes, unpack)])
        window = unread(store, extent.within)
        if window is None:
            return iter([(target.nbytes, Wait(unpack))])
        one = np.array([*window, 0], np.int64)
        return iter([(window[1], Fetch(store, extent.path, one[:1], one[1:2], one[2:], window[1], unpack))])
    dtype = extent.dtype.torch
    if extent.raw and dtype == target.dtype:  # only bits move
        bits = bits_of(dtype.itemsize)
        return _cut(store, copy, target.view(bits), bits)
    return _cut(store, copy, target, dtype)


@_decodes
def _unpack(
    store: Store, archive: Packed | Inline, copy: Copy, target: torch.Tensor, packed: memoryview | None = None
) -> None:
    plain = copy._replace(extent=replace(copy.extent, within=None))
    whole = plain.extent.raw and copy.extent.dtype.torch == target.dtype and is_run(copy.shape, copy.strides)
    whole = whole and not copy.sparse and copy.start == copy.extent.offset == 0 and target.is_contiguous()
    if whole and unpacked_into(store, archive, as_bytes(target), packed):
        return
    run_here(_copy_tasks(unpacked(store, archive, packed=packed), plain, target))


def _cut(store: Store, copy: Copy, target: torch.Tensor, dtype: torch.dtype) -> Iterator[Task]:
    """Yield the tasks of a copy whose elements have ``dtype`` in the file, split until each task is one read."""
    extent, size = copy.extent, dtype.itemsize
    plain = extent.raw and dtype == target.dtype
    if plain and not copy.sparse and is_run(copy.shape, copy.strides) and target.is_contiguous():
        yield from run_tasks(store, extent.path, extent.offset + copy.start * size, target)
        return

    if isinstance(store, Remote):
        fetched = fetch_of(store, copy, target, dtype, BLOCK)
        if fetched is None:
            yield from _split(store, copy, target, dtype, BLOCK)
        else:
            yield fetched.nbytes, fetched
        return
    span = hull(copy.lengths, copy.strides) * size
    wanted = target.numel() * size
    begin = extent.offset + copy.start * size
    mapped = store.map(extent.path) if plain and _inner_run(copy) * size < _RUN else None
    if mapped is not None and begin + span <= len(mapped.buffer):  # (a read reports truncation)
        window = _ONCE if reads_once() else _WINDOW
        if span > window and target.numel() > 1:
            yield from _split(store, copy, target, dtype, window)
        else:
            check(store, extent.path, begin, span)
            yield wanted, partial(_through_mapping, store, mapped, copy, span, target)
    elif span <= wanted or _largest_gap(copy) * size <= store.gap:
        if span > BLOCK and target.numel() > 1:
            yield from _split(store, copy, target, dtype, BLOCK)
        else:
            yield span, partial(_through_buffer, store, copy, span, target, dtype)
    else:
        yield from _split(store, copy, target, dtype, 0)


def _split(store: Store, copy: Copy, target: torch.Tensor, dtype: torch.dtype, limit: int) -> Iterator[Task]:
    """Split along the dimension with the largest stride, into pieces that span at most ``limit`` bytes."""
    d = max(range(len(copy.shape)), key=lambda d: (copy.shape[d] > 1, copy.strides[d]))
    stride, length = copy.strides[d], copy.shape[d]
    lengths = copy.lengths
    inner = hull((*lengths[:d], 1, *lengths[d + 1 :]), copy.strides)
    many = max(1, (limit // dtype.itemsize - inner) // stride + 1)
    positions = copy.lists[d] if copy.lists else None
    if positions is None:
        ends = [*range(min(many, length // 2), length, min(many, length // 2)), length]
    else:
        apart = (
            np.diff(positions) * stride - inner > store.gap // dtype.itemsize
            if not limit
            else np.diff(positions // many) > 0
        )
        ends = [*(np.flatnonzero(apart) + 1).tolist(), length]
        if len(ends) == 1:
            ends = [length // 2, length]
    at = 0
    for end in ends:
        shape = (*copy.shape[:d], end - at, *copy.shape[d + 1 :])
        if positions is None:
            piece = copy._replace(start=copy.start + at * stride, shape=shape)
        else:
            lists = (*copy.lists[:d], positions[at:end] - positions[at], *copy.lists[d + 1 :])
            start = copy.start + int(positions[at]) * stride
            piece = even(copy._replace(start=start, shape=shape, lists=lists))
        yield from _cut(store, piece, target.narrow(d, at, end - at), dtype)
        at = end


def run_tasks(store: Store, path: str, offset: int, target: torch.Tensor) -> Iterator[Task]:
    """Yield the tasks that fill a contiguous array with one run of a file's bytes."""
    memory = as_bytes(target)
    if isinstance(store, Remote):
        if len(memory):
            yield len(memory), Fetch.of_run(store, path, offset, memory)
        return
    step = step_of(store)
    for at in range(0, len(memory), step):
        piece = memory[at : at + step]
        yield len(piece), partial(store.read_into, path, offset + at, piece)


def step_of(store: Store) -> int:
    """Return the largest size in bytes of one of several reads of a run: small ones keep the threads together in the
    file and let them end at the same time; large ones save requests to a server."""
    return BLOCK if store.gap else min(BLOCK, _STEP)


@_decodes
def _through_buffer(store: Store, copy: Copy, span: int, target: torch.Tensor, dtype: torch.dtype) -> None:
    extent = copy.extent
    buffer = _scratch(span)
    store.read_into(extent.path, extent.offset + copy.start * dtype.itemsize, as_bytes(buffer))
    if extent.swapped:
        unit = dtype.itemsize // (2 if dtype.is_complex else 1)
        buffer = buffer.view(-1, unit).flip(1).view(-1)
    _pick(buffer.view(bits_of(dtype.itemsize)), copy, target, lambda bits: resolved(extent, bits.view(dtype)))


def _scratch(nbytes: int) -> torch.Tensor:
    """Return scratch memory of this thread, valid until its next call. (Allocating each time would be most of the cost
    of a read, and the C library keeps up to 64 MiB of freed memory per thread.)"""
    buffer: torch.Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _own.buffer = torch.empty(max(nbytes, _SCRATCH), dtype=torch.uint8, device="cpu")
    return buffer[:nbytes]


@_decodes
def _through_mapping(store: Store, mapped: Mapped, copy: Copy, span: int, target: torch.Tensor) -> None:
    size = target.itemsize
    offset = copy.extent.offset + copy.start * size
    if not mapped.resident(offset, offset + span):
        mapped.request(offset + _starts(copy) * size, _reach(copy) * size)
    if offset % size == 0:
        _pick(torch.frombuffer(mapped.buffer, dtype=target.dtype, count=span // size, offset=offset), copy, target)
    else:  # vectorised kernels may rely on alignment, so copy bytes
        source = torch.frombuffer(mapped.buffer, dtype=torch.uint8, count=span, offset=offset)
        lists = (*copy.lists, None) if copy.lists else ()
        wide = copy._replace(shape=(*copy.shape, size), strides=(*(s * size for s in copy.strides), 1), lists=lists)
        _pick(source, wide, _as_byte_array(target))
    if target.nbytes > BLOCK or reads_once():
        mapped.let_go(offset, offset + span)
    store.confirm(copy.extent.path, mapped)


def _pick(
    source: torch.Tensor,
    copy: Copy,
    target: torch.Tensor,
    values: Callable[[torch.Tensor], torch.Tensor] = lambda elements: elements,
) -> None:
    """Copy the elements of a copy from ``source``, the 1-d array of all elements from the first to the last one."""
    elements = source.as_strided(copy.lengths, copy.strides)
    for d, positions in enumerate(copy.lists):
        if positions is not None:
            elements = elements.index_select(d, torch.from_numpy(positions))
    convert(values(elements), target.dtype, target)


def _as_byte_array(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor with any strides as uint8, with one more dimension for the bytes of an element."""
    size = tensor.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    strides = (*(s * size for s in tensor.stride()), 1)
    return flat.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)


def _inner_run(copy: Copy) -> int:
    """Return the number of elements that are contiguous in the file, along the innermost dimensions."""
    run_length = 1
    for n, s, positions in _inward(copy):
        if s != run_length or positions is not None:
            break
        run_length *= n
    return run_length


def _largest_gap(copy: Copy) -> int:
    """Return the largest number of elements between two consecutive wanted runs."""
    gap, reach = 0, 1
    for n, s, positions in _inward(copy):
        step = 1 if positions is None else int(np.diff(positions).max())
        gap = max(gap, step * s - reach)
        reach += (n - 1 if positions is None else int(positions[-1])) * s
    return gap


def _reach(copy: Copy) -> int:
    """Return the length in elements of runs whose gaps hold no whole page; see `_starts`."""
    return _paged(copy)[0]


def _starts(copy: Copy) -> NDArray[np.int64]:
    """Return where such runs begin, in elements after the first one."""
    starts = np.zeros(1, np.int64)
    for n, s, positions in _paged(copy)[1]:
        steps = np.arange(n) if positions is None else positions
        starts = (starts[:, None] + steps * s).ravel()
    return starts


def _paged(copy: Copy) -> tuple[int, list[Dimension]]:
    reach = 1
    outer: list[Dimension] = []
    for dimension in _inward(copy):
        n, s, positions = dimension
        if positions is None and not outer and (s - reach) * copy.extent.dtype.itemsize < mmap.PAGESIZE:
            reach += (n - 1) * s
        else:
            outer.append(dimension)
    return reach, outer


Dimension = tuple[int, int, "NDArray[np.int64] | None"]  # the length, stride and list of a dimension


def _inward(copy: Copy) -> list[Dimension]:
    """Return the dimensions of more than one element, the one with the smallest stride first."""
    lists = copy.lists or (None,) * len(copy.shape)
    found = [one for one in zip(copy.shape, copy.strides, lists, strict=True) if one[0] > 1]
    return sorted(found, key=lambda one: one[1])


class Range(NamedTuple):
    """The bytes that a copy reads: ``times`` runs of ``nbytes`` bytes, the first at ``start``. ``in_all`` is the total
    number of bytes, with the gaps between runs that the store reads in one request."""

    path: str
    start: int
    nbytes: int
    times: int
    in_all: int


def ranges(store: Store, copies: Sequence[Copy]) -> Iterator[tuple[Copy, Range]]:
    """Yield the range that each copy reads; adjacent runs count as one."""
    for copy in copies:
        size = copy.extent.dtype.itemsize
        length = _inner_run(copy)
        count, total, merged = 1, 1, True  # merged: the gaps so far are read, too
        for n, s, positions in _inward(copy):
            if s >= length:
                count *= n
            if not merged:
                total *= n
                continue
            apart = np.array([1]) if positions is None else np.diff(positions)
            wide = (apart * s - total) * size > store.gap
            merged = not wide.any()
            if positions is not None:
                total = total * (1 + int(wide.sum())) + int(apart[~wide].sum()) * s
            else:
                total = total + (n - 1) * s if merged else total * n
        start = copy.extent.offset + copy.start * size
        yield copy, Range(copy.extent.path, start, length * size, count, total * size)
