"""The small files beside weights: configuration and tokenizer, which tools at Hugging Face want in the same folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import DestinationError, FormatError, MissingFileError
from ..export.destination import appearing
from ..formats.huggingface import load_json
from ..io.local import split

# transformers: utils/__init__.py, tokenization_utils_base.py, processing_utils.py; the vocabularies of its tokenizers
MODEL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
ADAPTER = ("adapter_config.json", *(n for n in MODEL if n not in ("config.json", "generation_config.json")))


def folder_of(
    src: str | os.PathLike[str], root: str, told: str | os.PathLike[str] | None, name: str = "config.json"
) -> Path | None:
    """The folder whose ``name`` goes with the weights: the one that the user tells of (or the file itself), else that
    of the checkpoint, ``huggingface`` in it (verl), or the one above a tag of DeepSpeed's (the Trainer's checkpoint-N).
    None if there is none.

    Raises MissingFileError if the user's has no such file.
    """
    if told is not None:
        folder = Path(told)
        folder = folder.parent if folder.name == name else folder
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder} has no {name}: name a folder that holds it, such as the base model's")
        return folder
    here = [Path(src), Path(src) / "huggingface", Path(root), Path(root) / "huggingface"]
    here += [Path(root).parent] if (Path(root).parent / "latest").is_file() else []
    return next((folder for folder in here if (folder / name).is_file()), None)


def config_in(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Raises CorruptError if it is no JSON object."""
    return load_json(split(folder)[0], name)


def check_room_for(folder: Path | None, names: Iterable[str], dst: Path, overwrite: bool) -> None:
    """Raises DestinationError if one of the files is there already, and not ``overwrite``."""
    there = [name for name in names if folder is not None and (folder / name).is_file() and (dst / name).exists()]
    if folder is not None and dst.exists() and dst.samefile(folder):
        raise DestinationError(f"{dst} is the folder that the configuration is read from: choose another one")
    if there and not overwrite:
        raise DestinationError(f"{dst / there[0]} exists already: say overwrite=True, or choose another folder")


def copy(folder: Path | None, names: Iterable[str], dst: Path, changed: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Copy the files of these names that there are; ``changed``: what is to stand in one instead. Returns their new
    paths. Raises DestinationError."""
    written = []
    for name in names:
        if folder is None or not (folder / name).is_file():
            continue
        try:
            with appearing({dst / name: 0}, lambda: None) as temporary:  # replaces a link, and does not follow it
                part = temporary[dst / name]
                if name in changed:
                    text = json.dumps(changed[name], indent=2, sort_keys=True) + "\n"
                    part.write_text(text, encoding="utf-8")
                else:
                    shutil.copyfile(folder / name, part)
        except OSError as e:
            raise DestinationError(f"{dst / name} cannot be written ({e}); the weights are") from e
        written.append(dst / name)
    return written


def wanted_format(found: str, wanted: str, src: str | os.PathLike[str], other: str) -> None:
    """Raises FormatError if a checkpoint is not what a function is for."""
    if not found.startswith(wanted):
        raise FormatError(f"{os.fspath(src)} is {found!r}, not {wanted!r}: {other}")
