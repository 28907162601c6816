"""A look at the elements of a tensor: from a bounded number of bytes, taken evenly over all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inspect.moments import even_edges
from ..lazy import LazyArray
from .text import human_bytes, plural
from .values import as_numbers

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
    def lines(self) -> tuple[str, str]:
        """What was read, and what there is in it."""
        part = "all of" if self.read == self.total else f"{self.read:,} of"
        told = f"histogram of {part} {plural(self.total, 'element')} ({human_bytes(self.nbytes)} read)"
        stats = f"min {self.low:.4g}, max {self.high:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"
        odd = [f"{n:,} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        return told, "; ".join([stats, *odd])


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
