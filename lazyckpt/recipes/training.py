"""Recipes for the outputs of training: rank files, ZeRO states for another number of GPUs, moments over a run."""

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

# Formats of views of FSDP's rank files; the folders of accelerate and of the Trainer have such files, too.
_RANK_FILES = ("rank-files", "fsdp-dtensor", "fsdp-sharded", "fsdp-local", "accelerate", "hf-trainer")


def fsdp_ranks_to_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rules: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path | str:
    """Merge the rank files of FSDP into one file of whole tensors, in bounded memory and without torch.distributed.

    Rank files are accelerate's pytorch_model_fsdp_0_rank0.bin, ..., verl's model_world_size_8_rank_0.pt, ..., and local
    state dicts.

    Parameters
    ----------
    src
        The folder of the rank files.
    dst
        A file that ends with .safetensors, or with .bin, .pt, .pth or .ckpt for torch.load.
    dtype
        Convert floating-point tensors to this dtype.
    rules
        The parameters in flat parameters for which the checkpoint does not record them, as in `lazyckpt.open`:
        ``{"layers.*._flat_param": {"flat": {"up.weight": [64, 32], "up.bias": [64]}}}``.
    overwrite
        Replace the file if it exists.

    Returns
    -------
    Path, or str for a URL
        The file.

    Raises
    ------
    FormatError
        The folder has no rank files of FSDP, or a flat parameter has no rule.
    MissingFileError
        A rank's file is missing.
    DestinationError
        ``dst`` has another ending, exists, or cannot be written.
    LazyckptError
        What `lazyckpt.open` and `CheckpointView.to_safetensors` raise.

    Examples
    --------

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
    ending = Path(dst).suffix
    if ending not in (".safetensors", *TORCH.endings):
        raise DestinationError(f"{os.fspath(dst)} is no file of weights: end it with .safetensors or .pt")
    write = view.to_safetensors if ending == ".safetensors" else view.to_torch
    (written,) = write(dst, dtype=dtype, overwrite=overwrite)
    return written


def resume_zero(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, overwrite: bool = False
) -> dict[str, dict[str, bool]]:
    """Convert a checkpoint so that DeepSpeed resumes training from it on another number of GPUs.

    It writes a universal checkpoint (`CheckpointView.to_universal`), which any stage of ZeRO but 0 loads by
    ``engine.load_checkpoint(dst)`` or the Trainer's ``resume_from_checkpoint``.

    Parameters
    ----------
    src
        A checkpoint of ZeRO at any stage and on any number of GPUs, or of FSDP, DCP or torch.save, with the names of
        the engine's module.
    dst
        The folder to write.
    overwrite
        Replace an earlier result.

    Returns
    -------
    dict
        The entries to add to DeepSpeed's config.

    Raises
    ------
    LazyckptError
        What `lazyckpt.open` and `CheckpointView.to_universal` raise.

    Examples
    --------

    >>> config |= resume_zero("runs/gpt", "runs/gpt-universal")  # doctest: +SKIP
    >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> engine.load_checkpoint("runs/gpt-universal")  # doctest: +SKIP
    """
    CheckpointView(src).to_universal(dst, overwrite=overwrite)
    return {"checkpoint": {"load_universal": True}}


def moments_over_time(run: str | os.PathLike[str], name: str) -> xr.Dataset:
    """Return a parameter and its optimizer states over the saved steps of a run, as lazy variables of xarray.

    Indexing a step or a slice reads only its bytes. The steps may have different formats and numbers of ranks.

    Parameters
    ----------
    run
        The folder of the run, or its URL.
    name
        The name of the parameter.

    Returns
    -------
    xarray.Dataset
        Variables "weights", "fp32", "exp_avg", "exp_avg_sq", ... that have the parameter's shape, with dimensions
        ("step", ...) and the steps as coordinates. A state that is saved at other steps than the first has a dimension
        of its own, such as "step_exp_avg".

    Raises
    ------
    TensorNotFoundError
        There is no such parameter.
    DataError
        ``name`` is a prefix.
    LazyckptError
        What `lazyckpt.open_run` raises.

    Examples
    --------

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
