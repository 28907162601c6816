"""Folders of MLX that are not Hugging Face's: adapters of mlx-lm, and weights as npz.

Writers: mlx_lm/tuner/trainer.py `train` (``adapters.safetensors`` and, at the same time, a copy under the number of the
iteration, ``0000100_adapters.safetensors``) and mlx_lm/lora.py `train_model` (``adapter_config.json``) of mlx-lm 0.32;
mlx.nn.Module.save_weights of mlx 0.32 (``weights.npz``, or ``weights.00.npz``, ... of the conversion scripts of
mlx-examples, with ``config.json``). Models of mlx-lm itself are Hugging Face folders.
"""

from __future__ import annotations

import re
from typing import Any

from ...core.index import FileInfo, Index
from ...core.specs import TensorSpec
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, some
from .. import huggingface, numpy_files
from ..reader import Reader, Source
from ..shared.announce import announce

_ADAPTERS = ("adapters.safetensors", "adapters.npz")
_CONFIGS = ("adapter_config.json", "config.json")
_WEIGHTS = re.compile(r"weights(?:\.\d{2,})?\.npz")
_SAVED = re.compile(r"\d{7,}_adapters\.(?:safetensors|npz)")


def _files(source: Source) -> list[str]:
    """Return the files to read; [] if the folder is another's."""
    names = [name for name, entry in source.entries.items() if not entry.is_dir]
    adapter = next((name for name in _ADAPTERS if name in names and _CONFIGS[0] in names), None)
    if adapter is not None:
        return [adapter]
    return sorted(filter(_WEIGHTS.fullmatch, names)) if _CONFIGS[1] in names else []


def _read(source: Source) -> Index:
    store = source.store
    names = _files(source)
    announce(store, names)
    problems: list[Problem] = []
    meta: dict[str, Any] = huggingface.configs(store, problems)
    tensors: dict[str, TensorSpec] = {}
    files: dict[str, FileInfo] = {}
    broken: list[LazyckptError] = []
    for name in names:
        try:
            if name.endswith(".npz"):
                part = numpy_files.READER.read(Source(store, name))
                specs, info, notes = part.states["weights"], part.files[name], list(part.problems)
            else:
                shard = huggingface.read_shard(store, name)
                specs, info, notes = shard.specs, shard.info, shard.problems
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(name, e))
            continue
        twice = [key for key in specs if key in tensors]
        if twice:
            raise CorruptError(f"{source.where}: {name} repeats tensors of another file: {some(twice)}")
        tensors |= dict(specs)
        files[name] = info
        problems += notes
    if broken and not files:
        raise broken[0]
    older = sorted(filter(_SAVED.fullmatch, source.entries))
    if older and names[0] in _ADAPTERS:
        line = f"{names[0]} is read, the newest save; there are also {some(older)} (tag={older[0]!r})"
        problems.append(Problem("other-checkpoint", line, older[0]))
    return Index("mlx", {"weights": tensors}, files, stored=tensors, meta=meta, problems=tuple(problems))


def _recognises(source: Source) -> bool:
    return not source.path and bool(_files(source)) and not huggingface.has_weights(source.entries)


READER = Reader("mlx", "folders of MLX (adapters.safetensors of mlx-lm, weights.npz)", _recognises, _read)
