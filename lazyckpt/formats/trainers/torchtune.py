"""Output folders of torchtune's checkpointers: a folder for each epoch, and one with the state of the recipe.

Writer: torchtune/training/checkpointing/_checkpointer.py. `epoch_N` is a Hugging Face folder (FullModelHFCheckpointer:
weights converted to the names and layout of transformers, with an index) or has `model-0000n-of-0000m.bin` without one
(torchtune's own names, or Meta's), besides `adapter_model.pt`. `recipe_state/recipe_state.pt` has the optimizer and the
counters of the last epoch that was not the final one. Before 0.5 all files were in one folder: `hf_model_0001_N.pt`,
`meta_model_N.pt`, `torchtune_model_N.pt`, `adapter_N.pt`, `recipe_state.pt`. torchtune's distributed checkpoints
(`dist_epoch_N`) have the format of torch.distributed.checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...core.names import natural
from ...core.specs import TensorSpec
from ...errors import LazyckptError, MissingFileError, Problem, cannot_read
from ...io.containers.pickle.plain import Path
from ...layouts.tables import pattern
from .. import huggingface
from ..reader import Reader, Source
from ..shared.below import below
from ..shared.members import Member, together
from ..shared.naming import By
from ..torch_save import member

_STATE = "recipe_state"
_EPOCH = re.compile(r"epoch_(\d+)")
_OLD = re.compile(r"(?:hf_model_\d+|meta_model|torchtune_model|model)_(\d+)\.(?:pt|bin|safetensors)")


def _read(source: Source) -> Index:
    store = source.store
    problems: list[Problem] = []
    epochs = _epochs(source)
    chosen = _chosen(source, epochs)
    members: list[tuple[Path, Member]] = []
    broken: list[LazyckptError] = []
    names: list[str] = []
    aliases: dict[str, str] = {}
    if chosen is not None:
        try:
            weights = _weights(source, epochs[chosen])
            problems += weights.problems
            aliases = dict(weights.aliases)
            names = list(weights.states["weights"])
            members.append((("model",), _member(weights)))
        except LazyckptError as e:
            broken.append(e)
            problems.append(Problem("unreadable-file", f"the weights of epoch {chosen} cannot be read: {e}"))
    for path, place in _beside(source, epochs.get(chosen) if chosen is not None else None, chosen):
        try:
            members.append(((place,) if place else (), member(store, path, f"{path}/")))
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(path, e))
    if not members:
        raise broken[0]
    # recipes/full_finetune_*.py, lora_finetune_*.py `_setup_optimizer`: the optimizer receives model.parameters()
    by: By = "nothing" if any(map(pattern("torchtune.converted").search, names)) else "modules"
    done = next((m.meta["epochs_run"] for _, m in members if "epochs_run" in m.meta), None)
    models = ["model"]
    if type(done) is int and chosen is not None and done != chosen + 1:
        line = (
            f"the state of the recipe is that of epoch {done - 1}, the weights are of epoch {chosen}: open "
            f"tag='epoch_{done - 1}' for what belongs together"
        )
        problems.append(Problem("step-mismatch", line))
    if not names and any(place == ("adapter",) for place, _ in members):
        models = ["adapter"]
    index = together("torchtune", members, models, by)
    return replace(index, aliases={**aliases, **index.aliases}, problems=(*problems, *index.problems))


def _epochs(source: Source) -> dict[int, list[str]]:
    """Return the folder of each epoch, or its files if all epochs share one folder."""
    found: dict[int, list[str]] = {}
    for name in sorted(source.entries, key=natural):
        match = _EPOCH.fullmatch(name) if source.entries[name].is_dir else _OLD.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), []).append(name)
    return found


def _chosen(source: Source, epochs: Mapping[int, list[str]]) -> int | None:
    if source.tag is None:
        return max(epochs, default=None)
    number = source.tag.removeprefix("epoch_")
    if not number.isdecimal() or int(number) not in epochs:
        listed = ", ".join(f"epoch_{n}" for n in sorted(epochs)) or "none"
        raise MissingFileError(f"{source.where} has no epoch {source.tag!r}; there are: {listed}")
    return int(number)


def _weights(source: Source, names: list[str]) -> Index:
    """Index the weights of an epoch, from its folder or its files. Raises the errors of reading."""
    store = source.store
    if source.entries[names[0]].is_dir:
        return below(huggingface.read(Source(store.below(names[0]))), names[0])
    shards = {name: huggingface.read_shard(store, name) for name in names}
    specs = {key: spec for shard in shards.values() for key, spec in shard.specs.items()}
    return Index(
        format="torchtune",
        states={"weights": specs},
        files={name: shard.info for name, shard in shards.items()},
        stored=specs,
        aliases={a: o for shard in shards.values() for a, o in shard.aliases.items()},
        problems=tuple(line for shard in shards.values() for line in shard.problems),
    )


def _member(weights: Index) -> Member:
    held = weights.states["weights"]
    names = [n for n in (weights.stored or held) if n in held]
    tensors: dict[str, tuple[Path, TensorSpec]] = {name: ((name,), held[name]) for name in names}
    meta: dict[str, Any] = {}
    return Member("", tensors, [], meta, lambda _: meta, weights.files, weights.stored)


def _beside(source: Source, names: list[str] | None, epoch: int | None) -> list[tuple[str, str]]:
    """Return the files of adapter and recipe state as (path, key of their content) pairs."""
    found = []
    if names and source.entries[names[0]].is_dir and "adapter_model.pt" in source.inside(names[0]):
        found.append((f"{names[0]}/adapter_model.pt", "adapter"))
    if f"adapter_{epoch}.pt" in source.entries:
        found.append((f"adapter_{epoch}.pt", "adapter"))
    state = source.entries.get(_STATE)
    if state is not None and state.is_dir and f"{_STATE}.pt" in source.inside(_STATE):
        found.append((f"{_STATE}/{_STATE}.pt", ""))
    elif f"{_STATE}.pt" in source.entries:
        found.append((f"{_STATE}.pt", ""))
    return found


def _recognises(source: Source) -> bool:
    if source.path:
        return False
    state = source.entries.get(_STATE)
    return f"{_STATE}.pt" in source.entries or (
        state is not None and state.is_dir and f"{_STATE}.pt" in source.inside(_STATE)
    )


READER = Reader(
    "torchtune", "output folders of torchtune (epoch_N and recipe_state/recipe_state.pt)", _recognises, _read, tags=True
)
