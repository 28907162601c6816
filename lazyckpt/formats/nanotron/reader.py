"""The reader for folders of nanotron.

Writer: nanotron/serialize/main.py `save`, nanotron/trainer.py `save_checkpoint` (nanotron 0.4). A run has a folder for
each step, named by its number, and ``latest.txt``. ``checkpoint_metadata.json`` is written after weights and states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.index import Index
from ...core.placement import Mesh
from ...errors import LazyckptError, Problem, cannot_read
from ...io.storage.base import Entry
from ..huggingface import load_json
from ..reader import Reader, Source
from ..torch_save import member
from .optimizer import FOLDER as OPTIMIZER
from .optimizer import read_optimizer
from .weights import FOLDER as MODEL
from .weights import read_weights

META = "checkpoint_metadata.json"
_SCHEDULER = "lr_scheduler/lr_scheduler.pt"


def _is_checkpoint(entries: Mapping[str, Entry]) -> bool:
    if MODEL not in entries or not entries[MODEL].is_dir:
        return False
    return META in entries or ("config.yaml" in entries and "model_config.json" in entries)


def _recognises(source: Source) -> bool:
    return not source.path and _is_checkpoint(source.entries)


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    meta: dict[str, Any] = {}
    for name, key in ((META, "checkpoint_metadata"), ("model_config.json", "config")):
        if name in source.entries:
            try:
                meta[key] = load_json(source.store, name)
            except LazyckptError as e:
                problems.append(cannot_read(name, e))
    if META not in source.entries:
        problems.append(Problem("unfinished-save", f"{META} is missing: nanotron writes it last", META))
    metas = meta.get("checkpoint_metadata", {}).get("metas")
    step = metas.get("last_train_step") if isinstance(metas, Mapping) else None
    if type(step) is int:
        meta["step"] = step
    weights = read_weights(source, problems)
    optimizer = read_optimizer(source, weights.kinds, problems)
    files, stored = weights.files | optimizer.files, weights.stored | optimizer.stored
    if optimizer.meta:
        meta[OPTIMIZER] = optimizer.meta
    folder, _, scheduler = _SCHEDULER.partition("/")
    if folder in source.entries and scheduler in source.inside(folder):
        try:
            held = member(source.store, _SCHEDULER, f"{_SCHEDULER}/")
            meta[folder], files = held.meta, {**files, **held.files}
            stored |= dict(held.raw)
        except LazyckptError as e:
            problems.append(cannot_read(_SCHEDULER, e))
    return Index(
        format="nanotron",
        states={"weights": weights.specs, **_ordered(optimizer.states)},
        files=files,
        stored=stored,
        meta=meta,
        mesh=Mesh(tp=max(weights.tp, optimizer.tp), pp=max(weights.pp, optimizer.pp), dp=optimizer.dp, ep=optimizer.ep),
        problems=tuple(problems),
    )


def _ordered(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states with fp32 first."""
    return {name: states[name] for name in sorted(states, key=lambda name: name != "fp32")}


READER = Reader("nanotron", "folders of nanotron (checkpoint_metadata.json and model/)", _recognises, _read)
