"""Folders of LitGPT: ``lit_model.pth`` with its configuration beside it, one folder for each step and ``final``.

Writers: litgpt/pretrain.py `save_checkpoint`, litgpt/finetune/full.py and lora.py (``step-000100/``, ``final/``),
litgpt/utils.py `save_config`, `copy_config_files`, litgpt/scripts/convert_hf_checkpoint.py (litgpt 0.5.13). The file is
that of lightning/fabric `Fabric.save`: model, optimizer and counters, or the model alone; with sharding, a folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.index import FileInfo, Index
from ...errors import Problem, some
from .. import huggingface
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.below import below
from ..shared.members import together
from ..torch_save import member
from . import lightning

_MODEL = "lit_model.pth"
_FILES = (_MODEL, f"{_MODEL}.lora", f"{_MODEL}.adapter", f"{_MODEL}.adapter_v2")
_TEXTS = {name: name.partition(".")[0] for name in ("model_config.yaml", "hyperparameters.yaml", "prompt_style.yaml")}
_LONGEST = 1 << 20  # bytes of such a text


def _read(source: Source) -> Index:
    store = source.store
    there = [name for name in _FILES if name in source.entries]
    chosen = there[0]
    announce(store, [name for name in (chosen, *_TEXTS) if name in source.entries and not source.entries[name].is_dir])
    if source.entries[chosen].is_dir:
        index = below(lightning.READER.read(Source(store.below(chosen), listings={"": source.inside(chosen)})), chosen)
    else:
        index = together("litgpt", [((), member(store, chosen, f"{chosen}/"))])
    problems: list[Problem] = []
    if there[1:]:
        line = f"{chosen} is read, as LitGPT does; beside it there is {some(there[1:])}: open that by its own path"
        problems.append(Problem("other-checkpoint", line, there[1]))
    meta = huggingface.configs(store, problems)
    texts, files = _texts(source, problems)
    meta |= texts | {key: index.meta[key] for key in index.meta}
    if type(meta.get("step_count")) is int:
        meta["step"] = meta["step_count"]  # (iter_num counts the batches of a step)
    return replace(
        index,
        format="litgpt",
        meta=meta,
        files={**index.files, **files},
        problems=(*problems, *index.problems),
    )


def _texts(source: Source, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, FileInfo]]:
    """Return the YAML files as they are, by name without ending."""
    found: dict[str, Any] = {}
    files: dict[str, FileInfo] = {}
    for name, key in _TEXTS.items():
        entry = source.entries.get(name)
        if entry is None or entry.is_dir:
            continue
        if entry.info.size > _LONGEST:
            line = (
                f"{name} has {entry.info.size:,} bytes, which is too long for a configuration: it is not in view.meta"
            )
            problems.append(Problem("unreadable-file", line, name))
            continue
        found[key] = bytes(source.store.read(name, 0, entry.info.size)).decode("utf-8", "replace")
        files[name] = entry.info
    return found, files


def _recognises(source: Source) -> bool:
    if source.path or not any(name in source.entries for name in _FILES):
        return False
    return not huggingface.has_weights(source.entries)  # a model of the Hub, beside what LitGPT converted it to


READER = Reader("litgpt", "folders of LitGPT (lit_model.pth, model_config.yaml)", _recognises, _read)
