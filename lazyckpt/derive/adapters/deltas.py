"""The expressions of an adapter's weights, by method.

The formulas are those of peft 0.21: tuners/lora/layer.py, lora/dora.py, loha/layer.py, lokr/layer.py. Products are
computed in float32 (float64 if a matrix is float64), as PEFT does on the CPU, and added to the weight with one rounding
to its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...core.box import Shape
from ...core.expr import make, wide
from ...core.specs import Expr, Input
from ...errors import DataError

Operand = Expr | Input
Parts = Mapping[str, Operand]


def rank_of(parts: Parts) -> int | None:
    """Return the rank that the shapes of an adapter's tensors have; None if it has only whole matrices (LoKr)."""
    for part, d in (("A", 0), ("embedding_A", 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if part in parts:
            return parts[part].shape[d]
    return None


def method_of(parts: Parts) -> str | None:
    """Return the method that a module's parts belong to; None if they are none's, or not complete.

    >>> method_of({"A": None, "B": None, "alpha": None}), method_of({"A": None})
    ('lora', None)
    """
    names = set(parts) - {"alpha", "magnitude", "B.bias"}
    if names in ({"A", "B"}, {"A", "B", "mid"}):
        return "lora"
    if names == {"embedding_A", "embedding_B"}:
        return "embedding"
    hada = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
    if names in (hada, hada | {"hada_t1", "hada_t2"}):
        return "loha"
    one = [names & {"lokr_w1", "lokr_w1_a", "lokr_w1_b"}, names & {"lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}]
    first = one[0] in ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})
    second = one[1] in ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"})
    return "lokr" if first and second and names == one[0] | one[1] else None


def orientations(parts: Parts, shape: Shape) -> set[bool]:
    """Return how the matrices of a linear layer's LoRA fit its weight: False as they are, True transposed, as for
    weights with a row for each input (GPT-2's Conv1D). Both for square weights."""
    a, b = _flat(parts["A"]), _flat(parts["B"])
    found = set()
    if a[0] == b[1] and b[0] * a[1] == prod(shape) and shape[:1] == b[:1]:
        found.add(False)
    if a[0] == b[1] and shape == (a[1], b[0]) and parts["A"].shape == a and parts["B"].shape == b:
        found.add(True)
    return found


def linear(parts: Parts, shape: Shape, transposed: bool) -> Expr | None:
    """Return the product of a LoRA's matrices, in the shape of the weight of a linear or convolutional layer; None if
    they do not fit."""
    a, b = parts["A"], parts["B"]
    if "mid" in parts:
        # kohya's convolutions: up is (out, r, 1, 1), mid (r, r, h, w), down (r, in, 1, 1)
        mid = parts["mid"]
        found = _core(mid, _turned(_matrix(b), (1, 0)), _matrix(a))
        return _shaped(found, shape) if found is not None else None
    if orientations(parts, shape) & {transposed}:
        if transposed:
            return make("product", _turned(a, (1, 0)), _turned(b, (1, 0)))
        return _shaped(make("product", _matrix(b), _matrix(a)), shape)
    if len(shape) > 2 and len(a.shape) == len(shape) and (b.shape[0], a.shape[1]) == (shape[1], shape[0]):
        # of a grouped convolution: PEFT does not exchange inputs and outputs there
        whole = _shaped(make("product", _matrix(b), _matrix(a)), (shape[1], shape[0], *shape[2:]))
        return make("transpose", whole, axes=(1, 0, *range(2, len(shape))))
    return None


def embedding(parts: Parts, shape: Shape) -> Expr | None:
    """Return the product of the matrices of an embedding's LoRA; None if they do not fit."""
    a, b = parts["embedding_A"], parts["embedding_B"]
    if a.shape[0] != b.shape[1] or shape != (a.shape[1], b.shape[0]):
        return None
    return make("product", _turned(a, (1, 0)), _turned(b, (1, 0)))


def expert_orientations(parts: Parts, shape: Shape) -> set[bool]:
    """Return how the matrices of a LoRA fit a parameter of stacked experts: False for (experts, out, in), True for
    (experts, in, out)."""
    a, b = parts["A"].shape, parts["B"].shape
    if len(a) != 2 or len(b) != 2 or len(shape) != 3 or a[0] != b[1] or not shape[0] or a[0] % shape[0]:
        return set()
    return {turned for turned in (False, True) if (b[0], a[1]) == ((shape[2], shape[1]) if turned else shape[1:])}


def experts(parts: Parts, shape: Shape, transposed: bool) -> Expr:
    """Return the products of the matrices of stacked experts (PEFT's ``target_parameters``).

    A has the rows of one expert after those of the other; B has the columns of all experts for one rank after those for
    the other.
    """
    a, b = parts["A"], parts["B"]
    rank = a.shape[0] // shape[0]
    left = make("reshape", a, shape=(shape[0], rank, a.shape[1]))
    right = make("reshape", b, shape=(b.shape[0], rank, shape[0]))
    if transposed:
        return make("product", _turned(left, (0, 2, 1)), _turned(right, (2, 1, 0)))
    return make("product", _turned(right, (2, 0, 1)), left)


def loha(parts: Parts, shape: Shape) -> Expr | None:
    """Return the product, element by element, of the two products of LoHa's matrices; None if they do not fit."""
    found = []
    for n in (1, 2):
        a, b, core = parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"], parts.get(f"hada_t{n}")
        one = _core(core, a, b) if core is not None else _product(a, b)
        if one is None or prod(one.shape) != prod(shape):
            return None
        found.append(one)
    if found[0].shape != found[1].shape:
        return None
    return _shaped(make("multiply", *found), shape)


def lokr(parts: Parts, shape: Shape) -> Expr | None:
    """Return the Kronecker product of LoKr's two matrices, whole or as products; None if they do not fit."""
    first = parts.get("lokr_w1") or _product(parts["lokr_w1_a"], parts["lokr_w1_b"])
    if "lokr_w2" in parts:
        second: Operand | None = parts["lokr_w2"]
    elif "lokr_t2" in parts:
        second = _core(parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
    else:
        second = _product(parts["lokr_w2_a"], parts["lokr_w2_b"])
    if first is None or second is None or len(first.shape) != 2 or len(second.shape) < 2:
        return None
    ones = (1,) * (len(second.shape) - 2)
    left = make("reshape", first, shape=(*first.shape, *ones)) if ones else first
    found = make("kron", left, second)
    return _shaped(found, shape) if prod(found.shape) == prod(shape) and found.shape[0] == shape[0] else None


def added(weight: Operand, delta: Expr, scale: float, rounded: bool = False) -> Expr:
    """Return ``weight + scale * delta`` in the weight's dtype.

    ``rounded``: the second term is converted to the weight's dtype before, as PEFT does for embeddings and
    single parameters.
    """
    if rounded:
        term = make("linear", delta, weights=(scale,), dtype=weight.dtype)
        return make("linear", weight, term, weights=(1.0, 1.0), dtype=weight.dtype)
    return make("linear", weight, delta, weights=(1.0, scale), dtype=weight.dtype)


def dora(weight: Operand, origin: Operand, delta: Expr, scale: float, magnitude: Operand, axis: int) -> Expr:
    """Return ``m * (weight + scale * delta) / norm``, with the norms of ``origin + scale * delta``.

    ``origin`` is the weight before other adapters were added.
    """
    exact = wide(weight.dtype, delta.dtype)
    whole = make("linear", weight, delta, weights=(1.0, scale), dtype=exact)
    size = prod(magnitude.shape)
    if size != whole.shape[axis]:
        raise DataError(f"magnitudes of shape {magnitude.shape} do not fit a weight of {whole.shape}")
    line = magnitude if len(magnitude.shape) == 1 else make("reshape", magnitude, shape=(size,))
    normed = [] if origin is weight else [make("linear", origin, delta, weights=(1.0, scale), dtype=exact)]
    return make("lora.dora", whole, line, *normed, axis=axis, dtype=weight.dtype)


def _flat(one: Operand) -> Shape:
    return one.shape[0], prod(one.shape[1:])


def _matrix(one: Operand) -> Operand:
    return one if len(one.shape) == 2 else make("reshape", one, shape=_flat(one))


def _turned(one: Operand, axes: Sequence[int]) -> Expr:
    return make("transpose", one, axes=tuple(axes))


def _shaped(one: Expr, shape: Shape) -> Expr:
    return one if one.shape == shape else make("reshape", one, shape=shape)


def _product(a: Operand, b: Operand) -> Expr | None:
    return make("product", a, b) if len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0] else None


def _core(core: Operand, a: Operand, b: Operand) -> Expr | None:
    """Return the tensor ``p r k l`` of a core ``i j k l`` and matrices ``i p`` and ``j r`` (a Tucker decomposition)."""
    if len(core.shape) != 4 or (core.shape[0], core.shape[1]) != (a.shape[0], b.shape[0]):
        return None
    i, j, *kernel = core.shape
    area = prod(kernel)
    rows = make("reshape", _turned(core, (0, 2, 3, 1)), shape=(i * area, j))
    inner = make("reshape", make("product", rows, b), shape=(i, area * b.shape[1]))
    whole = make("reshape", make("product", _turned(a, (1, 0)), inner), shape=(a.shape[1], *kernel, b.shape[1]))
    return _turned(whole, (0, 3, 1, 2))
