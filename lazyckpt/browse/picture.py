"""Tensors as pictures for the screen: how they are drawn, their colours and legend. `inspect.pixels` pools them, as for
the explorer's page and for plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from ..core.units import human_bytes
from ..lazy import LazyArray
from .background import Check

if TYPE_CHECKING:
    from ..inspect.pixels import Pixels
    from ..inspect.planes import Plane

# Colours that people with any colour vision tell apart: blue and orange for signs, and viridis for sizes (matplotlib's
# table at even places). The middle of signed values is the background, so that zeros recede.
_NEGATIVE = {True: ((58, 142, 220), (150, 205, 255)), False: ((70, 140, 210), (8, 64, 130))}
_POSITIVE = {True: ((222, 122, 34), (255, 205, 120)), False: ((222, 130, 50), (140, 56, 4))}
_SIZES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_ODD = (255, 0, 170)
# The same for terminals of 16 colours, from -1 to 1 and from 0 to 1, in the values that Rich has for them.
_FEW_SIGNED = ((85, 255, 255), (0, 0, 170), (0, 0, 0), (170, 85, 0), (255, 255, 85))
_FEW_SIZES = ((0, 0, 0), (0, 0, 170), (0, 170, 170), (255, 255, 85), (255, 255, 255))
_GREYS = ((0, 0, 0), (255, 255, 255))
_ROBUST = 0.995  # share of the magnitudes at which the colours end: outliers would leave the rest without colour

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # first row, row after the last, first column, column after the last
HOW = {"mean": "mean", "absmax": "largest"}


class Picture:
    """A part of a tensor, pooled for the screen.

    Attributes
    ----------
    pixels
        What was read.
    values
        A float64 matrix: the mean or the largest absolute value of the finite elements of each cell; NaN if there are
        none.
    odd
        Whether a cell has a NaN or an infinity.
    most
        The number that has the strongest colour.
    signed
        Whether the colours tell signs apart.
    """

    def __init__(self, pixels: Pixels, how: str, nbytes: int) -> None:
        self.pixels, self.how, self.nbytes = pixels, how, nbytes
        self.values = pixels.values(how)
        odd = np.zeros(self.values.shape, np.int64)
        for count in (pixels.nan, pixels.inf):
            odd += 0 if count is None else count
        self.odd = odd > 0
        known = self.values[np.isfinite(self.values)]
        sizes = np.abs(known)
        most = float(np.quantile(sizes, _ROBUST)) if sizes.size else 0.0
        self.most = most or (float(sizes.max()) if sizes.size else 0.0)
        self.signed = bool((known < 0).any())

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def cols(self) -> int:
        return int(self.values.shape[1])

    @property
    def box(self) -> Box:
        rows, cols = self.pixels.row_edges, self.pixels.col_edges
        return int(rows[0]), int(rows[-1]), int(cols[0]), int(cols[-1])


@dataclass(frozen=True, slots=True)
class Drawn:
    """How a tensor is drawn: see `inspect.planes.plane_of`."""

    dims: tuple[int, int] | None
    at: Mapping[int, int]
    wrap: int | None
    plane: Plane


def drawn(t: LazyArray, dims: tuple[int, int] | None = None, index: int = -1) -> Drawn:
    """Return how a tensor is drawn: in the dimensions ``dims``, by default the last two. ``index`` counts the indices
    of the other ones in C order; -1 pools them. Raises DataError if the elements are no numbers."""
    from ..inspect.numbers import number_shape
    from ..inspect.pixels import row_length
    from ..inspect.planes import plane_of

    shape = number_shape(t)
    others = [d for d in range(len(shape)) if d not in (dims or (len(shape) - 2, len(shape) - 1))]
    at = {}
    if index >= 0 and len(shape) > 2:
        places = np.unravel_index(index, [shape[d] for d in others])
        at = dict(zip(others, (int(n) for n in places), strict=True))
    wrap = row_length(shape)
    return Drawn(dims, at, wrap, plane_of(t, dims, at, wrap))


def picture(
    t: LazyArray, rows: int, cols: int, how: str, box: Box | None, of: Drawn, check: Check | None = None
) -> Picture:
    """Read a part of a tensor for ``rows`` x ``cols`` cells: all of it, or a sample of more than 32 MiB. Raises what
    reading raises."""
    from ..inspect.pixels import SIDE, pooled

    window = None if box is None else (box[:2], box[2:])
    found = pooled(
        t, min(rows, SIDE), min(cols, SIDE), dims=of.dims, at=of.at, wrap=of.wrap, window=window, exact=False,
        check=check,
    )  # fmt: skip
    return Picture(found, how, found.read * t.nbytes // max(1, prod(numbers_of(t))))


def numbers_of(t: LazyArray) -> tuple[int, ...]:
    from ..inspect.numbers import number_shape

    return number_shape(t)


def colours(shown: Picture, dark: bool, back: Colour, palette: str = "") -> np.ndarray[Any, Any]:
    """Return the colours of the cells, as an array of uint8 of shape (rows, columns, 3).

    ``palette`` is "grey" for a terminal without colours, where larger numbers are lighter, and "few" for 16 colours."""
    values = shown.values
    with np.errstate(invalid="ignore"):
        scaled = np.clip(np.nan_to_num(values / shown.most if shown.most else values * 0), -1, 1)
    share = scaled / 2 + 0.5 if shown.signed else scaled
    if palette == "grey":
        found = _ramp(share, _GREYS)
    elif palette == "few":
        few = np.array(_FEW_SIGNED if shown.signed else _FEW_SIZES)
        found = few[np.rint(share * (len(few) - 1)).astype(int)]
    elif shown.signed:
        found = np.where(
            scaled[..., None] < 0, _ramp(-scaled, (back, *_NEGATIVE[dark])), _ramp(scaled, (back, *_POSITIVE[dark]))
        )
    else:
        found = _ramp(scaled, _SIZES)
    found[np.isnan(values)] = back
    found[shown.odd] = _ODD
    return found.astype(np.uint8)


def _ramp(at: np.ndarray[Any, Any], stops: tuple[Colour, ...]) -> np.ndarray[Any, Any]:
    """Return colours between stops that are evenly spaced from 0 to 1."""
    places = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(at, places, [stop[c] for stop in stops]) for c in range(3)], axis=-1)


def legend(shown: Picture, t: LazyArray) -> str:
    """Return what a picture shows, as text."""
    plane = shown.pixels.plane
    top, bottom, left, right = shown.box
    cell = [int(np.diff(edges).max(initial=1)) for edges in (shown.pixels.row_edges, shown.pixels.col_edges)]
    single = bool((shown.pixels.count <= 1).all())
    ends = f"colours {-shown.most if shown.signed else 0:.3g} to {shown.most:.3g}"
    parts = [ends, "each cell is an element" if single else f"{HOW[shown.how]} of {cell[0]:,} x {cell[1]:,}"]
    if (top, left, bottom, right) != (0, 0, plane.height, plane.width):
        parts.append(f"rows {top:,}-{bottom - 1:,}, columns {left:,}-{right - 1:,}")
    if plane.wrap:
        parts.append(f"in rows of {plane.width:,}")
    others = [d for d in range(t.ndim) if d not in (plane.row_dim, plane.col_dim)] if t.ndim > 2 else []
    if others:
        parts.append(f"dimension {plane.row_dim} x {plane.col_dim}")
    if others and plane.at:
        parts.append("at " + ", ".join(f"{plane.at[d]} of {t.shape[d]:,}" for d in others))
    elif others:
        parts.append(f"pooled over {' x '.join(f'{t.shape[d]:,}' for d in others)}")
    odd = ((shown.pixels.nan, "NaN"), (shown.pixels.inf, "Inf"))
    parts += [f"{int(n.sum()):,} {what}" for n, what in odd if n is not None and n.any()]
    read = f"{human_bytes(shown.nbytes)} read"
    parts.append(read if shown.pixels.exact else f"{read}, a sample")
    return "  ".join(parts)


def half_blocks(upper: np.ndarray[Any, Any], lower: np.ndarray[Any, Any]) -> list[Segment]:
    """Return a line of two rows of cells; neighbours of the same colours are one segment."""
    both = np.concatenate([upper, lower], axis=1)
    starts = np.flatnonzero(np.r_[True, (both[1:] != both[:-1]).any(axis=1)]).tolist()
    found = []
    for a, b in zip(starts, [*starts[1:], len(both)], strict=True):
        r, g, blue, r2, g2, blue2 = both[a].tolist()
        style = Style(color=Color.from_rgb(r, g, blue), bgcolor=Color.from_rgb(r2, g2, blue2))
        found.append(Segment("▀" * (b - a), style))
    return found
