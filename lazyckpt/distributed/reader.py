"""`LazyReader`: whatever lazyckpt opens, as what `torch.distributed.checkpoint.load` reads from.

torch's planners cut what a rank wants into read items by the chunks of each stored tensor (planner_helpers.py
`create_read_items_for_chunk_list`); here every tensor is one chunk, so that an item is a block of the tensor, and which
files hold it is the lazy tensor's affair.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import DataError, TensorNotFoundError
from ..io.storage.fsspec import is_url
from ..loading import fill
from ..tensor import LazyTensor
from ..view import CheckpointView
from .keys import Found, Kept, Keys

Source = str | os.PathLike[str] | Mapping[str, LazyTensor]

_GROUP = 1 << 30  # bytes that are read before they are committed


class LazyReader(StorageReader):
    """Loads any checkpoint that lazyckpt opens through ``dcp.load(state_dict, storage_reader=LazyReader(path))``.

    ``source``: a path (opened with ``options``, those of `lazyckpt.open`), a view, or any mapping from names to lazy
    tensors. The state dict may hold plain tensors, DTensors of any placement and ShardedTensors; each rank reads what
    it holds of them. Nothing of the checkpoint is executed: what is no tensor is given as `CheckpointView.meta` has it,
    so objects of unknown classes come as inert records.

    Keys. A distributed checkpoint's own keys come first. Everywhere else, and where these do not hold a key: weights
    under their names, bare or after ``model.``; states as ``optim.state.NAME.exp_avg`` (or ``optimizer.``), as torch's
    `get_state_dict` spells them; options as ``optim.param_groups.N.lr``; other values under their path in
    `CheckpointView.meta`. So a state dict ``{"model": ..., "optim": ...}`` loads from a DeepSpeed folder, and from a
    distributed checkpoint that was wrapped in another way. Options of ``param_groups`` that a checkpoint does not name
    (``foreach``, the parameters of each group where it numbers them) stay as the running optimizer has them; ``kept``
    lists their keys.

    Raises what opening raises at once. In `dcp.load`: RuntimeError for a key that the checkpoint lacks and ValueError
    for another shape (by torch), MissingFileError and DataError where wanted elements are in no file; on several ranks
    these are wrapped in torch's CheckpointException, which names the rank.
    """

    def __init__(self, source: Source, **options: Any) -> None:
        self._options = options
        self.kept: list[str] = []
        self._load_id = str(uuid.uuid4())
        self._open(source)

    def _open(self, source: Source) -> None:
        view = source if isinstance(source, Mapping) else CheckpointView(source, **self._options)
        self.view: Mapping[str, LazyTensor] = view
        self._keys = Keys(view)
        self._table: _Table | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from another checkpoint if one is given."""
        self.kept = []
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """What is read, as it would be opened."""
        return self.view.root if isinstance(self.view, CheckpointView) else ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Keys, shapes and dtypes, for torch's planners; the same on every rank."""
        if self._table is None:
            self._table = _Table(self._keys)
        metadata = Metadata(self._table, planner_data=self._table.paths, storage_data={})
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, on several threads, into the planner's tensors. Raises as the class says."""
        group: list[tuple[Any, LazyTensor, torch.Tensor]] = []
        size = 0
        for item in plan.items:
            key = item.storage_index.fqn
            found = self._found(key)
            if item.type == LoadItemType.BYTE_IO:
                if isinstance(found, LazyTensor):
                    raise DataError(f"{key!r} is a tensor in the checkpoint, no object")
                value = None if isinstance(found, Kept) else self._keys.plain(found)
                if isinstance(found, Kept) or _numbers_for_names(key, value, planner):
                    self.kept.append(key)
                else:
                    planner.load_bytes(item, _saved(value))
                continue
            if not isinstance(found, LazyTensor):
                raise DataError(f"{key!r} is no tensor in the checkpoint")
            block = zip(item.storage_offsets, item.lengths, strict=True)
            piece = found.lazy[tuple(slice(start, start + length) for start, length in block)]
            target = planner.resolve_tensor(item).detach()
            if target.shape != piece.shape:
                raise DataError(f"{key!r}: {tuple(piece.shape)} is to be read into memory of {tuple(target.shape)}")
            group.append((item, piece, target))
            size += piece.nbytes
            if size > _GROUP:
                _read(group, planner)
                group, size = [], 0
        _read(group, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _found(self, key: str) -> Found:
        if self._table is None:
            self._table = _Table(self._keys)
        found = self._table.found(key)
        if found is None:
            raise TensorNotFoundError(f"the checkpoint has nothing under the key {key!r}")
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be opened: a path that is there, or a URL."""
        text = os.fspath(checkpoint_id)
        return is_url(text) or Path(text).exists()


class _Table(dict[str, Any]):
    """The keys that the checkpoint has, as torch describes them; asked for another, it says what would be read for
    it. ``paths``: key -> where it belongs in a state dict."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self._keys = keys
        self._listed: dict[str, Found] = {}
        self._others: dict[str, Found | None] = {}
        for key, path, found in keys.listed():
            self._listed[key] = found
            self.paths[key] = path
            self[key] = _described(found)

    def found(self, key: str) -> Found | None:
        if key in self._listed:
            self._keys.check(key)
            return self._listed[key]
        if key not in self._others:
            self._others[key] = self._keys.find(key)
        return self._others[key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.found(key) is not None

    def __missing__(self, key: str) -> Any:
        found = self.found(key)
        if found is None:
            raise KeyError(key)
        return _described(found)

    def get(self, key: str, default: Any = None) -> Any:
        found = self.found(key)
        return default if found is None else _described(found)


def _described(found: Found) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(found, LazyTensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * found.ndim), found.shape)
    return TensorStorageMetadata(TensorProperties(dtype=found.dtype), found.shape, [chunk])


def _read(group: list[tuple[Any, LazyTensor, torch.Tensor]], planner: LoadPlanner) -> None:
    fill((piece, target) for _, piece, target in group)
    for item, _, target in group:
        planner.commit_tensor(item, target)


def _numbers_for_names(key: str, value: Any, planner: LoadPlanner) -> bool:
    """Whether the checkpoint numbers the parameters of a group, and the state dict that is loaded into names them."""
    if not key.endswith(".params") or "param_groups." not in key:
        return False
    running = getattr(planner, "state_dict", {}).get(key)
    return _all(running, str) and _all(value, int)


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _saved(value: Any) -> io.BytesIO:
    """The file that planners expect: of our own making, never the checkpoint's."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
