"""What training leaves behind: files of ranks, a ZeRO state for other ranks, the moments over the steps of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DataError, DestinationError, FormatError, TensorNotFoundError, some
from ..export.torch import TORCH
from ..runs.view import RunView, StepTensor
from ..view import CheckpointView

if TYPE_CHECKING:
    import xarray as xr

# (the folders of accelerate and of the Trainer hold them, too)
_RANK_FILES = ("rank-files", "fsdp-dtensor", "fsdp-sharded", "fsdp-local", "accelerate", "hf-trainer")


def fsdp_ranks_to_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rules: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the weights that FSDP's ranks have saved each for itself (pytorch_model_fsdp_0_rank0.bin, ...; verl's
    model_world_size_8_rank_0.pt, ...; local state dicts) as one file of whole tensors, without torch.distributed, and
    return its path. In bounded memory.

    ``dst``: ends with .safetensors, or with .bin, .pt, .pth or .ckpt for torch.load. ``rules``: of flat parameters that
    nothing tells what they are made of, as `lazyckpt.open` takes them: {"layers.*._flat_param": {"flat": {"up.weight":
    [64, 32], "up.bias": [64]}}}.

    Raises FormatError (these are other files; a flat parameter without a rule), MissingFileError (a rank's file is
    lost), and what `to_safetensors` raises.

    >>> fsdp_ranks_to_file("out/checkpoint-500/pytorch_model_fsdp_0", "model.safetensors")  # doctest: +SKIP
    """
    view = CheckpointView(src, rules=rules)
    if view.format not in _RANK_FILES:
        raise FormatError(
            f"{os.fspath(src)} is {view.format!r}, no folder of FSDP's rank files: "
            "lazyckpt.open(src).to_safetensors(dst) takes any checkpoint"
        )
    flat = [name for name in view if name.rpartition(".")[2].startswith("_flat_param")]
    if flat:
        why = next((p for p in view.problems if p.code == "flat-parameter"), "rules= takes its shapes")
        raise FormatError(f"{os.fspath(src)}: what {flat[0]!r} is made of is not known: {why}")
    path = Path(dst)
    if path.suffix not in (".safetensors", *TORCH.endings):
        raise DestinationError(f"{path} is no file of weights: end it with .safetensors or .pt")
    write = view.to_safetensors if path.suffix == ".safetensors" else view.to_torch
    (written,) = write(path, dtype=dtype, overwrite=overwrite)
    return written


def resume_zero(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, overwrite: bool = False
) -> dict[str, dict[str, bool]]:
    """Make a checkpoint (of ZeRO at any stage and on any number of GPUs; also of FSDP, DCP or torch.save, with the
    names that the engine has) ready to train on under DeepSpeed on another number of GPUs, with any stage of ZeRO but
    0: `CheckpointView.to_universal`. Returns the lines that DeepSpeed's config needs; ``engine.load_checkpoint(dst)``
    (or the Trainer's ``resume_from_checkpoint``) does the rest.

    >>> config |= resume_zero("runs/gpt", "runs/gpt-universal")  # doctest: +SKIP
    >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> engine.load_checkpoint("runs/gpt-universal")  # doctest: +SKIP
    """
    CheckpointView(src).to_universal(dst, overwrite=overwrite)
    return {"checkpoint": {"load_universal": True}}


def moments_over_time(run: str | os.PathLike[str], name: str) -> xr.Dataset:
    """A parameter and the optimizer's states of its shape over the steps that a run has saved: variables "weights",
    "fp32", "exp_avg", "exp_avg_sq", ..., of dimensions ("step", ...), with the steps as coordinates. Lazy: a step or a
    slice reads its own bytes. The steps may be of several formats and numbers of ranks.

    A state that is not there at the same steps as the first has a dimension of its own, "step_exp_avg". Raises
    TensorNotFoundError (no such parameter), DataError (``name`` is a prefix), and what `lazyckpt.open_run` raises.

    >>> moments = moments_over_time("runs/gpt", "layers.3.mlp.up.weight")  # doctest: +SKIP
    >>> (moments["exp_avg"] ** 2).sum(("d4096", "d1024")) ** 0.5  # doctest: +SKIP
    """
    import xarray as xr

    from ..formats.zarr.documents import dimension_names
    from ..interop.xarray import variable

    found: dict[str, Any] = {}
    for state, view in RunView(run).states.items():
        try:
            found[state] = view[name]
        except TensorNotFoundError as e:
            missing = e
    if not found:
        raise missing
    first = next(iter(found.values()))
    if not isinstance(first, StepTensor):
        raise DataError(f"{name!r} is a prefix, not one parameter: {some(first, 4)}")
    data: dict[str, xr.Variable] = {}
    coordinates: dict[str, Any] = {}
    for state, tensor in found.items():
        if tensor.shape[1:] != first.shape[1:]:  # Adam's count of steps
            continue
        dim = "step" if tensor.steps == first.steps else f"step_{state}"
        coordinates[dim] = list(tensor.steps)
        data[state] = variable(tensor, None, [dim, *dimension_names(tuple(tensor.shape[1:]))], state=state)
    return xr.Dataset(data, coordinates)
