"""What an export is going to write, told before it does: from names, shapes and dtypes alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ..core.chunking import grid_of
from ..core.dtypes import dtype_of
from ..core.units import size_in_bytes
from ..formats.zarr.documents import Part as ZarrPart
from ..formats.zarr.documents import contents
from ..io.storage.fsspec import is_url
from ..jobs.destination import local_path
from ..lazy import LazyArray
from . import dcp
from .files import FileFormat
from .safetensors import SAFETENSORS
from .shards import split
from .torch import TORCH
from .zarr import planned

FILES: Mapping[str, FileFormat] = {"safetensors": SAFETENSORS, "torch": TORCH}
_WEIGHTS = ("weights", "fp32")
_AROUND = 2048  # bytes of a file of torch.save besides its tensor, about
_OPTION = "step"  # a count, which is written in another way or not at all


class View(dcp.View, ZarrPart[LazyArray], Protocol):  # type: ignore[misc]  # the two know the same ``states``
    """What is asked of a view."""


class Amount(NamedTuple):
    """``tensors``: how many, each tied one once; ``nbytes``: of their elements, as they are written; ``dtypes``."""

    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """``states``: what goes out, by state; ``files``: how many there will be, None where that is not known before;
    ``room``: bytes that the target has to have, about; None where that depends on how well they compress."""

    states: Mapping[str, Amount]
    files: int | None
    room: int | None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(amount.nbytes for amount in self.states.values())

    @property
    def tensors(self) -> int:
        """How many there are, counted in each state."""
        return sum(amount.tensors for amount in self.states.values())


def of_files(to: str, views: Sequence[View], dest: str, max_shard_size: int | str | None) -> Forecast:
    """Of safetensors or torch files: one view, or those of all ranks, each of which gets a folder."""
    form = FILES[to]
    files = 0
    tensors: list[LazyArray] = []
    for view in views:
        own = view.once()[0]
        one = Path(dest).suffix in form.endings or max_shard_size is None
        shards = 1 if one else len(split(own, size_in_bytes(max_shard_size or 0)))
        files += shards + (shards > 1)  # the index
        tensors += own.values()
    amount = _amount(tensors)
    return Forecast({views[0].state: amount}, files, amount.nbytes)


def of_zarr(view: View, dest: str, codec: str | None, memory: int | None) -> Forecast:
    """Of a zarr hierarchy. Raises DataError for what it cannot hold."""
    found = contents(view)
    plan = planned(found, codec, None, None, memory, is_url(dest))
    groups = dict(zip(found.groups, found.about["states"], strict=True))
    of_state: dict[str, list[LazyArray]] = {state: [] for state in found.about["states"]}
    for path, tensor in found.arrays.items():
        of_state[groups[path.partition("/")[0]]].append(tensor)
    files = sum(prod(grid_of(tuple(i.tensor.shape), i.cut.file)) for i in plan.items) + len(plan.documents)
    packed = dest.endswith(".zip")
    room = plan.room() * (1 + packed) if codec is None else None
    return Forecast({s: _amount(tensors) for s, tensors in of_state.items()}, 1 if packed else files, room)


def of_dcp(view: View) -> Forecast:
    """Of a folder of torch.distributed.checkpoint, or of Megatron's rank files: what all ranks have counts once."""
    states: dict[str, Amount] = {}
    if view.state in _WEIGHTS:
        states[view.state] = _amount(view.once()[0].values())
        if view.state == "weights" and "fp32" in view.states:
            states["fp32"] = _amount(view.states["fp32"].once()[0].values())
    moments = [s for s in view.states if s not in _WEIGHTS] if view.state in _WEIGHTS else [view.state]
    states |= {moment: _amount(tensor for _, tensor in view.states[moment].items()) for moment in moments}
    return _folder(states)


def of_universal(view: View) -> Forecast:
    """Of a DeepSpeed universal checkpoint: masters of all weights in float32, and what has their shapes."""
    weights = view.once()[0]
    masters = dict(view.states["fp32"].once()[0]) if "fp32" in view.states else {}
    masters = {**weights, **masters}
    states = {"fp32": _amount(masters.values(), torch.float32)}
    for state, part in view.states.items():
        if state not in (*_WEIGHTS, _OPTION):
            states[state] = _amount(t for n, t in part.items() if n in masters and t.numel() == masters[n].numel())
    if view.state == "weights":
        states = {"weights": _amount(weights.values()), **states}
    return _folder(states)


def free_at(dest: str) -> int | None:
    """Bytes that are free where ``dest`` is to be; None for a URL."""
    if is_url(dest) and not dest.startswith("file://"):
        return None
    at = Path(os.path.abspath(local_path(dest.removeprefix("file://"))))
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def _folder(states: Mapping[str, Amount]) -> Forecast:
    return Forecast(states, None, sum(amount.nbytes + _AROUND * amount.tensors for amount in states.values()))


def _amount(tensors: Iterable[LazyArray], dtype: torch.dtype | None = None) -> Amount:
    """``dtype``: that floats get."""
    kinds: dict[str, None] = {}
    count = nbytes = 0
    for t in tensors:
        of = dtype if dtype is not None and t.dtype.is_floating_point else t.dtype
        kinds[dtype_of(of).short] = None
        count += 1
        nbytes += t.numel() * of.itemsize
    return Amount(count, nbytes, tuple(kinds))
