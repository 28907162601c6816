"""The elements of a tensor as text, and as JSON. Of a large tensor its edges are shown, and no more is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dtypes import to_numpy
from ..core.units import human_bytes, plural
from ..errors import DataError
from ..inspect.moments import even_edges
from ..lazy import LazyArray

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

LIMIT = 1000  # elements that are shown in full
JSON_LIMIT = 1_000_000  # elements that are given as JSON


def values(t: LazyArray, width: int = 100) -> str:
    """All elements of a small tensor, the first and last few along every dimension of a large one."""
    if t.numel() <= LIMIT:
        return _text(as_numbers(t[...]), width, sys.maxsize, 3)
    rest = t.shape
    while prod(min(n, 2) for n in rest) > LIMIT:  # more dimensions than have corners to show
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
    for d in cut:  # numpy prints "..." for the middle of what is longer than two edges
        array = np.insert(array, edge, array.take(0, axis=d), axis=d)
    return _text(array, width, 0, edge)


def json_values(t: LazyArray) -> Any:
    """All elements as nested lists. JSON has no NaN, no infinity and no complex numbers: they are the texts "NaN",
    "Infinity", "-Infinity", and pairs of numbers. Raises DataError where there are more than `JSON_LIMIT` elements.
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
    """As numbers that numpy prints: small floats become float32, which holds them exactly; what has no numbers (packed
    4-bit floats, raw bits) its bytes."""
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


def _text(array: np.ndarray[Any, Any], width: int, threshold: int, edge: int) -> str:
    return np.array2string(
        array, max_line_width=width, precision=4, separator=", ", threshold=threshold, edgeitems=edge
    )


# -- A look at the elements of a tensor: from a bounded number of bytes, taken evenly over all of it.

_BYTES = 4 << 20  # that are read of a tensor
_PLACES = 64  # that they are taken from
_BINS = 48


@dataclass(frozen=True, slots=True)
class Sample:
    """``read``, ``nbytes``: elements and bytes that were read; ``total``: elements that there are. ``nan``, ``inf``:
    how many of those read are NaN, or infinite. Of the finite ones: smallest, largest, mean, standard deviation (all 0
    if there are none), and how many of them fall between one of ``edges`` and the next."""

    read: int
    nbytes: int
    total: int
    nan: int
    inf: int
    low: float
    high: float
    mean: float
    std: float
    counts: tuple[int, ...]
    edges: tuple[float, ...]

    @property
    def facts(self) -> tuple[str, ...]:
        """What was read, and what there is in it, a text each."""
        part = "all of" if self.read == self.total else f"{self.read:,} of"
        told = f"histogram of {part} {plural(self.total, 'element')} ({human_bytes(self.nbytes)} read)"
        stats = f"min {self.low:.4g}, max {self.high:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"
        odd = [f"{n:,} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        return told, stats, *odd

    @property
    def lines(self) -> tuple[str, str]:
        """`facts` as two lines."""
        told, *stats = self.facts
        return told, "; ".join(stats)


def sample(t: LazyArray, nbytes: int = _BYTES) -> Sample:
    """Read about ``nbytes`` bytes of a tensor, all of a smaller one, else from 64 places over all of it. Of complex
    numbers it looks at the absolute values; what torch has no numbers for (packed 4-bit floats) is taken as bytes.

    Raises what reading raises: MissingFileError where a file is lost.
    """
    pieces = list(_pieces(t, nbytes))
    parts = [as_numbers(piece[...]).reshape(-1) for piece in pieces]
    values: np.ndarray[Any, Any] = np.concatenate(parts) if parts else np.empty(0)
    values = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
    finite = values[np.isfinite(values)]
    nan = int(np.isnan(values).sum())
    told: dict[str, float] = dict.fromkeys(("low", "high", "mean", "std"), 0.0)
    counts, edges = np.empty(0, np.int64), np.empty(0)
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the largest: then it says inf
            told = {"mean": float(finite.mean()), "std": float(finite.std())}
            told |= {"low": float(finite.min()), "high": float(finite.max())}
            counts, edges = np.histogram(finite, even_edges(told["low"], told["high"], _BINS))
    return Sample(
        read=sum(piece.numel() for piece in pieces),
        nbytes=sum(piece.nbytes for piece in pieces),
        total=t.numel(),
        nan=nan,
        inf=len(values) - nan - len(finite),
        counts=tuple(counts.tolist()),
        edges=tuple(edges.tolist()),
        **told,
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
    """A line of blocks, as high as the counts.

    >>> text_histogram(Sample(3, 12, 3, 0, 0, 0, 2, 1, 1, (0, 1, 4), (0, 1, 2, 3)))
    ' ▂█'
    """
    top = max(found.counts, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // top) if top else 0] for n in found.counts)
