"""Convert any checkpoint to a folder that `transformers.AutoModel...from_pretrained` loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, DestinationError, FormatError, MissingFileError, sentences
from ..formats.huggingface import ties_of
from ..io.storage.joined import stores_of
from ..jobs.guard import local_path
from ..jobs.places import PIECE
from ..tensor import LazyTensor
from ..view import CheckpointView
from .parts import MODEL, check_room_for, config_in, copy, folder_of, wanted_format, with_dtype

_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")  # Megatron's, whose rows are padded


def to_hf(
    src: str | os.PathLike[str] | CheckpointView,
    dst: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> list[Path]:
    """Write the weights of any checkpoint as a folder for transformers, in bounded memory.

    The folder gets safetensors, config.json and the files of the generation config and the tokenizer. Neither the
    model's class nor a GPU is needed. Names of megatron-core become Hugging Face's, and the rows that pad its
    vocabulary are left out if config.json has the vocabulary's size. A name that config.json ties to another is left
    out, as transformers does: it does not tie two names that are both in the file.

    Parameters
    ----------
    src
        The checkpoint: anything that `lazyckpt.open` opens, or a view. The config.json of a view is that of its
        ``meta["config"]``, which says what `CheckpointView.layers` and the like changed.
    dst
        The folder to write.
    config
        A folder with config.json, such as the base model's. By default the checkpoint's folder, or the folder
        ``huggingface`` in it. If there is none, only weights are written.
    dtype
        Convert floating-point tensors to this dtype. By default they keep theirs (float32 for ZeRO-3). config.json gets
        the dtype that is written.
    max_shard_size
        Largest size of a file, in bytes or as text such as "5GB". None writes one file.
    overwrite
        Replace files of an earlier result.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    FormatError
        The checkpoint has no weights, or tensors of Megatron that have no name at Hugging Face.
    DataError
        config.json ties tensors that differ.
    MissingFileError
        The checkpoint, one of its files, or ``config`` does not exist.
    DestinationError
        The folder cannot be written, or has such files and ``overwrite`` is False.
    LazyckptError
        What `lazyckpt.open` and `CheckpointView.to_safetensors` raise.

    Examples
    --------

    >>> to_hf("runs/fsdp/step_90", "hf", config="base-model", dtype=torch.bfloat16)  # doctest: +SKIP
    >>> transformers.AutoModelForCausalLM.from_pretrained("hf")  # doctest: +SKIP
    """
    if local_path(dst).suffix == ".safetensors":
        raise DestinationError(f"{os.fspath(dst)} names a file: transformers wants a folder")
    view, beside = for_transformers(src, config)
    settings = config_in(beside) if beside is not None else {}
    told = src.meta.get("config") if isinstance(src, CheckpointView) and config is None else None
    if isinstance(told, Mapping):
        settings = dict(told)
    return write_folder(view, dst, beside, settings, dtype, max_shard_size, overwrite)


def for_transformers(
    src: str | os.PathLike[str] | CheckpointView, config: str | os.PathLike[str] | None
) -> tuple[CheckpointView, Path | None]:
    """Open the weights of a checkpoint under Hugging Face's names; return them and the folder of its config.json.

    Raises what `to_hf` raises.
    """
    if isinstance(src, CheckpointView):
        view, src = src, stores_of(src._store)[0].root  # of several checkpoints the first one has the configuration
        beside = folder_of(src, src, config)
    else:
        view = CheckpointView(src)
        beside = folder_of(src, view.root, config)
        if view.format.startswith("megatron"):
            view = _from_megatron(src, view, config_in(beside) if beside is not None else {})
    if view.unreadable:
        raise MissingFileError(f"{os.fspath(src)}: {next(iter(view.unreadable.values()))}")
    if not len(view) or view.state not in ("weights", "fp32"):
        raise FormatError(f"{os.fspath(src)} ({view.format}) holds no weights, only {', '.join(view.states)}")
    return view, beside


def write_folder(
    view: CheckpointView,
    dst: str | os.PathLike[str],
    beside: Path | None,
    settings: dict[str, Any],
    dtype: torch.dtype | None,
    max_shard_size: int | str | None,
    overwrite: bool,
) -> list[Path]:
    """Write a view as a folder for transformers, with the small files of the folder ``beside``. Return the files.

    ``settings`` is the content of config.json, which gets the dtype that is written. Raises what `to_hf` raises.
    """
    place = local_path(dst)  # other files are copied there, too
    tied = _tied(view, settings)
    part = view.select(lambda name: name not in tied) if tied else view
    dtypes = {dtype or t.dtype for t in part.values() if t.dtype.is_floating_point}
    check_room_for(beside, MODEL, place, overwrite)
    written = part.to_safetensors(dst, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    config = with_dtype(settings, dtypes.pop()) if len(dtypes) == 1 else settings
    changed = {"config.json": config} if len(dtypes) == 1 or config != _config(beside) else {}
    return [*map(Path, written), *copy(beside, MODEL, place, changed)]


def zero3_to_hf(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> list[Path]:
    """Write the weights of a DeepSpeed ZeRO checkpoint as a folder for transformers, by `to_hf`.

    ZeRO-3 stores fp32 master weights, which ``dtype=torch.bfloat16`` converts; ZeRO-1 and 2 also store 16-bit weights.

    Parameters
    ----------
    src
        The folder with ``latest`` (the Trainer's ``checkpoint-N``, whose config.json is used), or the folder of a tag.
    dst, config, dtype, max_shard_size, overwrite
        The same as for `to_hf`.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    FormatError
        The checkpoint is not one of DeepSpeed.
    LazyckptError
        What `to_hf` raises.

    Examples
    --------

    >>> zero3_to_hf("out/checkpoint-500", "hf", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    wanted_format(CheckpointView(src).format, "deepspeed", src, "to_hf takes any checkpoint")
    return to_hf(src, dst, config=config, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)


def torch_dist_to_hf(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> list[Path]:
    """Write a checkpoint of megatron-core (torch_dist, or the legacy format) as a folder for transformers, by `to_hf`.

    Neither megatron, a GPU nor the model's class is needed. It supports the model families of `CheckpointView.rename`.

    Parameters
    ----------
    src
        The checkpoint.
    dst, dtype, max_shard_size, overwrite
        The same as for `to_hf`.
    config
        A folder with the config.json of the same architecture. Megatron's args are not translated to a config.json.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    FormatError
        The checkpoint is not one of Megatron, or has tensors without a name at Hugging Face.
    LazyckptError
        What `to_hf` raises.

    Examples
    --------

    >>> torch_dist_to_hf("runs/iter_0000500", "hf", config="llama-base", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    wanted_format(CheckpointView(src).format, "megatron", src, "to_hf takes any checkpoint")
    return to_hf(src, dst, config=config, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)


def _from_megatron(src: str | os.PathLike[str], view: CheckpointView, config: dict[str, Any]) -> CheckpointView:
    """Rename to Hugging Face's names, with as many rows of the vocabulary as config.json says.

    Raises FormatError for tensors that have no such name, or whose values would mean something else: the model would
    load and be wrong.
    """
    inner = config.get("text_config")
    rows = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    embeddings = {name: t for name in _EMBEDDINGS if (t := view.exact(name)) is not None}
    padded = [name for name, t in embeddings.items() if type(rows) is int and t.shape[0] > rows > 0]
    if padded:
        view = CheckpointView(src, rules={name: {"cat": 0, "rows": rows} for name in padded})
    model = config.get("model_type")
    renamed = view.rename(model if isinstance(model, str) else "hf")
    odd = [problem for problem in renamed.problems if problem.code in ("not-renamed", "unlike-values")]
    if odd:
        raise FormatError(
            f"{os.fspath(src)} does not go under Hugging Face's names as a whole: {sentences(odd)}. "
            "lazyckpt.open(src).rename({...}) takes a table of your own, and to_safetensors writes it"
        )
    return renamed


def _tied(view: CheckpointView, config: dict[str, Any]) -> set[str]:
    """Return the names that transformers leaves out for this config.json. Raises DataError if such a name is not tied
    in the checkpoint and has other values."""
    found = set()
    for alias, owner in ties_of(config, view).items():
        if view.owner(alias) != view.owner(owner) and not _same(view[alias], view[owner]):
            raise DataError(
                f"config.json ties {alias!r} to {owner!r}, but the checkpoint holds two different tensors: set "
                '"tie_word_embeddings": false in the config.json that is passed as config='
            )
        found.add(alias)
    return found


def _same(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors are equal bit for bit, comparing one piece after the other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    pieces = zip(a.pieces(PIECE), b.pieces(PIECE), strict=True)
    return all(torch.equal(_bits(x), _bits(y)) for (_, x), (_, y) in pieces)


def _bits(t: LazyTensor) -> torch.Tensor:
    return t[...].reshape(-1).view(torch.uint8)


def _config(beside: Path | None) -> dict[str, Any]:
    return {} if beside is None else config_in(beside)
