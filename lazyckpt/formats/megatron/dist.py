"""megatron-core's distributed checkpoints: a folder with metadata.json, common.pt and the tensors of all ranks.

Writer: megatron/core/dist_checkpointing/serialization.py `save`, core.py (`metadata.json`), strategies/torch.py (on
torch.distributed.checkpoint) or, up to 0.15, strategies/zarr.py. A key is a tensor of the whole model, whatever the
parallel layout; `stacks` maps keys to the model's names. Optimizers: optimizer/optimizer.py `sharded_state_dict`
("optimizer.state.exp_avg." and the key of the parameter), optimizer/distrib_optimizer.py
`sharded_param_state_fully_reshardable`, `_fs_model_space` (reshaped to a grid: `regridded`), `_dp_reshardable`
(buckets as ranks hold them: `reshardable`).
"""

from __future__ import annotations

import itertools
import json
import posixpath
import re
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...core.box import Shape, c_strides
from ...core.extents import Extent, Hole
from ...core.index import FileInfo, Index
from ...core.specs import TensorSpec, renamed
from ...errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.pickle.plain import Path
from ...io.storage.base import Entry, Store
from ...layouts.megatron import is_expert, without_module
from ...layouts.merge import decide, user_rules
from .. import torch_save as torchsave
from ..dcp import reader as dcp
from ..dcp.chunks import ChunkBytes, in_chunks
from ..dcp.items import Item
from ..huggingface import has_weights
from ..reader import Reader, Source
from ..shared.announce import announce, announce_folders, listing
from ..shared.members import Member, together
from ..torch_save import member as torch_member
from ..zarr.grid import Array, Packing
from ..zarr.metadata import array_v2
from ..zarr.packing import NoTensorError
from .described import CONTEXT, STATE, WEIGHTS, Described, contradictions, described, described_by_context
from .extra_states import EXTRA, extra_meta
from .files import find_iteration, unfinished
from .mesh import mesh_of
from .reshardable import by_parameter
from .stacks import logical, regridded

# -- The zarr backend of megatron-core's distributed checkpoints: a folder for each tensor, a raw file for each
# chunk.

_MAX_JSON = 1 << 20  # bytes of an array's description
_MAX_CHUNKS = 1 << 24


def in_folder(store: Store, folder: str = "") -> Member:
    """Index the arrays of a folder, and its objects. Damaged ones are reported. Raises the first error if all arrays
    are damaged."""
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    problems: list[Problem] = []
    files: dict[str, FileInfo] = {}
    meta: dict[str, Any] = {}
    error: LazyckptError | None = None
    folders = {k: posixpath.join(folder, k) for k, entry in sorted(listing(store, folder).items()) if entry.is_dir}
    announce_folders(store, folders.values())
    inside = {key: listing(store, below) for key, below in folders.items()}
    announce(store, [f"{below}/.zarray" for key, below in folders.items() if ".zarray" in inside[key]])
    unwanted: dict[str, tuple[Path, Item]] = {}
    objects = [key for key in folders if ".zarray" not in inside[key] and not key.endswith(EXTRA)]
    announce(store, [f"{folders[key]}/{name}" for key in objects for name in inside[key] if name.endswith(".pt")])
    for key, below in folders.items():
        listed = inside[key]
        if ".zarray" in listed:
            try:
                tensors[key] = ((key,), _array(store, below, key, listed, problems))
            except LazyckptError as e:
                error = error or e
                problems.append(Problem("unreadable-file", f"{key!r} cannot be read: {e}", below))
                continue
            files |= {f"{below}/{name}": e.info for name, e in listed.items() if not e.is_dir}
        else:
            for name in sorted(n for n in listed if n.endswith(".pt")):
                if key.endswith(EXTRA):
                    path, info = f"{below}/{name}", listed[name].info
                    unwanted[f"{key}/{name.removesuffix('.pt')}"] = (key,), Item(path, 0, info.size)
                    files[path] = info
                    continue
                try:
                    one = torch_member(store, f"{below}/{name}", f"{key}/{name.removesuffix('.pt')}.")
                except LazyckptError as e:
                    line = f"an object cannot be read and is not in view.meta: {e}"
                    problems.append(Problem("unreadable-object", line, f"{below}/{name}"))
                    continue
                meta[f"{key}/{name.removesuffix('.pt')}"] = one.meta.get("", one.meta)
                files |= one.files
    if error is not None and not tensors:
        raise error
    return Member(
        format="megatron-zarr",
        tensors=tensors,
        objects=[(key,) for key in meta],
        meta=meta,
        named=lambda rest: meta,
        files=files,
        unwanted=unwanted,
        problems=problems,
    )


def _array(store: Store, folder: str, key: str, listed: Mapping[str, Entry], problems: list[Problem]) -> TensorSpec:
    where = f"{store.root}/{folder}/.zarray"
    array = _described(store, folder, where)
    dtype, shape, chunk = array.dtype, array.shape, array.chunk
    grid = [range(-(-n // size)) for n, size in zip(shape, chunk, strict=True)]
    if prod(map(len, grid)) > min(_MAX_CHUNKS, 64 + 64 * len(listed)):
        raise CorruptError(f"{where}: {prod(map(len, grid)):,} chunks, the folder has {len(listed):,} files: damaged")
    nbytes = prod(chunk) * dtype.itemsize
    chunks: list[tuple[Shape, Shape, ChunkBytes]] = []
    lost = []
    for place in itertools.product(*grid):
        name = array.key(place)
        path = f"{folder}/{name}"
        entry = listed.get(name)
        piece: ChunkBytes = Extent(path, 0, dtype, chunk, c_strides(chunk))
        if entry is None or entry.info.size != nbytes:
            size = "is missing" if entry is None else f"has {entry.info.size:,} bytes in place of {nbytes:,}"
            piece = Hole(path, f"{path} {size}")
            lost.append(name)
        chunks.append((tuple(n * size for n, size in zip(place, chunk, strict=True)), chunk, piece))
    if lost:
        line = f"{key}: {len(lost):,} of {len(chunks):,} chunks cannot be read ({some(lost)})"
        problems.append(Problem("missing-elements", line, key))
    return in_chunks(key, dtype, shape, chunks)


def _described(store: Store, folder: str, where: str) -> Array:
    size = store.stat(f"{folder}/.zarray").size
    try:
        about = json.loads(bytes(store.read(f"{folder}/.zarray", 0, min(size, _MAX_JSON))))
        array = array_v2(about, where)
    except NoTensorError as e:
        raise CorruptError(f"{where}: {e}: Megatron writes no such array") from None
    except CorruptError:
        raise
    except (ValueError, AttributeError, RecursionError) as e:
        raise CorruptError(f"{where} describes no array ({e!r:.80}): the file is damaged") from None
    plain = array.packing == Packing(tuple(range(len(array.shape))))
    if not plain or array.separator != "." or about.get("zarr_format") != 2:
        raise CorruptError(f"{where}: not a zarr v2 array in C order without compression, as Megatron writes them")
    return array


# -- megatron-core's distributed checkpoints: a folder with metadata.json, common.pt and the tensors of all
# ranks.

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_BUFFER = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_NAMES = {"fp32_param": "fp32", "param": "fp32"}
_ABOUT = "metadata.json"
_MAX_JSON_DIST = 1 << 16
_HEAD = 512  # bytes of metadata.json that identify its writer
_FORMATS = {"torch_dist": "megatron-dist", "zarr": "megatron-zarr"}


def is_dist(source: Source) -> bool:
    """Return whether the folder is such a checkpoint, or the iteration to read in it is one."""
    if source.path:
        return False
    if is_here(source.store, "", source.entries) or _has_context(source):
        return True
    folder = find_iteration(source, strict=False)
    return bool(folder) and is_here(source.store, folder or "", source.inside(folder or ""))


def read_dist(source: Source) -> Index:
    """Index the folder, or its iteration to read. Raises what `read` does, and FormatError for malformed rules."""
    if is_here(source.store, "", source.entries):
        about = described(source.store, "", source.entries)
        return with_rules(read(source.store, about=about), source.rules)
    if _has_context(source):
        about = described_by_context(source.store, source.inside(CONTEXT))
        return with_rules(read(source.store, WEIGHTS, about=about), source.rules)
    folder = find_iteration(source) or ""
    about = described(source.store, folder, source.inside(folder))
    index = with_rules(read(source.store, folder, about=about), source.rules)
    problems = unfinished(source, folder)
    if has_weights(source.entries):  # ms-swift: swift/megatron/trainers/base.py `save_checkpoint`
        line = (
            f"beside {folder} there are weights of Hugging Face's kind, which are not read: open them by their own file"
        )
        problems.append(Problem("other-checkpoint", line, folder))
    return replace(index, problems=(*problems, *index.problems))


def _has_context(source: Source) -> bool:
    """Return whether the folder is one of NeMo 2."""
    return all(n in source.entries and source.entries[n].is_dir for n in (CONTEXT, WEIGHTS)) and is_here(
        source.store, WEIGHTS, source.inside(WEIGHTS)
    )


def with_rules(index: Index, rules: Mapping[str, Any]) -> Index:
    """Apply the user's rules. The tensors are whole, so only "rows" has an effect. Raises FormatError for a malformed
    rule."""
    if not rules:
        return index
    users = [user_rules(rules)]

    def cut(name: str, spec: TensorSpec) -> TensorSpec:
        merged = decide(name, [spec.shape], users)
        if merged.shape == spec.shape:
            return spec
        return replace(spec, shape=merged.shape, rule="; ".join(filter(None, (spec.rule, merged.rule))))

    states = {state: {name: cut(name, spec) for name, spec in table.items()} for state, table in index.states.items()}
    return replace(index, states=states)


def is_here(store: Store, folder: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a folder, with these entries, is such a checkpoint itself."""
    about = entries.get(_ABOUT)
    if "common.pt" in entries:
        return about is not None or ".metadata" in entries
    if about is None or about.is_dir:  # other writers may use the name, too: look at the contents
        return False
    return b'"sharded_backend"' in bytes(store.read(posixpath.join(folder, _ABOUT), 0, min(about.info.size, _HEAD)))


def read(store: Store, *folders: str, about: Described | None = None) -> Index:
    """Index such a folder, or several that were saved as one (of model, optimizer and the rest).

    ``about``: what is described beside them; the arguments in a ``common.pt`` take precedence.
    Raises CorruptError, FormatError (unknown backend), MissingFileError."""
    folders, about = folders or ("",), about or Described()
    problems = list(about.problems)
    for folder in folders:
        there = listing(store, folder)
        announce(store, [posixpath.join(folder, name) for name in (_ABOUT, "common.pt", ".metadata") if name in there])
    backends = {folder: _backend(store, folder, problems) for folder in folders}
    tensors = _union([_tensors(store, folder, backend) for folder, backend in backends.items()], problems)
    commons: list[Member] = []
    trained: list[Member] = []  # of Megatron-Bridge
    for folder in folders:
        path = posixpath.join(folder, "common.pt")
        try:
            commons.append(torchsave.member(store, path, f"{path}/" if len(folders) > 1 else "common.pt/"))
        except LazyckptError as e:
            problems.append(cannot_read(path, e, ", nor the arguments of the run and the schedule in it"))
        path = posixpath.join(folder, STATE)
        if STATE in listing(store, folder):
            try:
                trained.append(torchsave.member(store, path, f"{path}/" if len(folders) > 1 else f"{STATE}/"))
            except LazyckptError as e:
                problems.append(cannot_read(path, e))
    members: list[tuple[tuple[str, ...], Member]] = [*(((), member) for member in commons), ((), tensors)]
    members += [(("train_state",), member) for member in trained]
    whole = together(_FORMATS[next(iter(backends.values()))], members)
    own = next((common.meta["args"] for common in commons if hasattr(common.meta.get("args"), "__dict__")), None)
    args = about.args if own is None else own
    states, unknown = _states(tensors, args)
    states |= next((steps for common in commons if (steps := _steps(common, states))), {})
    problems += contradictions(about, states.get("weights", {}), (path[0] for path in tensors.objects if path))
    more = about.meta if args is None or args is own else {"args": args, **about.meta}
    extra = extra_meta(store.pinned(tensors.files), tensors.unwanted, args)
    meta = [*([more] if more else []), whole.meta, *([] if extra is None else [extra])]
    return Index(
        format=whole.format,
        states=states or {"weights": {}},
        files={**whole.files, **about.files},
        stored=whole.stored,
        meta=ChainMap(*meta) if len(meta) > 1 else whole.meta,  # type: ignore[arg-type]
        mesh=mesh_of(args),
        problems=(*problems, *tensors.problems, *unknown),
    )


def _union(parts: Sequence[Member], problems: list[Problem]) -> Member:
    """Return the tensors and objects of several folders as those of one."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    for part in parts:
        twice = [key for key in part.tensors if key in tensors]
        if twice:
            line = f"{len(twice):,} tensors are in several folders, those of the first are read: {some(twice)}"
            problems.append(Problem("duplicate-tensor", line, only_one(twice)))
        tensors |= {key: value for key, value in part.tensors.items() if key not in tensors}
    return Member(
        format=parts[0].format,
        tensors=tensors,
        objects=[path for part in parts for path in part.objects],
        meta=ChainMap(*(part.meta for part in parts)),  # type: ignore[arg-type]
        named=lambda rest: ChainMap(*(part.named(rest) for part in parts)),  # type: ignore[arg-type]
        files={path: info for part in parts for path, info in part.files.items()},
        stored=ChainMap(*(part.raw for part in parts)),  # type: ignore[arg-type]
        reshaped={key: shape for part in parts for key, shape in part.reshaped.items()},
        unwanted={key: item for part in parts for key, item in part.unwanted.items()},
        problems=[line for part in parts for line in part.problems],
    )


def _backend(store: Store, folder: str, problems: list[Problem]) -> str:
    path = posixpath.join(folder, _ABOUT)
    if _ABOUT not in listing(store, folder):
        line = f"{path} is missing: it is written last, so the save was not finished, or not copied whole"
        problems.append(Problem("unfinished-save", line, path))
        return "torch_dist"
    try:
        about = json.loads(bytes(store.read(path, 0, min(store.stat(path).size, _MAX_JSON_DIST))))
        backend = about["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptError(f"{store.root}/{path} does not name a sharded_backend: the file is damaged") from None
    if backend not in _FORMATS:
        raise FormatError(
            f"{store.root}/{path}: the backend {backend!r:.60} is none of those that lazyckpt reads "
            f"({', '.join(_FORMATS)})"
        )
    return str(backend)


def _tensors(store: Store, folder: str, backend: str) -> Member:
    if backend == "zarr":
        return in_folder(store, folder)
    return dcp.in_folder(store, folder, lambda key: f".{EXTRA}" not in key)


def _states(member: Member, args: Any) -> tuple[dict[str, dict[str, TensorSpec]], list[Problem]]:
    by_key: dict[str, dict[str, TensorSpec]] = {}
    buffers: dict[str, TensorSpec] = {}
    inside: set[str] = {path[0] for path in member.objects if path}  # type: ignore[misc]
    bare = _bare_keys(member.tensors)
    for key, (_, spec) in member.tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None:
            state = _NAMES.get(match["state"], match["state"])
            whole = regridded(spec, member.reshaped.get(key))
            name = bare.get(match["key"], match["key"])
            by_key.setdefault(state, {})[name] = renamed(whole, name)
        elif _BUFFER.match(key):
            buffers[key] = spec
        elif not key.endswith("_extra_state") and not any(key.startswith(f"{name}.") for name in inside):
            name = bare.get(key, key)
            by_key.setdefault("weights", {})[name] = renamed(regridded(spec, member.reshaped.get(key)), name)
    local = _local(args)
    states = {state: logical(keys, local) for state, keys in by_key.items()}
    problems = []
    if buffers:
        found, reasons = by_parameter(buffers, states.get("weights", {}), args, local)
        for state, tensors in found.items():
            states.setdefault(state, {}).update(tensors)
        problems = [
            Problem(
                "undecided-layout",
                f"{len(keys):,} tensors are buffers of the distributed optimizer as ranks hold them (dp_reshardable: "
                f"{some(keys)}), and the positions of the parameters in them are not known: {reason}. They are in "
                "view.stored; a save with --dist-ckpt-optim-fully-reshardable has states by parameter",
                only_one(keys),
            )
            for keys, reason in reasons
        ]
    order = ["weights", "fp32"]
    states = dict(sorted(states.items(), key=lambda item: order.index(item[0]) if item[0] in order else 2))
    return states, problems


def _bare_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the keys of weights in Megatron's model for keys in a module of NeMo around it."""
    own = [k for k in keys if not _STATE.fullmatch(k) and not _BUFFER.match(k) and not k.endswith("_extra_state")]
    return without_module([k for k in own if not k.startswith("optimizer.")])


def _steps(common: Member, states: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    """Return the optimizer's step count as {"step": ...}; {} if there is none. All parameters share one number, or if
    there are two optimizers, dense parameters and experts have one each."""
    counts = [
        spec for path, spec in common.tensors.values() if path[:1] == ("optimizer",) and path[-1] == "common_step"
    ]
    others = {state: table for state, table in states.items() if state not in ("weights", "fp32")}
    names = others.get("exp_avg", next(iter(others.values()), {}))  # (beside Adam, Muon counts no steps)
    if not counts or len(counts) > 2 or not names:
        return {}
    return {"step": {name: renamed(counts[-1] if is_expert(name) else counts[0], name) for name in names}}


def _local(args: Any) -> bool | None:
    implementation = getattr(args, "transformer_impl", None)
    return None if implementation is None else implementation == "local"


READER = Reader(
    "megatron-dist",
    "megatron-core's distributed checkpoints (metadata.json, common.pt)",
    is_dist,
    read_dist,
    tags=True,
)
