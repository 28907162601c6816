"""``tensor/...``: what the values of a tensor are: pictures, histograms, norms, spectra, bits, outliers, tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError
from ...inspect.bits import bits_of
from ...inspect.histogram import histogram_of
from ...inspect.norms import norms as norms_of
from ...inspect.norms import outliers as outliers_of
from ...inspect.numbers import Array, is_narrow
from ...inspect.pixels import SIDE, pooled
from ...inspect.stats import noise, singular_values
from ...lazy import LazyArray
from ...show.values import window
from ..packing import pack
from ..query import Query
from ..subject import AUTO, Subject
from .drawn import drawn

_CELLS = 20_000  # maximum number of values in a table


def _exact(query: Query, nbytes: int) -> bool:
    how = query.one_of("exact", ("auto", "yes", "no"))
    return how == "yes" or (how == "auto" and nbytes <= AUTO)


def tile(subject: Subject, query: Query) -> bytes:
    """Pool a window of a tensor in a grid of cells.

    Parameters of the request: those of `Subject.tensor` and `drawn`. ``rows``, ``cols``: the size of the grid. ``how``:
    "all" (default), or the one pooling that is wanted: "mean", "min", "max", "absmax". ``exact``: "auto" (default:
    everything is read of windows up to 64 MiB, else a sample), "yes" or "no". ``fraction``: how many bits of the
    fractions of pooled values to keep, for answers that compress well; by default all.

    Returns
    -------
    bytes
        The arrays ``mean``, ``min``, ``max`` (or the one that is wanted) of shape (rows, cols), as float32 if that
        represents the elements exactly, else float64; NaN for cells without a finite element. If each cell is one
        element, only ``mean``. ``nan`` and ``inf``: how many of the elements are so, as uint32; only if some are.
        Header: ``window``, ``exact``, ``read`` (elements), ``single`` (whether each cell is one element), and
        ``lost``, the number of elements in files that cannot be read, if there are some.
    """
    part = any(name in query for name in ("at", "r0", "r1", "c0", "c1"))
    return picture(subject.whole(query, not part), query)


def picture(t: LazyArray, query: Query) -> bytes:
    """Pool a window of a tensor, as ``tensor/tile`` answers it."""
    d = drawn(query, t)
    rows, cols = query.number("rows", 256, 1, SIDE), query.number("cols", 256, 1, SIDE)
    how = query.one_of("how", ("all", "mean", "min", "max", "absmax"))
    (r0, r1), (c0, c1) = d.window
    share = (r1 - r0) * (c1 - c0) / max(1, d.plane.height * d.plane.width)
    found = pooled(
        t, rows, cols, dims=d.dims, at=d.at, wrap=d.wrap, window=d.window,
        exact=_exact(query, int(share * t.nbytes)), check=query.check, lost=True,
    )  # fmt: skip
    dtype = np.float32 if is_narrow(t.spec.dtype) else np.float64
    held = found.count if found.lost is None else found.count + found.lost
    single = bool((held <= 1).all())
    names = ("mean",) if single else ("mean", "min", "max") if how == "all" else (how,)
    header = {"window": d.window, "exact": found.exact, "read": found.read, "single": single}
    if found.lost is not None:
        header["lost"] = int(found.lost.sum())
    odd = {} if found.nan is None or found.inf is None else {"nan": found.nan, "inf": found.inf}
    fraction = query.number("fraction", 0, 1, 52) if "fraction" in query and not single else None
    left = [(name, found.values(name)) for name in reversed(names)]
    del found
    arrays: dict[str, Array] = {}
    while left:  # what was packed is dropped: all of it would be three times the answer
        name, values = left.pop()
        arrays[name] = values.astype(dtype)
        if fraction is not None:
            arrays[name] = _rounded(arrays[name], fraction)
    arrays |= {name: counts.astype(np.uint32) for name, counts in odd.items()}
    return pack(header, arrays)


def _rounded(array: Array, fraction: int) -> Array:
    """Round floats to some bits of their fractions; what is rounded beyond the largest number stays as it is."""
    found, exponent = np.frexp(array)
    scale = 2.0 ** (fraction + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        found *= scale
        np.round(found, out=found)
        found /= scale
        np.ldexp(found, exponent, out=found)
    np.copyto(found, array, where=~np.isfinite(found))
    return found


def histogram(subject: Subject, query: Query) -> dict[str, Any]:
    """Count the values of a tensor in bins.

    Parameters of the request: those of `Subject.tensor`. ``bins``: their number. ``scale``: "linear" (bins of equal
    width) or "log" (the edges are powers of 2, on both sides of zero). ``exact``: as for `tile`.

    Returns
    -------
    dict
        ``edges``, ``counts``; ``count``, ``nan``, ``posinf``, ``neginf``, ``zeros``, ``mean``, ``std``, ``min``,
        ``max``, ``absmax``, ``l1``, ``l2`` of the elements that were read; ``exact``, ``read`` (elements), ``total``.
    """
    t = subject.whole(query)
    scale = query.one_of("scale", ("linear", "log"))
    bins = query.number("bins", 100, 1, 2000)
    found = histogram_of(t, bins, scale == "log", _exact(query, t.nbytes), query.check)
    return {**found.as_dict(), "scale": scale}


def norms(subject: Subject, query: Query) -> bytes:
    """Compute the norms of the rows and columns of a tensor.

    Parameters of the request: those of `Subject.tensor` and `drawn`. ``rows``, ``cols``: the number of groups.

    Returns
    -------
    bytes
        The arrays ``rows`` and ``cols``, as float64; of groups of several the root mean square. Header: ``window``.
    """
    t = subject.whole(query, "at" not in query)
    d = drawn(query, t)
    rows, cols = query.number("rows", 512, 1, SIDE), query.number("cols", 512, 1, SIDE)
    found = norms_of(t, rows, cols, dims=d.dims, at=d.at, wrap=d.wrap, window=d.window, check=query.check)
    return pack({"window": d.window}, {"rows": found.rows, "cols": found.cols})


def spectrum(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute the singular values of a matrix, largest first.

    Parameters of the request: those of `Subject.tensor`. ``dims`` and ``at``: which matrix of a tensor of more
    dimensions; every other dimension has an index.

    Returns
    -------
    dict
        ``values``. ``accuracy``: values below it are noise.
    """
    t = subject.whole(query, "at" not in query)
    if t.ndim > 2:
        plane = drawn(query, t).plane
        left = [n for n in range(t.ndim) if n not in plane.at and n not in (plane.row_dim, plane.col_dim)]
        if left:
            raise DataError(f"singular values are of a matrix: choose an index of dimension {left[0]}")
        t = t.lazy[tuple(plane.at.get(n, slice(None)) for n in range(t.ndim))]
    values = singular_values(t, query.check)
    return {"values": values.tolist(), "accuracy": noise(values)}


def bits(subject: Subject, query: Query) -> dict[str, Any]:
    """Count the bit patterns of a tensor of 8- or 16-bit numbers.

    Parameters of the request: those of `Subject.tensor`.

    Returns
    -------
    dict
        ``sign``, ``exponent``, ``mantissa``: the number of bits of each. ``bias`` of the exponent. ``ones``: the
        fraction of elements in which each bit is set, from the highest. ``exponents``: how many elements have each
        value of the exponent's bits; null for integers. ``distinct``: number of patterns. ``entropy``, in bits.
        ``common``: the 20 most frequent patterns as (pattern, count, value). ``count``: number of elements.
    """
    found = bits_of(subject.whole(query), query.check)
    order = np.argsort(-found.counts, kind="stable")[:20]
    layout = found.layout
    return {
        "sign": layout.sign,
        "exponent": layout.exponent,
        "mantissa": layout.mantissa,
        "bias": layout.bias,
        "count": found.count,
        "ones": found.ones.tolist(),
        "exponents": None if found.exponents is None else found.exponents.tolist(),
        "distinct": found.distinct,
        "entropy": found.entropy,
        "common": [[int(found.patterns[n]), int(found.counts[n]), float(found.values[n])] for n in order],
    }


def outliers(subject: Subject, query: Query) -> dict[str, Any]:
    """Find the elements with the largest absolute values, and the first ones that are NaN or infinite.

    Parameters of the request: those of `Subject.tensor`. ``count``: how many of each.

    Returns
    -------
    dict
        ``largest`` and ``odd``: pairs of index and value. ``nan``, ``posinf``, ``neginf``: how many there are.
    """
    count = query.number("count", 20, 0, 1000)
    found = outliers_of(subject.whole(query), count, count, check=query.check)
    return {
        "largest": [[list(i), v] for i, v in zip(found.indices, found.values, strict=True)],
        "odd": [[list(i), v] for i, v in zip(found.odd_indices, found.odd_values, strict=True)],
        "nan": found.nan,
        "posinf": found.posinf,
        "neginf": found.neginf,
    }


def table(subject: Subject, query: Query) -> dict[str, Any]:
    """Return the values of a window as text: each digit that tells a value from its neighbours of the same dtype.

    Parameters of the request: those of `Subject.tensor` and `drawn`; every dimension that is not drawn has an index. At
    most 20,000 values.

    Returns
    -------
    dict
        ``window``, and ``values``: a list of texts for each row. The last row of a wrapped tensor may be shorter.
    """
    t = subject.whole(query, False)
    d = drawn(query, t)
    (r0, r1), (c0, c1) = d.window
    if max(r1 - r0, 1) * max(c1 - c0, 1) > _CELLS:
        raise DataError(f"a table has at most {_CELLS:,} values: ask for a smaller window")
    block = window(t, *d.window, dims=d.dims, at=d.at, wrap=d.wrap)
    return {"window": d.window, "values": [[_text(value) for value in row] for row in block]}


def _text(value: Any) -> str:
    if isinstance(value, np.complexfloating):
        return f"{value.real!s}{'+' if value.imag >= 0 or np.isnan(value.imag) else ''}{value.imag!s}j"
    return str(value)


ENDPOINTS = {
    "tensor/tile": tile,
    "tensor/histogram": histogram,
    "tensor/norms": norms,
    "tensor/spectrum": spectrum,
    "tensor/bits": bits,
    "tensor/outliers": outliers,
    "tensor/values": table,
}
