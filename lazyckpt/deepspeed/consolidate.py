"""DeepSpeed's functions that turn a checkpoint into one fp32 state dict, on lazy views.

Source: deepspeed/utils/zero_to_fp32.py, deepspeed/checkpoint/utils.py. Differences: pipelines, tensor parallelism,
experts, BF16_Optimizer and ZeRO-0 are supported; ZeRO-1 keeps its frozen parameters (deepspeed loses them); nothing is
unpickled; memory does not grow with the model; and files are published when all are complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

import torch

from ..errors import DataError
from ..export.files import plan_of_files
from ..export.options import complete
from ..export.safetensors import SAFETENSORS
from ..export.torch import TORCH
from ..export.writer import carry_out
from ..loading import read_all
from ..tensor import LazyTensor
from ..view import CheckpointView, with_wrappers

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: Literal[False] = False,
) -> dict[str, torch.Tensor]: ...
@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    lazy_mode: Literal[True],
) -> dict[str, LazyTensor]: ...
@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]: ...
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the fp32 master weights of a ZeRO checkpoint as a state dict.

    Parameters
    ----------
    checkpoint_dir
        The folder with ``latest``, or the folder of a tag.
    tag
        The checkpoint in the folder. By default the one that the file ``latest`` names.
    exclude_frozen_parameters
        Leave out the frozen parameters.
    lazy_mode
        Return `LazyTensor`s, for models of any size. ``.contiguous()`` reads one.

    Returns
    -------
    dict of str to torch.Tensor or LazyTensor
        Tensors of the full shapes, on the CPU: buffers (floating-point ones in float32), frozen parameters (in their
        stored dtype), trained parameters (float32), then tied names, which share one tensor.

    Raises
    ------
    MissingFileError, FormatError, CorruptError
        What `lazyckpt.open` raises.
    DataError
        The checkpoint has no master weights under names.
    """
    view = _fp32(checkpoint_dir, tag)
    tensors, aliases = _state(view, exclude_frozen_parameters)
    found: dict[str, Any] = dict(tensors) if lazy_mode else dict(read_all(tensors, torch.device("cpu"), None, True))
    return found | {alias: found[name] for alias, name in aliases.items()}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Move a model to the CPU and load the fp32 master weights of a ZeRO checkpoint into it.

    Tensors are converted to the dtypes of the parameters without a second copy of the model. Names that only one side
    has are ignored.

    Parameters
    ----------
    model
        The module to fill.
    checkpoint_dir, tag
        The same as for `get_fp32_state_dict_from_zero_checkpoint`.

    Returns
    -------
    torch.nn.Module
        ``model``.

    Raises
    ------
    DataError
        A shape differs, or the checkpoint has no master weights under names. Nothing is loaded.
    LazyckptError
        What `get_fp32_state_dict_from_zero_checkpoint` raises.
    """
    model = model.cpu()
    _fp32(checkpoint_dir, tag).load_into(model, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    progress: bool | None = None,
) -> list[Path | str]:
    """Write the fp32 master weights of a ZeRO checkpoint as files.

    Parameters
    ----------
    checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters, progress
        The same as for `convert_zero_checkpoint_to_state_dict`.

    Returns
    -------
    list of Path, or of str for a URL
        The files.

    Raises
    ------
    LazyckptError
        What `convert_zero_checkpoint_to_state_dict` raises.
    """
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
        progress=progress,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    progress: bool | None = None,
) -> list[Path | str]:
    """Write the master weights of a ZeRO checkpoint as files, with 4 MiB of memory a thread.

    Existing files of the same names are replaced when the new files are complete.

    Parameters
    ----------
    checkpoint_dir
        The folder with ``latest``, or the folder of a tag.
    output_dir
        The folder to write to. A path that ends with .bin, .pt or .safetensors is the file to write, as in older
        releases of deepspeed.
    dtype
        Convert every floating-point tensor to this dtype: float32, float16, bfloat16, or the name of one.
    max_shard_size
        Largest size of a file, in bytes or as text such as "5GB". None writes one file.
    safe_serialization
        Write ``model.safetensors`` instead of ``pytorch_model.bin``.
    tag
        The checkpoint in the folder. By default the one that the file ``latest`` names.
    exclude_frozen_parameters
        Leave out the frozen parameters.
    progress
        Show a progress bar. By default on a terminal or in a notebook.

    Returns
    -------
    list of Path, or of str for a URL
        The files.

    Raises
    ------
    DataError
        ``dtype`` is not supported, or the checkpoint has no master weights under names.
    DestinationError
        The files cannot be written.
    LazyckptError
        What `get_fp32_state_dict_from_zero_checkpoint` raises.
    """
    wanted = _DTYPES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if wanted not in _DTYPES.values():
        raise DataError(f"the dtype {dtype!r} is none of {', '.join(sorted(_DTYPES))}")
    tensors, aliases = _state(_fp32(checkpoint_dir, tag), exclude_frozen_parameters)
    form = SAFETENSORS if safe_serialization else TORCH
    plan = plan_of_files(
        form, tensors, aliases, output_dir, wanted, max_shard_size, complete({"overwrite": True}, "convert")
    )
    return list(carry_out(plan, complete({"progress": progress}, "convert_zero_checkpoint_to_state_dict")))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy an object with all of its tensors, so that `torch.save` writes the tensors and not the larger storages that
    they are views of.

    Parameters
    ----------
    item
        Lists, tuples and dicts, nested, with tensors in them. A `LazyTensor` is read.
    device
        Where to put the copies.

    Returns
    -------
    Any
        The copy.
    """
    if isinstance(item, LazyTensor):
        return item.to(device)
    if isinstance(item, torch.Tensor):
        same = item.device == torch.device(device)
        return item.detach().clone() if same else item.detach().to(device)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(v, device) for v in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(v, device) for v in item)
    if isinstance(item, dict):
        return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})
    return item


def _fp32(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> CheckpointView:
    """Return the state of the master weights, or the weights of a checkpoint that was trained in fp32."""
    view = with_wrappers(checkpoint_dir, "deepspeed", tag)
    weights = view.states.get("weights")
    fp32 = view.states.get("fp32")
    if fp32 is not None and (weights is None or all(name in fp32 for name in weights)):
        return fp32
    if (
        fp32 is None
        and weights is not None
        and not any(t.dtype in (torch.float16, torch.bfloat16) for t in weights.values())
    ):
        return weights
    raise DataError(
        f"{os.fspath(checkpoint_dir)}: the fp32 master weights are "
        f"{'not there' if fp32 is None else 'there under numbers only'} (see view.problems). The weights in "
        "their training dtype are view.states['weights']"
    )


def _state(view: CheckpointView, exclude_frozen: bool) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors in DeepSpeed's order, and tied names -> the names of their tensors."""
    buffers, frozen = (set(view.meta.get(key) or ()) for key in ("buffer_names", "frozen_parameters"))
    tensors = {}
    for name in sorted(view.specs, key=lambda n: 0 if n in buffers else 1 if n in frozen else 2):
        if name in frozen and exclude_frozen:
            continue
        tensor: LazyTensor = view[name]
        tensors[name] = tensor.astype(torch.float32) if name in buffers and tensor.dtype.is_floating_point else tensor
    return tensors, {alias: owner for alias, owner in view.aliases.items() if owner in tensors}
