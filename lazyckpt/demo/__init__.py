"""The demo of `lazyckpt demo`: its checkpoints, and the walk through them.

All files come from the usual writers: DeepSpeed saved the rank files, safetensors writes the shards, torch.save the
other checkpoints. The walk runs every line that it shows.
"""

from __future__ import annotations

from .files import write
from .walk import Step, walk

__all__ = ["Step", "walk", "write"]
