"""The contents of all ranks' files by name, and the tensors that they form.

Each rank's file is indexed once and its records are dropped; of a DTensor only the offset of its array is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.box import Shape, is_run
from ...core.dtypes import DType
from ...core.extents import Extent, Hole
from ...core.specs import TensorSpec
from ...errors import Problem, only_one, some
from ...io.containers.pickle.plain import Path, Plain
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import TorchFile
from ...layouts.placements import Cut, Layout, MeshPlacement, Same
from ..dcp.chunks import in_chunks, uncovered
from ..shared.naming import MODELS
from ..shared.rank_shards import undecided
from ..torch_save import crc_of
from .fragments import MeshFragments, Team
from .records import DTensor, Records, ShardedTensor, is_dtensor

_MAX_WORLD = 1 << 20

# (root of the files' objects, rank) -> (the rank's file, the reason why it cannot be read, "" if it can)
Lost = Callable[[Path, int], tuple[str, str]]
Piece = StoredTensor | DTensor | ShardedTensor


@dataclass(slots=True)
class Held:
    """What the ranks hold under one name.

    ``root`` is the path of the files' object in the training state, ``key`` the name in that object, ``path`` the whole
    path. ``clash`` is the reason why the ranks' arrays do not form one tensor. ``tie`` is equal for two names whose
    arrays share memory on every rank (0: the arrays are empty on all ranks).
    """

    root: Path
    key: str
    path: Path
    shape: Shape
    dtype: DType
    clash: str = ""
    tie: int = 0


@dataclass(slots=True)
class Plains(Held):
    """An ordinary tensor, of which every rank has its own; all mappings are by rank."""

    extents: dict[int, Extent] = field(default_factory=dict)
    sums: dict[int, int | None] = field(default_factory=dict)
    storages: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Meshed(Held):
    """A DTensor. ``places``: rank -> coordinate; ``offsets``: rank -> offset of its array in its file, in bytes."""

    layout: Layout = field(default_factory=lambda: Layout((), ()))
    names: tuple[str, ...] = ()
    places: dict[int, Shape] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    odd: dict[int, Extent] = field(default_factory=dict)
    meshes: dict[tuple[int, ...], Shape] = field(default_factory=dict)


@dataclass(slots=True)
class Sharded(Held):
    """A ShardedTensor.

    ``listed`` maps (start, shape) of every block to the rank that has it, ``held`` that of every stored block to its
    extents by rank.
    """

    world: int | None = None
    listed: dict[tuple[Shape, Shape], int | None] = field(default_factory=dict)
    held: dict[tuple[Shape, Shape], dict[int, Extent]] = field(default_factory=dict)
    storages: dict[int, str] = field(default_factory=dict)  # of the rank's first block


class Collected:
    """The contents of all rank files.

    ``tensors`` maps raw names to what the ranks hold, ``unreadable`` names to reasons. ``ranks`` holds the ranks that
    the files list.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Held] = {}
        self.unreadable: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.ranks: set[int] = set()
        self.world = 1  # of ShardedTensors
        self.meshes: dict[tuple[str, ...], Shape] = {}
        self._shared: dict[Any, Any] = {}

    # -- collecting the files

    def add(self, rank: int, root: Path, file: TorchFile, plain: Plain, records: Records) -> bool:
        """Add one rank's file. Return False, and add nothing, if the file is from a save over other ranks.

        ``root`` is the path of the file's object in the training state. Raises CorruptError for a damaged file.
        """
        pieces: list[tuple[str, str, Path, Piece]] = []
        for key, inner in plain.paths.items():
            name = ".".join(map(str, (*root, key) if key else root))
            if key in plain.tensors:
                pieces.append((name, key, (*root, *inner), plain.tensors[key]))
                continue
            record = plain.taken[key]
            try:
                piece: Piece = records.dtensor(record) if is_dtensor(record) else records.sharded(record)
            except ValueError as e:
                what = f"{file.path}: {name!r} is a {record.module}.{record.name}, but {e}"
                self.unreadable.setdefault(_logical((*root, *inner)), what)
                continue
            pieces.append((name, key, (*root, *inner), piece))
        if any(self._contradicts(name, piece) for name, _, _, piece in pieces):
            return False
        for name, key, path, piece in pieces:
            if isinstance(piece, DTensor):
                new: Held = Meshed(
                    root, key, path, piece.shape, piece.local.dtype, layout=piece.layout, names=piece.mesh.names
                )
                if isinstance(held := self._entry(name, rank, new), Meshed):
                    self._meshed(held, rank, file, piece)
            elif isinstance(piece, ShardedTensor):
                new = Sharded(root, key, path, piece.shape, piece.dtype, world=piece.world)
                if isinstance(held := self._entry(name, rank, new), Sharded):
                    self._sharded(held, rank, file, piece)
            elif piece.storage is None:
                self.unreadable.setdefault(_logical(path), f"{file.path}: {name!r} {piece.note}")
            elif isinstance(held := self._entry(name, rank, Plains(root, key, path, piece.shape, piece.dtype)), Plains):
                held.extents[rank] = file.extent(piece, name)
                held.sums[rank] = crc_of(file.records, piece)
                held.storages[rank] = piece.storage.key
                _tie(held, rank, piece)
        return True

    def _contradicts(self, name: str, piece: Piece) -> bool:
        """Return whether lower ranks' files put some of this tensor's ranks into another mesh."""
        held = self.tensors.get(name)
        if isinstance(held, Meshed) and isinstance(piece, DTensor):
            ranks = set(piece.mesh.ranks)
            return any(set(known) != ranks and not ranks.isdisjoint(known) for known in held.meshes)
        if isinstance(held, Sharded) and isinstance(piece, ShardedTensor):
            return held.world != piece.world
        return False

    def _meshed(self, held: Meshed, rank: int, file: TorchFile, tensor: DTensor) -> None:
        layout = self._shared.setdefault(tensor.layout, tensor.layout)
        mesh, local = tensor.mesh, tensor.local
        held.layout = layout if held.layout == layout else held.layout
        self.ranks.update(mesh.ranks)
        self.meshes.setdefault(mesh.names, mesh.shape)
        held.meshes[self._shared.setdefault(mesh.ranks, mesh.ranks)] = mesh.shape
        if mesh.coordinate is None or held.clash:  # a rank outside the mesh holds nothing
            return
        expected = layout.local_shape(tensor.shape, mesh.coordinate)
        empty = 0 in expected
        if held.layout != layout:
            held.clash = f"rank {rank} holds it as {describe(layout)}, a lower one as {describe(held.layout)}"
        elif expected != local.shape and not (empty and 0 in local.shape):
            how = describe(layout, mesh.names)
            held.clash = f"rank {rank} holds an array of shape {local.shape}, its placement ({how}) says {expected}"
        elif local.storage is None and not empty:
            held.clash = f"rank {rank}'s array {local.note}"
        if held.clash:
            return
        held.places[rank] = self._shared.setdefault(mesh.coordinate, mesh.coordinate)
        if not empty:
            extent = file.extent(local, held.key)
            if extent.raw and is_run(extent.shape, extent.strides):
                held.offsets[rank] = extent.offset
            else:
                held.odd[rank] = extent
        _tie(held, rank, local)

    def _sharded(self, held: Sharded, rank: int, file: TorchFile, tensor: ShardedTensor) -> None:
        if tensor.world is not None:
            self.world = min(max(tensor.world, 1), _MAX_WORLD)
            self.ranks.update(range(self.world))
        listed = {(s.start, s.shape): s.rank for s in tensor.shards}
        if held.listed and held.listed.keys() != listed.keys():
            held.clash = held.clash or f"rank {rank}'s file lists other shards of it than a lower one's"
        if not held.listed:
            held.listed = listed
        for n, shard in enumerate(tensor.held):
            if shard.local is not None and shard.local.storage is not None:
                held.held.setdefault((shard.start, shard.shape), {})[rank] = file.extent(shard.local, held.key)
                if n == 0:
                    held.storages[rank] = shard.local.storage.key
                _tie(held, rank, shard.local)

    def _entry(self, name: str, rank: int, new: Held) -> Held | None:
        """Return what is known of the name so far; None if this rank's tensor contradicts it."""
        held = self.tensors.setdefault(name, new)
        if held is new:
            return held
        if type(held) is not type(new):
            held.clash = held.clash or f"rank {rank} holds it as another kind of tensor than a lower one"
        elif (held.shape, held.dtype) != (new.shape, new.dtype) and not isinstance(held, Plains):
            here, there = f"{new.dtype} of shape {new.shape}", f"{held.dtype} of shape {held.shape}"
            held.clash = held.clash or f"rank {rank} says it is {here}, a lower one {there}"
        else:
            return held
        return None

    # -- forming the tensors

    def spec(self, name: str, lost: Lost) -> TensorSpec:
        """Return the tensor of a name. On contradictions it has no fragments, and its rule gives the reason."""
        held = self.tensors[name]
        name = held.key
        if held.clash:
            reason = f"{held.clash}: are these the files of two saves? What each rank holds is in view.stored"
            return undecided(name, held.shape, held.dtype, reason)
        if isinstance(held, Meshed):
            return self._mesh_spec(name, held, lost)
        if isinstance(held, Sharded):
            return self._shard_spec(name, held, lost)
        assert isinstance(held, Plains)
        return self._plain_spec(name, held)

    def _mesh_spec(self, name: str, held: Meshed, lost: Lost) -> TensorSpec:
        rule = f"placed as its DTensor says: {describe(held.layout, held.names)}"
        if held.layout.partial:
            reason = (
                f"the ranks hold parts that have yet to be reduced ({held.layout.partial}): it was saved as a DTensor "
                "with a Partial placement. What each rank holds is in view.stored"
            )
            return undecided(name, held.shape, held.dtype, reason)
        places = dict(held.places)
        for ranks, shape in held.meshes.items():
            if any(rank not in places for rank in ranks):
                coordinates = np.ndindex(*shape)
                places |= {r: tuple(c) for r, c in zip(ranks, coordinates, strict=True) if r not in places}
        order = sorted(places)
        team = self._team(name, held, order, tuple(places[rank] for rank in order), lost)
        fragments = MeshFragments(
            held.shape,
            held.dtype,
            held.layout,
            team,
            np.array([held.offsets.get(r, 0) for r in order], np.int64),
            {n: held.odd[r] for n, r in enumerate(order) if r in held.odd},
        )
        one = tuple(fragments) if len(fragments) == 1 else fragments
        return TensorSpec(name, held.shape, held.dtype, one, rule=rule)

    def _team(self, name: str, held: Meshed, order: Sequence[int], coordinates: tuple[Shape, ...], lost: Lost) -> Team:
        """Return the ranks of a tensor, as one object for all tensors on the same ranks."""
        whole = len(order) == len(held.places)
        key = (held.root, tuple(order), coordinates)
        if whole and key in self._shared:
            team: Team = self._shared[key]
            return team
        paths, reasons = [], []
        for rank in order:
            path, reason = lost(held.root, rank)
            paths.append(path)
            reasons.append("" if rank in held.places else reason or f"{path} does not hold {name!r}")
        team = Team(coordinates, tuple(paths), tuple(reasons))
        return self._shared.setdefault(key if whole else team, team)  # type: ignore[no-any-return]

    def _shard_spec(self, name: str, held: Sharded, lost: Lost) -> TensorSpec:
        chunks: list[tuple[Shape, Shape, Any]] = []
        for (start, shape), rank in held.listed.items():
            extents = held.held.get((start, shape))
            if extents:
                chunks += [(start, shape, extents[r]) for r in sorted(extents)]
            elif 0 not in shape:
                path, reason = lost(held.root, rank if rank is not None else 0)
                chunks.append((start, shape, Hole(path, reason or f"{path} does not hold its shard of {name!r}")))
        gap = uncovered(held.shape, [(start, shape) for start, shape, _ in chunks])
        if gap > 0:
            line = f"{gap:,} elements of {name!r} are in no shard of any file"
            self.problems.append(Problem("missing-elements", line, name))
        return in_chunks(name, held.dtype, held.shape, chunks, "placed as its ShardedTensor says")

    def _plain_spec(self, name: str, held: Plains) -> TensorSpec:
        """Return the tensor of which every rank has a copy; the lowest rank's is read."""
        first = min(held.extents)
        lowest = held.extents[first]
        alike = [r for r in sorted(held.extents) if held.extents[r].shape == lowest.shape]
        same = [r for r in alike if held.extents[r].dtype == lowest.dtype]
        layout = self._shared.setdefault(("same", len(same)), Layout((len(same),), (Same(),)))
        coordinates = tuple((n,) for n in range(len(same)))
        team = Team(coordinates, tuple(held.extents[r].path for r in same), ("",) * len(same))
        odd = {n: e for n, r in enumerate(same) if not ((e := held.extents[r]).raw and is_run(e.shape, e.strides))}
        fragments = MeshFragments(
            lowest.shape,
            lowest.dtype,
            layout,
            self._shared.setdefault(team, team),
            np.array([held.extents[r].offset for r in same], np.int64),
            odd,
        )
        rule = f"replicated on {len(same)} ranks, the lowest's is read" if len(same) > 1 else ""
        one = tuple(fragments) if len(fragments) == 1 else fragments
        return TensorSpec(name, lowest.shape, lowest.dtype, one, rule=rule)

    def differing(self, names: Iterable[str]) -> list[Problem]:
        """Return problems of plain tensors whose copies differ, as far as shapes and the zips' checksums show."""
        differ: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            held = self.tensors.get(name)
            if not isinstance(held, Plains) or held.clash:
                continue
            first = min(held.extents)
            kind, crc = (held.extents[first].shape, held.extents[first].dtype), held.sums[first]
            other = tuple(
                rank
                for rank, extent in sorted(held.extents.items())
                if (extent.shape, extent.dtype) != kind
                or (held.sums[rank] != crc and None not in (crc, held.sums[rank]))
            )
            if other:
                differ.setdefault(other, []).append(held.key)
        return [
            Problem(
                "differing-replicas",
                f"{len(keys):,} tensors ({some(keys)}) are no shards and differ on ranks {some(ranks)}: the lowest's "
                "are read (the others: view.stored; nothing in the files says that they are shards of one)",
                only_one(keys),
            )
            for ranks, keys in differ.items()
        ]

    def ties(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names whose arrays share memory on every rank: name in the files -> the first such name."""
        first: dict[tuple[Any, ...], str] = {}
        aliases = {}
        for name in names:
            held = self.tensors.get(name)
            if held is not None and held.tie and not held.clash:
                owner = first.setdefault((held.tie, type(held), held.shape, held.dtype), held.key)
                if owner != held.key:
                    aliases[held.key] = owner
        return aliases


def _logical(path: Path) -> str:
    """Return the likely name of the weight at a path whose contents cannot be read."""
    return ".".join(map(str, path[1:] if path[0] in MODELS and len(path) > 1 else path)) if path else ""


def _tie(held: Held, rank: int, local: StoredTensor) -> None:
    if local.storage is not None and 0 not in local.shape:
        at = (local.storage.key, local.offset, local.shape, local.strides, local.conj, local.neg)
        held.tie = hash((held.tie, rank, at)) or 1


def describe(layout: Layout, names: Sequence[str] = ()) -> str:
    """Return a layout as one line of text.

    >>> describe(Layout((2, 4), (Same(), Cut(0))), ("replicate", "shard"))
    'replicate=2: Replicate(), shard=4: Shard(0)'
    """
    labels = names if len(names) == len(layout.mesh) else [f"mesh[{n}]" for n in range(len(layout.mesh))]
    order = layout.order or range(len(layout.mesh))
    return ", ".join(f"{labels[m]}={layout.mesh[m]}: {_spelled(layout.placements[m])}" for m in order)


def _spelled(placement: MeshPlacement) -> str:
    if isinstance(placement, Cut):
        if placement.split > 1:
            return f"_StridedShard({placement.dim}, split_factor={placement.split})"
        return f"Shard({placement.dim})"
    return "Replicate()" if isinstance(placement, Same) else f"Partial({placement.reduce})"
