"""Checkpoints and running distributed models: torch's DTensors, meshes and `torch.distributed.checkpoint`.

- `LazyReader`: any checkpoint that lazyckpt opens, as a storage reader for `torch.distributed.checkpoint.load`;
- `load_into`: a view into a module of which each rank has its own experts (`CheckpointView.load_into` does all other
  modules, FSDP2's and tensor-parallel ones among them);
- expert parallelism: `init_ep_mesh` makes the ("ep", "ep_fsdp") mesh, `build_ep_fqn2spec_info` says what of a model is
  spread over it (one `EPSpecInfo` for each parameter), `ep_specs` reads the same from a checkpoint, without processes;
  `drop_ep_dim`, `restore_ep_dim` and, for whole state dicts and views, `drop_ep_dims`, `restore_ep_dims` go from all
  experts to one rank's and back;
- state dicts: `get_dtype_size`, `get_shard_info` (the plan of Hugging Face's shards), `save_state_dict`;
- one file of a distributed checkpoint, streamed: `dcp_to_torch_save`, `dcp_to_safetensors`;
- the accelerator, whichever it is: `get_device_type`, `synchronize`, `empty_cache`.

It is not imported by ``import lazyckpt``: torch's distributed packages take a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import loading
from ..tensor import LazyTensor
from .convert import dcp_to_safetensors, dcp_to_torch_save
from .layout import ep_specs
from .mesh import EPDegrees, EPSpecInfo, build_ep_fqn2spec_info, empty_cache, get_device_type, init_ep_mesh, synchronize
from .reader import LazyReader
from .statedict import ShardInfo, get_dtype_size, get_shard_info, save_state_dict
from .tensors import drop_ep_dim, drop_ep_dims, restore_ep_dim, restore_ep_dims

__all__ = [
    "EPDegrees",
    "EPSpecInfo",
    "LazyReader",
    "ShardInfo",
    "build_ep_fqn2spec_info",
    "dcp_to_safetensors",
    "dcp_to_torch_save",
    "drop_ep_dim",
    "drop_ep_dims",
    "empty_cache",
    "ep_specs",
    "get_device_type",
    "get_dtype_size",
    "get_shard_info",
    "init_ep_mesh",
    "load_into",
    "restore_ep_dim",
    "restore_ep_dims",
    "save_state_dict",
    "synchronize",
]


def load_into(
    view: Mapping[str, LazyTensor],
    module: torch.nn.Module,
    strict: bool = True,
    *,
    ep: Mapping[str, EPSpecInfo] | None = None,
) -> Any:
    """`CheckpointView.load_into` for a view or any mapping of lazy tensors.

    ``ep``: how the module's parameters lie on the experts' mesh (`build_ep_fqn2spec_info`). Where its parameter holds
    this EP rank's experts only, plain or as a DTensor over "ep_fsdp", these alone are read. Raises MeshError besides.
    """
    return loading.load_into(view if ep is None else drop_ep_dims(view, ep), module, strict)
