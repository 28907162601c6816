"""The elements of a tensor as text and as JSON. Only the edges of a large tensor are shown and read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dtypes import dtype_of, to_numpy
from ..core.units import human_bytes, plural
from ..errors import DataError
from ..inspect.moments import even_edges
from ..inspect.numbers import number_shape, numbers, packing
from ..inspect.planes import checked, plane_of
from ..lazy import LazyArray

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

LIMIT = 1000  # maximum number of elements of a tensor that is shown in full
JSON_LIMIT = 1_000_000  # maximum number of elements that are returned as JSON


def values(t: LazyArray, width: int = 100) -> str:
    """Return all elements of a small tensor as text, or the first and last few along every dimension of a large one."""
    if t.numel() <= LIMIT:
        return _text(as_numbers(t[...]), width, sys.maxsize, 3)
    rest = t.shape
    while prod(min(n, 2) for n in rest) > LIMIT:  # too many dimensions to show even the corners of all
        rest = rest[1:]
    first = t.ndim - len(rest)
    if first:
        return f"at [{'0, ' * first}...]:\n" + values(t.lazy[(0,) * first], width)
    edge = next(e for e in (3, 2, 1) if prod(min(n, 2 * e) for n in t.shape) <= LIMIT)
    cut = [d for d, n in enumerate(t.shape) if n > 2 * edge]
    for d in cut:
        ends = [*range(edge), *range(-edge, 0)]
        t = t.lazy[(slice(None),) * d + (ends,)]
    array = as_numbers(t[...])
    for d in cut:  # one more element in the middle, so that numpy prints "..." between the edges
        array = np.insert(array, edge, array.take(0, axis=d), axis=d)
    return _text(array, width, 0, edge)


_CORNER = 3  # rows and columns at each end of a matrix that `corners` shows


@dataclass(frozen=True, slots=True)
class Corners:
    """The corners of a tensor as a table of texts. None among the indices stands for what is left out."""

    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]
    texts: tuple[tuple[str, ...], ...]
    note: str
    """Which matrix of a tensor of more dimensions this is, or ""."""


def corners(t: LazyArray, edge: int = _CORNER) -> Corners:
    """Read the first and last rows and columns of a matrix, the ends of a vector, or a number.

    Of a tensor with more dimensions, the first matrix is taken. Reads nothing but these elements.
    """
    note = ""
    if not t.numel():
        return Corners((), (), (), "it has no elements")
    if t.ndim > 2:
        at = (0,) * (t.ndim - 2)
        note = f"at [{', '.join(map(str, at))}, :, :]"
        t = t.lazy[at]
    shape = (1, 1, *t.shape)[-2:]
    kept = [list(range(n)) if n <= 2 * edge + 1 else [*range(edge), *range(n - edge, n)] for n in shape]
    for d in range(t.ndim):
        keep, n = kept[d - t.ndim], t.shape[d]
        if len(keep) < n:
            t = t.lazy[(slice(None),) * d + (keep,)]
    array = as_numbers(t[...]).reshape(len(kept[0]), len(kept[1]), -1)
    texts = [[_element(x) for x in row] for row in array]
    rows, columns = (_with_gap(keep, n, edge) for keep, n in zip(kept, shape, strict=True))
    full = [_with_gap(line, shape[1], edge, "…") for line in texts]
    if None in rows:
        full.insert(edge, ["⋮" if column is not None else "⋱" for column in columns])
    return Corners(tuple(rows), tuple(columns), tuple(map(tuple, full)), note)


def _with_gap(items: list[Any], whole: int, edge: int, gap: Any = None) -> list[Any]:
    """Return the items with a gap in the middle if they are not all."""
    return items if len(items) == whole else [*items[:edge], gap, *items[edge:]]


def _element(x: np.ndarray[Any, Any]) -> str:
    """Return an element as text; several numbers if it is packed."""
    if x.size > 1:
        return " ".join(str(one) for one in x.tolist())
    one = x.reshape(())[()]
    if x.dtype.kind == "f":
        return f"{one:.4g}"
    return f"{one:.4g}" if x.dtype.kind == "c" else str(one)


def json_values(t: LazyArray) -> Any:
    """Return all elements as nested lists, or raise DataError if there are more than `JSON_LIMIT`.

    JSON has no NaN, infinities or complex numbers: they become the strings "NaN", "Infinity" and "-Infinity", and pairs
    of numbers.
    """
    if t.numel() > JSON_LIMIT:
        raise DataError(
            f"{t.name!r}: {t.numel():,} elements are too many for JSON (the limit is {JSON_LIMIT:,}): ask for a part, "
            f"as in {t.name + '[:4]'!r}"
        )
    array = as_numbers(t[...])
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        odd = ~np.isfinite(array)
        names = [_ODD[str(x)] for x in array[odd].tolist()]
        array = array.astype(object)
        array[odd] = names
    return array.tolist()


_ODD = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def as_numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to an array that numpy can print.

    Floats of less than 32 bits become float32, which represents them exactly. Packed 4-bit floats and raw bits become
    their bytes."""
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    elif tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        try:
            tensor = tensor.float()
        except (RuntimeError, TypeError):
            tensor = tensor.view(torch.uint8)
    try:
        return to_numpy(tensor)
    except DataError:
        return to_numpy(tensor.view(torch.uint8))


def window(
    t: LazyArray,
    rows: tuple[int, int],
    cols: tuple[int, int],
    *,
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    wrap: int | None = None,
) -> list[Any]:
    """Read some rows and columns of a tensor as it is drawn.

    Parameters
    ----------
    t
        The tensor.
    rows, cols
        Half-open intervals, in numbers: a byte of packed 4-bit floats has two.
    dims, at, wrap
        How the tensor is drawn: see `lazyckpt.inspect.planes.plane_of`. Every dimension that is not drawn has an index.

    Returns
    -------
    list
        An array for each row, whose values print with the digits of their dtype. The last row of a wrapped tensor may
        be shorter.

    Raises
    ------
    DataError
        The arguments do not fit the tensor, or the elements are no numbers.
    LazyckptError
        What reading raises.
    """
    plane = plane_of(t, dims, at, wrap)
    checked(plane, (rows, cols))
    pack = packing(t.spec.dtype)
    if t.ndim == 0:
        return [_read(t[...].reshape(1))[slice(*cols)]][slice(*rows)]
    if t.ndim == 1:
        found: list[Any] = []
        for row in range(*rows):
            a, b = row * plane.width + cols[0], min(row * plane.width + cols[1], number_shape(t)[0])
            found.append(_read(t[a // pack : -(-b // pack)])[a % pack : a % pack + b - a] if a < b else [])
        return found
    ends: dict[int, tuple[int, int]] = {n: (i, i + 1) for n, i in plane.at.items()}
    drawn = [d for d in (plane.row_dim, plane.col_dim) if d is not None]
    ends |= dict(zip(drawn, (rows, cols), strict=True))
    if len(ends) < t.ndim:
        raise DataError(f"a table shows two dimensions of {t.name!r}: choose an index of each other one")
    *key, (a, b) = (ends[n] for n in range(t.ndim))
    block = _read(t[(*(slice(*one) for one in key), slice(a // pack, -(-b // pack)))])[..., a % pack : a % pack + b - a]
    return list(np.moveaxis(block, drawn, (0, 1)).reshape(rows[1] - rows[0], cols[1] - cols[0]))


def _read(block: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return elements as an array whose values print with the digits of their dtype."""
    return numbers(block) if packing(dtype_of(block.dtype)) > 1 else as_numbers(block)


def _text(array: np.ndarray[Any, Any], width: int, threshold: int, edge: int) -> str:
    return np.array2string(
        array, max_line_width=width, precision=4, separator=", ", threshold=threshold, edgeitems=edge
    )


# -- A sample of the elements of a tensor: a bounded number of bytes, spread evenly over all of it.

_BYTES = 4 << 20  # bytes to read of a tensor
_PLACES = 64  # places to read them from
_BINS = 48


@dataclass(frozen=True, slots=True)
class Sample:
    """Statistics of a sample of a tensor's elements. ``low``, ``high``, ``mean`` and ``std`` are 0 if no element of the
    sample is finite."""

    read: int
    """Number of elements in the sample."""
    nbytes: int
    """Number of bytes read."""
    total: int
    """Number of elements of the tensor."""
    nan: int
    """Number of NaN in the sample."""
    inf: int
    """Number of infinities in the sample."""
    low: float
    """Smallest finite element."""
    high: float
    """Largest finite element."""
    mean: float
    """Mean of the finite elements."""
    std: float
    """Standard deviation of the finite elements."""
    counts: tuple[int, ...]
    """Number of finite elements in each bin of the histogram."""
    edges: tuple[float, ...]
    """Edges of the bins: one more than ``counts``."""

    @property
    def facts(self) -> tuple[str, ...]:
        """The size of the sample, its statistics, and its counts of NaN and infinities, as texts."""
        part = "all of" if self.read == self.total else f"{self.read:,} of"
        size = f"histogram of {part} {plural(self.total, 'element')} ({human_bytes(self.nbytes)} read)"
        stats = f"min {self.low:.4g}, max {self.high:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"
        odd = [f"{n:,} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        return size, stats, *odd

    @property
    def lines(self) -> tuple[str, str]:
        """`facts` as two lines."""
        size, *stats = self.facts
        return size, "; ".join(stats)


def sample(t: LazyArray, nbytes: int = _BYTES) -> Sample:
    """Read about ``nbytes`` bytes of a tensor, from 64 places spread over it, or all of a smaller tensor.

    Complex numbers are represented by their absolute values, packed 4-bit floats by their bytes. Errors of reading are
    raised, such as MissingFileError.
    """
    pieces = list(_pieces(t, nbytes))
    parts = [as_numbers(piece[...]).reshape(-1) for piece in pieces]
    values: np.ndarray[Any, Any] = np.concatenate(parts) if parts else np.empty(0)
    values = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
    finite = values[np.isfinite(values)]
    nan = int(np.isnan(values).sum())
    moments: dict[str, float] = dict.fromkeys(("low", "high", "mean", "std"), 0.0)
    counts, edges = np.empty(0, np.int64), np.empty(0)
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):  # sums of the largest floats overflow to inf
            moments = {"mean": float(finite.mean()), "std": float(finite.std())}
            moments |= {"low": float(finite.min()), "high": float(finite.max())}
            counts, edges = np.histogram(finite, even_edges(moments["low"], moments["high"], _BINS))
    return Sample(
        read=sum(piece.numel() for piece in pieces),
        nbytes=sum(piece.nbytes for piece in pieces),
        total=t.numel(),
        nan=nan,
        inf=len(values) - nan - len(finite),
        counts=tuple(counts.tolist()),
        edges=tuple(edges.tolist()),
        **moments,
    )


def _pieces(t: LazyArray, nbytes: int) -> Iterator[LazyArray]:
    if t.nbytes <= nbytes:
        if t.numel():
            yield t
        return
    for _, region in t.pieces(-(-t.nbytes // _PLACES)):
        share = max(t.itemsize, nbytes * region.nbytes // t.nbytes)
        yield next(piece for _, piece in region.pieces(share))


def text_histogram(found: Sample) -> str:
    """Return the histogram of a sample as a line of block characters.

    >>> text_histogram(Sample(3, 12, 3, 0, 0, 0, 2, 1, 1, (0, 1, 4), (0, 1, 2, 3)))
    ' ▂█'
    """
    top = max(found.counts, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // top) if top else 0] for n in found.counts)
