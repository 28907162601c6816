"""Operations that merge models: task vectors (TIES, DARE, breadcrumbs), and means on a sphere (SLERP, Karcher).

The formulas are those of mergekit 0.1.5 (mergekit/merge_methods, mergekit/sparsify.py). Elements are computed in
float32, or in float64 if an operand is float64, and rounded once to the dtype of the result. Norms and scalar products
are sums in float64, in an order that does not depend on threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import acos, cos, fsum, nan, sin, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..box import Selection
from ..dtypes import DType, dtype_of
from ..expr import Kind, Scan, same_shape, wide
from ..rounding import exact_sum
from ..specs import Expr
from .elementwise import Elementwise, widest
from .ranking import Band, bands, chosen, mask_key, positions, random_mask

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_FIRST = " (which first reads the whole operands, once for all slices)"
_TINY = 1e-7  # sums of magnitudes below it are not scaled to each other


class Agreed(Elementwise):
    """The elements that all operands have in common: buffers of integers, of which there is no mean.

    ``name`` is the tensor's name, for the error. Raises DataError when elements are read that differ.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        kinds = dict.fromkeys(kind.dtype for kind in inputs)
        if len(kinds) != 1:
            raise DataError(f"{params['name']!r} has different dtypes: {', '.join(kind.short for kind in kinds)}")
        return Kind(same_shape(repr(params["name"]), inputs), inputs[0].dtype)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        first, *others = map(_bytes, blocks)
        if not all(torch.equal(one, first) for one in others):
            raise DataError(
                f"{e.params['name']!r} is {e.dtype.short} and differs between the operands: only floats "
                "are combined. Leave it out by select, or dequantize the views first"
            )
        return blocks[0]


def _bytes(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a block: a complex NaN does not equal itself, but its bytes do."""
    return block.contiguous().reshape(-1).view(torch.uint8)


class Merge(Elementwise):
    """An operation on the tensors of several models: ``dtype`` is that of the result, by default the widest."""

    prepares = True
    in_turn = True
    lets_go = False  # the sum is in the second block

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        shape = same_shape("a merge", inputs)
        for one in inputs:
            if not one.dtype.is_floating_point or not one.dtype.is_number:
                raise DataError(f"a merge has floating-point operands, not {one.dtype}")
        return Kind(shape, dtype_of(params["dtype"]) if params.get("dtype") else widest(inputs))

    def wide(self, e: Expr) -> DType:
        return wide(*(one.dtype for one in e.inputs))


class TaskVectors(Merge):
    """The base (operand 0) plus the combined differences of the other operands from it.

    Parameters: ``weights``, a number for each difference; ``sparsify``, which of its elements are kept: None for all,
    "magnitude" for the largest ``densities``, "outliers" for those below the largest ``gammas``, "random" for each with
    this probability, by ``seed`` and ``name``; ``rescale``, whether what is kept is scaled to the sum of magnitudes of
    the whole; ``consensus``, whether only differences of the sign are added that their "sum" has, or that most have
    ("count"); ``normalize``, whether the sum is divided by the weights that are in it; ``scale``, a factor of it.
    """

    def about(self, e: Expr) -> str:
        return super().about(e) + _FIRST * any(self._thinning(e))

    def _thinning(self, e: Expr) -> Iterator[bool]:
        """Yield whether whole operands are needed first, for each difference: their ranks or sums of magnitudes."""
        how = e.params["sparsify"]
        looks = bool(how) and (how != "random" or e.params["rescale"])
        return (looks and density < 1 for density in e.params.get("densities", ()))

    def prepare(self, e: Expr, scan: Scan) -> list[tuple[Band | None, float]]:
        """Return, for each difference, the band of magnitudes that is kept, and the factor that rescales it."""
        how, count = e.params["sparsify"], len(e.inputs) - 1
        found: list[Band | None] = [None] * count
        thinned = [n for n in range(count) if how and e.params["densities"][n] < 1]
        dtype = self.wide(e).torch

        def differences() -> Iterator[tuple[Selection, list[torch.Tensor]]]:
            for box, (base, *others) in scan(0, *(n + 1 for n in thinned)):
                base = base.to(dtype)
                yield tuple(map(range, box.start, box.stop)), [one.to(dtype).sub_(base) for one in others]

        if thinned and how != "random":
            numbers = [(e.params["densities"][n], e.params["gammas"][n] if how == "outliers" else 0.0) for n in thinned]
            for n, band in zip(thinned, bands(e.shape, dtype, numbers, how, differences), strict=True):
                found[n] = band
        factors = [1.0] * count
        if thinned and e.params["rescale"]:
            sums: list[tuple[list[float], list[float]]] = [([], []) for _ in thinned]
            for want, blocks in differences():
                for (whole, kept), n, block in zip(sums, thinned, blocks, strict=True):
                    whole.append(_magnitude(block))
                    kept.append(_magnitude(self._thinned(e, n, found[n], want, block)))
            for n, (whole, kept) in zip(thinned, sums, strict=True):
                before, after = exact_sum(whole), exact_sum(kept)
                factors[n] = 1.0 if before < _TINY or after < _TINY else before / after
        return list(zip(found, factors, strict=True))

    def _thinned(self, e: Expr, n: int, band: Band | None, want: Selection, block: torch.Tensor) -> torch.Tensor:
        """Set the elements of a difference that are not kept to 0."""
        density = e.params["densities"][n] if e.params["sparsify"] else 1
        if density >= 1:
            return block
        if e.params["sparsify"] == "random":
            key = mask_key(e.params["seed"], n, e.params["name"])
            keep = random_mask(key, positions(e.shape, want), density)
        else:
            assert band is not None  # `prepare` made one for each density below 1
            keep = chosen(band, block, e.shape, want)
        return block.masked_fill_(~keep, 0)

    def compute(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        weights, found = e.params["weights"], e.kept["prepared"]
        rest = iter(blocks)
        base = next(rest)

        def differences() -> Iterator[torch.Tensor]:
            for n, ((band, factor), weight, block) in enumerate(zip(found, weights, rest, strict=True)):
                one = self._thinned(e, n, band, want, block.sub_(base))
                if factor != 1:
                    one.mul_(factor)
                yield one.mul_(weight)

        if e.params["consensus"]:
            mixed, divisor = _agreeing(list(differences()), weights, e.params["consensus"])
        else:
            mixed = _total(differences())
            whole = fsum(weights)
            divisor = torch.tensor(whole if abs(whole) >= 1e-8 else 1.0, dtype=base.dtype)
        if e.params["normalize"]:
            mixed.div_(divisor)
        if e.params["scale"] != 1:
            mixed.mul_(e.params["scale"])
        return base.add_(mixed)


def _total(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, in their order. The first holds it."""
    total = None
    for term in terms:
        total = term if total is None else total.add_(term)
    assert total is not None  # an expression has an operand beside the base
    return total


def _agreeing(parts: list[torch.Tensor], weights: Sequence[float], how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the differences of the majority's sign, and the sum of their weights (1 if there is none)."""
    votes = _total([part.sign() if how == "count" else part.clone() for part in parts])
    up = votes >= 0
    divisor = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        other = ~torch.where(up, part > 0, part < 0)
        divisor.add_(torch.full_like(part, weight).masked_fill_(other, 0))
        part.masked_fill_(other, 0)
    return _total(parts), divisor.masked_fill_(divisor == 0, 1)


def _magnitude(block: torch.Tensor) -> float:
    return float(np.abs(block.to(torch.float64).numpy()).sum())


class ByProducts(Merge):
    """A linear combination of the operands whose coefficients follow from their scalar products, as whole tensors.

    If ``based``, operand 0 is a base: the differences of the others from it are combined, and added to it.
    """

    def about(self, e: Expr) -> str:
        return super().about(e) + _FIRST

    def based(self, e: Expr) -> bool:
        """Return whether operand 0 is a base."""
        return bool(e.params.get("based", False))

    @abstractmethod
    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        """Return the coefficients.

        Parameters
        ----------
        products
            The scalar products of the combined tensors with each other.
        params
            The parameters.
        """

    def prepare(self, e: Expr, scan: Scan) -> tuple[float, ...]:
        """Return the coefficients. The tensors are read once."""
        based = self.based(e)
        count = len(e.inputs) - based
        sums: dict[tuple[int, int], list[float]] = {(i, j): [] for i in range(count) for j in range(i + 1)}
        for _, blocks in scan(*range(len(e.inputs))):
            arrays = [block.to(torch.float64).numpy().ravel() for block in blocks]
            with np.errstate(over="ignore", invalid="ignore"):
                if based:
                    arrays = [one - arrays[0] for one in arrays[1:]]
                for (i, j), parts in sums.items():
                    parts.append(float((arrays[i] * arrays[j]).sum()))
        products = np.zeros((count, count))
        for (i, j), parts in sums.items():
            products[i, j] = products[j, i] = exact_sum(parts)
        if not np.isfinite(products).all():  # elements that are no numbers, in all of the result as in mergekit
            return (nan,) * count
        return tuple(map(float, self.coefficients(products, e.params)))

    def compute(self, e: Expr, want: Selection, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        rest = iter(blocks)
        base = next(rest) if self.based(e) else None

        def terms() -> Iterator[torch.Tensor]:
            for factor, block in zip(e.kept["prepared"], rest, strict=True):
                yield (block if base is None else block.sub_(base)).mul_(factor)

        total = _total(terms())
        return total if base is None else base.add_(total)


def _arc(cosine: float, t: float, collinear: float) -> tuple[float, float]:
    """Return the coefficients of two vectors at ``t`` of the way on the arc between them; straight if the cosine is
    beyond ``collinear``."""
    cosine = max(-1.0, min(1.0, cosine))
    if abs(cosine) > collinear:
        return 1 - t, t
    angle = acos(cosine)
    return sin((1 - t) * angle) / sin(angle), sin(t * angle) / sin(angle)


class Slerp(ByProducts):
    """Spherical interpolation of two tensors, as vectors: ``t`` of the way from the first to the second.

    Straight between vectors whose cosine is beyond 0.9995; a norm of ``eps`` or less counts as 1.
    """

    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        norms = [norm if (norm := sqrt(products[n, n])) > params["eps"] else 1.0 for n in range(2)]
        return _arc(products[0, 1] / norms[0] / norms[1], params["t"], 0.9995)


class NuSlerp(ByProducts):
    """Spherical interpolation of two tensors, or of their differences from a base, by ``weights``."""

    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        first, second = params["weights"]
        t = 0.5 if abs(first + second) < 1e-6 else second / (first + second)
        norms = [max(sqrt(products[n, n]), 1e-7) for n in range(2)]
        return _arc(products[0, 1] / norms[0] / norms[1], t, 1 - 1e-12)


class MultiSlerp(ByProducts):
    """The weighted mean of tensors on a sphere, taken in the plane that touches it at their weighted sum.

    Parameters: ``weights``; ``normalize_weights``, whether they are divided by their sum; ``eps``, added to norms.
    """

    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        eps, weights = params["eps"], np.array(params["weights"], np.float64)
        if params["normalize_weights"]:
            weights = weights / weights.sum()
        norms = np.sqrt(np.diagonal(products))
        units = np.diag(1 / (norms + eps))  # a vector is a row of coefficients of the tensors
        mean = weights @ units
        length = _length(mean, products)
        if length < eps:
            if len(weights) == 2:
                return list(weights)
            raise DataError("multislerp: the weighted sum of the tensors is zero: choose other weights")
        mean = mean / length
        tangent = weights @ (units - np.outer(units @ products @ mean, mean))
        along = _length(tangent, products) + eps
        return list((mean * cos(along) + tangent * (sin(along) / along)) * float((norms * weights).sum()))


class Karcher(ByProducts):
    """The Karcher mean of tensors on a sphere, all with the same weight, times their mean norm.

    ``max_iter`` steps at most, until one is shorter than ``tol``.
    """

    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        tol, norms = params["tol"], np.sqrt(np.diagonal(products))
        valid = [n for n in range(len(norms)) if not norms[n] <= tol]
        if not valid:
            return [0.0] * len(norms)
        units = np.zeros((len(valid), len(norms)))
        units[range(len(valid)), valid] = 1 / norms[valid]
        share = 1 / len(valid)
        mean = share * units.sum(0)
        length = _length(mean, products)
        mean = units[0].copy() if length < tol else mean / length
        for _ in range(params["max_iter"]):
            tangent = np.zeros(len(norms))
            for unit in units:
                cosine = min(1.0, max(-1.0, float(mean @ products @ unit)))
                angle = acos(cosine)
                if angle >= tol:
                    tangent += share * (angle / sin(angle)) * (unit - cosine * mean)
            length = _length(tangent, products)
            if length < tol:
                break
            mean = cos(length) * mean + sin(length) * (tangent / length)
            mean = mean / (_length(mean, products) or 1.0)
        return list(mean * float(norms.sum() / len(norms)))


class ModelStock(ByProducts):
    """The base (operand 0) plus a part of the mean difference of the others from it, by the angles between these."""

    def based(self, e: Expr) -> bool:
        return True

    def coefficients(self, products: NDArray[np.float64], params: Mapping[str, Any]) -> Sequence[float]:
        count = len(products)
        norms = np.sqrt(np.diagonal(products))
        cosines = [
            min(1.0, max(-1.0, products[i, j] / max(norms[i] * norms[j], 1e-6)))
            for i in range(count)
            for j in range(i + 1, count)
        ]
        cosine = fsum(cosines) / len(cosines)
        divisor = 1 + (count - 1) * cosine
        t = 0.0 if abs(divisor) < 1e-6 else count * cosine / divisor
        return [t / count] * count


def _length(vector: NDArray[np.float64], products: NDArray[np.float64]) -> float:
    """Return the norm of a combination of tensors."""
    return sqrt(max(0.0, float(vector @ products @ vector)))


OPS: dict[str, Any] = {
    "merge.agreed": Agreed(),
    "merge.task_vectors": TaskVectors(),
    "merge.slerp": Slerp(),
    "merge.nuslerp": NuSlerp(),
    "merge.multislerp": MultiSlerp(),
    "merge.karcher": Karcher(),
    "merge.model_stock": ModelStock(),
}
