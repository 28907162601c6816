"""Weights in the training dtype, from the model states: a module's state dict, experts, and what ZeRO-3 keeps there
(frozen fragments, buffers).

Sources: runtime/engine.py `_save_checkpoint`, `_save_moe_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from ...core.index import Extent, Hole, Rank
from ...errors import LazyckptError
from ...io.rebuild import StoredTensor
from ...io.torchfile import Record, TorchFile
from .autoep import layer_of, stacked_files
from .building import Building, Local, Shards, buffer_names, local, shapes_of, table, tensors_in
from .files import RankFiles, name_of_rank
from .flat import FlatFragments, Partition


def expert_shards(b: Building, files: RankFiles) -> Shards:
    """Experts have files of their own, under global ids."""
    names: dict[str, dict[int, Local]] = {}
    for (_, _, mp), path in files.experts.items():
        try:
            file = b.file(path)
            for name, tensor in tensors_in(file, file.root).items():
                names.setdefault(name, {})[mp % b.tp] = local(file, name, tensor, Rank(tp=mp % b.tp))
        except LazyckptError as e:
            b.tell(f"{path} cannot be read, its expert is lost: {e}")
    return {"weights": stacked_files(b, names, b.placements)}


def module_shards(file: TorchFile, model: Mapping[Any, Any], aliases: Mapping[str, str], rank: Rank) -> Shards:
    """A module's state dict; tied names are left to their owners. (ZeRO-3 leaves the parameters in it empty.)"""
    tensors = tensors_in(file, model.get("module"))
    names = {
        name: {rank.tp: local(file, name, t, rank)}
        for name, t in tensors.items()
        if name not in aliases and not (t.shape == (0,) and name not in buffer_names(model) and "zero_pp" in file.path)
    }
    return {"weights": names}


def frozen_shards(b: Building, files: RankFiles, model: Mapping[Any, Any], first: TorchFile, rank: Rank) -> Shards:
    """ZeRO-3: frozen parameters, in the training dtype, cut over the data-parallel ranks' model states."""
    shapes = shapes_of(first, model.get("frozen_param_shapes"))
    if stacks := [n for n in shapes if layer_of(n, b.placements) is not None]:
        b.tell(f"{first.path}: frozen experts ({stacks[0]!r}, ...) are in view.stored only")
        shapes = {n: s for n, s in shapes.items() if n not in stacks}
    pieces: dict[str, list[Partition]] = {name: [] for name in shapes}
    dtypes: dict[str, torch.dtype] = {}
    world = b.world
    for dp, found, hole in each_rank(b, files, world, rank, "frozen_param_fragments") if shapes else ():
        for name in shapes:
            tensor = found[1].get(name) if found else None
            extent: Extent | Hole
            if found and isinstance(tensor, StoredTensor) and len(tensor.shape) == 1:
                extent = found[0].extent(tensor, name)
                dtypes[name] = tensor.dtype
            else:
                extent = hole or Hole(first.path, f"rank {dp}'s model states have no fragment of {name!r}")
            pieces[name].append(Partition(extent, rank._replace(dp=dp)))
    return {
        "fp32": {
            name: {
                rank.tp: Local(shape, dtypes[name], FlatFragments(shape, -(-prod(shape) // world), tuple(pieces[name])))
            }
            for name, shape in shapes.items()
            if name in dtypes
        }
    }


def each_rank(
    b: Building, files: RankFiles, world: int, rank: Rank, key: str
) -> Iterator[tuple[int, tuple[TorchFile, dict[Any, Any]] | None, Hole | None]]:
    """ZeRO-3's model states: (dp rank, (its file, the table under ``key``) or None, why there is none)."""
    mp = rank.pp * b.tp + rank.tp
    for dp in range(world):
        path = files.zero_model.get((dp, mp)) or name_of_rank(next(iter(files.zero_model.values())), dp, mp)
        try:
            file = b.file(path)
            yield dp, (file, table(file, table(file, file.root).get(key))), None
        except LazyckptError as e:
            line = f"{path} cannot be read: {e}"
            b.tell(line)
            yield dp, None, Hole(path, line)


def compare_buffers(b: Building, files: RankFiles, first: TorchFile, model: Mapping[Any, Any], rank: Rank) -> None:
    """ZeRO-3: every rank saves its own buffers. Rank 0's are read; where the zip's checksums tell that another rank's
    differ, a line says so. (Parameters are empty there: they are not saved.)"""
    tensors = tensors_in(first, model.get("module"))
    buffers = {n: c for n, t in tensors.items() if 0 not in t.shape and (c := _crc(first.records, t)) is not None}
    if not buffers:
        return
    differ: dict[str, list[int]] = {}
    for dp, found, _ in each_rank(b, files, b.world, rank, "module"):
        if dp == 0 or found is None:
            continue
        for name, crc in buffers.items():
            tensor = found[1].get(name)
            if isinstance(tensor, StoredTensor) and _crc(found[0].records, tensor) not in (crc, None):
                differ.setdefault(name, []).append(dp)
    for name, ranks in differ.items():
        b.tell(f"the buffer {name!r} differs on ranks {_listed(ranks)}: rank 0's is read (the others: view.stored)")


def _crc(records: Mapping[str, Record], tensor: StoredTensor) -> int | None:
    """The checksum of a tensor's bytes, where it is all of its storage."""
    if tensor.storage is None:
        return None
    record = records.get(tensor.storage.key)
    if record is None or record.nbytes != prod(tensor.shape) * tensor.dtype.itemsize:
        return None
    return record.crc


def _listed(ranks: Iterable[int]) -> str:
    items = list(map(str, ranks))
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
