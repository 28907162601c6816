"""Folders of verl: what Megatron's workers save for one role, and the steps of a run with several roles.

Writers (verl 0.9.1): verl/utils/checkpoint/megatron_checkpoint_manager.py `save_checkpoint` (``model/dist_ckpt``,
``model/huggingface``, ``optimizer/dist_ckpt``, ``extra/dist_ckpt``, ``transformer_config.json``, and last
``ckpt_contents.json``); until 0.7 ``dist_ckpt`` and ``huggingface``, without a manifest. The folders of FSDP's workers
are rank files (ranks/files.py). verl/trainer/ppo/ray_trainer.py `_save_checkpoint`: ``global_step_N`` with a folder for
each role (``actor``, ``critic``) and ``data.pt``, and last ``latest_checkpointed_iteration.txt`` beside the steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...core.placement import Mesh
from ...errors import LazyckptError, MissingFileError, Problem, cannot_read, some
from ...io.containers.pickle.values import namespace
from ...io.storage.base import Store
from .. import huggingface
from ..dcp.reader import read_folder
from ..huggingface import load_json
from ..megatron import dist
from ..megatron.described import Described
from ..ranks import reader as ranks
from ..reader import Reader, Source
from ..shared.below import below
from ..shared.wrappers import without_wrappers
from ..torch_save import member

# -- The folder of a role that Megatron trained.

_MANIFEST = "ckpt_contents.json"
_CONFIG = "transformer_config.json"
_DIST = "dist_ckpt"
_HF = "huggingface"
_PARTS = ("model", "optimizer", "extra")
# fields of megatron/core/transformer/transformer_config.py -> arguments of Megatron-LM with that meaning
_ARGUMENTS = {
    "gated_linear_unit": "swiglu",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
}


def _read_role(source: Source) -> Index:
    problems: list[Problem] = []
    split = _is_split(source)
    documents = _documents(source, split, problems)
    if split and _MANIFEST not in source.entries:
        problems.append(Problem("unfinished-save", f"{_MANIFEST} is missing: verl writes it last", _MANIFEST))
    folders = [f"{part}/{_DIST}" for part in _PARTS] if split else [_DIST]
    there = [folder for folder in folders if _holds(source, folder)]
    problems += _missing(documents.get("ckpt_contents"), there)
    if there and _CONFIG not in source.entries:
        line = (
            f"{_CONFIG} is missing: names of layer norms, the degrees, and the positions of parameters in the buckets "
            "of the optimizer are guessed from the keys, or not known"
        )
        problems.append(Problem("missing-metadata", line, _CONFIG))
    args = _arguments(documents)
    index = Index("megatron-dist", {"weights": {}}, {}, stored={}) if not there else _read_dist(source, there, args)
    weights = f"model/{_HF}" if split else _HF
    hf = Source(source.store.below(weights)) if source.inside(weights) else None
    if hf is not None and _has_weights(hf):
        if index.states.get("weights"):
            line = f"there are weights of two kinds: {there[0]} is read, as verl does; open {weights} for the others"
            problems.append(Problem("other-checkpoint", line, weights))
        else:
            index = _with_weights(index, hf, weights, problems)
    if not any(index.states.values()):
        raise MissingFileError(
            f"{source.where} has neither weights nor states of an optimizer: it was not copied whole, or open one of "
            f"{some(there or [weights])}"
        )
    if not index.states.get("weights"):
        problems.append(Problem("missing-weights", "there are only states of the optimizer, and no weights"))
    meta: dict[str, Any] = {**documents, **({"args": args} if args is not None else {})}
    step = _number(documents.get("ckpt_contents"), "global_step")
    if step is not None:
        meta["step"] = step
    inside = index.meta
    return replace(
        index,
        meta={**meta, **{key: inside[key] for key in inside if key not in meta}},
        mesh=_mesh(index.mesh, args, _number(documents.get("ckpt_contents"), "world_size")),
        problems=(*problems, *index.problems),
    )


def _is_split(source: Source) -> bool:
    """Return whether the folder has the layout of version 2, which has a folder for each part."""
    if _MANIFEST in source.entries:
        return True
    return any(part in source.entries and _holds(source, f"{part}/{_DIST}") for part in _PARTS)


def _holds(source: Source, folder: str) -> bool:
    """Return whether a folder is there and has files: verl makes folders that it leaves empty."""
    return folder.partition("/")[0] in source.entries and bool(source.inside(folder))


def _documents(source: Source, split: bool, problems: list[Problem]) -> dict[str, Any]:
    hf = f"model/{_HF}" if split else _HF
    found: dict[str, Any] = {}
    for path, key in ((_MANIFEST, "ckpt_contents"), (_CONFIG, "transformer_config"), (f"{hf}/config.json", "config")):
        folder, _, name = path.rpartition("/")
        if (not folder or _holds(source, folder)) and name in source.inside(folder):
            try:
                found[key] = load_json(source.store, path)
            except LazyckptError as e:
                problems.append(cannot_read(path, e))
    return found


def _missing(manifest: Any, there: list[str]) -> list[Problem]:
    """Return problems for the folders that the manifest lists and that are not there."""
    contents = manifest.get("contents") if isinstance(manifest, dict) else None
    found = []
    for name, about in contents.items() if isinstance(contents, dict) else ():
        path = about.get("path") if isinstance(about, dict) else None
        if isinstance(path, str) and path.endswith(f"/{_DIST}") and path not in there:
            line = f"{path} is missing, in which {_MANIFEST} places {name!r:.80}"
            found.append(Problem("missing-file", line, path))
    return found


def _read_dist(source: Source, folders: list[str], args: Any) -> Index:
    first = source.inside(folders[0])
    if ".metadata" in first and not {"common.pt", "metadata.json"} & first.keys():  # of Megatron-FSDP: all in one
        return read_folder(source.store, folders[0])
    return dist.read(source.store, *folders, about=Described(args))


def _has_weights(hf: Source) -> bool:
    return huggingface.READER.recognises(hf)


def _with_weights(index: Index, hf: Source, folder: str, problems: list[Problem]) -> Index:
    """Return the index with the weights that a bridge wrote, under Hugging Face's names."""
    try:
        read = below(huggingface.read(hf), folder)
    except LazyckptError as e:
        problems.append(cannot_read(folder, e))
        return index
    states = {**read.states, **{state: table for state, table in index.states.items() if state != "weights"}}
    if len(states) > 1:
        line = (
            f"the weights, of {folder}, have Hugging Face's names, the states of the optimizer Megatron's: open "
            "optimizer/dist_ckpt for these alone"
        )
        problems.append(Problem("undecided-name", line))
    raw = {f"{folder}/{name}": spec for name, spec in (read.stored or {}).items()}
    return replace(
        index,
        format="huggingface",
        states=states,
        files={**read.files, **index.files},
        stored={**raw, **(index.stored or {})},
        aliases=read.aliases,
        unreadable=read.unreadable,
        problems=(*read.problems, *index.problems),
    )


def _arguments(documents: Mapping[str, Any]) -> argparse.Namespace | None:
    """Return what the model's configuration says of how it is cut, as arguments of Megatron-LM."""
    fields = documents.get("transformer_config")
    if not isinstance(fields, dict):
        return None
    found: dict[str, Any] = {_ARGUMENTS.get(str(key), str(key)): value for key, value in fields.items()}
    found["group_query_attention"] = type(found.get("num_query_groups")) is int
    config = documents.get("config")
    tied = config.get("tie_word_embeddings") if isinstance(config, dict) else None
    if isinstance(tied, bool):
        found["untie_embeddings_and_output_weights"] = not tied
    return namespace({str(key): value for key, value in found.items()})


def _mesh(mesh: Mesh, args: Any, world: int | None) -> Mesh:
    cut = mesh.tp * mesh.pp * (_number(vars(args), "context_parallel_size") or 1) if args is not None else 0
    return replace(mesh, dp=world // cut) if world is not None and cut and world % cut == 0 else mesh


def _number(table: Any, key: str) -> int | None:
    value = table.get(key) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _is_role(source: Source) -> bool:
    if source.path:
        return False
    names = source.entries
    if _MANIFEST in names:
        return True
    if _DIST in names:  # until 0.7
        return dist.is_here(source.store, _DIST, source.inside(_DIST))
    return any(
        part in names and _holds(source, folder := f"{part}/{_DIST}")
        and dist.is_here(source.store, folder, source.inside(folder))
        for part in _PARTS
    )  # fmt: skip


ROLE = Reader(
    "verl-megatron",
    "what verl saves of a model in Megatron (model/, optimizer/, extra/dist_ckpt)",
    _is_role,
    _read_role,
)

# -- The folder of a step, with the folders of its roles.

_ROLES = ("actor", "critic")
_DATA = "data.pt"


def _roles(source: Source) -> dict[str, Source]:
    """Return the roles that a step has, by name."""
    names = [name for name in _ROLES if name in source.entries and source.entries[name].is_dir]
    source.list_all(names)
    roles = {name: Source(source.store.below(name), listings={"": source.inside(name)}) for name in names}
    for role in roles.values():  # as the registry does for the step itself
        if isinstance(source.store, Store):
            role.store.reads_of_headers = source.store.reads_of_headers
    return roles


def _reader_of(role: Source) -> Reader | None:
    return next((reader for reader in (ROLE, ranks.READER) if reader.recognises(role)), None)


def _read_step(source: Source) -> Index:
    problems: list[Problem] = []
    found: dict[str, Index] = {}
    broken: list[LazyckptError] = []
    roles = _roles(source)
    for name, role in roles.items():
        reader = _reader_of(role)
        if reader is None:
            problems.append(Problem("unreadable-file", f"{name} is no checkpoint that verl writes", name))
            continue
        try:
            read = without_wrappers(reader.read(Source(role.store, rules=source.rules, listings={"": role.entries})))
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(name, e))
            continue
        found[name] = below(read, name, f"{name}." if len(roles) > 1 else "")
        if isinstance(source.store, Store):
            source.store.guards |= {f"{name}/{path}": guard for path, guard in role.store.guards.items()}
    if not found:
        raise broken[0]
    meta: dict[str, Any] = {}
    meta = (
        {name: index.meta for name, index in found.items()} if len(roles) > 1 else dict(*(found[n].meta for n in found))
    )
    step = next((index.meta["step"] for index in found.values() if "step" in index.meta), None)
    if step is not None:
        meta["step"] = step
    files = {path: info for index in found.values() for path, info in index.files.items()}
    if _DATA in source.entries:
        try:
            loader = member(source.store, _DATA, f"{_DATA}/")
            meta["data"] = loader.meta
            files |= loader.files
        except LazyckptError as e:
            problems.append(cannot_read(_DATA, e))
    states = {state: None for index in found.values() for state in index.states}
    meshes = {index.mesh for index in found.values()}
    return Index(
        format="verl" if len(roles) > 1 else next(iter(found.values())).format,
        states={
            state: {name: spec for index in found.values() for name, spec in index.states.get(state, {}).items()}
            for state in states
        },
        files=files,
        stored={name: spec for index in found.values() for name, spec in (index.stored or {}).items()},
        aliases={alias: owner for index in found.values() for alias, owner in index.aliases.items()},
        meta=meta,
        mesh=meshes.pop() if len(meshes) == 1 else Mesh(),
        problems=(*problems, *(line for index in found.values() for line in index.problems)),
        unreadable={name: why for index in found.values() for name, why in index.unreadable.items()},
        ruled=tuple(name for index in found.values() for name in index.ruled),
    )


def _is_step(source: Source) -> bool:
    return not source.path and any(_reader_of(role) is not None for role in _roles(source).values())


STEP = Reader("verl", "steps of verl (global_step_N with actor/ and critic/)", _is_step, _read_step)
