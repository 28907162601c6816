"""DeepSpeed's functions that make one fp32 state dict of a checkpoint, under its names, over the lazy view.

Source: deepspeed/utils/zero_to_fp32.py, deepspeed/checkpoint/utils.py. What they do here and not there: pipelines,
tensor parallelism, experts, BF16_Optimizer and ZeRO-0 are read too; ZeRO-1 keeps its frozen parameters (there they are
lost); nothing is unpickled; memory does not grow with the model; and the files appear when all are complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The checkpoint's fp32 master weights as a state dict: name -> torch.Tensor, on the CPU, of the full shapes.

    Buffers come first, then frozen parameters (in the dtype that they are stored in), then what was trained, then tied
    names, which get the same tensor. Floating-point buffers are converted to fp32. ``tag``: by default what the file
    ``latest`` names. ``lazy_mode``: name -> LazyTensor, of any size of model; ``.contiguous()`` reads one.

    Raises MissingFileError, FormatError, CorruptError, and DataError where master weights cannot be named.
    """
    view = _fp32(checkpoint_dir, tag)
    tensors, aliases = _state(view, exclude_frozen_parameters)
    found: dict[str, Any] = dict(tensors) if lazy_mode else dict(read_all(tensors, torch.device("cpu"), None, True))
    return found | {alias: found[name] for alias, name in aliases.items()}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Put the model on the CPU, fill it with the checkpoint's fp32 weights, and return it.

    One tensor is read at a time, and converted to the dtype of the parameter that it fills. Names that only one side
    has are passed over. Raises DataError if a shape differs (nothing is loaded then), and as
    `get_fp32_state_dict_from_zero_checkpoint`.
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
) -> list[Path]:
    """Write the fp32 master weights as files; parameters, result and errors are those of
    `convert_zero_checkpoint_to_state_dict`."""
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
) -> list[Path]:
    """Write the master weights as ``pytorch_model.bin`` or, with ``safe_serialization``, ``model.safetensors``, sharded
    with an index above ``max_shard_size`` (bytes or text; None: one file). Returns the paths of the files.

    Every floating-point tensor is converted to ``dtype`` (float32, float16, bfloat16, or their names). Memory stays at
    4 MiB a thread, whatever the size of the model; files of the same names are replaced when the new ones are
    complete. An ``output_dir`` that ends with .bin, .pt or .safetensors is the file to write, as in older releases.

    Raises DataError (another ``dtype``), DestinationError, and as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    wanted = _DTYPES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if wanted not in _DTYPES.values():
        raise DataError(f"the dtype {dtype!r} is none of {', '.join(sorted(_DTYPES))}")
    tensors, aliases = _state(_fp32(checkpoint_dir, tag), exclude_frozen_parameters)
    form = SAFETENSORS if safe_serialization else TORCH
    plan = plan_of_files(form, tensors, aliases, output_dir, wanted, max_shard_size, overwrite=True)
    return list(carry_out(plan, complete({"progress": progress}, "convert_zero_checkpoint_to_state_dict")))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of ``item`` with every tensor in it (in lists, tuples and dicts, nested) cloned to ``device``, so that
    saving it writes the tensors and not the larger storages that they are views of. A LazyTensor is read."""
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
    """The state of the master weights; of a checkpoint that has none, because it was trained in fp32, the weights."""
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
        f"{'not there' if fp32 is None else 'there under numbers only'} (view.problems tells more). The weights in "
        "their training dtype are view.states['weights']"
    )


def _state(view: CheckpointView, exclude_frozen: bool) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """-> (the tensors in DeepSpeed's order, tied names -> the names among them)."""
    buffers, frozen = (set(view.meta.get(key) or ()) for key in ("buffer_names", "frozen_parameters"))
    tensors = {}
    for name in sorted(view.specs, key=lambda n: 0 if n in buffers else 1 if n in frozen else 2):
        if name in frozen and exclude_frozen:
            continue
        tensor: LazyTensor = view[name]
        tensors[name] = tensor.astype(torch.float32) if name in buffers and tensor.dtype.is_floating_point else tensor
    return tensors, {alias: owner for alias, owner in view.aliases.items() if owner in tensors}
