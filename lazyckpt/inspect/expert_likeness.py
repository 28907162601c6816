"""How alike the experts of a layer are: the cosines of the angles between them, as vectors of all their elements.

All experts of the layer are read a block of rows at a time, and the products of each two are summed in float64.
Above a limit of bytes, evenly spaced rows stand for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, LazyckptError
from ..layouts.stages import expert_of
from ..lazy import LazyArray
from .expert_norms import EXPERTS, grid_of, parts_of
from .layers import Layers
from .numbers import number_shape, numbers

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

SAMPLE = 256 << 20
"""Bytes that `expert_likeness` reads of a layer by default."""
_BLOCK = 32 << 20  # bytes of all experts' rows at a time, as float64


@dataclass(frozen=True, slots=True)
class Likeness:
    """The likeness of the experts of a layer.

    Attributes
    ----------
    layer
        The number of the layer, or its name.
    experts
        The numbers of the experts.
    cosines
        float64 of shape (experts, experts); NaN for an expert that is zero or not finite.
    exact
        Whether all elements were read.
    read, nbytes
        Bytes that were read, and bytes of all experts of the layer.
    """

    layer: str
    experts: tuple[int, ...]
    cosines: NDArray[np.float64]
    exact: bool
    read: int
    nbytes: int

    def nearest(self) -> tuple[list[int | None], NDArray[np.float64]]:
        """Return, for each expert, the number of the other expert with the largest cosine to it, and that cosine.

        Of an expert that is zero or not finite, and of a single one, they are None and NaN.
        """
        others = self.cosines.copy()
        np.fill_diagonal(others, -np.inf)
        others[np.isnan(others)] = -np.inf
        best = others.argmax(axis=1)
        largest = others[np.arange(len(best)), best]
        good = np.isfinite(largest)
        found = [self.experts[n] if yes else None for n, yes in zip(best.tolist(), good.tolist(), strict=True)]
        return found, np.where(good, largest, np.nan)


def expert_likeness(
    tensors: Mapping[str, LazyArray],
    layer: int | str,
    most: int = SAMPLE,
    check: Callable[[], None] = lambda: None,
) -> Likeness:
    """Return the cosines between the experts of a layer.

    Parameters
    ----------
    tensors
        Tensors by full name.
    layer
        The number of the layer; its name, such as ``thinker.model.layers.0``, if several stacks of layers have experts.
    most
        Bytes to read at most: above, evenly spaced rows are read.
    check
        Called between blocks; what it raises ends the work.

    Raises
    ------
    DataError
        The layer has no experts or more than 2,048, their tensors have different shapes, or elements that are no
        numbers.
    """
    return likeness_of(experts_by_layer(tensors), layer, most, check)


Parts = Mapping[str, Mapping[str, Mapping[int, LazyArray]]]
"""Layer -> kind of an expert's tensors -> number of the expert -> tensor."""


def experts_by_layer(tensors: Mapping[str, LazyArray]) -> Parts:
    """Return the tensors of the experts of each layer, which is named as by `expert_norms`. Reads nothing."""
    layers: dict[str, dict[str, dict[int, LazyArray]]] = {}
    for name, (layer, expert), t in parts_of(tensors):
        found = expert_of(name)
        kind = found.layer + "*" + found.tail if found is not None else name.rpartition("[")[0]
        layers.setdefault(layer, {}).setdefault(kind, {})[expert] = t
    return layers


def likeness_of(
    parts: Parts, layer: int | str, most: int = SAMPLE, check: Callable[[], None] = lambda: None
) -> Likeness:
    """Return the cosines between the experts of a layer, as `expert_likeness`, which it is for several layers."""
    kinds = parts.get(str(layer))
    if not kinds:
        raise DataError(f"layer {layer} has no experts: expert_norms() lists those that have")
    experts = tuple(sorted({expert for each in kinds.values() for expert in each}))
    if len(experts) > EXPERTS:
        raise DataError(f"layer {layer} has {len(experts):,} experts: at most {EXPERTS:,} are compared with each other")
    for kind, each in kinds.items():
        if len({number_shape(t) for t in each.values()}) > 1 or len(each) < len(experts):
            raise DataError(f"{kind}: the experts of layer {layer} have different tensors, which have no angle")
    nbytes = sum(t.nbytes for each in kinds.values() for t in each.values())
    step = max(1, -(-nbytes // most))
    gram = torch.zeros(len(experts), len(experts), dtype=torch.float64, device="cpu")
    read = 0
    for each in kinds.values():
        first = each[experts[0]]
        rows = int(first.shape[0]) if first.ndim else 1
        width = max(1, first.numel() // max(1, rows))
        many = max(1, _BLOCK // (8 * width * len(experts)))
        many = 1 if step > 1 and rows >= step * 4 else many
        stride = many * step if step > 1 else many
        for start in range(0, rows, stride):
            check()
            stop = min(start + many, rows)
            blocks = [each[expert].lazy[start:stop][...] if first.ndim else each[expert][...] for expert in experts]
            read += sum(block.nbytes for block in blocks)
            vectors = torch.stack([_numbers(block) for block in blocks])
            gram += vectors @ vectors.T
    norms = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(norms, norms)).clamp(-1, 1)
    return Likeness(str(layer), experts, cosines.numpy(), read == nbytes, read, nbytes)


def nearest_experts(
    tensors: Mapping[str, LazyArray], most: int = SAMPLE, check: Callable[[], None] = lambda: None
) -> Layers:
    """Return, for each expert, the largest cosine of the angles to the other experts of its layer: twins have 1.

    Parameters
    ----------
    tensors
        Tensors by full name. Those of no expert are not read.
    most
        Bytes to read at most of each layer: above, evenly spaced rows are read.
    check
        Called between blocks; what it raises ends the work.

    Returns
    -------
    Layers
        Rows and columns as by `expert_norms`. A layer whose experts cannot be read or compared has the mark "?" in each
        cell.

    Raises
    ------
    DataError
        There are no experts, or more than 16 Mi pairs of a layer and an expert.
    """
    parts = experts_by_layer(tensors)
    if not parts:
        raise DataError("no tensor of this view is of an expert: there is nothing to compare")
    layers = tuple(parts)
    experts = tuple(sorted({expert for kinds in parts.values() for each in kinds.values() for expert in each}))
    values = grid_of(layers, experts)
    marks: dict[tuple[str, int | None], str] = {}
    for n, layer in enumerate(layers):
        try:
            found = likeness_of(parts, layer, most, check)
        except (LazyckptError, OSError):
            marks |= {(layer, expert): "?" for each in parts[layer].values() for expert in each}
            continue
        values[n, [experts.index(expert) for expert in found.experts]] = found.nearest()[1]
    return Layers("likeness", layers, experts, values, {}, marks)


def _numbers(block: torch.Tensor) -> torch.Tensor:
    if block.is_complex():
        return torch.view_as_real(block.to(torch.complex128)).reshape(-1)
    return torch.from_numpy(numbers(block)).to(torch.float64).reshape(-1)
