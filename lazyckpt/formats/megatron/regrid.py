"""Tensors that megatron-core reshapes before it saves them: a grid of blocks, each block flat.

Writer: megatron/core/dist_checkpointing/strategies/torch.py `mcore_to_pyt_state_dict` (up to 0.14: ranges of a
flattened parameter, "fully_sharded_model_space"): [4, 64, 96] cut into (4, 1, 2) blocks is saved as [4, 1, 2, 3072].
The original shape is in `Metadata.mcore_data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...core.box import Box, Shape
from ...core.index import Fragment, Part, TensorSpec
from ...core.plan import OnDemand, Selection, fragments_near
from ...errors import CorruptError


def regridded(spec: TensorSpec, shape: Shape | None) -> TensorSpec:
    """The tensor in its original shape; unchanged if that is None. Raises CorruptError if it cannot have had it."""
    if shape is None or shape == spec.shape:
        return spec
    grid = spec.shape[:-1]
    fits = len(grid) == len(shape) and all(g and n % g == 0 for n, g in zip(shape, grid, strict=True))
    if not fits or prod(spec.shape) != prod(shape):
        raise CorruptError(
            f"{spec.name!r} of shape {spec.shape} is said to have been {shape}, which cannot be: damaged"
        )
    block = tuple(n // g for n, g in zip(shape, grid, strict=True))
    rule = f"saved as a grid of {'x'.join(map(str, grid))} flat blocks"
    return replace(spec, shape=shape, fragments=Regridded(spec.fragments, block), rule=rule)


@dataclass(frozen=True, slots=True, eq=False)
class Regridded(OnDemand):
    """``fragments`` of the grid; each is one flat interval of one block."""

    fragments: Sequence[Fragment]
    block: Shape

    def near(self, want: Selection) -> list[Fragment]:
        """Those of the blocks that are wanted."""
        if any(not r for r in want):
            return []
        cells = [range(r[0] // n, r[-1] // n + 1) for r, n in zip(want, self.block, strict=True)]
        return list(self._moved(fragments_near(self.fragments, (*cells, range(prod(self.block))))))

    def _moved(self, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        for fragment in fragments:
            for part in fragment.parts or (Part(Box.of(fragment.local_shape), (0,) * len(fragment.local_shape)),):
                *cell, first = part.start
                if prod(part.local.shape[:-1]) != 1:
                    raise CorruptError(
                        f"a chunk of shape {part.local.shape} holds several blocks: Megatron writes none"
                    )
                span = (first, first + part.local.shape[-1])
                at = tuple(c * n for c, n in zip(cell, self.block, strict=True))
                yield replace(fragment, local_shape=self.block, parts=(Part(Box.of(self.block), at),), span=span)

    def __iter__(self) -> Iterator[Fragment]:
        return self._moved(self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)
