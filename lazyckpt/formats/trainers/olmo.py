"""Folders of OLMo-core: `model_and_optim/`, `train/rankN.pt`, `config.json` and `.metadata.json`.

Writer: olmo_core/train/checkpoint.py `Checkpointer.save`, `_save_train_state`, `_save_metadata`,
olmo_core/train/callbacks/config_saver.py (ai2-olmo-core 3.0). `model_and_optim` is a folder of
torch.distributed.checkpoint with the keys ``model`` and ``optim``. `.metadata.json` is written last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...errors import LazyckptError, Problem, cannot_read
from ..dcp.reader import in_folder
from ..huggingface import load_json
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.members import Member, together
from ..torch_save import member

_WEIGHTS = "model_and_optim"
_META = ".metadata.json"
_JSON = {_META: "metadata", "config.json": "config"}
_TRAIN = "train/rank0.pt"  # the other ranks' files differ in random states and places in the data


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    documents: dict[str, Any] = {}
    announce(source.store, [name for name in (*_JSON, _TRAIN) if _has(source, name)])
    for name, key in _JSON.items():
        if name in source.entries:
            try:
                documents[key] = load_json(source.store, name)
            except LazyckptError as e:
                problems.append(cannot_read(name, e))
    if _META not in source.entries:
        problems.append(Problem("unfinished-save", f"{_META} is missing: OLMo-core writes it last", _META))
    found: list[tuple[tuple[str, ...], Member]] = [((), in_folder(source.store, _WEIGHTS))]
    if _has(source, _TRAIN):
        try:
            found.append((("train",), member(source.store, _TRAIN, f"{_TRAIN}/")))
        except LazyckptError as e:
            problems.append(cannot_read(_TRAIN, e))
    else:
        problems.append(Problem("missing-file", f"{_TRAIN} is missing: the state of the trainer", _TRAIN))
    index = together("olmo-core", found)
    meta: dict[str, Any] = {**index.meta, **documents}
    train = meta.get("train")
    step = train.get("global_step") if isinstance(train, Mapping) else None
    if type(step) is int:
        meta["step"] = step
    return replace(index, meta=meta, problems=(*problems, *index.problems))


def _has(source: Source, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (not folder or folder in source.entries) and name in source.inside(folder)


def _recognises(source: Source) -> bool:
    entry = source.entries.get(_WEIGHTS) if not source.path else None
    if entry is None or not entry.is_dir:
        return False
    return _META in source.entries or "train" in source.entries


READER = Reader("olmo-core", "folders of OLMo-core (model_and_optim/ and train/)", _recognises, _read)
