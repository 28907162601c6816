"""Merge models as a merge file says, in mergekit's own YAML, to a folder that transformers loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..derive import merge_file
from ..derive.arithmetic import assembled
from ..derive.merges import method_of
from ..errors import DataError, DestinationError, FormatError, MissingFileError, Problem
from ..view import CheckpointView, view_of
from .huggingface import for_transformers, write_folder
from .parts import config_in


@dataclass(frozen=True)
class Merge:
    """A merge that is described and not yet computed.

    Attributes
    ----------
    view
        The merged model, as a lazy view.
    method
        The name of the method.
    models
        The paths of the models, the base first.
    beside
        The folder of the configuration and the tokenizer that the result gets; None if there is none.
    config
        The content of the result's config.json.
    """

    view: CheckpointView
    method: str
    models: tuple[str, ...]
    beside: Path | None
    config: dict[str, Any]


def read_merge(
    file: str | os.PathLike[str] | Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    missing: Literal["error", "skip", "keep"] = "error",
) -> Merge:
    """Read a merge file of mergekit, and open the models that it names. Reads no tensor data.

    The models may be anything that `lazyckpt.open` opens: folders of Hugging Face, ZeRO, FSDP and DCP checkpoints,
    Megatron's (whose names become Hugging Face's, as in `to_hf`). A path that does not exist and looks like
    ``owner/name`` is a repository of the Hub.

    Parameters
    ----------
    file
        The path of a YAML or JSON file, or its content. ``models`` and ``slices`` are supported with ``base_model``,
        ``dtype``, ``out_dtype`` and ``parameters`` with filters and gradients, for the methods of `lazyckpt.merge` and
        "passthrough". Computations are in float32 whatever ``dtype`` says, and rounded once to ``out_dtype`` or
        ``dtype``. The random masks of DARE follow the parameter ``seed``.
    config
        A folder with config.json. By default that of ``base_model`` or, without one, of the first model.
    missing
        What to do with a name or a shape that a model lacks: "error" lists them, "skip" leaves them out, "keep" takes
        the tensor of the base model or, without it, of the first model that has it. Not for ``slices``.

    Returns
    -------
    Merge
        The view, and what belongs beside it.

    Raises
    ------
    FormatError
        The file is no merge file, or PyYAML is not installed.
    DataError
        The file asks for what is not supported (other methods, ``tokenizer_source``, LoRAs); a model lacks names, or
        shapes differ.
    LazyckptError
        What `lazyckpt.open` raises.
    """
    where = "the merge" if isinstance(file, Mapping) else os.fspath(file)
    found = merge_file.parse(file if isinstance(file, Mapping) else _read(where), where)
    opened = {model: _opened(model, config if model == found.donor else None) for model in found.models}
    views = {model: view for model, (view, _) in opened.items()}
    what = f"the merge by {found.method}"
    listed = list(views.values())
    rows = list(merge_file.rows(found, views, missing))
    if not rows:
        raise DataError(f"{what}: no tensor has the same name and shape in all models")
    like = found.models.index(found.donor)
    store, index = assembled(listed, rows, what=what, format="merged", dtype=found.dtype, like=like)
    problems = (*index.problems, *_unused(found))
    view = view_of(store, replace(index, problems=problems), next(iter(index.states)), ())
    beside = opened[found.donor][1]
    settings = {} if beside is None else config_in(beside)
    if found.sliced and settings:
        settings = _with_layers(settings, found)
    return Merge(view, found.method, tuple(found.models), beside, settings)


def merge_to_hf(
    file: str | os.PathLike[str] | Mapping[str, Any],
    dst: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> list[Path]:
    """Merge models as a merge file of mergekit says, to a folder for transformers, in bounded memory.

    The folder gets safetensors, and the configuration and tokenizer of the base model.

    Parameters
    ----------
    file, config
        The same as for `read_merge`.
    dst
        The folder to write.
    max_shard_size, overwrite
        The same as for `to_hf`.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    LazyckptError
        What `read_merge` and `to_hf` raise.

    Examples
    --------

    >>> merge_to_hf("config.yml", "merged")  # doctest: +SKIP
    """
    return write_merge(read_merge(file, config=config), dst, max_shard_size=max_shard_size, overwrite=overwrite)


def write_merge(
    merge: Merge, dst: str | os.PathLike[str], *, max_shard_size: int | str | None = "5GB", overwrite: bool = False
) -> list[Path]:
    """Write a merge that `read_merge` returned as a folder for transformers.

    Parameters
    ----------
    merge
        The merge.
    dst
        The folder to write.
    max_shard_size, overwrite
        The same as for `to_hf`.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    LazyckptError
        What `to_hf` raises.
    """
    if Path(dst).suffix == ".safetensors":
        raise DestinationError(f"{os.fspath(dst)} names a file: transformers wants a folder")
    return write_folder(merge.view, dst, merge.beside, merge.config, None, max_shard_size, overwrite)


def _read(path: str) -> Any:
    try:
        import yaml
    except ImportError as e:
        raise FormatError(f"{path} is YAML, which takes a package: pip install pyyaml ({e})") from None
    try:
        return yaml.safe_load(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise FormatError(f"{path} is no YAML: {' '.join(str(e).split())[:200]}") from None


def _opened(model: str, config: str | os.PathLike[str] | None) -> tuple[CheckpointView, Path | None]:
    """Open a model: a path, or the repository of the Hub if there is no such path."""
    if "://" in model or Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return for_transformers(model, config)
    try:
        return for_transformers(f"hf://{model}", config)
    except (MissingFileError, OSError) as e:
        raise MissingFileError(f"there is no file or folder {model}, and as a repository of the Hub: {e}") from e


def _unused(file: merge_file.MergeFile) -> list[Problem]:
    """Return problems for parameters that the method does not have; mergekit ignores them, too."""
    tables = [file.parameters]
    for one in file.slices:
        tables += [one.parameters, *(source.parameters for source in one.sources)]
    known = method_of(file.method).parameters
    unknown = dict.fromkeys(key for table in tables for key in table if key not in known)
    return [
        Problem("unused-rule", f"{file.where}: {file.method} has no parameter {key!r}: it has no effect", key)
        for key in unknown
    ]


def _with_layers(config: dict[str, Any], file: merge_file.MergeFile) -> dict[str, Any]:
    """Set the number of layers in config.json, and take from lists of a value for each layer those of the layers that
    are used."""
    key = next((key for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in config), None)
    if key is None:
        raise FormatError(f"{file.where}: the config.json of {file.donor} does not say how many layers there are")
    used = [n for one in file.slices for n in one.sources[0].layers or ()]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == config[key]:
        config = config | {"layer_types": [kinds[n] for n in used]}
    return config | {key: len(used)}
