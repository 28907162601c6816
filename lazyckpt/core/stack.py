"""One tensor from several checkpoints, stacked along a new first dimension. Pure.

Each stays in the files that it is in; these are named from the folder that all the checkpoints lie in. So the stack is
an ordinary tensor of one store, and reading a part of it touches the checkpoints of that part only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..errors import LazyckptError
from .compose import ComposedFragments, Piece, compose, whole_of
from .index import Fragment, Hole, TensorSpec, from_folder
from .plan import OnDemand, Selection, fragments_near, plan


class Layer(NamedTuple):
    """The tensor at one ``step``; its files lie in ``folder`` ("" for the store's own)."""

    step: int
    folder: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class StackedFragments(ComposedFragments):
    """The fragments of all layers; ``steps``: the coordinates along the first dimension."""

    steps: tuple[int, ...] = ()


def stack(name: str, layers: Sequence[Layer], dtype: torch.dtype) -> TensorSpec:
    """The tensors (of one shape, one at least) as one of shape (layers, ...), converted to ``dtype``. Raises ValueError
    if they differ in shape, or in whether replicas are averaged."""
    pieces: list[Piece] = []
    shape = layers[0].spec.shape
    for n, layer in enumerate(layers):
        spec = replace(layer.spec, dtype=dtype, fragments=_Moved(layer.spec.fragments, layer.folder))
        pieces.append(whole_of(spec, (n, *(0 for _ in shape)), (None, *range(len(shape)))))
    spec = compose(name, (len(layers), *shape), pieces, rule=f"stacked from {len(layers)} steps")
    return replace(spec, fragments=StackedFragments(tuple(pieces), tuple(layer.step for layer in layers)))


def readable(spec: TensorSpec) -> bool:
    """Whether all of its elements stand in files that are there."""
    if getattr(spec.fragments, "intact", False) or not spec.numel:
        return True
    if spec.fragments and not any(isinstance(f.extent, Hole) for f in spec.fragments):
        return True
    try:  # what one file lacks, another may hold
        plan(spec, tuple(map(range, spec.shape)))
    except LazyckptError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Moved(OnDemand):
    """Fragments whose files are named from further up, made on demand."""

    fragments: Sequence[Fragment]
    folder: str

    def near(self, want: Selection) -> list[Fragment]:
        return [self._moved(f) for f in fragments_near(self.fragments, want)]

    def __iter__(self) -> Iterator[Fragment]:
        return map(self._moved, self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)

    def _moved(self, fragment: Fragment) -> Fragment:
        if not self.folder:
            return fragment
        return replace(fragment, extent=from_folder(self.folder, fragment.extent))
