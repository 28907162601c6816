"""Folders of Levanter: a Zarr array for each leaf of the trainer's state, and ``metadata.json``.

Writer: levanter/checkpoint.py `save_checkpoint`, `_save_metadata` (written last), levanter/tensorstore_serialization.py
`tree_serialize_leaves_tensorstore` (levanter 1.2): the keys of a leaf are folders. Optimizers are optax's, whose
moments are trees like the model (orbax/trees.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...core.specs import renamed
from ...errors import LazyckptError, Problem, cannot_read
from ..huggingface import load_json
from ..orbax.trees import WEIGHTS, named
from ..reader import Reader, Source
from ..zarr.reader import FOLDER

_META = "metadata.json"
_MARK = "is_temporary"
_MOST = 4096  # bytes of a metadata.json
_KEY = "training_key"  # of the trainer's state, an array
_STATES = ("opt_state", "optimizer", "training_state")


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    meta: dict[str, Any] = {}
    if _META in source.entries:
        try:
            meta["metadata"] = load_json(source.store, _META)
        except LazyckptError as e:
            problems.append(cannot_read(_META, e))
        step = meta.get("metadata", {}).get("step")
        if type(step) is int:
            meta["step"] = step
    else:
        problems.append(Problem("unfinished-save", f"{_META} is missing: Levanter writes it last", _META))
    index = FOLDER.read(source)
    arrays = index.states[WEIGHTS]
    found = named(tuple(name.split(".")) for name in arrays)
    states = {
        state: {name: renamed(arrays[".".join(key)], name) for name, key in table.items()}
        for state, table in found.states.items()
    }
    return replace(
        index,
        format="levanter",
        states=states,
        stored=arrays,
        meta={**index.meta, **meta},
        problems=(*problems, *index.problems, *found.problems),
    )


def _recognises(source: Source) -> bool:
    if source.path or "model" not in source.entries:
        return False
    about = source.entries.get(_META)
    if about is None:  # an unfinished save, known by the arrays of the trainer's state
        return any(name in source.entries for name in _STATES) and ".zarray" in source.inside(_KEY)
    if about.is_dir or not 0 < about.info.size <= _MOST:
        return False
    try:
        table = json.loads(bytes(source.store.read(_META, 0, about.info.size)))
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and _MARK in table and "step" in table


READER = Reader("levanter", "folders of Levanter (metadata.json, an array for each leaf)", _recognises, _read)
