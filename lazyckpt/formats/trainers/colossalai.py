"""Folders of ColossalAI: an optimizer in shards with an index, alone or beside the model's folder.

Writers (ColossalAI 0.5.0): colossalai/checkpoint_io/general_checkpoint_io.py `save_sharded_model`,
`save_sharded_optimizer` (likewise hybrid_parallel_checkpoint_io.py, and Gemini's and ZeRO's plugins, which gather
states to whole ones): the model as Hugging Face saves one, ``pytorch_optim-00001.bin`` (number of a parameter -> its
states), ``pytorch_optim.bin.index.json`` and ``pytorch_optim_group.bin`` (the param_groups).
applications/Colossal-LLaMA/colossal_llama/utils/ckpt_io.py `save_checkpoint`: ``modeling/``, ``optimizer/``,
``lr_scheduler`` and ``running_states.json``.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...core.names import natural
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, some
from ...io.containers.pickle.plain import Path
from .. import huggingface
from ..huggingface import load_json
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.below import below
from ..shared.members import Member, together
from ..shared.naming import By
from ..shared.paths import inside
from ..torch_save import member
from .folder import as_member

_INDEX = "pytorch_optim.bin.index.json"
_MODEL, _OPTIM = "modeling", "optimizer"
_SCHEDULER, _STATE = "lr_scheduler", "running_states.json"


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    members: list[tuple[Path, Member]] = []
    broken: list[LazyckptError] = []
    meta: dict[str, Any] = {}
    by: By = "order"
    alone = _INDEX in source.entries
    whole: Index | None = None
    if not alone and _MODEL in source.entries:
        try:
            whole = below(huggingface.read(Source(source.store.below(_MODEL))), _MODEL)
            ordered, model = as_member(whole)
            by = "order" if ordered else "shape"
            members.append((("model",), model))
            meta |= whole.meta
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(_MODEL, e))
    try:
        members += _optimizer(source, "" if alone else _OPTIM, problems)
    except LazyckptError as e:
        broken.append(e)
        problems.append(cannot_read(_INDEX if alone else _OPTIM, e))
    if not members:
        raise broken[0]
    if not alone:
        meta |= _beside(source, members, problems)
    index = together("colossalai", members, ["model"], by)
    return replace(
        index,
        aliases={**(whole.aliases if whole is not None else {}), **index.aliases},
        meta={**meta, **{key: index.meta[key] for key in index.meta}},
        problems=(*problems, *(whole.problems if whole is not None else ()), *index.problems),
    )


def _optimizer(source: Source, folder: str, problems: list[Problem]) -> list[tuple[Path, Member]]:
    """Return the shards of an optimizer. Raises the errors of the index, and CorruptError if it names other folders."""
    path = posixpath.join(folder, _INDEX)
    table = load_json(source.store, path)
    listed, about = table.get("weight_map"), table.get("metadata")
    weights = {str(key): str(name) for key, name in listed.items()} if isinstance(listed, dict) else {}
    shards = sorted(set(weights.values()))
    groups = about.get("param_groups") if isinstance(about, dict) else None
    names = [*shards, *([groups] if isinstance(groups, str) else [])]
    if not shards or not all(map(inside, names)):
        raise CorruptError(f"{source.store.root}/{path} lists no files of this folder: it is damaged or hostile")
    paths = {name: posixpath.join(folder, name) for name in names}
    announce(source.store, list(paths.values()))
    found: list[tuple[Path, Member]] = []
    for name in names:
        try:
            one = member(source.store, paths[name], f"{name}/")
        except LazyckptError as e:
            problems.append(cannot_read(paths[name], e))
            continue
        if name == groups:
            found.append(((), _groups(one)))
            continue
        problems += _others(one, paths[name], path, {key for key, file in weights.items() if file == name})
        found.append((("optimizer", "state"), one))
    if groups not in names:
        line = f"{path} names no file of param_groups: which parameter has which number is not known"
        problems.append(Problem("missing-file", line, path))
    if not any(base for base, _ in found):
        raise CorruptError(f"{source.store.root}/{path}: none of its files can be read ({some(shards)})")
    return found


def _others(one: Member, path: str, index: str, listed: set[str]) -> list[Problem]:
    """Return a problem if a file holds states of other parameters than the index lists for it: it is another file."""
    there = {str(own[0]) for own in (*(own for own, _ in one.tensors.values()), *one.objects) if own}
    other = sorted(there ^ listed, key=natural)
    if not other:
        return []
    line = f"{path} and {index} differ in which parameters' states it holds ({some(other)}): it may be another file"
    return [Problem("inconsistent-metadata", line, path)]


def _groups(one: Member) -> Member:
    """Return the list of a file of param_groups as that of the optimizer."""
    objects: dict[str, Any] = {"optimizer": {"param_groups": one.meta.get("", one.meta)}}
    return Member("", {}, [("optimizer", "param_groups")], objects, lambda _: objects, one.files)


def _beside(source: Source, members: list[tuple[Path, Member]], problems: list[Problem]) -> dict[str, Any]:
    """Add the schedule, and return the counters."""
    meta: dict[str, Any] = {}
    if _SCHEDULER in source.entries and not source.entries[_SCHEDULER].is_dir:
        try:
            members.append(((_SCHEDULER,), member(source.store, _SCHEDULER, f"{_SCHEDULER}/")))
        except LazyckptError as e:
            problems.append(cannot_read(_SCHEDULER, e))
    if _STATE in source.entries:
        try:
            meta["running_states"] = load_json(source.store, _STATE)
            if type(meta["running_states"].get("step")) is int:
                meta["step"] = meta["running_states"]["step"]
        except LazyckptError as e:
            problems.append(cannot_read(_STATE, e))
    else:
        line = f"{_STATE} is missing: it is written last, so the save was not finished, or not copied whole"
        problems.append(Problem("unfinished-save", line, _STATE))
    return meta


def _recognises(source: Source) -> bool:
    if source.path:
        return False
    if _INDEX in source.entries:
        return True
    return _OPTIM in source.entries and _MODEL in source.entries and _INDEX in source.inside(_OPTIM)


READER = Reader(
    "colossalai",
    "folders of ColossalAI (modeling/ and optimizer/ with pytorch_optim.bin.index.json)",
    _recognises,
    _read,
)
