"""The small files of a model whose weights were changed: config.json says how they are quantized, and its layers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..derive.dequantize.evidence import KEYS, without_quantization
from ..errors import DataError, sentences
from ..view import CheckpointView
from .parts import MODEL, check_room_for, config_in, copy, folder_of, with_dtype

_UNSURE = ("undecided-quantization", "contradicting-quantization")


def with_quantization(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the quantized model.

    Parameters
    ----------
    config
        The contents of the config.json of the model.
    settings
        Its ``quantization_config``.
    """
    return {**{key: value for key, value in config.items() if key not in KEYS}, "quantization_config": dict(settings)}


def with_config(view: CheckpointView, src: str) -> CheckpointView:
    """Return a view whose meta has the config.json beside the checkpoint ``src``, if the reader has not put it there:
    methods that change layers and experts adapt it. Raises CorruptError if it is not a JSON object."""
    folder = None if "config" in view.meta or "://" in src else folder_of(src, view.root, None)
    if folder is None:
        return view
    return view._of(replace(view._index, meta={**view._index.meta, "config": config_in(folder)}))


class SideFiles:
    """The configuration and tokenizer of a model, to be written beside its changed weights.

    Parameters
    ----------
    src
        The checkpoint, as the user named it.
    view
        The view that is written.
    root
        The folder of the checkpoint as it was opened: that of ``view`` may be of an adapter, too.
    dtype
        The dtype of the weights; None leaves what config.json says.
    settings
        The ``quantization_config`` of the quantized model; None if it is not quantized.
    plain
        Whether the model was dequantized, so that its ``quantization_config`` is left out.
    restacked
        Whether layers or experts are others, so that config.json is that of the view's meta.

    Attributes
    ----------
    names : list of str
        The files; empty if there is no config.json beside the checkpoint.

    Raises
    ------
    CorruptError
        config.json is not valid JSON.
    """

    def __init__(
        self,
        src: str,
        view: CheckpointView,
        root: str,
        dtype: torch.dtype | None,
        *,
        settings: Mapping[str, Any] | None = None,
        plain: bool = False,
        restacked: bool = False,
    ) -> None:
        self.view = view
        self.plain = plain
        self.quantized = settings is not None
        self.restacked = restacked
        self._folder = None if "://" in src else folder_of(src, root, None)
        self._config: dict[str, Any] = config_in(self._folder) if self._folder is not None else {}
        if restacked and self._folder is not None:
            self._config = dict(view.meta["config"])
        if plain:
            self._config = without_quantization(self._config)
        if dtype is not None:
            self._config = with_dtype(self._config, dtype)
        if settings is not None:
            self._config = with_quantization(self._config, settings)
        self.names = [name for name in MODEL if self._folder is not None and (self._folder / name).is_file()]

    def check(self, dst: str | os.PathLike[str], overwrite: bool) -> None:
        """Raise DestinationError if a file exists and is not to be replaced, and DataError if tensors stay quantized:
        config.json would be wrong."""
        unsure = [problem for problem in self.view.problems if problem.code in _UNSURE] if self.plain else []
        if self.names and unsure:
            raise DataError(
                f"some tensors stay as they are stored, so no config.json can say that the model is not quantized: "
                f"{sentences(unsure)}"
            )
        check_room_for(self._folder, MODEL, Path(dst), overwrite)

    def write(self, dst: str | os.PathLike[str]) -> list[Path]:
        """Write the files and return their paths. Raises DestinationError."""
        return copy(self._folder, MODEL, Path(dst), {"config.json": self._config})

    def contents(self) -> dict[str, bytes]:
        """Return the contents of the files, by name."""
        folder = self._folder
        found = {} if folder is None else {name: (folder / name).read_bytes() for name in self.names}
        if found:
            found["config.json"] = (json.dumps(self._config, indent=2, sort_keys=True) + "\n").encode()
        return found
