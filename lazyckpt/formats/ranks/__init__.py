"""Folders of rank files of torch.save that hold shards: DTensors, ShardedTensors and flat parameters."""

from .reader import READER

__all__ = ["READER"]
