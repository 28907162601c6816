"""The state that the modules of the DeepSpeed reader share: the rank files read, and the parts of the Index so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.extents import Extent, Hole
from ...core.index import FileInfo
from ...core.placement import Rank
from ...core.specs import Fragment, TensorSpec
from ...errors import CorruptError, FormatError, LazyckptError, Problem
from ...io.containers.pickle.plain import Parts, Plain
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import short
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.storage.base import Store
from ...layouts.merge import Source as RuleSource
from ...layouts.merge import decide
from ..shared.rank_shards import Merging, Shard, Shards, missing, undecided
from ..torch_save import Indexed, bloat, used_bytes
from .files import RankFiles, of_writers

Shapes = dict[str, Shape]


_RANKS = 4096  # limit on the ranks that may be claimed, or this many per file where that is more:
_RANKS_A_FILE = 64
# Key in place of a tensor-parallel rank for a tensor that has no counterpart on other ranks and is not merged.
ALONE = -1


class Stage(NamedTuple):
    """The model states of one model-parallel rank. ``model``: the saved dict; ``groups``: shapes in its flat groups."""

    rank: Rank
    file: TorchFile
    model: dict[Any, Any]
    groups: list[Shapes]


class Unnamed(NamedTuple):
    """An optimizer whose fp32 copies may name the parameters that order and shapes do not. ``total``: number of its
    parameters; ``numbers``: keys of those without a name; ``names``: the weights that these may be (empty: any);
    ``ways``: key -> name, for each order that fits."""

    where: str
    total: int
    numbers: list[str]
    names: list[str]
    ways: list[dict[str, str]]


@dataclass(slots=True)
class Building:
    """The state of building an Index. ``ranks``: number of model-parallel ranks, ``tp`` of them tensor-parallel in each
    stage; ``world``: number of ranks over which ZeRO partitions (all data-parallel ranks, except with MiCS);
    ``placements``: expert placements of AutoEP (see `autoep`); ``sources``: sources of merge rules, in order of
    precedence; ``unnamed``: optimizers whose parameters only their values can name;
    ``lost``: mp rank -> path of its lost model states; ``gone``: flat groups for which no rank has a file."""

    store: Store
    ranks: int = 1
    tp: int = 1
    world: int = 1
    placements: dict[str, list[list[int]]] = field(default_factory=dict)
    sources: tuple[RuleSource, ...] = ()
    files: dict[str, FileInfo] = field(default_factory=dict)
    indexed: Indexed = field(default_factory=Indexed)
    lost: dict[int, str] = field(default_factory=dict)
    gone: list[tuple[Rank, Shapes, Hole]] = field(default_factory=list)
    problems: dict[Problem, None] = field(default_factory=dict)  # in order, each once
    unreadable: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    unnamed: list[Unnamed] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)  # parameter that a file only numbers -> how its name is known
    weight_shapes: dict[str, dict[int, Shape]] = field(default_factory=dict)  # name -> tensor-parallel rank -> shape
    merging: Merging = field(init=False)
    _read: dict[str, TorchFile | LazyckptError] = field(default_factory=dict)
    _infos: dict[str, FileInfo] = field(default_factory=dict)
    _pickles: Pickles = field(default_factory=Pickles)
    _parts: Parts = field(default_factory=dict)
    _used: tuple[Any, dict[str, int]] = (None, {})
    _lean: TorchFile | None = None  # the last file, if its tensors need most of its bytes

    def __post_init__(self) -> None:
        self.merging = Merging(lambda name, shapes: decide(name, shapes, self.sources), self._absent)

    def file(self, path: str, keep: bool = True) -> TorchFile:
        """Index a rank file, once. ``keep``: whether to cache it for further calls (a thousand files take much memory).
        Raises the errors of `read_torch_file`."""
        found = self._read.get(path)
        if found is None:
            try:
                found = read_torch_file(self.store, path, self._pickles)
            except LazyckptError as e:
                found = of_writers(path, e)
            if keep:
                self._read[path] = found
        if isinstance(found, LazyckptError):
            raise found
        if path not in self.files:
            self.files[path] = found.info
            self.indexed.keep(found)
            if self._lean is None or not found.like(self._lean):  # else it holds and needs as many bytes
                if self._used[0] is not found.root:  # otherwise its pickle equals the previous file's
                    self._used = found.root, used_bytes(Plain(found.root, path, found.pickle_size, parts=self._parts))
                problems = bloat(path, found, self._used[1])
                self._lean = None if problems else found
                for problem in problems:
                    self.report(problem)
        return found

    def info(self, path: str) -> FileInfo:
        """Return the FileInfo of a rank file without reading its contents. Raises MissingFileError."""
        if path not in self._infos:
            self._infos[path] = self.files.get(path) or self.store.stat(path)
        return self._infos[path]

    def report(self, problem: Problem) -> None:
        self.problems[problem] = None

    def add(self, shards: Shards) -> None:
        """Merge the shards of one pipeline stage. A name that an earlier stage had keeps that stage's tensor."""
        for name, by_rank in shards.get("weights", {}).items():
            self.weight_shapes.setdefault(name, {t: r.shape for t, r in by_rank.items()})
        for state, names in shards.items():
            specs = self.states.setdefault(state, {})
            for name, by_rank in names.items():
                if name not in specs:
                    spec = self._merged(state, name, by_rank)
                    rule = self.named.get(name, "") if state != "weights" else ""
                    specs[name] = replace(spec, rule=rule) if rule and not spec.rule else spec
                else:  # shared modules: copies can differ, DeepSpeed does not keep all attributes in sync
                    line = f"several pipeline stages hold {name!r}: the first stage's is read (the others: view.stored)"
                    self.report(Problem("duplicate-tensor", line, name))

    def _merged(self, state: str, name: str, by_rank: dict[int, Shard]) -> TensorSpec:
        first = by_rank[min(by_rank)]
        weights = self.weight_shapes.get(name, {})
        reshaped = any(weights.get(t, r.shape) != r.shape for t, r in by_rank.items())
        if ALONE in by_rank or first.shape == () or (self.tp == 1 and reshaped):  # (scalars are equal on all ranks)
            return TensorSpec(name, first.shape, first.dtype, first.fragments)
        if not reshaped:
            return self.merging.whole(name, by_rank, self.tp)
        reason = (
            f"{state!r} has another shape than the weights: how its shards on tensor-parallel ranks form "
            "the whole tensor is not known; read each shard in view.stored"
        )
        self.report(Problem("unmerged-tensor", f"the optimizer's state {reason}", name))
        return undecided(name, first.shape, first.dtype, f"it cannot be put together: {reason}")

    def _absent(self, name: str, tp: int, like: Shard) -> Shard:
        """Return the shard of a tensor-parallel rank whose files do not list the tensor: an empty one if its weight has
        no elements (no optimizer lists such a shard); otherwise the rank's files are lost, and the shard is a hole."""
        weight = self.weight_shapes.get(name, {}).get(tp)
        if weight is not None and prod(weight) == 0:
            return Shard(weight, like.dtype, ())
        paths = [path for mp, path in self.lost.items() if mp % self.tp == tp]
        hole = Hole(paths[0] if paths else "", f"tensor-parallel rank {tp} is lost: {', '.join(paths)}")
        return missing(hole, like.shape, like.dtype)

    def report_unmerged(self) -> None:
        """Report the tensors whose shards cannot be merged."""
        for name, reason in self.merging.unmerged.items():
            self.report(Problem("unmerged-tensor", f"{name!r} cannot be put together: {reason}", name))


def check_ranks(count: int, what: str, files: int, where: str) -> None:
    """Raise CorruptError if ``count`` ranks (``what``) are implausible for ``files`` files. The model states of
    ``where`` or a file's name claim the number. Lost files are reported rank by rank, and nothing could be read of a
    million ranks with two files."""
    if count > max(_RANKS, _RANKS_A_FILE * files):
        raise CorruptError(
            f"{where or 'the model states'}: {short(count)} {what} are claimed, {files:,} files are here: most "
            "of the checkpoint is missing, or the number is wrong"
        )


def table(file: TorchFile, value: Any) -> dict[Any, Any]:
    """Return a value of a rank file that has to be a dict; {} for None. Raises CorruptError for other types, and
    FormatError for the placeholders of Nebula (runtime/checkpoint_engine/nebula_checkpoint_engine.py `save`)."""
    if value is None:
        return {}
    if value is file.root and value == "":
        raise FormatError(
            f"{file.path} is a placeholder of DeepSpeed's Nebula engine, which keeps the data in its own storage "
            "(persistent_storage_path in the configuration): load them there with torch_nebula and save them again"
        )
    if not isinstance(value, dict):
        raise CorruptError(f"{file.path}: found a {type(value).__name__} where DeepSpeed writes a dict")
    return value


def shapes_of(file: TorchFile, value: Any) -> Shapes:
    """Return a saved table of parameter names and shapes. Raises CorruptError if it is malformed."""
    shapes = {}
    for name, shape in table(file, value).items():
        if not isinstance(name, str) or not isinstance(shape, tuple):
            raise CorruptError(f"{file.path}: a table of shapes has the key {str(name)[:80]!r}")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or prod(shape) >= 1 << 62 or len(shape) > 64:
            raise CorruptError(f"{file.path}: the shape of {name[:80]!r} is {short(shape)}")
        shapes[name] = tuple(shape)
    return shapes


def local(file: TorchFile, name: str, tensor: StoredTensor, rank: Rank) -> Shard:
    """Return the shard for a tensor of a rank file. Raises CorruptError if the file cannot hold it."""
    extent: Extent = file.extent(tensor, name)
    return Shard(extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))


def tensors_in(file: TorchFile, value: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict in a rank file, by name."""
    return {k: t for k, t in table(file, value).items() if isinstance(k, str) and isinstance(t, StoredTensor)}


def buffer_names(model: Mapping[Any, Any]) -> set[str]:
    """Return the names of the persistent buffers of a rank's module."""
    names = model.get("buffer_names")
    return {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()


# -- Two saves under one tag whose rank files have different names, so that the later save did not overwrite the
# earlier one.


class _Save(NamedTuple):
    sharded: bool  # ZeRO-3
    prefix: str | None  # of its optimizer files; None if it has no such files
    written: int  # modification time in nanoseconds


def keep_one_save(b: Building, files: RankFiles) -> None:
    """Keep the files of one save, and report the others."""
    if not (files.model and files.zero_model) and len(files.by_prefix) < 2:
        return
    saves = [s for sharded in (False, True) if (s := _save(b, files, sharded)) is not None]
    if not saves:
        return  # nothing can be read: the reader reports why
    kept = max(saves, key=lambda s: (s.prefix is not None or not files.optim, s.written))
    dropped: list[str] = []
    if kept.sharded:
        dropped += files.model.values()
        files.model = {}
    else:
        dropped += files.zero_model.values()
        files.zero_model = {}
    if kept.prefix is not None:
        dropped += [p for prefix, paths in files.by_prefix.items() if prefix != kept.prefix for p in paths.values()]
        files.optim = files.by_prefix[kept.prefix]
    for path in dropped:
        line = f"{path} belongs to another save under the same tag (another dtype or ZeRO stage): left over, not used"
        b.report(Problem("left-over-file", line, path))


def _save(b: Building, files: RankFiles, sharded: bool) -> _Save | None:
    """Return the save that has model states of this kind; None if they cannot be read."""
    path = files.zero_model.get((0, 0)) if sharded else files.model.get(0)
    if path is None:
        return None
    try:
        file = b.file(path)
        config = table(file, file.root).get("ds_config")
    except LazyckptError:
        return None
    bf16 = config.get("bf16", config.get("bfloat16")) if isinstance(config, dict) else None
    wanted = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""
    order = sorted(files.by_prefix, key=lambda prefix: prefix != wanted)
    prefix = next((p for p in order if _sharded(b, next(iter(files.by_prefix[p].values()))) is sharded), None)
    return _Save(sharded, prefix, file.info.mtime_ns)


def _sharded(b: Building, path: str) -> bool | None:
    """Return whether an optimizer file is from ZeRO-3 (stage3.py `_rigid_state_dict`); None if it cannot be read."""
    try:
        file = b.file(path)
        state: dict[Any, Any] = table(file, table(file, file.root).get("optimizer_state_dict"))
    except LazyckptError:
        return None
    return "fp32_flat_groups" in state
