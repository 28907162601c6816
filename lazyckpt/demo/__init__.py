"""What `lazyckpt demo` shows: its checkpoints, and the walk through them.

Every file is a real one: the rank files were saved by DeepSpeed, the shards are written by safetensors, the other
checkpoints by torch.save. Every line that the walk shows is the line that runs.
"""

from __future__ import annotations

from .files import write
from .walk import Step, walk

__all__ = ["Step", "walk", "write"]
