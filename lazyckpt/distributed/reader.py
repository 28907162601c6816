"""`LazyReader`: a storage reader for `torch.distributed.checkpoint.load` from any checkpoint that lazyckpt opens.

torch's planners cut the tensors of a rank into read items by the chunks of each stored tensor (planner_helpers.py
`create_read_items_for_chunk_list`). Here every tensor is one chunk, so that an item is a block of the tensor, and the
lazy tensor finds the files.
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
from ..io.storage.urls import is_url
from ..loading import fill
from ..tensor import LazyTensor
from ..view import CheckpointView
from .keys import Found, Kept, Keys

Source = str | os.PathLike[str] | Mapping[str, LazyTensor]

_GROUP = 1 << 30  # bytes to read before they are committed to the planner


class LazyReader(StorageReader):
    """Load any checkpoint that lazyckpt opens by ``dcp.load(state_dict, storage_reader=LazyReader(path))``.

    The state dict may have plain tensors, DTensors of any placement and ShardedTensors; each rank reads only its own
    part of them. No code of the checkpoint is executed: values that are not tensors are those of `CheckpointView.meta`,
    in which objects of unknown classes are inert records.

    A distributed checkpoint's own keys are looked up first. Other keys, and those of all other checkpoints, are:
    weights by name, bare or after ``model.``; states as ``optim.state.NAME.exp_avg`` (or ``optimizer.``), as torch's
    `get_state_dict` spells them; options as ``optim.param_groups.N.lr``; other values by their path in
    `CheckpointView.meta`. So a state dict ``{"model": ..., "optim": ...}`` loads from a DeepSpeed folder, and from a
    distributed checkpoint of another nesting. Options of ``param_groups`` that the checkpoint lacks (``foreach``, or
    the parameters of each group if it numbers them) keep the values of the running optimizer; ``kept`` lists their
    keys.

    `dcp.load` raises RuntimeError for a key that the checkpoint lacks and ValueError for another shape (both by torch),
    MissingFileError for a missing file and DataError for a tensor without data. With several ranks, torch wraps these
    in a CheckpointException that names the rank.

    Parameters
    ----------
    source
        A path, a view, or any mapping from names to lazy tensors.
    **options
        Options of `lazyckpt.open`, for a path.

    Raises
    ------
    LazyckptError
        What `lazyckpt.open` raises.
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
        """Prepare for another load.

        Parameters
        ----------
        checkpoint_id
            Another checkpoint to open. By default the same one is loaded again.

        Raises
        ------
        LazyckptError
            What `lazyckpt.open` raises.
        """
        self.kept = []
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint; "" for a mapping that is not a view."""
        return self.view.root if isinstance(self.view, CheckpointView) else ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return keys, shapes and dtypes for torch's planners; the same on every rank.

        Parameters
        ----------
        *args, **kwargs
            Not used.

        Returns
        -------
        Metadata
            The metadata of the whole checkpoint.
        """
        if self._table is None:
            self._table = _Table(self._keys)
        metadata = Metadata(self._table, planner_data=self._table.paths, storage_data={})
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint is open.

        Parameters
        ----------
        metadata, is_coordinator, *args, **kwargs
            Not used.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged.

        Parameters
        ----------
        plan
            The plan of this rank.

        Returns
        -------
        LoadPlan
            ``plan``.
        """
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Parameters
        ----------
        plans
            The plans of all ranks.

        Returns
        -------
        list of LoadPlan
            ``plans``.
        """
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors, on several threads.

        Parameters
        ----------
        plan
            The plan of this rank.
        planner
            The planner that has the tensors.

        Returns
        -------
        Future
            A future that is done.

        Raises
        ------
        MissingFileError
            A file does not exist.
        DataError
            A key is a tensor on one side only, or a tensor has no data.
        TensorNotFoundError
            The checkpoint lacks a key.
        """
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
        """Return whether a checkpoint may be opened: its path exists, or it is a URL.

        Parameters
        ----------
        checkpoint_id
            A path or a URL.

        Returns
        -------
        bool
            True for every URL.
        """
        text = os.fspath(checkpoint_id)
        return is_url(text) or Path(text).exists()


class _Table(dict[str, Any]):
    """Key -> torch's description of its value. It has the checkpoint's own keys, and finds other keys on lookup.
    ``paths``: key -> path in a state dict."""

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
    """Return whether the checkpoint numbers the parameters of a group that the running state dict names."""
    if not key.endswith(".params") or "param_groups." not in key:
        return False
    running = getattr(planner, "state_dict", {}).get(key)
    return _all(running, str) and _all(value, int)


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _saved(value: Any) -> io.BytesIO:
    """Return a value as the file that planners expect. It is written here, so torch never unpickles the checkpoint."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
