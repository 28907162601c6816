"""What tests do in worker processes. A process that is spawned imports this module: it imports little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.data

__all__ = ["Rows", "Slices", "Stored", "options_of", "rows"]


def rows(view: Mapping[str, Any], wanted: list[int]) -> list[list[int]]:
    """What a worker reads of a view that came to it in a pickle."""
    return [view["w"][row].tolist() for row in wanted] + [view["p.q"][...].tolist()]


def options_of(store: Any) -> object:
    return store.options


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The rows of a lazy tensor."""

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view["w"])

    def __getitem__(self, row: int) -> torch.Tensor:
        found: torch.Tensor = self.view["w"][row]
        return found


class Slices(torch.utils.data.Dataset[torch.Tensor]):
    """Each tenth row of a lazy tensor, and the row after it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return 24

    def __getitem__(self, n: int) -> torch.Tensor:
        found: torch.Tensor = self.tensor[n * 10 : n * 10 + 2]
        return found


class Stored(torch.utils.data.Dataset[torch.Tensor]):
    """The first 32,000 bytes of a store's file "data", in 32 tensors."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __len__(self) -> int:
        return 32

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.store.read("data", n * 1000, 1000)), dtype=torch.uint8)
