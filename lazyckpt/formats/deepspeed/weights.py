"""Weights in the training dtype, from the model states: a module's state dict, experts, and ZeRO-3's frozen fragments
and buffers.

Sources: runtime/engine.py `_save_checkpoint`, `_save_moe_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from typing import Any

from ...core.extents import Extent, Hole
from ...core.placement import Rank
from ...errors import LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.needs import TORCH, ZIP_END
from ...io.containers.pickle.plain import Plain
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import TorchFile, is_whole
from ...io.containers.zip_directory import checksums
from ..shared.announce import announce
from ..shared.flat import Alike, FlatFragments, Piece
from ..shared.rank_shards import Shard, Shards
from ..torch_save import crc_of, whole_storage
from .autoep import layer_of, stacked_files
from .building import Building, Stage, buffer_names, check_ranks, local, shapes_of, table, tensors_in
from .files import RankFiles, name_of_rank, path_of_writer, writer_of


def expert_shards(b: Building, files: RankFiles) -> Shards:
    """Read the experts' weights from their own files, where they have global ids."""
    names: dict[str, dict[int, Shard]] = {}
    for (_, expert, mp), path in files.experts.items():
        try:
            file = b.file(path)
            others = []
            for name, tensor in tensors_in(file, file.root).items():
                if expert_in(name) in (None, expert):
                    names.setdefault(name, {})[mp % b.tp] = local(file, name, tensor, Rank(tp=mp % b.tp))
                else:
                    others.append(name)
            if others:
                line = f"{path} holds tensors of another expert ({some(others)}): it is another file, not used"
                b.report(Problem("inconsistent-metadata", line, path))
        except LazyckptError as e:
            b.report(cannot_read(path, e, ", its expert is lost"))
    return {"weights": stacked_files(b, names, b.placements)}


def expert_in(name: str) -> int | None:
    """Return the number of the expert in a tensor's name; None if there is none.

    >>> expert_in("moe.deepspeed_moe.experts.deepspeed_experts.3.fc.weight")
    3
    """
    number = name.partition(".deepspeed_experts.")[2].partition(".")[0]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 8 else None


def module_shards(file: TorchFile, model: Mapping[Any, Any], aliases: Mapping[str, str], rank: Rank) -> Shards:
    """Return the tensors of a module's state dict, except tied names. (ZeRO-3 leaves the parameters in it empty.)"""
    tensors = tensors_in(file, model.get("module"))
    names = {
        name: {rank.tp: local(file, name, t, rank)}
        for name, t in tensors.items()
        if name not in aliases and not (t.shape == (0,) and name not in buffer_names(model) and "zero_pp" in file.path)
    }
    return {"weights": names}


def alike(stages: Mapping[int, Stage]) -> bool:
    """Return whether the modules of all model-parallel ranks have the same bytes, by checksums of their storages."""
    seen: set[Any] = set()
    for stage in stages.values():
        tensors = tensors_in(stage.file, stage.model.get("module"))
        keys = {name: t.storage.key if t.storage is not None else "" for name, t in tensors.items()}
        stored = sorted(set(keys.values()))
        if not stored or any(key not in stage.file.records for key in stored):
            return False
        crcs = tuple(checksums(stage.file.records, stored))
        if None in crcs:
            return False
        seen.add((tuple((n, keys[n], t.shape, t.dtype, t.offset, t.strides) for n, t in tensors.items()), crcs))
    return len(seen) == 1 < len(stages)


def _buffers(first: TorchFile, model: Mapping[Any, Any]) -> dict[str, int]:
    """Return the checksums of the buffers in the model states of a rank of ZeRO-3."""
    tensors = tensors_in(first, model.get("module"))
    return {n: c for n, t in tensors.items() if 0 not in t.shape and (c := crc_of(first.records, t)) is not None}


def announce_rest(b: Building, files: RankFiles, stages: Iterable[Stage]) -> None:
    """Announce what `sharded_rest` reads."""
    for stage in stages:
        mp = stage.rank.pp * b.tp + stage.rank.tp
        whole = shapes_of(stage.file, stage.model.get("frozen_param_shapes")) or _buffers(stage.file, stage.model)
        own = [files.zero_model[key] for key in sorted(files.zero_model) if key[1] == mp]
        announce(b.store, own, TORCH if whole else ZIP_END)


def sharded_rest(b: Building, files: RankFiles, model: Mapping[Any, Any], first: TorchFile, rank: Rank) -> Shards:
    """Return ZeRO-3's frozen parameters, and compare the buffers of all data-parallel ranks. ``first``: the model
    states of the lowest rank.

    Frozen parameters, in the training dtype, are cut over these ranks. Every rank saves its own buffers: the lowest
    rank's are read, and a different zip checksum on another rank is reported. (Other parameters are empty there.)
    """
    shapes = shapes_of(first, model.get("frozen_param_shapes"))
    if stacks := [n for n in shapes if layer_of(n, b.placements) is not None]:
        b.report(
            Problem("unsupported-tensor", f"{first.path}: frozen experts ({stacks[0]!r}, ...) are in view.stored only")
        )
        shapes = {n: s for n, s in shapes.items() if n not in stacks}
    buffers = _buffers(first, model)
    ranks: list[tuple[str, Rank, int]] = []  # path, rank, and the number of the pieces that its file has
    pieces: list[Sequence[Piece]] = []
    differ: dict[str, list[int]] = {}
    mp = rank.pp * b.tp + rank.tp
    for dp in range(b.world):
        if (dp, mp) not in files.zero_model:
            path = name_of_rank(first.path, dp, mp)
            b.report(Problem("missing-file", f"{path} is missing", path))
        elif not (shapes or buffers or _is_whole(b, path := files.zero_model[dp, mp])):
            _report_damage(b, path)
    last: TorchFile | None = None
    checked: list[tuple[str, str]] = []  # the buffers of this file and their storages
    for dp in range(b.world) if shapes or buffers else ():
        path = files.zero_model.get((dp, mp)) or name_of_rank(next(iter(files.zero_model.values())), dp, mp)
        here = rank._replace(dp=dp)
        try:
            file = b.file(path, keep=False)
            fragments, module = (
                table(file, table(file, file.root).get(k)) for k in ("frozen_param_fragments", "module")
            )
        except LazyckptError as e:
            problem = cannot_read(path, e)
            if (dp, mp) in files.zero_model:
                b.report(problem)
            pieces.append([Hole(path, str(problem))] * len(shapes))
            ranks.append((path, here, len(pieces) - 1))
            last = None
            continue
        if last is None or not file.like(last):  # else all is at the same places
            flat = [(name, fragments.get(name)) for name in shapes]
            extents = [
                file.extent(t, name) if isinstance(t, StoredTensor) and len(t.shape) == 1 else None for name, t in flat
            ]
            pieces.append(extents)
            held = {name: t for name in buffers if isinstance(t := module.get(name), StoredTensor)}
            keys = {name: whole_storage(file.records, t) for name, t in held.items()}
            checked = [(name, key) for name, key in keys.items() if key is not None]
            last = None if any(e is not None and e.within for e in extents) else file
        ranks.append((path, here, len(pieces) - 1))
        crcs = checksums(file.records, [key for _, key in checked]) if path != first.path else ()
        for (name, _), crc in zip(checked, crcs, strict=False):
            if crc not in (buffers[name], None):
                differ.setdefault(name, []).append(dp)
    _report_differing(b, differ, buffers.keys())
    frozen: dict[str, dict[int, Shard]] = {}
    for n, name in enumerate(shapes):
        mine = tuple(of_file[n] for of_file in pieces)
        dtype = next((piece.dtype for piece in reversed(mine) if isinstance(piece, Extent)), None)
        if dtype is not None:
            shape = shapes[name]
            fragments_ = FlatFragments(shape, -(-prod(shape) // b.world), Alike(ranks, mine))
            frozen[name] = {rank.tp: Shard(shape, dtype, fragments_)}
    return {"fp32": frozen}


def _report_differing(b: Building, differ: Mapping[str, list[int]], buffers: AbstractSet[str]) -> None:
    """Report tensors that some ranks saved with other values than the rank that is read. ``differ``: name -> ranks."""
    for name, others in differ.items():
        what = "buffer" if name in buffers else "tensor"
        where = f"rank{'s' if len(others) > 1 else ''} {some(others, 8)}"
        line = f"the {what} {name!r} differs on {where}: the lowest rank's is read (the others: view.stored)"
        b.report(Problem("differing-replicas", line, name))


def compare_writers(b: Building, files: RankFiles, stages: Iterable[Stage]) -> None:
    """Compare what the writers of FastPersist saved of the same model states, and report copies that are missing.

    All data-parallel writers save the model states of ZeRO-0 to 2, each with its own buffers; with experts, only the
    first writer does (runtime/engine.py `_save_checkpoint`, `_save_moe_checkpoint`). ``io_multiplier`` counts each
    writer several times (runtime/model_checkpointing/writer_factory.py `create_writer`)."""
    for stage in stages:
        path = stage.file.path
        by = writer_of(path)
        if by is None:
            continue
        known = next((first for first, others in files.copies.items() if path in (first, *others)), path)
        written = dict.fromkeys((known, *files.copies.get(known, ())))
        check_ranks(by[1], "writers", len(written), path)
        expected = 1 if stage.model.get("num_experts") else by[1] // _multiplier(stage)
        lost = [one for n in range(expected) if (one := path_of_writer(path, n)) not in written]
        if lost:
            line = f"{len(lost):,} of {max(expected, 1):,} copies of the model states are missing ({some(lost)})"
            what = "the buffers of their ranks are lost"
            if lost[0] == path_of_writer(path, 0):
                what += f"; those of {path} are read, which may differ"
            b.report(Problem("missing-file", f"{line}: {what}", only_one(lost)))
        _compare(b, stage, [one for one in written if one != path])


def _multiplier(stage: Stage) -> int:
    at = stage.model.get("ds_config")
    for key in ("checkpoint", "writer", "io_multiplier"):
        at = at.get(key) if isinstance(at, dict) else None
    return at if type(at) is int and at > 0 else 1


def _compare(b: Building, stage: Stage, others: list[str]) -> None:
    """Report the tensors of a module, and of a ZeRO-0 optimizer, that differ in other writers' files, by the checksums
    of the zips."""
    if not others:
        return
    announce(b.store, others)
    tensors = _written(stage.file, stage.model)
    first = {n: c for n, t in tensors.items() if 0 not in t.shape and (c := crc_of(stage.file.records, t)) is not None}
    differ: dict[str, list[int]] = {}
    for path in others:
        try:
            file = b.file(path, keep=False)
            module = _written(file, table(file, file.root))
        except LazyckptError as e:
            b.report(cannot_read(path, e))
            continue
        writer, _ = writer_of(path) or (0, 0)
        for name, crc in first.items():
            other = module.get(name)
            alike = other is not None and (other.shape, other.dtype) == (tensors[name].shape, tensors[name].dtype)
            if other is None or not alike or crc_of(file.records, other) not in (crc, None):
                differ.setdefault(name, []).append(writer)
    _report_differing(b, differ, buffer_names(stage.model))


def _written(file: TorchFile, model: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of the module and of the optimizer in a rank's model states."""
    found = tensors_in(file, table(file, model.get("module")))
    optimizer = model.get("optimizer")
    if optimizer:
        held = Plain(optimizer, file.path, file.pickle_size).tensors
        found |= {f"optimizer.{name}": tensor for name, tensor in held.items()}
    return found


def _is_whole(b: Building, path: str) -> bool:
    """Return whether a file whose contents are not needed is complete, as far as its end tells."""
    try:
        return is_whole(b.store, path, b.info(path).size)
    except OSError:  # also a missing file: `_report_damage` reports it
        return False


def _report_damage(b: Building, path: str) -> None:
    """Report a damaged file whose contents are not needed."""
    try:
        b.file(path, keep=False)
    except LazyckptError as e:
        b.report(cannot_read(path, e))


def copies(file: TorchFile, module: Mapping[str, StoredTensor], trained: set[str]) -> dict[str, str]:
    """Return the other names of tied parameters -> owners, where each name was saved on its own: matrices that no
    optimizer has, with the checksum of one that an optimizer has. (With experts, engine.py saves clones; it lists
    ``shared_params`` only with ZeRO.)"""
    owners: dict[tuple[Any, ...], list[str]] = {}
    for name, t in module.items():
        if len(t.shape) > 1 and (crc := crc_of(file.records, t)) is not None:
            owners.setdefault((t.shape, t.dtype, crc), []).append(name)
    found: dict[str, str] = {}
    for names in owners.values():
        if len(known := [n for n in names if n in trained]) == 1:
            found |= {n: known[0] for n in names if n not in trained}
    return found


def report_fused_attention(b: Building) -> None:
    """Report merged q, k and v of Megatron-DeepSpeed whose order on a rank is not recorded.

    Up to December 2024 they alternate by groups of heads, as in Megatron; since its commit 676a482c
    (model/transformer.py `each_hidden_size`) each rank has all of its q, then its k, then its v. The files do not
    differ otherwise.
    """
    weights = next((b.states[state] for state in ("weights", "fp32") if b.states.get(state)), {})
    open_ones = [
        name
        for name in weights
        if "query_key_value" in name
        and (how := b.merging.hows.get(name)) is not None
        and (how.kind, how.fused) == ("concatenated", 1)
        and how.by != "user"
    ]
    if open_ones:
        line = (
            f"{len(open_ones):,} fused q, k and v ({some(open_ones)}) are concatenated rank by rank, as "
            "ds_to_universal does. Megatron-DeepSpeed of December 2024 and later keeps q, k and v apart on every rank, "
            "and the files do not show the version: for that one, open with rules={'*query_key_value*': {'cat': 0, "
            "'parts': 3}}, or with their three sizes for parts"
        )
        b.report(Problem("assumed-layout", line, only_one(open_ones)))
