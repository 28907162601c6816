"""How close two tensors are: the norm of their difference and the cosine of the angle between them.

Both come from four sums over the elements, which are added up in any order without rounding (`math.fsum`), so that the
same tensors have the same digits on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..core.rounding import exact_sum
from .moments import BLOCK

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch


class Sums(NamedTuple):
    """Sums over pairs of elements (x, y), in float64. Pairs with a NaN or an infinity are left out.

    Attributes
    ----------
    xx, yy, xy
        The sums of x * x, y * y and x * y; for complex numbers, of their real and imaginary parts.
    dd
        The sum of (x - y) * (x - y).
    """

    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    dd: float = 0.0


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
        found = _sums(p.masked_fill(odd, 0), q.masked_fill(odd, 0))
    return found


def sums_of_equal(x: torch.Tensor) -> Sums:
    """Return the sums of a tensor and its copy."""
    p = _flat(x, x.is_complex())
    square = _dot(p, p)
    if not math.isfinite(square):
        p = p.masked_fill(_odd(torch.isfinite(p), x.is_complex()), 0)
        square = _dot(p, p)
    return Sums(square, square, square, 0.0)


def together(sums: Iterable[Sums]) -> Sums:
    """Add up sums; their order does not matter."""
    parts = list(sums)
    return Sums(*(exact_sum([one[n] for one in parts]) for n in range(4)))


def closeness(found: Sums) -> Closeness:
    """Return how close two tensors are. Squares that float64 cannot hold give None."""
    if not all(map(math.isfinite, found)):
        return Closeness(None, None, None, None)
    a, b, apart = math.sqrt(found.xx), math.sqrt(found.yy), math.sqrt(found.dd)
    cosine = max(-1.0, min(1.0, found.xy / a / b)) if a and b else None
    return Closeness(apart / a if a else None, cosine, a, b)


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


def _dot(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the sum of the products. The digits of `torch.dot` depend on where in memory the numbers begin and on the
    number of processors."""
    if len(p) <= BLOCK:
        return float((p * q).sum())
    pairs = zip(torch.split(p, BLOCK), torch.split(q, BLOCK), strict=True)
    return exact_sum([float((a * b).sum()) for a, b in pairs])
