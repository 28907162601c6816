"""Recipes for a part of a checkpoint, which read only that part's bytes: one layer, or the adapters of a base model.

Names of adapters: peft/utils/save_and_load.py `get_peft_model_state_dict`, and each method's own,
peft/tuners/tuners_utils.py `_remove_adapter_name_from_key` and tuners/lora/model.py `_get_adapter_state_dict`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.names import natural
from ..derive.dequantize.evidence import KEYS
from ..errors import DataError, DestinationError, FormatError, MissingFileError, TensorNotFoundError, some
from ..formats.huggingface import load_json
from ..io.storage.local import split
from ..jobs.destination import Files
from ..jobs.executor import run
from ..jobs.guard import local_path
from ..jobs.places import PIECE
from ..jobs.plan import Text, WritePlan
from ..jobs.publish import once
from ..jobs.write import write
from ..view import CheckpointView

# -- The small files of a folder for transformers: configuration and tokenizer.

# transformers: utils/__init__.py, tokenization_utils_base.py, processing_utils.py; the vocabularies of its tokenizers
MODEL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
ADAPTER = ("adapter_config.json", *(n for n in MODEL if n not in ("config.json", "generation_config.json")))


def folder_of(
    src: str | os.PathLike[str], root: str, given: str | os.PathLike[str] | None, name: str = "config.json"
) -> Path | None:
    """Return the folder whose file ``name`` belongs to the weights: ``given`` (or the folder of that file), else the
    checkpoint's folder, ``huggingface`` in it (verl), or the parent of a tag of DeepSpeed (the Trainer's checkpoint-N).
    None if there is none.

    Raises MissingFileError if ``given`` has no such file.
    """
    if given is not None:
        folder = Path(given)
        folder = folder.parent if folder.name == name else folder
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder} has no {name}: name a folder that holds it, such as the base model's")
        return folder
    here = [Path(src), Path(src) / "huggingface", Path(root), Path(root) / "huggingface"]
    here += [Path(root).parent] if (Path(root).parent / "latest").is_file() else []
    return next((folder for folder in here if (folder / name).is_file()), None)


def config_in(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON file of a folder. Raises CorruptError if it is not a JSON object."""
    return load_json(split(folder)[0], name)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json with the dtype of the weights, as `save_pretrained` writes it, also in the configurations of
    parts of the model. Before transformers 5 the key was torch_dtype.

    >>> with_dtype({"torch_dtype": "float16", "text_config": {"dtype": "float16"}}, torch.float32)
    {'torch_dtype': 'float32', 'text_config': {'dtype': 'float32'}}
    """
    name = str(dtype).removeprefix("torch.")

    def told(table: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(table)
        for key, value in table.items():
            if key in _DTYPE:
                found[key] = name
            elif key.endswith("_config") and key not in KEYS and isinstance(value, Mapping):
                found[key] = told(value)
        return found

    return told(config) if any(key in config for key in _DTYPE) else told(config) | {"dtype": name}


_DTYPE = ("dtype", "torch_dtype")


def check_room_for(folder: Path | None, names: Iterable[str], dst: Path, overwrite: bool) -> None:
    """Raise DestinationError if one of the files exists in ``dst`` and ``overwrite`` is False."""
    there = [name for name in names if folder is not None and (folder / name).is_file() and (dst / name).exists()]
    if folder is not None and dst.exists() and dst.samefile(folder):
        raise DestinationError(f"{dst} is the folder that the configuration is read from: choose another one")
    if there and not overwrite:
        raise DestinationError(f"{dst / there[0]} exists already: say overwrite=True, or choose another folder")


def copy(folder: Path | None, names: Iterable[str], dst: Path, changed: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Copy the files of these names that exist, and return their new paths. ``changed``: new contents of a file.
    Raises DestinationError."""
    texts: dict[str, Text] = {}
    for name in names:
        if folder is not None and (folder / name).is_file():
            whole = json.dumps(changed[name], indent=2, sort_keys=True) + "\n" if name in changed else None
            texts[name] = partial(_content, folder / name) if whole is None else whole.encode()
    place = local_path(dst)
    if texts:
        destination = Files(place, list(texts), (), overwrite=True)  # replaces a link instead of following it
        try:
            write(WritePlan(destination, (), once(), texts=texts), verify=False, progress=False, run=run)
        except DestinationError as e:
            raise DestinationError(f"{e}. The weights are written, {', '.join(texts)} are not") from e
    return [place / name for name in texts]


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(PIECE):
            yield data


def wanted_format(found: str, wanted: str, src: str | os.PathLike[str], other: str) -> None:
    """Raise FormatError if a checkpoint is not of the format that a function converts."""
    if not found.startswith(wanted):
        raise FormatError(f"{os.fspath(src)} is {found!r}, not {wanted!r}: {other}")


# -- A part of a checkpoint: a layer, or the adapters of a base model.

_CONFIG = "adapter_config.json"
_OUTER = "base_model.model."  # the modules of a PeftModel around the model
_METHODS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "trainable_tokens_")  # prefixes of their parameters
_WHOLE = "modules_to_save"  # modules that are trained as a whole, with the adapter


def one_layer(src: str | os.PathLike[str], layer: int) -> CheckpointView:
    """Open one layer of a checkpoint of any size and layout.

    Layers are the numbers after ``layers``, ``layer``, ``h``, ``blocks`` or ``block`` in the names. Opening reads no
    tensor data; `to`, `load_into` and `to_safetensors` of the result read only the layer's bytes.

    Parameters
    ----------
    src
        The checkpoint: anything that `lazyckpt.open` opens.
    layer
        The number of the layer in the names.

    Returns
    -------
    CheckpointView
        The layer's tensors, with names relative to the layer.

    Raises
    ------
    TensorNotFoundError
        There is no such layer, or several lists of layers have it. The message has their prefixes;
        ``lazyckpt.open(src)[prefix]`` opens one.
    LazyckptError
        What `lazyckpt.open` raises.

    Examples
    --------

    >>> one_layer("llama-405b", 77).to_safetensors("layer77.safetensors")  # doctest: +SKIP
    """
    view = CheckpointView(src)
    pattern = re.compile(r"(?:^|.*?\.)(?:layers?|blocks?|h)\.(\d+)(?=\.)")
    lists: dict[str, int] = {}
    for name in view:
        match = pattern.match(name)
        if match is not None:
            lists.setdefault(match[0], int(match[1]))
    found = [prefix for prefix, number in lists.items() if number == layer]
    if len(found) != 1:
        numbers = sorted({prefix.rpartition(".")[0] for prefix in lists}, key=natural)
        raise TensorNotFoundError(
            f"{view.root} has several layers {layer}: {', '.join(found)}. lazyckpt.open(src)[...] takes one of these"
            if found
            else f"{view.root} has no layer {layer}; "
            + (f"there are {len(lists)}, under {some(numbers, 4)}" if lists else "no name has a list of layers")
        )
    part: CheckpointView = view[found[0]]
    return part


def adapters(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    adapter: str = "default",
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the adapter of a PEFT model as a folder that ``PeftModel.from_pretrained(base, dst)`` loads.

    It supports LoRA and its variants, IA3, LoHa, LoKr, OFT and BOFT, and ``modules_to_save``. The folder gets
    adapter_model.safetensors with PEFT's names. Of a checkpoint of the whole model only the adapter's bytes are read.

    Parameters
    ----------
    src
        A checkpoint of the whole model, or of adapters.
    dst
        The folder to write.
    adapter
        The name of the adapter, for a model that has several.
    config
        A folder with adapter_config.json, which is copied with the files of a tokenizer. By default the checkpoint's
        folder. If there is none, only tensors are written; ``lora_alpha``, which scales them, is only in the config.
    dtype
        Convert floating-point tensors to this dtype.
    overwrite
        Replace files of an earlier result.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    TensorNotFoundError
        There is no such adapter.
    DataError
        The config has ``bias``: biases of the base model belong to the adapter, which is not supported.
    LazyckptError
        What `lazyckpt.open` and `CheckpointView.to_safetensors` raise.

    Examples
    --------

    >>> adapters("out/checkpoint-500", "adapter", config="adapter-at-start")  # doctest: +SKIP
    >>> peft.PeftModel.from_pretrained(base, "adapter")  # doctest: +SKIP
    """
    view = CheckpointView(src)
    beside = folder_of(src, view.root, config, _CONFIG)
    bias = config_in(beside, _CONFIG).get("bias", "none") if beside is not None else "none"
    if bias != "none":
        raise DataError(
            f"{beside} has an {_CONFIG} with bias={bias!r}: biases of the base model belong to that adapter, which are "
            "not supported here. lazyckpt.open(src).select(...).to_safetensors(dst, names=...) writes what you choose"
        )
    if any(file.rpartition("/")[2].startswith("adapter_model.") for file in view.files):  # nothing else is in it
        keys = {name: _OUTER + name.removeprefix(_OUTER) for name in view}
    else:
        keys = {name: key for name in view if (key := _key(name, adapter)) is not None}
    if not keys:
        others = sorted({word for name in view if (word := _adapter_of(name)) is not None})
        raise TensorNotFoundError(
            f"{view.root} has no adapter {adapter!r}"
            + (f"; there is: {', '.join(others)}" if others else ": no name is one of PEFT's")
        )
    place = local_path(dst)
    check_room_for(beside, ADAPTER, place, overwrite)
    written = view.select(keys.__contains__).to_safetensors(
        place / "adapter_model.safetensors", names=keys, dtype=dtype, overwrite=overwrite
    )
    return [*map(Path, written), *copy(beside, ADAPTER, place, {})]


def _key(name: str, adapter: str) -> str | None:
    """Return a tensor's name in an adapter's file; None if the tensor does not belong to the adapter.

    >>> _key("model.layers.0.q_proj.lora_A.default.weight", "default")
    'base_model.model.model.layers.0.q_proj.lora_A.weight'
    >>> _key("score.modules_to_save.default.weight", "default")
    'base_model.model.score.weight'
    >>> _key("model.layers.0.q_proj.base_layer.weight", "default")
    """
    parts = name.removeprefix(_OUTER).split(".")
    at = _place(parts)
    if at is None:
        return None
    head, rest = parts[: at + 1], parts[at + 1 :]
    if rest[:1] == [adapter]:
        rest = rest[1:]
    elif head[-1] == _WHOLE or rest not in ([], ["weight"], ["bias"]):  # of another adapter
        return None
    if head[-1] == _WHOLE:
        head = head[:-1]
    elif head[-1] == "lora_magnitude_vector":  # DoRA's vector is a module in memory, but a tensor in the file
        rest = []
    return _OUTER + ".".join([*head, *rest])


def _adapter_of(name: str) -> str | None:
    parts = name.split(".")
    at = _place(parts)
    return parts[at + 1] if at is not None and len(parts) > at + 1 and parts[at + 1] != "weight" else None


def _place(parts: list[str]) -> int | None:
    """Return the index of the first part of a name that is a module of an adapter, or None."""
    return next((n for n, part in enumerate(parts) if part == _WHOLE or part.startswith(_METHODS)), None)
