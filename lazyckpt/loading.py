"""Reading many tensors: all of a view to a device, or one by one into a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from .core.index import Archive
from .errors import DataError
from .io.archives import locate_all
from .io.pool import Task, run
from .io.store import Store
from .io.transfer import Ring
from .tensor import LazyTensor

_GROUP = 256 << 20  # bytes that are read at once before their dtype is converted
_LOOKED_UP = 64  # archives that are looked up at once


def read_all(
    lazy: Mapping[str, LazyTensor], place: torch.device, dtype: torch.dtype | None, copy: bool
) -> dict[str, torch.Tensor]:
    """See `CheckpointView.to`."""
    done: dict[str, torch.Tensor] = {}
    if place.type == "meta":
        return {name: t.to("meta", _target_dtype(t.dtype, dtype)) for name, t in lazy.items()}
    if place.type != "cpu":
        ring = Ring(place)
        for name, t in lazy.items():
            done[name] = t.read_through(ring, _target_dtype(t.dtype, dtype))
        ring.finish()
        return done
    maps: dict[str, Any] = {}
    reading: list[str] = []
    for name, t in lazy.items():
        mapped = None if copy or _target_dtype(t.dtype, dtype) not in (None, t.dtype) else t.mapped(maps)
        if mapped is None:
            reading.append(name)
        else:
            done[name] = mapped
    while reading:
        group = _first_bytes(reading, lazy, _GROUP) if dtype is not None else reading
        done.update(_read_together(group, lazy, dtype))
        reading = reading[len(group) :]
    return done


def _first_bytes(names: list[str], lazy: Mapping[str, LazyTensor], limit: int) -> list[str]:
    """As many of the first names as hold ``limit`` bytes, at least one."""
    size = 0
    for n, name in enumerate(names):
        size += lazy[name].nbytes
        if size > limit and n:
            return names[:n]
    return names


def _read_together(
    names: list[str], lazy: Mapping[str, LazyTensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    ready: dict[str, Callable[[], torch.Tensor]] = {}

    def tasks() -> Iterator[Task]:
        for group in _looked_up(names, lazy):
            for name in group:
                more, ready[name] = lazy[name].start()
                yield from more

    run(tasks())
    return {name: _converted(ready[name](), dtype) for name in names}


def _looked_up(names: list[str], lazy: Mapping[str, LazyTensor]) -> Iterator[list[str]]:
    """The names, in groups whose archives were looked up together."""
    group: list[str] = []
    found: list[tuple[Store, Archive, str]] = []
    for name in names:
        t = lazy[name]
        group.append(name)
        found += [(t.store, archive, t.name) for archive in t.archives]
        if len(found) >= _LOOKED_UP:
            _look_up(found)
            yield group
            group, found = [], []
    _look_up(found)
    yield group


def _look_up(found: list[tuple[Store, Archive, str]]) -> None:
    for store in {id(store): store for store, _, _ in found}.values():
        locate_all(store, [(archive, name) for s, archive, name in found if s is store])


def _target_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype | None:
    return wanted if own.is_floating_point or own.is_complex else None


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = _target_dtype(tensor.dtype, dtype)
    return tensor if wanted is None else tensor.to(wanted)


def load_into(view: Mapping[str, LazyTensor], module: torch.nn.Module, strict: bool) -> Any:
    """See `CheckpointView.load_into`."""
    wanted = _slots(module)
    missing = [name for name in wanted if name not in view]
    unexpected = [name for name in view if name not in wanted]
    problems = []
    if strict and missing:
        problems.append(f"the checkpoint lacks {_listed(missing)}")
    if strict and unexpected:
        problems.append(f"the module lacks {_listed(unexpected)}")
    found = {name: view[name] for name in wanted if name not in missing}
    for name, tensor in found.items():
        owner, attribute = wanted[name]
        shape = tuple(getattr(owner, attribute).shape)
        if shape != tuple(tensor.shape):
            problems.append(f"{name!r} is {tuple(tensor.shape)} in the checkpoint and {shape} in the module")
        tensor.check()  # a missing file is told before anything is written
    if problems:
        raise DataError(f"nothing was loaded: {'; '.join(problems)}")

    filled: dict[int, torch.Tensor] = {}  # tied parameters of the module are one object: filled once
    for name, tensor in found.items():
        owner, attribute = wanted[name]
        target: torch.Tensor = getattr(owner, attribute)
        if id(target) in filled:
            if target.is_meta:
                _set(owner, attribute, filled[id(target)])
            continue
        if target.is_meta:
            filled[id(target)] = _materialised(tensor, target)
            _set(owner, attribute, filled[id(target)])
            filled[id(filled[id(target)])] = filled[id(target)]
            continue
        with torch.no_grad():
            target.copy_(tensor.to(target.device))
        filled[id(target)] = target
    return _IncompatibleKeys(missing, unexpected)


def _slots(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Names of the state dict -> (the module that holds the tensor, its attribute); buffers that are not saved are not
    among them."""
    slots = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                slots[start + attribute] = (owner, attribute)
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and attribute not in owner._non_persistent_buffers_set:
                slots[start + attribute] = (owner, attribute)
    return slots


def _materialised(tensor: LazyTensor, target: torch.Tensor) -> torch.Tensor:
    data = tensor.to("cpu", target.dtype)
    return torch.nn.Parameter(data, target.requires_grad) if isinstance(target, torch.nn.Parameter) else data


def _set(owner: torch.nn.Module, attribute: str, value: torch.Tensor) -> None:
    table: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
    table[attribute] = value


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
