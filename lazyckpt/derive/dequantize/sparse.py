"""Sparse weights of compressed-tensors: the values that are not zero, and a bit for each element.

``compressed`` has the values, ``bitmask`` the bits of each row, the first in the lowest bit, and ``shape`` the shape.
In sparse-24-bitmask two of four neighbours have values, so ``compressed`` is [out, in / 2]; in sparse-bitmask it is
flat, and ``row_offsets`` says where rows begin. The weight of a module ``m`` has them as ``m.compressed``, or, in
sparse-bitmask of some versions, as ``m.weight.compressed``.

Source: compressed-tensors 0.10.2 compressors/sparse_compressors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...core.dtypes import U8
from ...core.expr import make
from ...core.specs import Expr
from .model import Model


class Sparse(NamedTuple):
    """The sparse weight of a module: its name, its value as it was before, and what is stored of it."""

    module: str
    value: Expr
    names: tuple[str, ...]


def found(model: Model) -> Iterator[Sparse]:
    """Yield the sparse weights whose tensors fit each other."""
    for stem in model.ending(".compressed", ".bitmask", ".shape"):
        names = (f"{stem}.compressed", f"{stem}.bitmask", f"{stem}.shape")
        values, mask = model.kind(names[0]), model.kind(names[1])
        if model.kind(names[2]).shape not in ((2,), (2, 1)):
            continue
        shape = tuple(int(n) for n in model.read(names[2]).reshape(-1))
        if len(shape) != 2 or mask.dtype is not U8 or mask.shape != (shape[0], -(-shape[1] // 8)):
            continue
        module = stem.removesuffix(".weight")
        operands = (model.operand(names[0]), model.operand(names[1]))
        offsets = f"{stem}.row_offsets"
        if offsets in model.names:
            if len(values.shape) == 1 and model.kind(offsets).shape == (shape[0],) and model.is_small(offsets):
                starts = tuple(int(n) for n in model.read(offsets))
                yield Sparse(
                    module, make("dequantize.bitmask", *operands, shape=shape, starts=starts), (*names, offsets)
                )
        elif values.shape == (shape[0], shape[1] // 2) and shape[1] % 4 == 0:
            yield Sparse(module, make("dequantize.sparse24", *operands, shape=shape), names)
