"""Readers of torch.distributed.checkpoint: folders with `.metadata`, and those of its HuggingFaceStorageWriter."""

from .hub import READER as HUB
from .reader import READER

__all__ = ["HUB", "READER"]
