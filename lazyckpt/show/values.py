"""The elements of a tensor as text, and as JSON. Of a large tensor its edges are shown, and no more is read."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np
import torch

from ..core.dtypes import to_numpy
from ..errors import DataError
from ..lazy import LazyArray

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
