"""Writers of test checkpoints: the real libraries make the files, the writing process itself says what is in them.

A `lazyckpt.testing.Case` is one checkpoint beside the truth that its training process held in memory when it saved.
Nothing here reads a checkpoint back: the truth never passes through the files under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from lazyckpt.testing.case import Case, bit_equal

__all__ = ["Case", "TruthFiles", "bit_equal"]


class TruthFiles(Mapping[str, dict[str, torch.Tensor]]):
    """The safetensors files of a folder, by stem; each access loads afresh, so no test can spoil another's truth."""

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
