"""Where the slices of tensor-parallel ranks belong, found by their contents and not by what anyone says about them."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from .deepspeed_held import States
from .deepspeed_train import same_bits

Place = tuple[int, list[list[int]]] | None
"""The dimension that is split, and which of its indices each tensor-parallel rank holds; None: all hold everything."""


def distinct(t: Tensor, generator: torch.Generator) -> Tensor:
    """Values for ``t`` by which its rows can be told apart, in 16 bits too; a vector may have up to 255 elements."""
    if t.ndim > 1:
        return torch.randn(t.shape, generator=generator) * 0.2
    return (torch.randperm(255, generator=generator)[: t.numel()] - 127) / 128


def find_place(name: str, whole: Tensor, slices: list[Tensor]) -> Place:
    """Raises RuntimeError unless the slices hold all of ``whole``, each element where it is found in it."""
    split = [d for d in range(whole.ndim) if any(s.shape[d] != whole.shape[d] for s in slices)]
    if len(split) > 1:
        raise RuntimeError(f"{name}: {tuple(whole.shape)} is split as {[tuple(s.shape) for s in slices]}")
    if not split:
        for s in slices:
            same_bits("a replicated parameter", {name: s}, {name: whole})
        return None
    index = {_row(row): i for i, row in enumerate(whole.unbind(split[0]))}
    rows = [[index[_row(row)] for row in s.unbind(split[0])] for s in slices]
    if sorted(i for part in rows for i in part) != list(range(whole.shape[split[0]])):
        raise RuntimeError(f"{name}: the slices hold {rows}")
    return split[0], rows


def _row(row: Tensor) -> bytes:
    return row.contiguous().flatten().view(-1).float().numpy().tobytes()


def merge_slices(slices: list[States], places: dict[str, Place]) -> States:
    """The whole tensors of what the tensor-parallel ranks, in their order, hold."""
    states: States = {}
    for key in slices[0]:
        merged = states[key] = {}
        for name, first in slices[0][key].items():  # rank 0 has something of everything
            parts = [s[key][name] if name in s[key] else _nothing(s["weights"][name], first.dtype) for s in slices]
            place = places[name]
            if place is None:
                for part in parts[1:]:
                    same_bits(f"what the ranks hold of the replicated {key}", {name: part}, {name: parts[0]})
                merged[name] = parts[0]
                continue
            dim, rows = place
            joined = torch.cat(parts, dim)
            merged[name] = torch.empty_like(joined).index_copy(dim, torch.tensor([*chain(*rows)]), joined)
    return states


def _nothing(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The state of a slice without elements, which no optimizer holds."""
    if weight.numel():
        raise RuntimeError(f"no state of a slice of shape {tuple(weight.shape)}")
    return torch.empty_like(weight, dtype=dtype)


def rule(place: Place) -> str:
    """In a word: "replicated", "cat0" (the ranks' slices in order), "parts0" (each rank has several runs of rows)."""
    if place is None:
        return "replicated"
    dim, rows = place
    order = [*chain(*rows)]
    return f"{'cat' if order == sorted(order) else 'parts'}{dim}"
