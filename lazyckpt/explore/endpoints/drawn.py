"""The parameters of requests about a window of a tensor: how it is drawn, and which rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...errors import DataError
from ...inspect.planes import Plane, Window, plane_of
from ...lazy import LazyArray
from ..query import Query


class Drawn(NamedTuple):
    """How a tensor is drawn, as the arguments of the functions of `inspect`."""

    dims: tuple[int, int] | None
    at: Mapping[int, int]
    wrap: int | None
    window: Window
    plane: Plane


def drawn(query: Query, t: LazyArray) -> Drawn:
    """Return how a request draws a tensor.

    Parameters
    ----------
    query
        ``dims``: the dimensions of rows and columns ("0,1"). ``at``: indices of other dimensions ("2:5,3:0"); the rest
        are pooled. ``wrap``: of a tensor of one dimension, the number of columns. ``r0``, ``r1``, ``c0``, ``c1``: the
        rows and columns of the window; by default all.
    t
        The tensor.

    Raises
    ------
    DataError
        They do not fit the tensor.
    """
    dims = _numbers(query, "dims")
    if dims is not None and len(dims) != 2:
        raise DataError(f"the parameter 'dims' names {len(dims)} dimensions: two are drawn, as in dims=0,1")
    at = {}
    for pair in filter(None, query.text("at", "").split(",")):
        dim, _, index = pair.partition(":")
        at[_number("at", dim)] = _number("at", index)
    wrap = query.number("wrap", 0, 1, 1 << 40) or None
    chosen = None if dims is None else (dims[0], dims[1])
    plane = plane_of(t, chosen, at, wrap)
    r0 = query.number("r0", 0, 0, plane.height)
    r1 = query.number("r1", plane.height, r0, plane.height)
    c0 = query.number("c0", 0, 0, plane.width)
    c1 = query.number("c1", plane.width, c0, plane.width)
    return Drawn(chosen, at, wrap, ((r0, r1), (c0, c1)), plane)


def _numbers(query: Query, name: str) -> list[int] | None:
    text = query.text(name, "")
    return [_number(name, one) for one in text.split(",")] if text else None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise DataError(f"the parameter {name!r} has {text!r:.40}, which is no number")
    return int(text)
