"""Checkpoints and running distributed models: torch's DTensors, meshes and `torch.distributed.checkpoint`.

- `LazyReader`: any checkpoint that lazyckpt opens, as a storage reader for `torch.distributed.checkpoint.load`;
- `load_into`: load a view into a module with expert parallelism (`CheckpointView.load_into` loads all other modules,
  also with FSDP2 and tensor parallelism);
- expert parallelism: `init_ep_mesh` makes the ("ep", "ep_fsdp") mesh, `build_ep_fqn2spec_info` describes how a model is
  distributed over it (one `EPSpecInfo` for each parameter), `ep_specs` derives the same from a checkpoint, without
  processes; `drop_ep_dim`, `restore_ep_dim` and, for whole state dicts and views, `drop_ep_dims`, `restore_ep_dims`
  convert between the experts of all ranks and those of one rank;
- state dicts: `get_dtype_size`, `get_shard_info` (the plan of Hugging Face's shards), `save_state_dict`;
- a distributed checkpoint as one file, in bounded memory: `dcp_to_torch_save`, `dcp_to_safetensors`;
- the accelerator of any kind: `get_device_type`, `synchronize`, `empty_cache`.

``import lazyckpt`` does not import this package, because torch's distributed packages are slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.modules.module import _IncompatibleKeys

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
) -> _IncompatibleKeys:
    """Load a view, or any mapping of lazy tensors, into a module, as `CheckpointView.load_into` does.

    Parameters
    ----------
    view
        Names -> lazy tensors.
    module
        The module to fill.
    strict
        Raise if the names of the view and of the module differ.
    ep
        How the module's parameters are distributed over the experts' mesh (`build_ep_fqn2spec_info`). Of a parameter
        that has only the experts of this EP rank (a plain tensor, or a DTensor over "ep_fsdp"), only these are read.

    Returns
    -------
    NamedTuple of missing_keys and unexpected_keys
        The same as `torch.nn.Module.load_state_dict` returns.

    Raises
    ------
    MeshError
        ``ep`` does not fit the tensors.
    LazyckptError
        What `CheckpointView.load_into` raises.
    """
    return loading.load_into(view if ep is None else drop_ep_dims(view, ep), module, strict)
