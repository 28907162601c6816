"""Checkpoints of Megatron-LM and megatron-core: a file for each model-parallel rank, or distributed ones."""

from ..reader import Reader
from .dist import is_dist, read_dist
from .files import is_legacy
from .reader import read

READER = Reader(
    "megatron",
    "Megatron folders (an iteration, or the folder with `latest_checkpointed_iteration.txt`)",
    is_legacy,
    read,
    tags=True,
)
DIST = Reader(
    "megatron-dist",
    "megatron-core's distributed checkpoints (metadata.json, common.pt)",
    is_dist,
    read_dist,
    tags=True,
)
