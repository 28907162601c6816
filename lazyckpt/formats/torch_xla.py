"""Folders of torch_xla's fully sharded data parallelism: a file of torch.save for each rank, with ``shard_metadata``.

Writer: what torch_xla/distributed/fsdp/README.md and `XlaFullyShardedDataParallel` ask users to save (pytorch/xla,
commit 41398bfff3; also transformers/trainer.py `_save_tpu`): ``{"model": ..., "shard_metadata":
model.get_shard_metadata(), "optimizer": ...}`` in ``PREFIX_rank-00000000-of-00000004.pth`` or
``rank0-of-4-pytorch_model.bin``. Under other names of ranks (``epoch_1_rank_0.ckpt``) the reader of rank files
finds them.

Each parameter is flattened, padded and cut into one equal piece for each rank (`_get_shard`), or padded and cut along
dimension 0 (``shard_param_on_dim_0``). With ``flatten_parameters``, the parameters of a module are one flat parameter
before that. torch_xla/distributed/fsdp/state_dict_utils.py `consolidate_sharded_state_dicts` is the inverse. Buffers
are those of rank 0. The optimizer numbers the pieces, and its states are cut like them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ..core.box import Shape
from ..core.dtypes import DType
from ..core.expr import cast
from ..core.extents import Hole
from ..core.flat import interval, joined
from ..core.index import FileInfo, Index
from ..core.placement import Mesh
from ..core.specs import Fragment, TensorSpec
from ..errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, only_one, some
from ..io.containers.pickle.plain import Path, Plain
from ..io.containers.torch_file import read_torch_file
from ..io.limits import check_ranks
from . import huggingface
from .reader import Reader, Source
from .shared.announce import announce
from .shared.members import Member, references_in, together
from .shared.paths import paths
from .torch_save import specs_of, warnings

_NAME = re.compile(r"(?P<before>.*?)rank-?(?P<rank>\d{1,8})-of-(?P<world>\d{1,8})(?P<after>.*)\.(?:pth|pt|bin|ckpt)")
_MODEL, _OPTIMIZER = "-pytorch_model", "-optimizer"  # of transformers: the model's files and those beside them
_SHARD, _FLAT = "_fsdp_shard", "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")


def _recognises(source: Source) -> bool:
    if source.path:
        return False
    names = [m for name in source.entries if (m := _NAME.fullmatch(name)) and m["after"] != _OPTIMIZER]
    if not names or not huggingface.READER.recognises(source):
        return bool(names)
    # beside other weights, such a name alone does not tell
    return any(m["after"] == _MODEL for m in names) or _is_cut(source, min(m.string for m in names))


def _is_cut(source: Source, path: str) -> bool:
    """Return whether a file has pieces, or cannot be read, which the reader reports."""
    try:
        root = read_torch_file(source.store, path).root
    except LazyckptError:
        return True
    return isinstance(root, dict) and "shard_metadata" in root


class Own(NamedTuple):
    """A parameter in a piece: its name, its shape, and its first element in what all pieces make."""

    name: str
    shape: Shape
    first: int


@dataclass(slots=True)
class File:
    """What one rank's file holds: its tensors by path, the rest, and the table of how they are cut."""

    path: str
    rank: int
    tensors: dict[Path, TensorSpec]
    rest: dict[Any, Any]
    cuts: Mapping[str, Any]


def _read(source: Source) -> Index:
    problems: list[Problem] = []
    series, world = _chosen(source, problems)
    return _index(source, series, world, problems)


def world_in(meta: Mapping[Any, Any]) -> int | None:
    """Return the number of ranks that the objects of a rank's file name, if torch_xla's FSDP wrote it, else None."""
    cuts = meta.get("shard_metadata")
    world = cuts.get("world_size") if isinstance(cuts, dict) and "shard_info" in cuts else None
    return world if type(world) is int and world > 0 else None


def read_ranks(source: Source, saves: Sequence[dict[int, str]], world: int) -> Index:
    """Index files under other names, by rank, which `world_in` has found to be of torch_xla. Raises as the reader
    does."""
    if len(saves) != 1:
        raise _several(source, [next(iter(names.values())) for names in saves])
    return _index(source, list(saves), world, [])


def _several(source: Source, names: Sequence[str]) -> FormatError:
    return FormatError(
        f"{source.where} has the rank files of {len(names):,} saves ({some(names)}): put those of one save into a "
        "folder of their own"
    )


def _index(source: Source, series: list[dict[int, str]], world: int, problems: list[Problem]) -> Index:
    check_ranks(source.where, world, sum(map(len, series)))
    announce(source.store, [name for names in series for name in names.values()])
    files: dict[str, FileInfo] = {}
    stored: dict[str, TensorSpec] = {}
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    meta: dict[Any, Any] = {}
    order: list[tuple[Shape, list[Own]]] = []
    tops: set[Any] = set()
    for names in series:
        ranks = _ranks(source, names, world, files, stored, problems)
        first = _with_model(ranks, source.where)
        if not tops.isdisjoint(has := {path[0] for path in first.tensors}):
            line = (
                f"{first.path} and the files of other ranks like it have a second {some(sorted(map(str, tops & has)))}:"
                " its tensors are in view.stored only; move these files to a folder of their own"
            )
            problems.append(Problem("other-checkpoint", line, first.path))
            continue
        tops |= has
        meta |= {key: value for key, value in first.rest.items() if key != "shard_metadata"}
        lost = _lost(names, ranks, world)
        for rank, path in lost.items():
            if path not in names.values():  # else the error of reading it is a problem already
                problems.append(Problem("missing-file", f"{path} is missing: the pieces of rank {rank} are lost", path))
        for place, spec in _assembled(first, ranks, lost, order, problems):
            tensors["/".join(map(str, place))] = place, spec

    member = Member(
        format="torch-xla",
        tensors=tensors,
        objects=list(paths(meta, 4)),
        meta=meta,
        named=references_in(meta),
        files=files,
        stored=stored,
        problems=problems,
    )
    return replace(together("torch-xla", [((), member)], ["model"]), mesh=Mesh(dp=world))


def _chosen(source: Source, problems: list[Problem]) -> tuple[list[dict[int, str]], int]:
    """Return the files of one save, by rank, a table for each kind of file; and the number of ranks.

    Raises FormatError if the folder has several saves.
    """
    saves: dict[tuple[str, int], dict[str, dict[int, str]]] = {}
    for name, entry in sorted(source.entries.items()):
        match = _NAME.fullmatch(name)
        if match is not None and not entry.is_dir:
            kinds = saves.setdefault((match["before"], int(match["world"])), {})
            kinds.setdefault(match["after"], {})[int(match["rank"])] = name
    whole = [save for save, kinds in saves.items() if all(len(names) == save[1] for names in kinds.values())]
    found = whole if len(whole) == 1 else list(saves)
    if len(found) != 1:
        raise _several(source, [next(iter(next(iter(kinds.values())).values())) for kinds in saves.values()])
    others = [
        n for save, kinds in saves.items() if save != found[0] for names in kinds.values() for n in names.values()
    ]
    if others:
        line = f"{len(others):,} files are left over from another save and not read: {some(others)}"
        problems.append(Problem("left-over-file", line, only_one(others)))
    kinds = saves[found[0]]
    return [kinds[after] for after in sorted(kinds, key=lambda after: (after == _OPTIMIZER, after))], found[0][1]


def _ranks(
    source: Source,
    names: Mapping[int, str],
    world: int,
    files: dict[str, FileInfo],
    stored: dict[str, TensorSpec],
    problems: list[Problem],
) -> dict[int, File]:
    """Read the files of one kind; return them by the ranks that they name themselves, as torch_xla sorts them.

    Raises the first error if none can be read, and CorruptError if two files are of the same rank.
    """
    found: dict[int, File] = {}
    errors: list[LazyckptError] = []
    for number, path in sorted(names.items()):
        try:
            file = _file(source, path, world, files, stored, problems)
        except LazyckptError as e:
            errors.append(e)
            problems.append(cannot_read(path, e, ", nor the pieces of its rank"))
            continue
        if file.rank in found:
            raise CorruptError(
                f"{source.where}: {path} and {found[file.rank].path} both say that they are of rank {file.rank}: one "
                "is a copy of another file"
            )
        if file.rank != number:
            line = f"{path} is of rank {file.rank} by its own metadata, which is believed"
            problems.append(Problem("misnamed-file", line, path))
        found[file.rank] = file
    if not found:
        raise errors[0]
    return found


def _with_model(ranks: Mapping[int, File], where: str) -> File:
    """Return the file of the first rank. Raises FormatError if it has pieces of parameters elsewhere than in its
    model: their names in optimizers would not be known."""
    first = ranks[min(ranks)]
    for path in first.tensors:
        if path[0] != "model" and any(part.startswith(_SHARD) for part in ".".join(map(str, path)).split(".")):
            raise FormatError(
                f"{where}/{first.path} has the pieces of its parameters in {str(path[0])!r:.80}; torch_xla and this "
                "library expect them in 'model': save the files again with that key"
            )
    return first


def _file(
    source: Source,
    path: str,
    world: int,
    files: dict[str, FileInfo],
    stored: dict[str, TensorSpec],
    problems: list[Problem],
) -> File:
    file = read_torch_file(source.store, path)
    plain = Plain(file.root, f"{source.where}/{path}", file.pickle_size, f"{path}/")
    rest = plain.rest if isinstance(plain.rest, dict) else {}
    cuts = rest.get("shard_metadata")
    if not isinstance(cuts, dict):
        raise FormatError(
            f"{source.where}/{path} has the name of a rank file of torch_xla, but no 'shard_metadata' that say how its "
            "tensors are cut: open the file by its own path"
        )
    rank = cuts.get("rank")
    if type(rank) is not int or not 0 <= rank < world or cuts.get("world_size") != world:
        raise CorruptError(
            f"{source.where}/{path}: its metadata say rank {rank!r:.20} of {cuts.get('world_size')!r:.20}, its name or "
            f"another file that there are {world}: it is of another save, or damaged"
        )
    specs = specs_of(file, plain, f"{path}/")
    files[path] = file.info
    stored |= dict(specs)
    inner = set(plain.inner)
    tensors = {where: specs[f"{path}/{key}"] for key, where in plain.paths.items() if key not in inner}
    problems += warnings(path, file, plain)
    return File(path, rank, tensors, rest, cuts)


def _lost(names: Mapping[int, str], ranks: Mapping[int, File], world: int) -> dict[int, str]:
    """Return the path of the file that is missing or unreadable, for each rank without one."""
    read = {file.path for file in ranks.values()}
    gone = [path for path in names.values() if path not in read]
    like = next(iter(names.values()))
    lost = [rank for rank in range(world) if rank not in ranks]
    given = dict(zip(lost, gone, strict=False))
    return {rank: names.get(rank) or given.get(rank) or f"the file of rank {rank} ({like}, ...)" for rank in lost}


def _assembled(
    first: File,
    ranks: Mapping[int, File],
    lost: Mapping[int, str],
    order: list[tuple[Shape, list[Own]]],
    problems: list[Problem],
) -> Iterator[tuple[Path, TensorSpec]]:
    """Yield all tensors of files of one kind as whole ones, with their paths in an unsharded training state. The pieces
    of the model are appended to ``order``, in which optimizers number them."""
    buffers = first.cuts.get("buffer_info")
    for path, spec in first.tensors.items():
        if path[0] != "model":
            continue
        name = ".".join(map(str, path[1:]))
        owned = _owned(name, spec, first)
        if owned is None:
            about = buffers.get(name) if isinstance(buffers, dict) else None
            dtype = about.get("_orig_dtype") if isinstance(about, dict) else None
            yield ("model", _bare(name)), cast(spec, dtype) if isinstance(dtype, DType) else spec
            continue
        order.append((spec.shape, owned))
        pieces = {rank: file.tensors.get(path) for rank, file in ranks.items()}
        for own in owned:
            yield ("model", own.name), _whole(own, spec, pieces, lost)
    numbered = _numbered(first, order, problems)
    for path, spec in first.tensors.items():
        if path[0] == "model":
            continue
        if len(path) != 4 or path[1] != "state":
            yield path, spec
            continue
        shape, owned = numbered.get((path[0], str(path[2])), ((), []))
        pieces = {rank: file.tensors.get(path) for rank, file in ranks.items()}
        for own in owned:
            whole = _whole(own, spec, pieces, lost) if spec.shape == shape else spec
            yield (path[0], "state", own.name, path[3]), whole


def _owned(name: str, spec: TensorSpec, file: File) -> list[Own] | None:
    """Return the parameters that a piece is of; None if the tensor is not cut."""
    parts = name.split(".")
    at = next((n for n, part in enumerate(parts) if part.startswith(_SHARD)), None)
    if at is None:
        return None
    prefix, suffix = ".".join(parts[:at]), ".".join(parts[at:])
    table = file.cuts.get("shard_info")
    about = table.get(prefix) if isinstance(table, dict) else None
    info = about.get(suffix) if isinstance(about, dict) else None
    if not isinstance(info, dict) or not isinstance(info.get("_orig_name"), str):
        raise CorruptError(f"{file.path}: 'shard_metadata' do not say what {name!r:.200} is a piece of")
    full = f"{prefix}.{info['_orig_name']}" if prefix else info["_orig_name"]
    shape = _shape(info.get("_orig_size"), file, name)
    count = prod(spec.shape) * int(file.cuts["world_size"])
    if count < prod(shape) or (len(spec.shape) > 1 and spec.shape[1:] != shape[1:]):
        raise CorruptError(f"{file.path}: pieces of shape {spec.shape} make no tensor of shape {shape} ({name!r:.200})")
    if _FLAT not in full:
        return [Own(_bare(full), shape, 0)]
    flat = file.cuts.get("flatten_info")
    listed = flat.get(full) if isinstance(flat, dict) else None
    if not isinstance(listed, tuple | list) or len(listed) != 3 or len({len(one) for one in listed}) != 1:
        raise CorruptError(f"{file.path}: 'shard_metadata' do not say which parameters {full!r:.200} consists of")
    found, first = [], 0
    module = full.rpartition(".")[0]
    for own, size, numel in zip(*listed, strict=True):
        inner = _shape(size, file, name)
        if prod(inner) != numel or not isinstance(own, str):
            raise CorruptError(f"{file.path}: {own!r:.80} has {numel!r:.20} elements and the shape {inner}")
        found.append(Own(_bare(f"{module}.{own}"), inner, first))
        first += prod(inner)
    if first > count:
        raise CorruptError(f"{file.path}: the parameters of {full!r:.200} have more elements than its pieces")
    return found


def _shape(size: Any, file: File, name: str) -> Shape:
    if not isinstance(size, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in size):
        raise CorruptError(f"{file.path}: the shape of {name!r:.200} is given as {size!r:.80}")
    return tuple(size)


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(own: Own, like: TensorSpec, pieces: Mapping[int, TensorSpec | None], lost: Mapping[int, str]) -> TensorSpec:
    """Return a parameter, or a state of it, from the pieces of all ranks."""
    size, end = prod(like.shape), own.first + prod(own.shape)
    found: list[tuple[int, TensorSpec]] = []
    for rank in sorted({*pieces, *lost}):
        a, b = max(own.first, rank * size), min(end, (rank + 1) * size)
        if a >= b:
            continue
        piece = pieces.get(rank)
        if piece is None or piece.shape != like.shape or piece.dtype is not like.dtype:
            path = lost.get(rank, "")
            why = f"{path} is missing" if path else f"rank {rank} has no such piece of {own.name!r}"
            hole = Fragment(Hole(path or like.name, why), (b - a,))
            held = TensorSpec(like.name, (b - a,), like.dtype, (hole,))
        else:
            held = interval(piece, a - rank * size, b - rank * size)
        found.append((a - own.first, held))
    ranks = f"pieces of {len(found):,} ranks" if len(found) > 1 else "the piece of one rank"
    rule = f"{ranks}, by torch_xla's shard_metadata"
    whole = joined(TensorSpec(like.name, like.shape, like.dtype, ()), own.shape, found)
    return TensorSpec(like.name, own.shape, like.dtype, whole.fragments, rule=rule, expr=whole.expr)


def _numbered(
    file: File, order: Sequence[tuple[Shape, list[Own]]], problems: list[Problem]
) -> dict[tuple[Any, str], tuple[Shape, list[Own]]]:
    """Return what the numbers of optimizers stand for: (key of the optimizer, number) -> shape of the piece, and the
    parameters in it.

    `torch.optim.Optimizer` numbers the parameters that it is given. With one group of all, that is the order of the
    model's state dict; nothing says what several groups had.
    """
    found: dict[tuple[Any, str], tuple[Shape, list[Own]]] = {}
    for key in dict.fromkeys(path[0] for path in file.tensors if len(path) == 4 and path[1] == "state"):
        optimizer = file.rest.get(key)
        groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        one = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
        ids = one.get("params") if isinstance(one, dict) else None
        shapes = {
            (str(path[2]), spec.shape)
            for path, spec in file.tensors.items()
            if path[0] == key and len(path) == 4 and prod(spec.shape) > 1
        }
        numbers = list(map(str, ids)) if isinstance(ids, list) else []
        fits = len(numbers) == len(order) and all(
            shape == piece
            for number, (piece, _) in zip(numbers, order, strict=False)
            for n, shape in shapes
            if n == number
        )
        if not fits:
            line = f"the parameters that {key!r} numbers are not known: its states are in view.stored only"
            problems.append(Problem("undecided-name", line))
            continue
        found |= {(key, number): one for number, one in zip(numbers, order, strict=True)}
    return found


READER = Reader("torch-xla", "folders of torch_xla's FSDP (rank-N-of-M.pth with shard_metadata)", _recognises, _read)
