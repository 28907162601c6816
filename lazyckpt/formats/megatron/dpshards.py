"""The distributed optimizer until May 2023, whose data-parallel ranks each saved their part of the states.

Writer: Megatron-LM before commit 49e4bd68: megatron/checkpointing.py `get_checkpoint_names`
(``mp_rank_TT[_PPP]/model_rng.pt`` and, for every data-parallel rank, ``mp_rank_TT[_PPP]_DDD/optim.pt``),
megatron/optimizer/distrib_optimizer.py `build_model_gbuf_range`, `build_optimizer_group_ranges`,
`build_model_and_main_param_groups` and `state_dict`, megatron/model/distributed.py `DistributedDataParallel`.

The parameters of a chunk lie one behind the other in a buffer, the last one first, and every rank has an equal part of
it. A state in a file is the flat part of one parameter. No name is saved; the number and the sizes of these parts have
to be those that the layout gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.dtypes import F32, DType
from ...core.extents import Hole
from ...core.flat import Joined
from ...core.specs import Fragment
from ...errors import LazyckptError, Problem, cannot_read
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.limits import check_ranks
from ...io.storage.base import Store
from ...layouts.megatron import flag, is_buffer, number
from ..shared.announce import announce
from ..shared.rank_shards import Shard
from .gather import Gathered
from .optimizer import groups_of
from .ranks import RankFile
from .weights import Namer, add_state

_MASTERS = "shard_fp32_from_float16_groups"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``lo`` to ``hi`` of a parameter, which a data-parallel rank has."""

    key: str
    lo: int
    hi: int


_Held = dict[tuple[str, str], list[tuple[_Piece, Fragment, DType]]]  # (state, parameter) -> its parts


def add_dp_shards(g: Gathered, namer: Namer, store: Store) -> None:
    """Add the states in the files of data-parallel ranks."""
    pickles = Pickles()
    ranks = [rank for rank in g.grid.ranks.values() if rank.folder.shards]
    announce(store, [path for rank in ranks for path in rank.folder.shards.values()])
    for rank in ranks:
        files: dict[int, TorchFile] = {}
        for dp, path in rank.folder.shards.items():
            try:
                files[dp] = file = read_torch_file(store, path, pickles)
            except LazyckptError as e:
                g.grid.report(cannot_read(path, e, ", the optimizer's states in it are lost"))
                continue
            g.grid.files[path] = file.info
            g.grid.indexed.keep(file)
        try:
            _add(g, namer, rank, files)
        except (ValueError, LazyckptError) as e:
            where = rank.folder.model.rpartition("/")[0]
            line = f"{where}: where the states in its {len(rank.folder.shards)} optim.pt belong is not known: {e}"
            g.grid.report(Problem("undecided-layout", f"{line}: see view.stored", where))


def _add(g: Gathered, namer: Namer, rank: RankFile, files: Mapping[int, TorchFile]) -> None:
    """Add the states of one model-parallel rank. Raises ValueError if they do not have the expected sizes."""
    count = number(g.grid.args, "data_parallel_size") or 1 + max(rank.folder.shards)
    if any(dp >= count for dp in rank.folder.shards):
        raise ValueError(f"there are files of more than {count} data-parallel ranks")
    check_ranks(rank.folder.model, count, len(rank.folder.shards))
    table = {
        f"{chunk}.{own}": (tensors[own], name)
        for chunk, tensors in enumerate(rank.chunks)
        for own, name in namer.names(rank, chunk)
        if not is_buffer(own)
    }
    held: _Held = {}
    scalars: list[tuple[RankFile, str, str, StoredTensor]] = []
    layout = _layout(g, table, count)
    where = f"{rank.folder.model.rpartition('/')[0]}_%03d/optim.pt"
    lost = [dp for dp in range(count) if dp not in files]
    for dp in lost:
        if dp not in rank.folder.shards:
            line = f"{where % dp} is missing: the optimizer's states in it are lost"
            g.grid.report(Problem("missing-file", line, where % dp))
    for dp, file in files.items():
        for piece, states in _states(file, layout[dp], table):
            for state, value in states.items():
                if value.shape == ():
                    scalars.append((RankFile(rank.rank, rank.folder, file, {}, rank.chunks), state, piece.key, value))
                    continue
                extent = file.extent(value, piece.key)
                part = Fragment(extent, extent.shape, rank=rank.rank)
                held.setdefault((state, piece.key), []).append((piece, part, extent.dtype))
    for (state, key), parts in held.items():
        tensor, name = table[key]
        pieces = [(piece.lo, piece.hi - piece.lo, (part,)) for piece, part, _ in parts]
        for dp in lost:
            for piece in layout[dp]:
                if piece.key == key:
                    hole = Fragment(
                        Hole(where % dp, f"{where % dp} is missing, or cannot be read"), (piece.hi - piece.lo,)
                    )
                    pieces.append((piece.lo, piece.hi - piece.lo, (hole,)))
        rule = f"joined from the parts of {len(pieces)} data-parallel ranks, as their sizes confirm"
        shard = Shard(tensor.shape, parts[0][2], Joined(tensor.shape, tuple(sorted(pieces, key=lambda p: p[0]))), rule)
        g.add_shard(state, name, shard, rank.rank, files[min(files)].path)
    for holder, state, key, value in scalars:
        add_state(g, holder, state, table[key][1], value, 0)


def _layout(g: Gathered, table: Mapping[str, tuple[StoredTensor, str]], count: int) -> list[list[_Piece]]:
    """Return the parts of parameters that each data-parallel rank has, in the model's order."""
    single = flag(g.grid.args, "accumulate_allreduce_grads_in_fp32") is True
    buffers: dict[tuple[str, Any], list[str]] = {}
    for key, (tensor, _) in table.items():
        buffers.setdefault((key.partition(".")[0], None if single else tensor.dtype), []).append(key)
    found: list[list[_Piece]] = [[] for _ in range(count)]
    for keys in buffers.values():
        sizes = {key: prod(table[key][0].shape) for key in keys}
        total = at = sum(sizes.values())
        width = -(-total // count)
        for key in keys:
            at -= sizes[key]
            for dp in range(count):
                lo, hi = max(at, dp * width), min(at + sizes[key], total, (dp + 1) * width)
                if lo < hi:
                    found[dp].append(_Piece(key, lo - at, hi - at))
    return found


def _states(
    file: TorchFile, pieces: list[_Piece], table: Mapping[str, tuple[StoredTensor, str]]
) -> list[tuple[_Piece, dict[str, StoredTensor]]]:
    """Return the states of each part in a file. Raises ValueError if their sizes are not those of the parts."""
    optimizer = file.root.get("optimizer") if isinstance(file.root, dict) else None
    inner = optimizer.get("optimizer") if isinstance(optimizer, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(states, dict):
        raise ValueError(f"{file.path} holds no states of an optimizer")
    groups = groups_of(optimizer)
    masters = optimizer.get(_MASTERS)
    masters = masters if isinstance(masters, list) and len(masters) == len(groups) else [[] for _ in groups]
    decays = [group.get("wd_mult", 1.0) != 0.0 for group in groups]
    if len(set(decays)) < len(decays):
        raise ValueError(f"{file.path} has several groups that differ in more than weight decay")
    found: list[tuple[_Piece, dict[str, StoredTensor]]] = []
    for group, decay, mains in zip(groups, decays, masters, strict=True):
        own = [piece for piece in pieces if _decays(piece.key, table) == decay]
        half = [piece for piece in own if table[piece.key][0].dtype is not F32]
        own = [*(piece for piece in own if piece not in half), *half]
        ids = group.get("params")
        if not isinstance(ids, list) or len(ids) != len(own) or len(mains) != len(half):
            raise ValueError(f"{file.path} has {len(ids or ())} parameters in a group, {len(own)} are expected")
        for n, (piece, key) in enumerate(zip(own, ids, strict=True)):
            items = states[key].items() if isinstance(states.get(key), dict) else ()
            tensors = {state: t for state, t in items if isinstance(state, str) and isinstance(t, StoredTensor)}
            if n >= len(own) - len(half):
                main = mains[n - len(own) + len(half)]
                if not isinstance(main, StoredTensor):
                    raise ValueError(f"{file.path} has a {type(main).__name__} among its fp32 copies")
                tensors["fp32"] = main
            if any(t.shape not in ((), (piece.hi - piece.lo,)) for t in tensors.values()):
                raise ValueError(f"{file.path} has parts of other sizes than those of {piece.key.partition('.')[2]!r}")
            found.append((piece, tensors))
    if len(found) != len(pieces):
        raise ValueError(f"{file.path} has parts of {len(found)} parameters, {len(pieces)} are expected")
    return found


def _decays(key: str, table: Mapping[str, tuple[StoredTensor, str]]) -> bool:
    return len(table[key][0].shape) > 1 and not key.endswith(".bias")
