"""The weights of nanotron: a safetensors file for each parameter and tensor-parallel rank.

Writer: nanotron/serialize/weights.py `save_weights`, serialize/utils.py `get_path`, serialize/metadata.py
`TensorMetadata` (nanotron 0.4, checkpoint version 1.2). The parameter ``a.b.weight`` is in
``model/a/b/model_weight.safetensors``, or in ``model_weight_pp-rank-P-of-PP_tp-rank-T-of-TP.safetensors`` if the
tensor-parallel ranks hold shards. The tensor in a file is named ``data``. The header's metadata of a shard has the
shape of the whole and pairs of slices: which part of the shard is which part of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...core.box import Box, Shape, fits
from ...core.dtypes import DType
from ...core.extents import Hole
from ...core.index import FileInfo
from ...core.placement import Part, Rank
from ...core.specs import Fragment, TensorSpec, whole
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.safetensors import read_safetensors
from ...io.limits import check_ranks
from ..reader import Source
from ..shared.announce import announce

FOLDER = "model"
_FILE = re.compile(
    r"model_(?P<name>.+?)"
    r"(?:_pp-rank-(?P<pp>\d{1,7})-of-(?P<pps>\d{1,7})_tp-rank-(?P<tp>\d{1,7})-of-(?P<tps>\d{1,7}))?\.safetensors"
)
_DATA = "data"
_DEEP = 64  # maximum number of folders below each other: a module's name has fewer parts
_NUMPY = re.compile(r"np\.int64\((\d{1,18})\)")  # what numpy 2 prints where the writer's size is one of numpy
_SLICE = re.compile(r"(None|\d{1,18}),(None|\d{1,18}),(?:None|1)")


@dataclass(slots=True)
class Weight:
    """A parameter. ``parts`` has, for each tensor-parallel rank, the shape of its shard and where its blocks are in the
    tensor; it is empty if all ranks hold the whole tensor."""

    shape: Shape
    dtype: DType
    parts: dict[int, tuple[Shape, tuple[Part, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class Weights:
    """What the files below ``model/`` hold. ``tp`` and ``pp`` are the degrees that their names tell."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    kinds: dict[str, Weight] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    stored: dict[str, TensorSpec] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1


def read_weights(source: Source, problems: list[Problem]) -> Weights:
    """Index the weights. Raises the first error if there are files and none of them can be read."""
    found = Weights()
    by_name: dict[str, list[tuple[str, re.Match[str]]]] = {}
    ignored = []
    for folder, name in _files(source):
        path = f"{folder}/{name}"
        match = _FILE.fullmatch(name)
        if match is None:
            ignored.append(path)
            continue
        parts = [*folder.split("/")[1:], match["name"]]
        by_name.setdefault(".".join(parts), []).append((path, match))
    if ignored:
        line = f"{len(ignored):,} files of {FOLDER}/ are no parameters and are not read: {some(ignored)}"
        problems.append(Problem("ignored-file", line, only_one(ignored)))
    announce(source.store, [path for files in by_name.values() for path, _ in files])
    errors: list[LazyckptError] = []
    for name, files in by_name.items():
        _add(source, name, files, found, problems, errors)
    if errors and not found.files:
        raise errors[0]
    return found


def _files(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (folder, name) of all files below ``model/``, in the order of the names."""
    level = [FOLDER]
    for _ in range(_DEEP):
        source.list_all(level)
        below = []
        for folder in level:
            for name, entry in sorted(source.inside(folder).items()):
                if entry.is_dir:
                    below.append(f"{folder}/{name}")
                else:
                    yield folder, name
        level = below
    if level:
        raise CorruptError(
            f"{source.where}/{FOLDER} has more than {_DEEP} levels of folders: no checkpoint of nanotron"
        )


def _add(
    source: Source,
    name: str,
    files: list[tuple[str, re.Match[str]]],
    found: Weights,
    problems: list[Problem],
    errors: list[LazyckptError],
) -> None:
    """Add a parameter from its files."""
    sharded = [(path, match) for path, match in files if match["tp"] is not None]
    ranks = max((int(match["tps"]) for _, match in sharded), default=1)
    if sharded:
        check_ranks(source.where, ranks, len(files))
        found.tp = max(found.tp, ranks)
        found.pp = max(found.pp, *(int(match["pps"]) for _, match in sharded))
        stages = {(int(m["pp"]), int(m["pps"]), int(m["tps"])) for _, m in sharded}
        if len(stages) > 1 or len(sharded) < len(files):
            line = f"the files of {name!r} are of several layouts ({some(p for p, _ in files)}): only one is read"
            problems.append(Problem("left-over-file", line, name))
            pick = max(stages)
            sharded = [(p, m) for p, m in sharded if (int(m["pp"]), int(m["pps"]), int(m["tps"])) == pick]
    fragments: list[Fragment] = []
    kind: Weight | None = None
    lost: list[tuple[str, str]] = []
    there: set[int] = set()
    for path, match in sharded or files:
        tp = int(match["tp"] or 0)
        there.add(tp)
        where = f"{source.store.root}/{path}"
        try:
            file = read_safetensors(source.store, path)
            extent = file.extents.get(_DATA)
            if extent is None:
                raise CorruptError(f"{where} has no tensor named {_DATA!r}: no parameter of nanotron")
            rank = Rank(tp=tp, pp=int(match["pp"] or 0))
            parts: tuple[Part, ...] = ()
            shape = extent.shape
            if match["tp"] is not None:
                shape, parts = _placed(where, extent.shape, file.metadata)
        except LazyckptError as e:
            errors.append(e)
            problems.append(cannot_read(path, e))
            lost.append((path, f"{path} cannot be read: the shard of tensor-parallel rank {tp} of {name!r} is lost"))
            continue
        found.files[path] = file.info
        found.stored |= {f"{path}/{key}": whole(f"{path}/{key}", e, rank) for key, e in file.extents.items()}
        if kind is None:
            kind = Weight(shape, extent.dtype)
        if (kind.shape, kind.dtype) != (shape, extent.dtype):
            raise CorruptError(
                f"{where}: {name!r} is {extent.dtype} {shape}, in another file {kind.dtype} {kind.shape}"
            )
        if parts:
            kind.parts[tp] = extent.shape, parts
        fragments.append(Fragment(extent, extent.shape, parts or None, rank=rank))
    if kind is None:
        return
    if sharded:
        example = sharded[0][0]
        for tp in sorted(set(range(ranks)) - there):
            path = re.sub(r"_tp-rank-\d+-of-", f"_tp-rank-{tp}-of-", example)
            lost.append((path, f"{path} is missing: the shard of tensor-parallel rank {tp} of {name!r}"))
            problems.append(Problem("missing-file", f"{path} is missing", path))
    # whatever the other files do not hold was in the lost one
    fragments += [Fragment(Hole(path, reason), kind.shape) for path, reason in lost]
    found.kinds[name] = kind
    found.specs[name] = TensorSpec(name, kind.shape, kind.dtype, tuple(fragments))


def _placed(where: str, local: Shape, metadata: Mapping[str, str]) -> tuple[Shape, tuple[Part, ...]]:
    """Return the shape of the whole tensor, and the blocks of a shard in it. Raises CorruptError."""
    try:
        text = _NUMPY.sub(r"\1", metadata["unsharded_shape"])
        shape = tuple(int(n) for n in text.strip("()").split(",") if n.strip())
        pairs = [pair.split("#") for pair in metadata["local_global_slices_pairs"].split(";")]
        boxes = [(_box(mine, local), _box(globe, shape)) for mine, globe in pairs]
    except (KeyError, ValueError):
        raise CorruptError(
            f"{where}: its metadata does not say where the shard is in the whole (unsharded_shape and "
            "local_global_slices_pairs): damaged, or of a nanotron before checkpoint version 1.2"
        ) from None
    if not fits(shape, 1) or len(shape) != len(local) or any(a.shape != b.shape for a, b in boxes):
        raise CorruptError(f"{where}: its slices do not fit a shard of shape {local} of a tensor of shape {shape}")
    return shape, tuple(Part(mine, globe.start) for mine, globe in boxes)


def _box(text: str, shape: Shape) -> Box:
    """Return the block that slices select, as `SlicesPair.__str__` writes them. Raises ValueError."""
    matches = [_SLICE.fullmatch(one) for one in text.split("|")]
    starts, stops = [], []
    for n, length in enumerate(shape):
        match = matches[n] if n < len(matches) else None
        if n < len(matches) and match is None:
            raise ValueError(text)
        start = 0 if match is None or match[1] == "None" else int(match[1])
        stop = length if match is None or match[2] == "None" else int(match[2])
        if not 0 <= start <= stop <= length:
            raise ValueError(text)
        starts.append(start)
        stops.append(stop)
    if len(matches) > len(shape):
        raise ValueError(text)
    return Box(tuple(starts), tuple(stops))
