"""Common tasks, each as one short function on top of the public API, meant to be copied and changed.

Weights for transformers (`to_hf`, `zero3_to_hf`, `torch_dist_to_hf`, and torch's name `dcp_to_safetensors`), a merge of
several models by mergekit's YAML (`merge_to_hf`), one file from many (`fsdp_ranks_to_file`), a part of a checkpoint
(`one_layer`, `adapters`), resuming training on another number of GPUs (`resume_zero`), and the optimizer's moments over
the steps of a run (`moments_over_time`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .huggingface import to_hf, torch_dist_to_hf, zero3_to_hf
from .merging import merge_to_hf, read_merge, write_merge
from .parts import adapters, one_layer
from .training import fsdp_ranks_to_file, moments_over_time, resume_zero

if TYPE_CHECKING:
    from ..distributed.convert import dcp_to_safetensors

__all__ = [
    "adapters",
    "dcp_to_safetensors",
    "fsdp_ranks_to_file",
    "merge_to_hf",
    "moments_over_time",
    "one_layer",
    "read_merge",
    "resume_zero",
    "to_hf",
    "torch_dist_to_hf",
    "write_merge",
    "zero3_to_hf",
]


def __getattr__(name: str) -> Any:
    if name == "dcp_to_safetensors":  # its module imports torch.distributed.checkpoint, which takes 50 MB
        from ..distributed.convert import dcp_to_safetensors

        return dcp_to_safetensors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
