"""Statistics of tensors, by tasks that each read a run of elements in pieces that fit the processor's cache.

Memory is bounded by the tasks in flight, for tensors of any size. A task returns a few numbers (for 8- and 16-bit
elements the counts of bit patterns), which are merged in the order of the elements, so that the same tensor has the
same digits on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError, LazyckptError
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, Run, runner
from ..jobs.pieces import scratch
from ..jobs.places import PIECE
from ..jobs.progress import Bar
from ..jobs.write import RUN
from ..lazy import LazyArray
from .moments import (
    BLOCK,
    FEW,
    Array,
    Moments,
    Patterns,
    count,
    even_edges,
    exponent_of,
    few,
    merged,
    of_counts,
    of_numbers,
    of_rows,
    real,
    scaled_numbers,
    sparse,
    values,
)
from .packs import Pack, Packs
from .table import Histogram, Stats, Table, row

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

# -- Singular values of a matrix that is not in memory.

LIMIT = 8192  # the smaller of rows and columns: their Gram matrix takes 512 MiB, its eigenvalues minutes
_PIECE = 32 << 20  # bytes of a block of rows, as float64


def singular_values(tensor: LazyArray, check: Callable[[], None] | None = None) -> torch.Tensor:
    """Compute the singular values of a matrix, largest first, in float64. There are as many as the smaller side has.

    They are the roots of the eigenvalues of the smaller side's Gram matrix, which is summed in float64 over blocks of
    the larger side. Every element is read once. Memory is that of the Gram matrix (8 bytes times the square of the
    smaller side, and twice that for its eigenvalues) and some 100 MiB. Squaring loses half of the digits: values below
    `noise` are noise. ``check`` is called between blocks; what it raises ends the work.

    Raises DataError if the tensor is not a matrix, if its smaller side is above 8,192 (`LIMIT`), or if it has a NaN or
    an infinity; and what reading raises.
    """
    if tensor.ndim != 2:
        raise DataError(
            f"{tensor.name!r} has {tensor.ndim} dimensions: singular values are of matrices; take one, as in t.lazy[0]"
        )
    rows, columns = tensor.shape
    side, other = min(rows, columns), max(rows, columns)
    if side > LIMIT:
        raise DataError(
            f"{tensor.name!r} is {rows:,} x {columns:,}: of its smaller side at most {LIMIT:,} are taken. Take a part, "
            f"as in t.lazy[:, :{LIMIT}], or read it: torch.linalg.svdvals(t[...].float())"
        )
    dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
    if not tensor.spec.dtype.is_number:
        raise DataError(f"{tensor.name!r}: elements of {tensor.dtype} are no numbers")
    gram = torch.zeros(side, side, dtype=dtype, device="cpu")
    step = max(1, _PIECE // (max(1, side) * dtype.itemsize))
    wide = tensor.dtype in (torch.float64, torch.complex128)  # their squares may be beyond float64
    exponent: int | None = None  # the matrix that is summed is divided by 2 to this power
    for at in range(0, other, step):
        if check is not None:
            check()
        key = slice(at, at + step)
        block = (tensor.lazy[key] if rows >= columns else tensor.lazy[:, key])[...]
        numbers = block.to(dtype)
        largest = float(numbers.abs().max()) if wide and numbers.numel() else 1.0
        if largest:
            now = exponent_of(largest) if exponent is None else max(exponent, exponent_of(largest))
            gram = scaled_numbers(gram, 0 if exponent is None else 2 * (exponent - now))
            exponent = now
        numbers = scaled_numbers(numbers, -(exponent or 0))
        gram += numbers.mH @ numbers if rows >= columns else numbers @ numbers.mH
    if not bool(torch.isfinite(gram.diagonal().real).all()):
        raise DataError(f"{tensor.name!r} has NaN or infinities: t.stats() counts them")
    squares: torch.Tensor = torch.linalg.eigvalsh(gram)  # ascending; rounding may leave some below zero
    return scaled_numbers(squares.clamp_(min=0).sqrt_().flip(0), exponent or 0)


def noise(values: torch.Tensor) -> float:
    """Return the number below which singular values that `singular_values` returned are noise: the root of float64's
    rounding error in the sum of as many squares as there are values, in units of the largest one.

    >>> f"{noise(torch.ones(64)):.1e}"
    '1.2e-07'
    """
    return math.sqrt(values.numel() * math.ulp(1.0)) * float(values[0]) if values.numel() else 0.0


# -- Statistics of tensors.

Bins = int | Sequence[float]

_BINS = 1_000_000  # largest number of bins: every task in flight has counts of all
_SORTED = 1 << 16  # elements of 32 bits and more that a histogram sorts at a time


def stats_of(
    tensor: LazyArray,
    bins: Bins | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Stats:
    """Return the statistics of one tensor. See `LazyTensor.stats`. Raises what reading raises, and DataError for
    elements that are not numbers."""
    (one,) = _collect({tensor.name: tensor}, bins, runner(executor, memory), progress)
    if one.error is not None:
        raise one.error
    return one.row


def stats_of_all(
    tensors: Mapping[str, LazyArray],
    bins: Bins | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    check: Callable[[], None] = lambda: None,
) -> Table:
    """Return the statistics of all tensors, in order. See `CheckpointView.stats`. The row of a tensor that cannot be
    read has the reason. ``check`` is called before each run of elements; what it raises ends the work."""
    return Table(one.row for one in _collect(tensors, bins, runner(executor, memory), progress, check))


@dataclass(slots=True)
class _Found:
    """The results for a tensor so far. ``moments`` are kept by the flat index of each run, to be merged in order;
    counts are sums, for which order does not matter. When all runs are done, only ``whole`` and ``binned`` are left.

    ``patterns`` are those of a tensor that is one run; ``counts``, of all bit patterns, are the sum of several runs."""

    name: str
    tensor: LazyArray
    bins: int | None
    edges: Array | None
    seen: int = 0
    patterns: Patterns | None = None
    counts: Array | None = None
    moments: dict[int, Moments] = field(default_factory=dict)
    binned: Array | None = None  # of bins
    whole: Moments = field(default_factory=Moments)
    error: Exception | None = None
    errs_at: int = -1

    @property
    def narrow(self) -> bool:
        return self.tensor.itemsize <= 2

    def add(self, ahead: int, numel: int, results: Sequence[Any]) -> None:
        for what in results:
            if isinstance(what, Exception):
                self.fail(ahead, what)
            elif isinstance(what, Patterns):
                if numel == self.tensor.numel():
                    self.patterns = what
                    continue
                if self.counts is None:
                    self.counts = np.zeros(1 << 8 * self.tensor.itemsize, np.int64)
                self.counts[what.patterns] += what.counts
            elif isinstance(what, Moments):
                self.moments[ahead] = what
            else:
                self.binned = what if self.binned is None else self.binned + what
        self.seen += numel
        if self.seen == self.tensor.numel() and self.error is None:
            self._finish()

    def fail(self, ahead: int, error: Exception) -> None:
        """Keep the error of the first run in the order of elements."""
        if self.error is None or ahead < self.errs_at:
            self.error, self.errs_at = error, ahead

    def _finish(self) -> None:
        found = sparse(self.counts) if self.counts is not None else self.patterns
        if found is not None:
            numbers = values(self.tensor.dtype)[found.patterns]
            self.whole = of_counts(numbers, found.counts)
            self.set_range()
            if self.edges is not None:
                self.binned = np.histogram(numbers, self.edges, weights=found.counts)[0]
        elif self.moments:  # empty in the second pass, which only counts for the histogram
            self.whole = merged(self.moments[ahead] for ahead in sorted(self.moments))
        self.counts, self.patterns, self.moments = None, None, {}

    def set_range(self) -> None:
        """Set the edges of ``bins``, when the smallest and largest elements are known."""
        if self.bins is not None and self.edges is None:
            low, high = (self.whole.low, self.whole.high) if self.whole.finite else (0.0, 1.0)
            self.edges = even_edges(low, high, self.bins)

    @property
    def row(self) -> Stats:
        if self.error is not None:
            return row(self.name, self.tensor, None, None, " ".join(str(self.error).split()))
        self.set_range()  # an empty tensor has no runs that would set it
        histogram = None
        if self.edges is not None:
            binned = np.zeros(len(self.edges) - 1, np.int64) if self.binned is None else self.binned
            histogram = Histogram(tuple(self.edges.tolist()), tuple(map(int, binned)))
        return row(self.name, self.tensor, self.whole, histogram)


def _collect(
    tensors: Mapping[str, LazyArray],
    bins: Bins | None,
    run: Run,
    progress: bool | None,
    check: Callable[[], None] = lambda: None,
) -> list[_Found]:
    """Read all tensors, and again those with a histogram over their own range."""
    number = int(bins) if isinstance(bins, int | np.integer) else None
    if number is not None and not 1 <= number <= _BINS:
        raise DataError(f"bins={bins!r}: a histogram has 1 to {_BINS:,} bins, or edges: bins=[-1, 0, 1]")
    edges = None if bins is None or isinstance(bins, int | np.integer) else _checked(bins)
    found = [_Found(name, t, number, edges) for name, t in tensors.items()]
    wide = [one for one in found if not one.narrow] if number is not None else []
    with Bar(sum(one.tensor.nbytes for one in [*found, *wide]), "stats", progress) as bar:
        _go(found, run, bar, lambda one: partial(_measure, edges=edges), check, partial(_measure_pack, edges=edges))
        for one in wide:
            one.seen = 0
            one.set_range()
        _go(wide, run, bar, lambda one: partial(_bin, edges=one.edges), check)
    return found


def _go(
    found: Sequence[_Found],
    run: Run,
    bar: Bar,
    look: Callable[[_Found], Callable[[LazyArray], Any]],
    check: Callable[[], None],
    look_at_pack: Callable[[Pack], list[_Part]] | None = None,
) -> None:
    """Apply the function that ``look`` returns for a tensor to all of its runs, for all tensors. ``look_at_pack`` does
    the same for many small tensors."""
    packs = Packs()

    def packed(pack: Pack) -> Task:
        assert look_at_pack is not None  # else there are no packs
        return Task(pack.nbytes, PIECE + OVERHEAD, partial(look_at_pack, pack), pack.tensors[0])

    def tasks() -> Iterator[Task]:
        for n, one in enumerate(found):
            try:
                if one.narrow:
                    values(one.tensor.dtype)
                full = None if look_at_pack is None else packs.add(n, one.tensor)
                if full is not None:
                    check()
                    yield from map(packed, full)
                    continue
                one.tensor._check()
                for ahead, part in one.tensor.pieces(RUN):
                    check()
                    if one.error is not None:  # the row has an error: do not read the rest
                        break
                    yield Task(part.nbytes, PIECE + OVERHEAD, partial(_tried, look(one), n, ahead, part), part)
            except (LazyckptError, OSError) as e:
                one.fail(-1, e.with_traceback(None))
        for full in packs.rest():
            yield from map(packed, full)

    def done(task: Task, result: list[_Part]) -> None:
        for n, ahead, numel, what in result:
            found[n].add(ahead, numel, what)
        bar.add(task.nbytes)

    run(tasks(), done, tensors=[one.tensor for one in found])


_Part = tuple[int, int, int, Sequence[Any]]  # number of a tensor, elements before a run, elements of it, results


def _tried(do: Callable[[LazyArray], Sequence[Any]], n: int, ahead: int, part: LazyArray) -> list[_Part]:
    """Return the result for a run of a tensor, or the error of reading it."""
    try:
        found = do(part)
    except (LazyckptError, OSError) as e:
        found = (e.with_traceback(None),)
    return [(n, ahead, part.numel(), found)]


def _measure(part: LazyArray, edges: Array | None) -> Sequence[Any]:
    """Return the bit patterns of a run; for wider dtypes its moments and, if there are edges, counts between them."""
    pieces = (_read(piece) for _, piece in part.pieces(PIECE))
    if part.itemsize <= 2:
        if part.numel() <= FEW:
            return (few(_read(part)),)
        return (sparse(sum(map(count, pieces), np.zeros(1 << 8 * part.itemsize, np.int64))),)
    moments, binned = Moments(), []
    for numbers in pieces:
        moments += of_numbers(numbers)
        if edges is not None:
            binned.append(_binned(numbers, edges))
    return (moments, sum(binned)) if binned else (moments,)


def _measure_pack(pack: Pack, edges: Array | None) -> list[_Part]:
    """Return what `_measure` returns for each tensor of a pack."""
    try:
        rows = pack.read()
    except (LazyckptError, OSError):  # perhaps only one of them cannot be read
        apart = zip(pack.numbers, pack.tensors, strict=True)
        return [one for n, t in apart for one in _tried(partial(_measure, edges=edges), n, 0, t)]
    found: Sequence[Sequence[Any]]
    if pack.dtype.itemsize <= 2:
        found = [(few(row),) for row in rows] if pack.numel <= FEW else [(sparse(count(row)),) for row in rows]
    else:
        moments = [of_numbers(row) for row in rows] if rows.is_complex() else of_rows(rows)
        found = [(m,) if edges is None else (m, _binned(row, edges)) for m, row in zip(moments, rows, strict=True)]
    return [(n, 0, pack.numel, what) for n, what in zip(pack.numbers, found, strict=True)]


def _bin(part: LazyArray, edges: Array | None) -> Sequence[Any]:
    assert edges is not None  # the first pass has set the range
    return (sum(_binned(_read(piece), edges) for _, piece in part.pieces(PIECE)),)


def _read(piece: LazyArray) -> torch.Tensor:
    return piece.read_into(scratch(piece.nbytes).view(piece.dtype).view(piece.shape))


def _binned(numbers: torch.Tensor, edges: Array) -> Array:
    """Count the elements between edges. The last bin includes its end, as in numpy."""
    flat = numbers.view(-1)
    counts = np.zeros(len(edges) - 1, np.int64)
    size = BLOCK if numbers.is_complex() else _SORTED
    for at in range(0, flat.numel(), size):
        counts += np.histogram(real(flat[at : at + size]), edges)[0]
    return counts


def _checked(bins: Sequence[float]) -> Array:
    try:
        edges = np.asarray(bins, np.float64)
    except (TypeError, ValueError):
        edges = np.empty(0)
    if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all() or not all(map(math.isfinite, edges)):
        raise DataError(f"bins={bins!r}: edges of a histogram are two or more finite numbers, ascending")
    return edges
