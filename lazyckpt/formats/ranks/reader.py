"""The reader for folders of rank files: what every rank passed to torch.save.

Writers: see files.py. A rank's file is a state dict or a whole training state. Its sharded tensors are the rank's
pieces (records.py); all other tensors are the rank's copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...core.index import FileInfo, Index
from ...core.placement import Mesh
from ...core.specs import TensorSpec
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.pickle.audit import dangers
from ...io.containers.pickle.plain import Path, Plain, TensorRef
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import Opaque
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.limits import check_ranks
from ...io.storage.base import Store
from ...layouts.flat_rules import is_flat_rule
from ..dcp.reader import in_folder
from ..huggingface import load_json, tied_names
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.members import Member, together
from ..shared.naming import MODELS, sort
from ..shared.paths import at, paths, put
from ..torch_save import Indexed, RankStored
from ..torch_xla import read_ranks, world_in
from .collect import Collected, Meshed, Sharded
from .files import Series, chosen, recognised
from .flat import FLAT, Hints, Split, split
from .optim import join
from .records import Records, is_dtensor, is_sharded

_JSON = {
    "fsdp_config.json": "fsdp_config",
    "lora_train_meta.json": "lora_train_meta",  # of verl: rank and alpha of the adapter
    "config.json": "config",
    "huggingface/config.json": "config",
}
_MESH = {"tp": "tp", "pp": "pp", "ep": "ep"}  # names of mesh dimensions; all others are data-parallel
_SMALL = 1 << 20  # the most elements of a mesh tensor that is read


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    return read_series(source, chosen(source.entries, problems), problems)


def read_series(
    source: Source, found: list[Series], problems: list[Problem], more: Sequence[tuple[Path, Member]] = ()
) -> Index:
    """Return the index of series of rank files, and of other members in the same checkpoint.

    If no file can be read, raises the error of the first one.
    """
    folder = _Folder(source, found, problems)
    for series in folder.series:
        folder.read(series)
    objects = (folder.meta, *(value for value in folder.meta.values() if isinstance(value, dict)))
    world = next(filter(None, map(world_in, objects)), None)
    if world is not None:
        saves = [{rank: series.path(rank) for rank in sorted(series.files)} for series in folder.series]
        return read_ranks(source, saves, world)
    folder.report_missing()
    if folder.broken and not folder.files and not more:
        raise next(iter(folder.broken.values()))
    collected = folder.collected
    beside = [*_optimizers(source, problems), *more]
    problems += [
        Problem(
            "unused-rule",
            f"rules[{glob!r}] has no effect: the files say how tensors lie; only flat parameters take a rule, with "
            "'flat'",
        )
        for glob, rule in source.rules.items()
        if not is_flat_rule(rule)
    ]

    tensors, flats = _assembled(source, folder, beside)
    meta = folder.meta

    def named(rest: Sequence[tuple[Path, str]]) -> Mapping[str, Any]:
        for path, _ in rest:
            put(meta, path, TensorRef(folder.stored_name(path)))
        return meta

    member = Member(
        format=_format(collected),
        tensors=tensors,
        objects=list(paths(meta, 4)),
        meta=meta,
        named=named,
        files=folder.files,
        stored=RankStored(source.store.pinned(folder.files), tuple(folder.files), folder.indexed),
        aliases=collected.ties(tensors),
        problems=problems,
    )
    index = together(member.format, [((), member), *beside])
    weights = dict(index.states.get("weights", {}))
    lines = collected.problems + _unreadable(index.states)
    kept = {spec.stored_as or name for name, spec in weights.items()}
    lines += collected.differing(n for n, (_, spec) in tensors.items() if spec.name in kept and n not in flats.gone)
    ties = tied_names(meta.get("config", {}), weights, lines)
    return replace(
        index,
        aliases={**index.aliases, **ties},
        mesh=_mesh(collected),
        problems=(*index.problems, *lines),
        unreadable=collected.unreadable,
        ruled=tuple(flats.flats),
    )


Found = dict[str, tuple[Path, TensorSpec]]


def _assembled(source: Source, folder: _Folder, beside: Sequence[tuple[Path, Member]]) -> tuple[Found, Split]:
    """Return all tensors by raw name, with flat parameters split and optimizer slices joined."""
    collected = folder.collected
    hints = Hints()
    if _format(collected) == "fsdp-local":
        hints = _hints(folder, beside)
    flats = split(collected, source.rules, hints, folder.lost, folder.problems)
    slices, joined = join(collected, _param_groups(folder.meta), folder.lost, folder.problems)
    found: Found = {}
    for raw, held in collected.tensors.items():
        for key in flats.made_of.get(raw, ()):
            if key not in collected.tensors or key == raw:
                found[key] = flats.parameters[key]
        if raw in flats.parameters:
            found[raw] = flats.parameters[raw]
        elif raw not in flats.gone and raw not in joined:
            found[raw] = held.path, collected.spec(raw, folder.lost)
    return found | slices, flats


def _optimizers(source: Source, problems: list[Problem]) -> list[tuple[Path, Member]]:
    """Return the optimizers in subfolders of torch.distributed.checkpoint (accelerate's ``optimizer_0``)."""
    names = [n for n, e in sorted(source.entries.items()) if e.is_dir and n.startswith("optim")]
    found: list[tuple[Path, Member]] = []
    for name in names:
        if ".metadata" in source.inside(name):
            try:
                found.append(((name,) if found else (), in_folder(source.store, name)))
            except LazyckptError as e:
                problems.append(cannot_read(name, e))
    return found


def _hints(folder: _Folder, beside: Sequence[tuple[Path, Member]]) -> Hints:
    """Return names and shapes of parameters from an optimizer's states, if there are any."""
    collected = folder.collected
    own: Found = {
        raw: (held.path, collected.spec(raw, folder.lost))
        for raw, held in collected.tensors.items()
        if str(held.path[0]).startswith("optim")
    }
    for tensors, objects, meta in (
        (own, list(paths(folder.meta, 4)), folder.meta),
        *((m.tensors, m.objects, m.meta) for _, m in beside),
    ):
        states = sort(tensors, objects, lambda path: None).states
        shapes = {
            name: spec.shape
            for s, table in states.items()
            if s != "weights"
            for name, spec in table.items()
            if spec.shape
        }
        groups = _param_groups(meta)
        listed = groups if isinstance(groups, list) else []
        named = [g.get("params") for g in listed if isinstance(g, dict)]
        order = [n for names in named if isinstance(names, list) for n in names if isinstance(n, str)]
        if order and shapes:
            return Hints({name: shapes[name] for name in order if name in shapes}, "the optimizer's states")
    return Hints()


def _param_groups(meta: Mapping[str, Any]) -> Any:
    return next((at(meta, (top, "param_groups")) for top in meta if str(top).startswith("optim")), None)


class _Folder:
    """The rank files of a folder, which are indexed one by one."""

    def __init__(self, source: Source, series: list[Series], problems: list[Problem]) -> None:
        self.store: Store = source.store
        self.problems = problems
        self.files: dict[str, FileInfo] = {}
        self.broken: dict[str, LazyckptError] = {}
        self.meta: dict[str, Any] = {}
        self.collected = Collected()
        self.series = series
        self.roots: dict[Path, Series] = {}  # the path of a series' objects in the training state -> the series
        self.indexed = Indexed()
        self._pickles = Pickles()
        self._notes: dict[Problem, list[str]] = {}  # problem -> the files that have it
        for name, key in _JSON.items():
            where, _, last = name.rpartition("/")
            if last in (source.entries if not where else source.inside(where)):
                try:
                    self.meta[key] = load_json(self.store, name)
                except LazyckptError as e:
                    self.problems.append(cannot_read(name, e))

    def read(self, series: Series) -> None:
        """Index all files of a series, except those of another save."""
        first = True
        left: list[int] = []
        announce(self.store, [series.path(rank) for rank in sorted(series.files)])
        for rank in sorted(series.files):
            path = series.path(rank)
            try:
                file = read_torch_file(self.store, path, self._pickles)
                where = f"{self.store.root}/{path}"
                plain = Plain(file.root, where, file.pickle_size, f"{path}/", take=_sharded)
                records = Records(rank, lambda tensor, file=file: self._values(file, tensor))  # type: ignore[misc]
                if first:  # the other files have the same root
                    root = _root(series, self.series, file.root)
                    self.roots[root] = series
                if not self.collected.add(rank, root, file, plain, records):
                    left.append(rank)
                    continue
            except LazyckptError as e:
                self.broken[path] = e
                continue
            self.files[path] = file.info
            self.indexed.keep(file)
            for note in (*dangers(file.globals), *plain.notes):
                self._notes.setdefault(note, []).append(path)
            if first:
                first = False
                _add_meta(self.meta, root, plain.rest)
        for note, files in self._notes.items():
            self.problems.append(note.prefixed(some(files), only_one(files)))
        self._notes.clear()
        if left:
            others = [series.path(rank) for rank in left]
            line = (
                f"{len(left):,} files are left over from a save over other ranks and not read: {some(others)} (their "
                "meshes contradict those of the lower ranks' files)"
            )
            self.problems.append(Problem("left-over-file", line, only_one(others)))
            for rank in left:
                del series.files[rank]

    def report_missing(self) -> None:
        """Add problems for files that are missing or cannot be read."""
        for series in self.series:
            check_ranks(self.store.root, series.world or 0, len(series.files))
            count = range(series.world) if series.world is not None else sorted(self.collected.ranks)
            gone = [series.path(rank) for rank in count if rank not in series.files]
            if gone:
                line = f"{len(gone):,} of {len(count):,} rank files are missing: {some(gone)}"
                self.problems.append(Problem("missing-file", line, only_one(gone)))
            broken = [path for rank in series.files if (path := series.path(rank)) in self.broken]
            for path in broken:
                self.problems.append(cannot_read(path, self.broken[path]))

    def lost(self, root: Path, rank: int) -> tuple[str, str]:
        """Return a rank's file of the series at this root, and the reason why it cannot be read ("" if it can)."""
        name = self.roots[root].path(rank)
        if name in self.files:
            return name, ""
        return name, f"{name} cannot be read: {self.broken[name]}" if name in self.broken else f"{name} is missing"

    def stored_name(self, path: Path) -> str:
        """Return the raw name, in the lowest rank's file, of the object at a path."""
        root = max((root for root in self.roots if path[: len(root)] == root), key=len)
        series = self.roots[root]
        file = next(name for rank in sorted(series.files) if (name := series.path(rank)) in self.files)
        return f"{file}/{'.'.join(map(str, path[len(root) :]))}"

    def _values(self, file: TorchFile, tensor: StoredTensor) -> Sequence[int]:
        """Read the numbers of a mesh, which older files hold only as a tensor."""
        extent = file.extent(tensor, "a mesh")
        size = prod(extent.shape)
        if size > _SMALL or not extent.raw or extent.dtype.is_floating_point or extent.dtype.is_complex:
            raise CorruptError(f"{file.path}: a mesh of shape {extent.shape} and dtype {extent.dtype}")
        data = bytes(self.store.read(extent.path, extent.offset, size * extent.dtype.itemsize))
        step = extent.dtype.itemsize
        return [int.from_bytes(data[n : n + step], "little", signed=True) for n in range(0, len(data), step)]


def _sharded(record: Opaque) -> bool:
    return is_dtensor(record) or is_sharded(record)


def _root(series: Series, all_series: Sequence[Series], value: Any) -> Path:
    """Return the path of a series' objects in a training state, as if one file held the whole state."""
    models = [s for s in all_series if s.is_model]
    if series not in models:
        alone = sum(s.item.startswith("optim") for s in all_series) == 1
        return ("optim",) if series.item.startswith("optim") and alone else (series.item,)
    if len(models) > 1:
        return (series.item or "rank",)
    inside = isinstance(value, dict) and any(isinstance(value.get(key), dict) for key in MODELS)
    return () if inside or len(all_series) == 1 else ("model",)


def _add_meta(meta: dict[str, Any], root: Path, rest: Any) -> None:
    if isinstance(rest, dict):
        rest.pop("_metadata", None)  # the versions of modules, which every state dict has
    if not root:
        meta |= rest if isinstance(rest, dict) else {"": rest}
    elif rest not in ({}, None):
        meta[str(root[0])] = rest


def _unreadable(states: Mapping[str, Mapping[str, TensorSpec]]) -> list[Problem]:
    """Return problems, by reason, for the tensors that have no data."""
    reasons: dict[str, list[str]] = {}
    for table in states.values():
        for name, spec in table.items():
            if spec.numel and spec.expr is None and not len(spec.fragments):
                reasons.setdefault(spec.rule, []).append(name)
    return [
        Problem(
            "unmerged-tensor",
            f"{len(names):,} tensors cannot be read as a whole ({some(names)}): {reason}",
            only_one(names),
        )
        for reason, names in reasons.items()
    ]


def _mesh(collected: Collected) -> Mesh:
    """Return the parallel degrees, from the dimension names of the largest mesh."""
    names, shape = max(collected.meshes.items(), key=lambda item: (prod(item[1]), len(item[1])), default=((), ()))
    degrees = {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    for n, size in enumerate(shape):
        degrees[_MESH.get(names[n], "dp") if len(names) == len(shape) else "dp"] *= size
    degrees["dp"] *= collected.world  # ShardedTensors record only the world size
    return Mesh(**degrees)


def _format(collected: Collected) -> str:
    kinds = collected.tensors.values()
    if any(isinstance(h, Sharded) and str(h.path[-1]).endswith(FLAT) for h in kinds):
        return "fsdp-local"
    if any(isinstance(h, Sharded) for h in kinds):
        return "fsdp-sharded"
    return "fsdp-dtensor" if any(isinstance(h, Meshed) for h in kinds) else "rank-files"


def _recognises(source: Source) -> bool:
    return not source.path and recognised(source.entries)


READER = Reader(
    "rank-files",
    "folders of rank files of torch.save (model_world_size_8_rank_0.pt, ..._rank0.bin)",
    _recognises,
    _read,
)
