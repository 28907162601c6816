"""DeepSpeed's functions for checkpoints, under deepspeed's own names, on lazy tensors and without deepspeed.

- one fp32 state dict of a checkpoint, in memory or as files: `get_fp32_state_dict_from_zero_checkpoint`,
  `load_state_dict_from_zero_checkpoint`, `convert_zero_checkpoint_to_fp32_state_dict`,
  `convert_zero_checkpoint_to_state_dict`, `clone_tensors_for_torch_save`;
- names of rank files: `get_model_ckpt_name_for_rank`, `get_zero_ckpt_name_for_rank`, `get_layer_ckpt_name_for_rank`,
  and their inverse `parse_ckpt_name`, from a name to a `RankFile` with its kind and ranks;
- `DeepSpeedCheckpoint`: degrees, maps from ranks of other degrees to files, and the states of such ranks;
- every constant of deepspeed/checkpoint/constants.py, documented in `lazyckpt.deepspeed.constants`.
"""

from ..formats.deepspeed.files import (
    RankFile,
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
    parse_ckpt_name,
)
from . import constants
from .checkpoint import DeepSpeedCheckpoint
from .consolidate import (
    clone_tensors_for_torch_save,
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from .constants import *  # noqa: F403
from .states import FileProblem

__all__ = [
    "DeepSpeedCheckpoint",
    "FileProblem",
    "RankFile",
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "load_state_dict_from_zero_checkpoint",
    "parse_ckpt_name",
]
__all__ += constants.__all__
