"""Folders of torch's HuggingFaceStorageWriter: the ranks' safetensors files, consolidated or not.

Writer: torch/distributed/checkpoint/hf_storage.py. Each rank writes `shard-RANK-model-FILE-of-FILES.safetensors`. There
is neither an index nor a `.metadata`, so a tensor's shape is the extent of its chunks. After consolidation
(_consolidate_hf_safetensors.py) the ranks' files are in `sharded/`, beside the files of an ordinary Hugging Face
folder. torch 2.13 consolidates scalars (0 dimensions) as zeros, so these are read from the ranks' files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.box import Shape
from ...core.extents import Extent
from ...core.index import FileInfo, Index
from ...core.names import natural
from ...core.specs import TensorSpec
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, some
from ...io.storage.base import Entry, Store
from .. import huggingface
from ..reader import Reader, Source
from ..shared.announce import announce, listing
from .chunks import ChunkBytes, ShardFile, in_chunks, read_shard_file, uncovered

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_FOLDER = "sharded"


def _read(source: Source) -> Index:
    if _shards(source.entries):
        return _sharded(source.store, "")
    listed = source.inside(_FOLDER)
    if "model.safetensors.index.json" not in source.entries:  # it is written last
        index = _sharded(source.store, f"{_FOLDER}/")
        if not any(name.endswith(".safetensors") for name in source.entries):
            return index
        problem = Problem(
            "unfinished-save",
            f"the consolidated files have no index, so they may be unfinished: the ranks' files in {_FOLDER}/ are read",
        )
        return replace(index, problems=(problem, *index.problems))
    try:
        whole = huggingface.read(source)
    except LazyckptError as e:  # consolidation fails on some models, but the ranks' files are complete
        index = _sharded(source.store, f"{_FOLDER}/")
        line = f"the consolidated files cannot be read, the ranks' files in {_FOLDER}/ are read instead: {e}"
        return replace(index, problems=(Problem("unreadable-file", line), *index.problems))
    if not _shards(listed):
        return whole
    return _repaired(whole, _sharded(source.store, f"{_FOLDER}/"))


def _repaired(whole: Index, ranks: Index) -> Index:
    """Replace the tensors of the consolidated files that torch writes wrong by those of the ranks' files."""
    good, held = whole.states["weights"], ranks.states["weights"]
    single = [name for name, spec in good.items() if spec.shape == () and name in held]
    missing = [name for name in held if name not in good]
    problems = list(whole.problems)
    if single:
        line = (
            f"{len(single):,} tensors of one number are read from {_FOLDER}/, because torch writes zeros for them "
            f"when it consolidates: {some(single)}"
        )
        problems.append(Problem("replaced-tensor", line, _FOLDER))
    if missing:
        line = f"{len(missing):,} tensors are in {_FOLDER}/ only, and read from there: {some(missing)}"
        problems.append(Problem("replaced-tensor", line, _FOLDER))
    taken = {name: held[name] for name in (*single, *missing)}
    used = {fragment.extent.path for spec in taken.values() for fragment in spec.fragments}
    return replace(
        whole,
        states={"weights": {**good, **taken}},
        stored={**(whole.stored or {}), **taken},
        files={**whole.files, **{path: info for path, info in ranks.files.items() if path in used}},
        problems=tuple(problems),
    )


def _sharded(store: Store, folder: str) -> Index:
    names = _shards(listing(store, folder.rstrip("/")))
    problems = _lost_files(names)
    files: dict[str, FileInfo] = {}
    chunks: dict[str, list[tuple[Shape, Shape, ChunkBytes]]] = {}
    first: dict[str, Extent] = {}
    meta: dict[str, Any] = {}
    broken: list[LazyckptError] = []
    announce(store, [folder + name for name in names])
    for name in names:
        try:
            shard = read_shard_file(store, folder + name)
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(folder + name, e, ", its tensors are lost"))
            continue
        files[shard.path] = shard.info
        problems += shard.notes
        meta = meta or dict(shard.metadata)
        _add(store, shard, chunks, first)
    if not files:
        raise broken[0]
    weights: dict[str, TensorSpec] = {}
    gaps = {}
    for key, held in chunks.items():
        shape = tuple(map(max, zip(*(tuple(map(sum, zip(a, n))) for a, n, _ in held)))) if first[key].shape else ()
        weights[key] = in_chunks(key, first[key].dtype, shape, held)
        gap = uncovered(shape, [(start, sizes) for start, sizes, _ in held])
        if gap > 0:
            gaps[key] = gap
    if gaps:
        line = (
            f"{sum(gaps.values()):,} elements of {len(gaps):,} tensors are in no file ({some(gaps)}): "
            "a rank's file is lost"
        )
        problems.append(Problem("missing-elements", line))
    return Index(
        format="huggingface-dcp",
        states={"weights": weights},
        files=files,
        stored=weights,
        meta=meta,
        problems=tuple(problems),
    )


def _add(
    store: Store, shard: ShardFile, chunks: dict[str, list[tuple[Shape, Shape, ChunkBytes]]], first: dict[str, Extent]
) -> None:
    for key, (start, extent) in shard.chunks.items():
        known = first.setdefault(key, extent)
        if (known.dtype, len(known.shape)) != (extent.dtype, len(extent.shape)):
            raise CorruptError(
                f"{store.root}/{shard.path}: {key!r} is {extent.dtype} with {len(extent.shape)} dimensions, in "
                f"{known.path} it is {known.dtype} with {len(known.shape)}: these files are not of one save"
            )
        chunks.setdefault(key, []).append((start, extent.shape, extent))


def _shards(entries: Mapping[str, Entry]) -> list[str]:
    return sorted((n for n, e in entries.items() if _SHARD.fullmatch(n) and not e.is_dir), key=natural)


def _lost_files(names: list[str]) -> list[Problem]:
    """Return problems of missing ranks below the highest one. (The loss of the last ranks cannot be detected.)"""
    ranks = {int(m[1]) for n in names if (m := _SHARD.fullmatch(n))}
    counts = {m[3] for n in names if (m := _SHARD.fullmatch(n))}
    lost = (
        [f"shard-{r:05d}-..." for r in range(1, min(max(ranks), 100_000)) if r not in ranks] if len(counts) == 1 else []
    )
    problems = []
    if lost:
        line = f"{len(lost):,} ranks have no file ({some(lost)}): lost, or they had nothing to write"
        problems.append(Problem("missing-file", line))
    if len(counts) > 1:
        line = f"the files are of several saves: their names count {some(sorted(counts))} files"
        problems.append(Problem("left-over-file", line))
    return problems


def _recognises(source: Source) -> bool:
    if source.path:
        return False
    if _shards(source.entries):
        return True
    folder = source.entries.get(_FOLDER)
    return folder is not None and folder.is_dir and bool(_shards(source.inside(_FOLDER)))


READER = Reader(
    "huggingface-dcp",
    "folders of torch's HuggingFaceStorageWriter (shard-*-model-*.safetensors)",
    _recognises,
    _read,
)
