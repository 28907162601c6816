"""Operations without operands: tensors of one number, and of random numbers that depend on the place only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..axes import shape_of
from ..box import Selection
from ..dtypes import dtype_of
from ..expr import Kind, Op
from ..specs import Expr
from .ranking import mask_key, positions, random_bits

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_PARTS = 12  # numbers that are summed: their sum has variance 1


class Fill(Op):
    """``shape``, ``value``, ``dtype``: a tensor of one number."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        return Kind(tuple(params["shape"]), dtype_of(params["dtype"]))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return ()

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.full(shape_of(want), e.params["value"], dtype=e.dtype.torch)


class Normal(Fill):
    """``shape``, ``std``, ``seed``, ``name``, ``dtype``: normally distributed numbers, with mean 0.

    Each is the sum of 12 numbers that are even between 0 and 1, less 6 (so at most 6 standard deviations), which are
    hashed from the seed, the name and the place of the element, and summed as integers.
    """

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        places = positions(e.shape, want)
        total = np.zeros(places.shape, np.int64)
        for n in range(_PARTS):
            key = mask_key(e.params["seed"], n, e.params["name"])
            total += (random_bits(key, places) >> np.uint64(32)).astype(np.int64)
        numbers = (total - (_PARTS << 31)).astype(np.float64) * (e.params["std"] / 2.0**32)
        return torch.from_numpy(numbers).to(torch.float32).view(shape_of(want))


OPS: dict[str, Op] = {"fill": Fill(), "random.normal": Normal()}
