"""Writers of test checkpoints: real libraries write the files, and the writing process records their true content.

A :class:`Case` is a checkpoint with the truth that its training process had in memory when it saved.  Nothing here
reads a checkpoint back: the truth never passes through the files under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

__all__ = ["Case", "TruthFiles", "bit_equal"]


class TruthFiles(Mapping[str, dict[str, torch.Tensor]]):
    """The safetensors files of a folder, by stem; each access loads anew, so no test can modify another's truth."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            raise KeyError(name)
        return load_file(path)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(p.stem for p in self.folder.glob("*.safetensors")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"TruthFiles({str(self.folder)!r}, {list(self)})"


@dataclass(frozen=True)
class Case:
    """A checkpoint and its expected content."""

    path: Path
    """The path that a user opens."""
    truth: Mapping[str, dict[str, torch.Tensor]]
    """State name ("weights", "fp32", "exp_avg", ...) -> logical name -> tensor."""
    info: dict[str, Any]
    """Facts that the writer knows: tied, frozen, buffers, dtype, stage, dp, ..."""
    rank_buffers: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """"rank0", "rank1", ... -> persistent buffers of that rank, for writers whose ranks hold different ones."""
    shards: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """"mp_rank_00.fp32", ... -> that model-parallel rank's part of a state, before merging."""
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Raw name -> tensor, if the test knows all of them."""
    reference: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors that the library's own tools read from the checkpoint, for comparison: "zero_to_fp32" or whole states."""


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether dtype, shape and bits are equal (so NaN equals itself and -0.0 differs from 0.0)."""
    for t in (a, b):
        if t.layout != torch.strided or t.is_quantized or t.is_nested or t.is_meta:
            raise TypeError(f"no single block of bytes to compare: {t.layout}, {t.dtype}, {t.device}")
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    if t.element_size() == 1:  # torch can copy some one-byte dtypes (float4_e2m1fn_x2) only as another dtype
        return t.view(torch.uint8).contiguous()
    return t.contiguous().flatten().view(torch.uint8)
