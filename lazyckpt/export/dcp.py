"""The torch.distributed.checkpoint format: a folder with `.metadata` and files of concatenated torch.save items.

The tensors that the view reads, "weights" or "fp32", become ``model.NAME``. Optimizer states become
``optim.state.NAME.STATE``, and optimizer options ``optim.param_groups.N.OPTION`` if the checkpoint says to which
parameters they apply. "fp32" beside "weights" becomes ``fp32.NAME``; ``meta`` keeps its keys. A view of a single
optimizer state writes only that state. Both names of a tied tensor are written and share the same bytes. A step count
that no tensor holds becomes ``optim.state.NAME.step``. `dcp.load` loads the folder as ``{"model": ..., "optim": ...}``
of torch's `get_state_dict`, on any number of ranks (FSDP2, tensor parallelism).

Source: torch/distributed/checkpoint/filesystem.py `_FileSystemWriter` (the files, and the places of items),
default_planner.py (the metadata), _traverse.py `traverse_state_dict` (which parts of a state dict are items),
state_dict.py `get_state_dict` (names: ``model.NAME``, ``optim.state.NAME.exp_avg``, ``optim.param_groups.0.lr``).

A large tensor is split into chunks of whole rows, so that each of many ranks reads only its part. Tied names are two
keys whose chunks are the same bytes; torch reads both as if it had written the tensor twice.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import NoneType
from typing import Any, NamedTuple

import torch

from ..core.box import Shape
from ..core.dtypes import dtype_of
from ..core.merkle import Form
from ..derive.groups import param_groups, step_of
from ..errors import DataError, some
from ..io.containers.pickle.plain import TensorRef
from ..jobs.destination import Kind
from ..jobs.plan import File, Writable, WritePlan
from ..jobs.publish import fingerprint
from ..lazy import LazyArray, named
from .options import WriteOptions
from .torch import Held, Item, row
from .training import Lost, NotLoaded, restored
from .writer import BY_NAMES, NO_RANKS, WEIGHTS, View, Writer, check_names, forecast_of_states, plan_of_folder

CHUNK = 32 << 20  # maximum bytes of a chunk, unless a single row is larger
FILE = 1 << 30  # maximum bytes of a file, unless a single chunk is larger
Key = tuple[str | int, ...]


class _Chunk(NamedTuple):
    """A chunk of a tensor: the tensor's key, the start of the chunk within the tensor, and its place in the file."""

    key: str
    start: Shape
    item: Item


@dataclass(slots=True)
class StateDict:
    """A flattened state dict, by dotted key: the path of each value, the tensors, the other objects, and the aliases
    (additional keys of a tensor)."""

    paths: dict[str, Key] = field(default_factory=dict)
    tensors: dict[str, Writable] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, path: Key, value: Any) -> None:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise DataError(f"two values would be called {key!r} in the distributed checkpoint: select one of them")
        self.paths[key] = path
        (self.tensors if isinstance(value, LazyArray | Held) else self.objects)[key] = value


def _plan(view: View, dest: str | os.PathLike[str], options: WriteOptions) -> WritePlan:
    lost: Lost = {}
    state = _state_dict(view, lost)
    check_names(state.paths)
    rows = list(files_of(state.tensors))
    objects, spans = objects_of(state.objects)
    texts = {"__0_0.distcp": objects} if spans else {}
    metadata = metadata_of(state, rows, spans, dict(state.paths))
    files = []
    for name, chunks in rows:
        items = [chunk.item for chunk in chunks]
        files.append(File(name, sum(item.tensor.nbytes for item in items), partial(row, items)))
    lazy = {key: t for key, t in state.tensors.items() if isinstance(t, LazyArray)}
    where = [(t, (key, str(t.dtype), tuple(t.shape))) for key, t in lazy.items()]
    return plan_of_folder(
        dest,
        options,
        Kind("distributed checkpoint", (".metadata",)),
        list(lazy.values()),
        fingerprint(where, [objects, metadata]),
        files,
        {**texts, ".metadata": metadata},  # last, because it completes the checkpoint
        lost,
        around=2048 * max((len(chunks) for _, chunks in rows), default=1),
    )


# -- the state dict


def _state_dict(view: View, lost: Lost) -> StateDict:
    """Convert the view to the state dict that a training script saves: ``model``, ``optim``, and other entries."""
    state = StateDict()
    states = view.states
    if view.state in WEIGHTS:
        tensors, aliases = view.once()
        for name, tensor in tensors.items():
            state.add(("model", name), tensor)
        for alias, owner in aliases.items():
            state.paths[f"model.{alias}"] = ("model", alias)
            state.aliases[f"model.{alias}"] = f"model.{owner}"
        if view.state == "weights" and "fp32" in states:
            for name, tensor in states["fp32"].once()[0].items():
                state.add(("fp32", name), tensor)
        moments = [s for s in states if s not in WEIGHTS]
    else:
        moments = [view.state]
    for moment in moments:
        for name, tensor in states[moment].items():
            state.add(("optim", "state", name, moment), tensor)
    if view.state in WEIGHTS:
        strange = [
            n for n in {n: None for moment in moments for n in states[moment]} if f"model.{n}" not in state.paths
        ]
        if strange:
            line = (
                f"written under {len(strange):,} names that no tensor of the model has ({some(strange)}): dcp.load "
                "does not give them to the optimizer of that model"
            )
            lost["optim.state"] = NotLoaded(line)
    if view.state in WEIGHTS:
        if "exp_avg" in states and "step" not in states:
            steps = step_of(view)
            if steps is not None:
                count = torch.tensor(steps.done, dtype=torch.float32, device="cpu")
                for name in states["exp_avg"]:
                    state.add(("optim", "state", name, "step"), Held(count))
        _add_meta(state, view, lost)
    return state


def _add_meta(state: StateDict, view: View, lost: Lost) -> None:
    stored = view.stored

    def tensor(name: str) -> Any:
        return named(stored, name)

    known = {t.spec.stored_as or key for key, t in state.tensors.items() if isinstance(t, LazyArray)}
    groups = [] if not any(k.startswith("optim.state.") for k in state.paths) else param_groups(view)
    ours = ("optim", "param_groups")
    for n, group in enumerate(restored(groups, "optim.param_groups", tensor, lost)):
        for option, value in group.items():
            state.add((*ours, n, option), value)
    # keep DeepSpeed's dicts whole; flatten other state dicts as torch does
    apart = not view.format.startswith("deepspeed")
    for top, value in view.meta.items():
        made = restored(value, str(top), tensor, lost)
        if made is None and value is not None:
            continue
        for path, part in flattened(made, (str(top),)) if apart else [((str(top),), made)]:
            key = ".".join(map(str, path))
            taken = key in state.paths or (groups and path[:2] == ours)
            if not taken and key not in known:
                state.add(path, _whole(part))


def flattened(value: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    """Flatten a value like `traverse_state_dict`: descend into dicts, and into lists that contain a tensor or dict."""
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        for key, part in value.items():
            yield from flattened(part, (*path, str(key)))
    elif isinstance(value, list) and not _terminal(value):
        for n, part in enumerate(value):
            yield from flattened(part, (*path, n))
    else:
        yield path, value


def _terminal(values: list[Any]) -> bool:
    return not any(
        isinstance(v, dict | LazyArray | TensorRef) or (isinstance(v, list) and not _terminal(v)) for v in values
    )


def _whole(value: Any) -> Any:
    """Read the tensors inside an object, which are small (a generator's state in a tuple); keep a lazy tensor lazy."""
    if isinstance(value, LazyArray | Held):
        return value
    return _read(value)


def _read(value: Any) -> Any:
    if isinstance(value, LazyArray):
        return value[...]
    if isinstance(value, dict):
        return {key: _read(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_read(part) for part in value)
    return value


# -- the files


def _chunks(tensor: Writable) -> Iterator[tuple[Shape, Writable]]:
    """Split a tensor into chunks of whole rows of at most `CHUNK` bytes; yield (start, chunk)."""
    shape = tuple(tensor.shape)
    width = prod(shape[1:]) * tensor.itemsize
    rows = max(1, CHUNK // max(width, 1))
    if not isinstance(tensor, LazyArray) or not shape or shape[0] <= rows or not width:
        yield (0,) * len(shape), tensor
        return
    for at in range(0, shape[0], rows):
        yield (at, *(0,) * (len(shape) - 1)), tensor.lazy[at : at + rows]


def files_of(tensors: Mapping[str, Writable]) -> Iterator[tuple[str, list[_Chunk]]]:
    """Distribute the chunks over files; yield (file name, chunks)."""
    chunks: list[_Chunk] = []
    offset, number = 0, 1
    for key, tensor in tensors.items():
        whole = Form(dtype_of(tensor.dtype).name, tuple(tensor.shape), tensor.nbytes)
        width = tensor.nbytes // max(1, *whole.shape[:1], 1)
        for start, part in _chunks(tensor):
            item = Item(offset, part, None, whole, start[0] * width if start else 0)
            if chunks and offset + item.length > FILE:
                yield f"__0_{number}.distcp", chunks
                chunks, offset, number = [], 0, number + 1
                item = item._replace(offset=0)
            chunks.append(_Chunk(key, start, item))
            offset += item.length
    if chunks:
        yield f"__0_{number}.distcp", chunks


def objects_of(objects: Mapping[str, Any]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the content of the file of all objects that are not tensors, and the (offset, size) of each object. Equal
    plain values are written once."""
    file = io.BytesIO()
    spans: dict[str, tuple[int, int]] = {}
    written: dict[object, tuple[int, int]] = {}
    for key, value in objects.items():
        same = repr(value) if type(value) in (bool, int, float, str, NoneType) else (key,)
        if same not in written:
            item = io.BytesIO()
            torch.save(value, item)
            written[same] = file.tell(), len(item.getbuffer())
            file.write(item.getbuffer())
        spans[key] = written[same]
    return file.getvalue(), spans


def metadata_of(
    state: StateDict,
    rows: list[tuple[str, list[_Chunk]]],
    spans: Mapping[str, tuple[int, int]],
    paths: Mapping[str, Key] | None,
) -> bytes:
    """Return the content of `.metadata`. ``paths``: what torch's default planner keeps there; Megatron: None."""
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    index: Callable[..., Any] = torch_metadata.MetadataIndex
    listed: dict[str, list[Any]] = {key: [] for key in state.tensors}
    places: dict[Any, Any] = {}
    keys: dict[str, list[str]] = {key: [key] for key in state.tensors}
    for alias, owner in state.aliases.items():
        keys[owner].append(alias)
    for key, (offset, length) in spans.items():
        places[index(key)] = _StorageInfo("__0_0.distcp", offset, length)
    for name, chunks in rows:
        for of, begins, item in chunks:
            start = torch.Size(begins)
            for key in keys[of]:
                places[index(key, start, len(listed[of]))] = _StorageInfo(name, item.offset, item.length)
            listed[of].append(torch_metadata.ChunkStorageMetadata(start, item.tensor.shape))
    entries: dict[str, Any] = {}
    for key in state.paths:
        tensor = state.tensors.get(state.aliases.get(key, key))
        if tensor is None:
            entries[key] = torch_metadata.BytesStorageMetadata()
        else:
            about = torch_metadata.TensorProperties(dtype=tensor.dtype)
            entries[key] = torch_metadata.TensorStorageMetadata(
                about, tensor.shape, list(listed[state.aliases.get(key, key)])
            )
    whole = torch_metadata.Metadata(entries, planner_data=paths, storage_data=places)
    return pickle.dumps(whole, protocol=4)


WRITER = Writer(
    name="dcp",
    what="torch.distributed.checkpoint",
    plan=_plan,
    forecast=forecast_of_states,
    options=frozenset({"dtype"}),
    refused={"mesh": NO_RANKS, "stored": BY_NAMES},
)
