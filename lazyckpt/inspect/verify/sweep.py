"""One pass over the bytes of the files: tallies of the tensors' elements, and checksums of what their writers recorded.

A plan of each tensor says which runs of bytes of which file hold its elements. The runs of all tensors and the records
with a checksum are then read file by file, each byte once, by tasks of some MiB. What is not a plain run of elements
(compressed chunks, transposed shards) is read tensor by tensor instead.

Memory: some 40 bytes for each run, the tallies of the tensors, and the pieces in flight.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.box import c_strides
from ...core.copies import Copy
from ...core.dtypes import DType
from ...core.expr import parallel
from ...core.extents import Extent, Hole, Packed
from ...core.plan import UncoveredError, pieces_of
from ...core.specs import TensorSpec
from ...core.table import Copies
from ...errors import DataError, LazyckptError
from ...io.codecs import WRONG_CHECKSUM
from ...io.reading.gather import planned
from ...io.reading.packed import is_filler, locate
from ...io.storage.access import OneFile
from ...io.storage.base import Store
from ...io.storage.joined import Joined, stores_of
from ...io.tensors import as_bytes
from ...jobs.batching import Task
from ...jobs.executor import OVERHEAD, Run
from ...jobs.pieces import scratch
from ...jobs.places import combined
from ...jobs.progress import Bar
from ...lazy import LazyArray, shape_of
from .tally import add, is_judged, tallies, tally, tally_runs

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

Array = np.ndarray[Any, Any]

_WINDOW = 4 << 20  # bytes that a task reads at a time
_TASK = 64 << 20  # most bytes of a task
_WIDEST = 16  # bytes of the largest element: a window begins that much earlier, for the element that it cuts
_PIECE = 4 << 20  # bytes of a piece of a tensor that is no plain run
_SMALL = 64 << 10  # bytes; smaller runs of a window are tallied together
_MANY = 8  # if there are as many
_NEAR = 64 << 10  # bytes; smaller gaps are read along


class Runs(NamedTuple):
    """Runs of elements in files, as columns, in the order of files and offsets.

    ``files`` are numbers, ``offsets`` in bytes, ``counts`` in elements; ``tensors`` are the numbers of the targets, and
    ``blocks`` the numbers of the copies in the plans of the tensors.
    """

    files: Array
    offsets: Array
    counts: Array
    tensors: Array
    blocks: Array

    @classmethod
    def joined(cls, parts: list[list[Array]]) -> Runs:
        """Return sorted runs, given a list of parts for each column. The lists are emptied, because there may be
        millions of runs (405B on 1,024 ranks: 4.6 million)."""
        columns = []
        for some in parts:
            columns.append(np.concatenate(some) if some else np.empty(0, np.int64))
            some.clear()
        order = np.lexsort((columns[1], columns[0]))
        for n, column in enumerate(columns):
            columns[n] = column[order]
        return cls(*columns)

    def part(self, first: int, last: int) -> Runs:
        """Return the runs from number ``first`` up to ``last``."""
        return Runs(*(column[first:last] for column in self))

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.files)


class Target(NamedTuple):
    """A tensor to examine."""

    state: str
    name: str
    tensor: LazyArray


class Record(NamedTuple):
    """Bytes of a file with a CRC-32."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(slots=True)
class Swept:
    """What the pass found.

    Attributes
    ----------
    tallies
        A tally for each target.
    runs, largest, squares, odd
        The runs, and for each of them the largest absolute value, the sum of
        squares, and whether it has NaN or infinities.
    paths
        The files of the runs, by number.
    wrong
        (path, record) of the records whose bytes have another checksum.
    errors
        Number of a target, or path of a file -> (code of the finding, why it cannot be read).
    absent
        Number of a target -> (blocks without a file, which read as the fill value; all blocks).
    nbytes
        The bytes that were read.
    """

    tallies: Array
    runs: Runs
    largest: Array
    squares: Array
    odd: Array
    paths: list[str]
    wrong: list[tuple[str, Record]] = field(default_factory=list)
    errors: dict[int | str, tuple[str, str]] = field(default_factory=dict)
    absent: dict[int, tuple[int, int]] = field(default_factory=dict)
    nbytes: int = 0


def blocks_of(tensor: LazyArray) -> Sequence[Copy]:
    """Return the copies that read a tensor; if some of its files are missing, those of the others.

    Raises what reading raises, except for missing files.
    """
    if tensor.spec.expr is not None:
        store = stores_of(tensor.store)[0]
        return [copy for spec in parallel(tensor.spec) for copy in blocks_of(LazyArray(store, spec))]
    want = tuple(map(range, tensor.spec.shape))
    try:
        return planned(tensor.store, tensor.spec, want)
    except FileNotFoundError:
        find = partial(locate, tensor.store, name=tensor.name)
        some = (f for f in tensor.spec.fragments if not isinstance(f.extent, Hole))
        return [c for f in some for _, c in pieces_of(f, want, find) if isinstance(c, Copy)]


def _stored_as(spec: TensorSpec) -> DType | None:
    """Return the dtype of a tensor in its files; None if it is computed from others than elements at its places."""
    kinds = {one.dtype for one in parallel(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def sweep(
    store: Store,
    targets: Sequence[Target],
    records: Mapping[str, Sequence[Record]],
    run: Run,
    progress: bool | None = None,
) -> Swept:
    """Read all runs of the targets and all records once.

    Parameters
    ----------
    store
        Where the files are.
    targets
        The tensors.
    records
        Path -> records of the file with a checksum, in the order of their offsets.
    run
        The engine.
    progress
        See `WriteOptions`.
    """
    kinds: list[DType] = []
    paths: dict[str, int] = {path: n for n, path in enumerate(records)}
    parts: list[list[Array]] = [[] for _ in Runs._fields]
    rest: list[tuple[int, LazyArray, bool]] = []
    single: list[tuple[int, int, int, int, int]] = []
    errors: dict[int | str, tuple[str, str]] = {}
    absent: dict[int, tuple[int, int]] = {}
    judges: dict[DType, bool] = {}
    total = 0
    for n, target in enumerate(targets):  # may be hundreds of thousands
        spec = target.tensor.spec
        dtype = None if isinstance(target.tensor.store, Joined) else _stored_as(spec)
        kinds.append(dtype or spec.dtype)
        count = prod(shape_of(target.tensor))
        total += count * spec.dtype.itemsize
        judged = judges.get(spec.dtype)
        if judged is None:
            judged = judges[spec.dtype] = is_judged(spec.dtype)
        if not judged or not count or not (spec.fragments or spec.expr is not None):
            continue  # a tensor without fragments is a problem of the view
        if dtype is None:
            rest.append((n, target.tensor, False))
            continue
        extent = _alone(spec)
        if extent is not None:
            single.append((paths.setdefault(extent.path, len(paths)), extent.offset, count, n, 0))
            continue
        try:
            some, others, fillers = _runs(n, target.tensor, paths)
        except (LazyckptError, OSError) as e:
            errors[n] = _why(e)
            continue
        for column, part in zip(parts, some, strict=True):
            column.append(part)
        rest += [(n, *other) for other in others]
        if fillers:
            absent[n] = fillers, len(others) + len(some.files)
    for column, values in zip(parts, np.array(single, np.int64).reshape(-1, len(parts)).T, strict=True):
        column.append(values)
    runs = Runs.joined(parts)
    found = Swept(
        tallies(len(targets)), runs, np.zeros(runs.size, np.float32), np.zeros(runs.size, np.float32),
        np.zeros(runs.size, np.bool_), list(paths), errors=errors, absent=absent,
    )  # fmt: skip
    sizes = np.array([d.itemsize for d in kinds], np.int64)
    sums: dict[tuple[str, int], list[tuple[int, int, int]]] = {}

    def done(task: Task, result: _Result) -> None:
        if isinstance(result, _Failed):
            found.errors.setdefault(result.what, (result.code, result.why))
        elif result.numbers is None:
            add(found.tallies, np.array([result.tensor]), result.rows)
        else:
            rows, numbers = result.rows, result.numbers
            add(found.tallies, runs.tensors[numbers], rows)
            largest = np.maximum(np.maximum(rows["high"], -rows["low"]), 0)
            np.maximum.at(found.largest, numbers, largest.astype(np.float32))
            np.add.at(found.squares, numbers, rows["squares"].astype(np.float32))
            found.odd[numbers[(rows["nan"] > 0) | (rows["inf"] > 0)]] = True
            for number, start, crc, nbytes in result.sums:
                sums.setdefault((result.path, number), []).append((start, crc, nbytes))
        found.nbytes += task.nbytes
        bar.add(task.nbytes)

    with Bar(total, "verify", progress) as bar, np.errstate(over="ignore"):
        tasks = _tasks(store, found, kinds, sizes, records)
        run(chain(tasks, _whole(rest)), done)
    for path, listed in records.items():
        for number, record in enumerate(listed):
            pieces = sorted(sums.pop((path, number), ()))
            if sum(nbytes for *_, nbytes in pieces) != record.nbytes:
                continue  # its task failed, which is an error of the file
            if combined((crc, nbytes) for _, crc, nbytes in pieces) != record.crc:
                found.wrong.append((path, record))
    return found


def _why(error: Exception) -> tuple[str, str]:
    """Return the code of the finding about an error, and the error as one line."""
    why = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError | UncoveredError):
        return "missing-elements", why
    if isinstance(error, DataError):
        return "not-examined", why
    return "wrong-checksum" if WRONG_CHECKSUM in why else "unreadable-file", why


def _alone(spec: TensorSpec) -> Extent | None:
    """Return the extent of a tensor that is one run of a file, as most are: planning takes longer than reading it."""
    if type(spec.fragments) is not tuple or len(spec.fragments) != 1:
        return None
    (fragment,) = spec.fragments
    extent = fragment.extent
    if fragment.parts is not None or fragment.span is not None or fragment.axes is not None:
        return None
    if type(extent) is not Extent or not extent.raw or extent.dtype is not spec.dtype or extent.shape != spec.shape:
        return None
    return extent if extent.strides == c_strides(spec.shape) else None


def _runs(n: int, tensor: LazyArray, paths: dict[str, int]) -> tuple[Runs, list[tuple[LazyArray, bool]], int]:
    """Return the plain runs of a tensor, the parts of it that are none, and how many of these have no file.

    With each part it returns whether it is a packed chunk, which is read as a whole.
    """
    copies = blocks_of(tensor)
    dtype, ndim = _stored_as(tensor.spec) or tensor.spec.dtype, tensor.ndim
    if isinstance(copies, Copies) and copies.table.packed is None and copies.table.dtype is dtype:
        local = [paths.setdefault(path, len(paths)) for path in copies.table.paths]
        plain = _is_run(copies.shapes, copies.strides)
        files, offsets = np.array(local, np.int64)[copies.table.files[plain]], copies.offsets[plain]
        counts, blocks = copies.shapes[plain].prod(1), np.flatnonzero(plain)
        odd = [copies[int(m)] for m in np.flatnonzero(~plain)]
    else:
        rows, odd = [], []
        for m, copy in enumerate(copies):
            extent = copy.extent
            shape, strides = np.array([copy.shape]), np.array([copy.strides])
            raw = extent.raw and extent.dtype is dtype and not copy.sparse
            if raw and (not ndim or _is_run(shape.reshape(1, ndim), strides.reshape(1, ndim))[0]):
                offset = extent.offset + copy.start * dtype.itemsize
                file = paths.setdefault(extent.path, len(paths))
                rows.append((file, offset, prod(copy.shape), m))
            else:
                odd.append(copy)
        files, offsets, counts, blocks = np.array(rows, np.int64).reshape(-1, 4).T
    numbers = np.full(len(files), n, np.int32)
    small = np.uint32 if int(counts.max(initial=0)) < 1 << 32 else np.int64
    found = Runs(files.astype(np.int32), offsets, counts.astype(small), numbers, blocks.astype(np.int32))
    # several copies of one place are one part, read through the tensor
    boxes = {(copy.at, copy.shape): copy for copy in odd}
    fillers = sum(is_filler(copy.extent) for copy in odd)
    others = [
        (tensor.lazy[copy.slices] if copy.at else tensor, isinstance(copy.extent.within, Packed))
        for copy in boxes.values()
    ]
    return found, others, fillers


def _is_run(shapes: Array, strides: Array) -> Array:
    """Return which blocks lie in their file without gaps, in any order of their dimensions."""
    shapes, strides = shapes.astype(np.int64), np.where(shapes == 1, 0, strides.astype(np.int64))
    order = np.argsort(strides, axis=1, kind="stable")
    lengths, steps = np.take_along_axis(shapes, order, 1), np.take_along_axis(strides, order, 1)
    inner = np.cumprod(lengths, axis=1) // lengths if shapes.shape[1] else lengths
    found: Array = ((lengths == 1) | (steps == inner)).all(1)
    return found


# -- the tasks


class _Found(NamedTuple):
    rows: Array
    numbers: Array | None  # of the runs, one for each row; None: one row for a tensor
    tensor: int = 0
    path: str = ""
    sums: tuple[tuple[int, int, int, int], ...] = ()  # number of a record, start of the piece, CRC-32, bytes


class _Failed(NamedTuple):
    what: int | str
    code: str
    why: str


_Result = _Found | _Failed


class _Places(NamedTuple):
    """Runs of elements in a file, in the order of their offsets, as columns."""

    begins: Array
    ends: Array
    sizes: Array  # of an element, in bytes
    kinds: Array  # the number of the dtype
    numbers: Array  # of the runs

    def between(self, low: int, high: int) -> _Places:
        """Return the runs with an element that ends in a range."""
        last = int(np.searchsorted(self.begins, high))
        picked = np.flatnonzero(self.ends[:last] > low)
        return _Places(*(column[picked] for column in self))


def _tasks(
    store: Store, found: Swept, kinds: Sequence[DType], sizes: Array, records: Mapping[str, Sequence[Record]]
) -> Iterator[Task]:
    """Yield the tasks that read the runs and records of all files, in the order of files and offsets."""
    codes: dict[DType, int] = {}
    code = np.array([codes.setdefault(kind, len(codes)) for kind in kinds], np.int64)
    dtypes = list(codes)
    runs = found.runs
    for number, path in enumerate(found.paths):
        first, last = np.searchsorted(runs.files, (number, number + 1)).tolist()
        own = records.get(path, ())
        some = runs.part(first, last)
        size = sizes[some.tensors]
        begins, numbers = some.offsets, np.arange(first, last)
        places = _Places(begins, begins + some.counts * size, size, code[some.tensors], numbers)
        starts = np.array([r.offset for r in own], np.int64)
        stops = starts + np.array([r.nbytes for r in own], np.int64)
        file = OneFile(store, path)
        torches = [kind.torch for kind in dtypes]
        for low, high in _ranges(np.concatenate([begins, starts]), np.concatenate([places.ends, stops])):
            near = np.flatnonzero((starts < high) & (stops > low)).tolist()
            pieces = [(n, own[n].offset, own[n].nbytes) for n in near]
            work = partial(_examine, file, low, high, places.between(low, high), torches, pieces)
            yield Task(high - low, _WINDOW + OVERHEAD, work)


def _ranges(begins: Array, ends: Array) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes that tasks read: the union of some intervals, cut at `_TASK` bytes."""
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begins[1:] > reach[:-1] + _NEAR) + 1
    firsts, lasts = np.append(0, apart), np.append(apart, len(begins)) - 1
    for low, high in zip(begins[firsts].tolist(), reach[lasts].tolist(), strict=True) if len(begins) else ():
        for at in range(low, high, _TASK):
            yield at, min(at + _TASK, high)


def _examine(
    file: OneFile,
    low: int,
    high: int,
    places: _Places,
    dtypes: Sequence[torch.dtype],
    records: Sequence[tuple[int, int, int]],
) -> _Result:
    """Read a range of a file; tally the elements that end in it, and compute the checksums of the records' pieces."""
    rows, whose = [], []
    sums: list[tuple[int, int, int, int]] = []
    try:
        for at in range(low, high, _WINDOW):
            end = min(at + _WINDOW, high)
            start = max(0, at - _WIDEST)
            buffer = scratch(_WINDOW + _WIDEST)[: end - start]
            memory = as_bytes(buffer)
            file.store.read_into(file.path, start, memory)
            for number, begin, nbytes in records:
                a, b = max(at, begin), min(end, begin + nbytes)
                if a < b:
                    sums.append((number, a, zlib.crc32(memory[a - start : b - start]), b - a))
            here = places.between(at, end)
            # the elements of each run that end in the window
            first = np.maximum(at - here.begins, 0) // here.sizes * here.sizes + here.begins
            behind = (np.minimum(end, here.ends) - here.begins) // here.sizes * here.sizes + here.begins
            taken = np.zeros(len(first), np.bool_)
            for kind in np.unique(here.kinds).tolist() if len(first) >= _MANY else ():
                small = np.flatnonzero((here.kinds == kind) & (behind > first) & (behind - first <= _SMALL))
                if len(small) >= _MANY:
                    found, done = tally_runs(buffer, first[small] - start, behind[small] - start, dtypes[kind])
                    rows.append(found[done])
                    whose += here.numbers[small[done]].tolist()
                    taken[small[done]] = True
            left = np.flatnonzero(~taken)
            for a, b, kind, number in zip(
                *(c[left].tolist() for c in (first, behind, here.kinds, here.numbers)), strict=True
            ):
                if a < b:
                    flat, dtype = buffer[a - start : b - start], dtypes[kind]
                    rows.append(tally((flat.clone() if (a - start) % dtype.itemsize else flat).view(dtype)))
                    whose.append(number)
    except (LazyckptError, OSError) as e:
        return _Failed(file.path, *_why(e))
    tallied = np.concatenate(rows) if rows else tallies(0)
    return _Found(tallied, np.array(whose, np.int64), path=file.path, sums=tuple(sums))


def _whole(rest: Iterable[tuple[int, LazyArray, bool]]) -> Iterator[Task]:
    """Yield the tasks that tally what is no plain run. A packed chunk is unpacked once, as a whole."""
    for n, tensor, packed in rest:
        for _, piece in tensor.pieces(max(_PIECE, tensor.nbytes if packed else 0)):
            yield Task(piece.nbytes, 2 * max(_PIECE, piece.nbytes) + OVERHEAD, partial(_tallied, n, piece), piece)


def _tallied(n: int, piece: LazyArray) -> _Result:
    try:
        return _Found(tally(piece[...].reshape(-1)), None, n)
    except (LazyckptError, OSError) as e:
        return _Failed(n, *_why(e))
