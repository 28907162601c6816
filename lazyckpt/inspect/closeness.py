"""How close two tensors are: the norm of their difference and the cosine of the angle between them.

Both come from four sums over the elements, which are added up in any order without rounding (`math.fsum`), so that the
same tensors have the same digits on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..core.rounding import exact_sum
from .moments import BLOCK, WIDE, exponent_of, scaled, scaled_numbers

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch


_FEW, _MANY = 2.0 ** (-2 * WIDE), 2.0 ** (2 * WIDE)  # sums of squares that have all digits


class Sums(NamedTuple):
    """Sums over pairs of elements (x, y), in float64. Pairs with a NaN or an infinity are left out.

    Attributes
    ----------
    xx, yy, xy
        The sums of x * x, y * y and x * y; for complex numbers, of their real and imaginary parts.
    dd
        The sum of (x - y) * (x - y).
    x, y, d
        The exponents of the units of x, y and x - y: ``xx`` is in units of ``4 ** x``, ``xy`` in those of
        ``2 ** (x + y)``. They are 0 unless the squares are beyond float64.
    """

    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    dd: float = 0.0
    x: int = 0
    y: int = 0
    d: int = 0


class Closeness(NamedTuple):
    """How close a tensor is to another one. A number that the elements do not have is None.

    Attributes
    ----------
    relative
        The norm of the difference divided by the norm of the first tensor; None if that is 0.
    cosine
        The cosine of the angle between the tensors as vectors; None if one of them is 0.
    norm_a, norm_b
        The norms (roots of the sums of squares) of the two tensors.
    """

    relative: float | None
    cosine: float | None
    norm_a: float | None
    norm_b: float | None


def sums_of(x: torch.Tensor, y: torch.Tensor) -> Sums:
    """Return the sums of two tensors of numbers that have the same number of elements."""
    planes = x.is_complex() or y.is_complex()
    p, q = _flat(x, planes), _flat(y, planes)
    found = _sums(p, q)
    if not all(map(math.isfinite, found)):
        odd = _odd(torch.isfinite(p) & torch.isfinite(q), planes)
        p, q = p.masked_fill(odd, 0), q.masked_fill(odd, 0)
        found = _sums(p, q)
    if _is_wide(x, y) and not all(_FEW < one < _MANY for one in (found.xx, found.yy, found.dd)):
        return _far_sums(p, q)
    return found


def sums_of_equal(x: torch.Tensor) -> Sums:
    """Return the sums of a tensor and its copy."""
    p = _flat(x, x.is_complex())
    square = _dot(p, p)
    if not math.isfinite(square):
        p = p.masked_fill(_odd(torch.isfinite(p), x.is_complex()), 0)
        square = _dot(p, p)
    exponent = 0
    if _is_wide(x) and not _FEW < square < _MANY:
        exponent = _exponent(p)
        p = scaled_numbers(p, -exponent)
        square = _dot(p, p)
    return Sums(square, square, square, 0.0, exponent, exponent)


def together(sums: Iterable[Sums]) -> Sums:
    """Add up sums; their order does not matter."""
    parts = list(sums)
    x = max((one.x for one in parts if one.xx), default=0)
    y = max((one.y for one in parts if one.yy), default=0)
    d = max((one.d for one in parts if one.dd), default=0)
    return Sums(
        exact_sum([scaled(one.xx, 2 * (one.x - x)) for one in parts]),
        exact_sum([scaled(one.yy, 2 * (one.y - y)) for one in parts]),
        exact_sum([scaled(one.xy, one.x + one.y - x - y) for one in parts]),
        exact_sum([scaled(one.dd, 2 * (one.d - d)) for one in parts]),
        x,
        y,
        d,
    )


def closeness(found: Sums) -> Closeness:
    """Return how close two tensors are. A number that float64 cannot hold is None."""
    if not all(map(math.isfinite, found)):
        return Closeness(None, None, None, None)
    a, b, apart = math.sqrt(found.xx), math.sqrt(found.yy), math.sqrt(found.dd)
    cosine = max(-1.0, min(1.0, found.xy / a / b)) if a and b else None
    relative = scaled(apart / a, found.d - found.x) if a else None
    return Closeness(_held(relative), cosine, _held(scaled(a, found.x)), _held(scaled(b, found.y)))


def _held(number: float | None) -> float | None:
    return None if number == math.inf else number


def _is_wide(*tensors: torch.Tensor) -> bool:
    """Return whether the squares of elements may be beyond float64."""
    return any(one.dtype in (torch.float64, torch.complex128) for one in tensors)


def _exponent(numbers: torch.Tensor) -> int:
    return exponent_of(float(numbers.abs().max())) if numbers.numel() else 0


def _flat(x: torch.Tensor, planes: bool) -> torch.Tensor:
    """Return the elements as float64; with ``planes`` as pairs of a real and an imaginary part."""
    if not planes:
        return x.to(torch.float64).reshape(-1)
    return torch.view_as_real(x.to(torch.complex128)).reshape(-1)


def _odd(finite: torch.Tensor, planes: bool) -> torch.Tensor:
    """Return which numbers to leave out: of complex ones both parts if one is not finite."""
    return ~finite if not planes else ~finite.view(-1, 2).all(1).repeat_interleave(2)


def _sums(p: torch.Tensor, q: torch.Tensor) -> Sums:
    apart = p - q
    return Sums(_dot(p, p), _dot(q, q), _dot(p, q), _dot(apart, apart))


def _far_sums(p: torch.Tensor, q: torch.Tensor) -> Sums:
    """Return the sums of finite numbers whose squares may be beyond float64."""
    x, y = _exponent(p), _exponent(q)
    halved = int(max(x, y) > 0)  # else the difference may be beyond float64
    apart = p * 0.5 - q * 0.5 if halved else p - q
    d = _exponent(apart)
    p, q, apart = (scaled_numbers(one, -e) for one, e in ((p, x), (q, y), (apart, d)))
    return Sums(_dot(p, p), _dot(q, q), _dot(p, q), _dot(apart, apart), x, y, d + halved)


def _dot(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the sum of the products. The digits of `torch.dot` depend on where in memory the numbers begin and on the
    number of processors."""
    if len(p) <= BLOCK:
        return float((p * q).sum())
    pairs = zip(torch.split(p, BLOCK), torch.split(q, BLOCK), strict=True)
    return exact_sum([float((a * b).sum()) for a, b in pairs])
