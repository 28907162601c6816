"""Which codes a scale belongs to, by shapes, and what families with codes and scales have in common."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.dtypes import F8_E4M3FN, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ, DType
from ...core.expr import make
from ...core.specs import Expr, Input

FLOAT8 = (F8_E4M3FN, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ)


class Blocks(NamedTuple):
    """How scales lie over codes: the shape that they get, with one dimension for each of the codes, and the number of
    neighbours in each dimension that share a scale."""

    shape: Shape
    block: Shape


def blocks_of(codes: Shape, scales: Shape, block: Sequence[int] | None) -> Blocks | None:
    """Return how scales lie over codes, or None if their shapes do not say it.

    Parameters
    ----------
    codes, scales
        The shapes.
    block
        The size of blocks in the last dimensions, as the configuration gives it.

    Examples
    --------
    >>> blocks_of((300, 200), (3, 2), (128, 128))
    Blocks(shape=(3, 2), block=(128, 128))
    >>> blocks_of((300, 200), (300,), None)
    Blocks(shape=(300, 1), block=(1, 200))
    >>> blocks_of((300, 200), (3, 2), None)
    """
    n = len(codes)
    if len(scales) == 2 * n and scales[1::2] == (1,) * n:  # modelopt: (out / 128, 1, in / 128, 1)
        scales = scales[::2]
    if scales in ((), (1,)):
        return Blocks((1,) * n, tuple(max(1, size) for size in codes))
    if len(scales) < n and scales == codes[: len(scales)]:  # one for each row, or for each expert
        scales = (*scales, *(1,) * (n - len(scales)))
    if len(scales) != n:
        return None
    given = (1,) * (n - len(block)) + tuple(block) if block is not None and len(block) <= n else None
    found = []
    for d, (size, count) in enumerate(zip(codes, scales, strict=True)):
        if count == size:
            found.append(1)
        elif count == 1 and (given is None or given[d] >= size or given[d] == 1):
            found.append(max(1, size))
        elif given is not None and given[d] > 0 and -(-size // given[d]) == count:
            found.append(given[d])
        else:
            return None
    return Blocks(scales, tuple(found))


def shaped(scales: Expr | Input, shape: Shape) -> Expr | Input:
    """Return scales in another shape."""
    return scales if scales.shape == shape else make("reshape", scales, shape=shape)


def scaled(
    codes: Expr | Input, scales: Expr | Input, blocks: Blocks, dtype: DType, zeros: Expr | Input | None = None
) -> Expr:
    """Return codes times scales."""
    operands = [codes, shaped(scales, blocks.shape)]
    if zeros is not None:
        operands.append(shaped(zeros, blocks.shape))
    return make("dequantize.scaled", *operands, block=blocks.block, dtype=dtype)


def excluded(module: str, patterns: Sequence[Any]) -> bool:
    """Return whether a configuration excludes a module from quantization: by its name, a name above it, the end of its
    name, or a glob.

    >>> excluded("model.layers.0.mlp.gate", ["mlp.gate"]), excluded("model.layers.0.mlp.gate_proj", ["mlp.gate"])
    (True, False)
    """
    for one in patterns:
        if not isinstance(one, str) or not one:
            continue
        if one in (module,) or module.startswith(f"{one}.") or module.endswith(f".{one}") or f".{one}." in module:
            return True
        if "*" in one and fnmatchcase(module, one):
            return True
    return False


def texts(found: Any) -> list[str]:
    """Return the strings in a list of a configuration; none if it is something else."""
    return [one for one in found if isinstance(one, str)] if isinstance(found, (list, tuple)) else []
