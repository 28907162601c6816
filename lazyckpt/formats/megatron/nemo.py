"""Checkpoints of NeMo 1: a ``.nemo`` archive, or the folder that it was unpacked to.

Writer: NVIDIA/NeMo nemo/core/connectors/save_restore_connector.py `SaveRestoreConnector.save_to` (a tar with
``model_config.yaml`` and ``model_weights.ckpt``, the state dict; compressed until 1.6) and
nemo/collections/nlp/parts/nlp_overrides.py `NLPSaveRestoreConnector.save_to` (for each model-parallel rank a folder
``mp_rank_TT`` or, with pipelines, ``tp_rank_TT_pp_rank_PPP``; or ``model_weights/``, a distributed checkpoint of
megatron-core). The state dict is that of the Lightning module, so the names of Megatron's model begin with ``model.``,
with ``model.module.`` in half precision (``megatron_amp_O2``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.index import Index
from ...core.names import natural
from ...errors import MissingFileError, Problem, some
from ...io.containers.pickle.rebuild import StoredTensor
from ...layouts.megatron import Degrees, without_module
from ...layouts.tables import pattern
from .. import torch_save as torchsave
from ..reader import Reader, Source
from . import dist
from .config import nemo_args, read_config
from .described import Described
from .files import Iteration, RankFolder
from .reader import read_ranks

CONFIG = "model_config.yaml"
_WEIGHTS = "model_weights.ckpt"
_FOLDER = "model_weights"
_RANK = re.compile(r"mp_rank_(\d{2,})|tp_rank_(\d{2,})_pp_rank_(\d{3,})")
_TODAY = 3.0  # the order of rows in Megatron's fused matrices (`layouts.megatron.version`); 0: that of old models


def _recognises(source: Source) -> bool:
    if source.path:
        return False
    names = source.entries
    if CONFIG in names and (_WEIGHTS in names or _FOLDER in names or source.store.root.endswith(".nemo")):
        return True
    ranks = _rank_folders(source)
    return bool(ranks) and any(_WEIGHTS in source.inside(name) for name in (ranks[0], ranks[-1]))


def _rank_folders(source: Source) -> list[str]:
    return sorted((n for n, e in source.entries.items() if e.is_dir and _RANK.fullmatch(n)), key=natural)


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    config = None
    if CONFIG in source.entries:
        config = read_config(source.store, CONFIG, problems)
    else:
        line = f"{CONFIG} is missing: how the model was cut is guessed from names and shapes"
        problems.append(Problem("missing-metadata", line, CONFIG))
    ranks = _rank_folders(source)
    found = [*ranks[:1], *(name for name in (_FOLDER, _WEIGHTS) if name in source.entries)]
    if not found:
        raise MissingFileError(
            f"{source.where} has no weights: neither {_WEIGHTS}, nor {_FOLDER}/, nor folders of ranks (mp_rank_00, "
            f"tp_rank_00_pp_rank_000). It has {some(sorted(source.entries), 6)}. Copy it again from its source."
        )
    if len(found) > 1:
        line = f"the weights are there {len(found)} times ({some(found)}): those of {found[0]} are read"
        problems.append(Problem("other-checkpoint", line, found[1]))
    if ranks:
        index = _of_ranks(source, config, ranks)
    elif found[0] == _FOLDER:
        about = Described() if config is None else Described(nemo_args(config, core=True), CONFIG)
        index = dist.with_rules(dist.read(source.store, _FOLDER, about=about), source.rules)
    else:
        index = _of_file(source, config)
    meta = dict(index.meta) | ({} if config is None else {"model_config": config})
    files = dict(index.files) | ({CONFIG: source.entries[CONFIG].info} if CONFIG in source.entries else {})
    format = "nemo" if index.format == torchsave.READER.name else "megatron-nemo"
    return replace(index, format=format, meta=meta, files=files, problems=(*problems, *index.problems))


def _of_file(source: Source, config: Mapping[str, Any] | None) -> Index:
    """Index a state dict in one file: of Megatron's models as that of one rank, of others as it is."""
    if config is not None and "tensor_model_parallel_size" in config:
        return read_ranks(source, _iteration(config, [RankFolder("", (0,), _WEIGHTS)]))
    return torchsave.READER.read(Source(source.store, _WEIGHTS))


def _of_ranks(source: Source, config: Mapping[str, Any] | None, ranks: list[str]) -> Index:
    source.list_all(ranks)
    folders, notes = [], []
    for name in ranks:
        path = f"{name}/{_WEIGHTS}"
        match = _RANK.fullmatch(name)
        if _WEIGHTS not in source.inside(name):
            notes.append(Problem("missing-file", f"{path} is missing: what this rank holds is lost", path))
        elif match is not None:
            numbers = tuple(int(digits[:9]) for digits in match.groups() if digits is not None)
            folders.append(RankFolder(name, numbers, path))
    found = _iteration(config, folders)
    found.notes += notes
    return read_ranks(source, found)


def _iteration(config: Mapping[str, Any] | None, ranks: list[RankFolder]) -> Iteration:
    known: dict[int, dict[Any, Any]] = {}

    def unwrap(root: dict[Any, Any]) -> dict[Any, Any]:
        """Return the dict that Megatron-LM would have saved. Ranks whose pickles are shared share it, too."""
        if id(root) not in known:
            tensors = [key for key, value in root.items() if isinstance(value, StoredTensor) and isinstance(key, str)]
            bare = without_module(tensors)
            model = {bare.get(key, key): value for key, value in root.items()}
            core = any(pattern("megatron.linear").fullmatch(name) for name in bare.values())
            old = config is not None and config.get("megatron_legacy") is True
            args = {} if config is None else {"args": nemo_args(config, core)}
            known[id(root)] = {"model": model, "checkpoint_version": 0 if old else _TODAY, **args}
        return known[id(root)]

    return Iteration("", ranks, unwrap=unwrap, named=_named)


def _named(d: Degrees, tp: int, pp: int) -> str:
    folder = f"mp_rank_{tp:02d}" if d.pp == 1 else f"tp_rank_{tp:02d}_pp_rank_{pp:03d}"
    return _WEIGHTS if d.tp == d.pp == 1 else f"{folder}/{_WEIGHTS}"


READER = Reader(
    "nemo",
    "NeMo 1: .nemo archives and unpacked ones (model_config.yaml, model_weights.ckpt)",
    _recognises,
    _read,
)
