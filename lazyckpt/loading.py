"""Read many tensors: a whole view to a device, or into the parameters of a module.

Each rank reads only its own part of a parameter that is distributed over ranks (a DTensor of FSDP2 or tensor
parallelism).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.modules.module import _IncompatibleKeys

from .core.extents import Packed
from .core.names import unwrapped
from .core.specs import Place
from .errors import DataError, some
from .formats.shared.wrappers import own_names
from .io.memory import many_objects
from .io.pool import run
from .io.reading.arenas import Plain, plain, plain_tasks
from .io.reading.device import Ring, ring
from .io.reading.packed import locate_all
from .io.storage.base import Store
from .io.tasks import Task
from .io.tensors import empty
from .jobs.progress import Bar
from .layouts.placements import Cut, Layout, MeshPlacement, Same, Summand
from .lazy import LazyArray, named

_GROUP = 256 << 20  # bytes to read at once before their dtype is converted
_SORTED = 4096  # tensors to sort by their places at once: the first ones are read while others are looked up
_LOOKED_UP = 1024  # archives to locate at once
_LONG = 1 << 30  # bytes from which on a progress bar is shown on terminals
T = TypeVar("T")


def read_all(
    lazy: Mapping[str, LazyArray], place: torch.device, dtype: torch.dtype | None, copy: bool
) -> dict[str, torch.Tensor]:
    """See `CheckpointView.to`. A mapping with a method ``place`` tells with it where tensors are that need not be
    described (see `namespace.Owned`)."""
    done: dict[str, torch.Tensor] = {}
    if place.type == "meta":
        return {name: t.to("meta", _target_dtype(t.dtype, dtype)) for name, t in lazy.items()}
    total: int | None = getattr(lazy, "nbytes", None)
    with _bar(sum(t.nbytes for t in lazy.values()) if total is None else total) as bar, many_objects():
        if place.type == "cpu":
            _read_to_cpu(lazy, dtype, copy, done, bar)
        else:
            with ring(place) as way:
                for name in _looked_up(lazy, lazy.__getitem__):
                    t = lazy[name]
                    done[name] = t._send(way, _target_dtype(t.dtype, dtype))
                    bar.add(t.nbytes)
    return done


def _read_to_cpu(
    lazy: Mapping[str, LazyArray], dtype: torch.dtype | None, copy: bool, done: dict[str, torch.Tensor], bar: Bar
) -> None:
    maps: dict[str, Any] = {}
    reading = list(lazy) if copy else []
    for name, t in () if copy else lazy.items():
        mapped = None if _target_dtype(t.dtype, dtype) not in (None, t.dtype) else t._mapped(maps)
        if mapped is None:
            reading.append(name)
        else:
            done[name] = mapped
            bar.add(t.nbytes)
    while reading:
        group = _first_bytes(reading, lazy, _GROUP) if dtype is not None else reading
        done.update(_read_together(group, lazy, dtype, bar))
        reading = reading[len(group) :]


def _bar(total: int) -> Bar:
    return Bar(total, "read", None if total >= _LONG else False)


def _first_bytes(names: list[str], lazy: Mapping[str, LazyArray], limit: int) -> list[str]:
    """Return the first names with at most ``limit`` bytes together, but at least one."""
    size = 0
    for n, name in enumerate(names):
        size += lazy[name].nbytes
        if size > limit and n:
            return names[:n]
    return names


def _read_together(
    names: list[str], lazy: Mapping[str, LazyArray], dtype: torch.dtype | None, bar: Bar
) -> dict[str, torch.Tensor]:
    ready: dict[str, Callable[[], torch.Tensor]] = {}
    done: dict[str, torch.Tensor] = {}

    def tasks() -> Iterator[Task]:
        rest: list[str] = []
        for at in range(0, len(names), _SORTED):
            for store, wanted in _plain(names[at : at + _SORTED], lazy, rest).values():
                for nbytes, do in plain_tasks(store, wanted, done):
                    yield nbytes, do
                    bar.add(nbytes)  # the task is submitted
        for name in rest:
            t = lazy[name]
            more, ready[name] = t._start()
            yield from more
            bar.add(t.nbytes)

    with many_objects():
        run(tasks())
        return {name: _converted(done[name] if name in done else ready[name](), dtype) for name in names}


def _plain(
    names: Sequence[str], lazy: Mapping[str, LazyArray], rest: list[str]
) -> dict[int, tuple[Store, list[Plain]]]:
    """Return those tensors that are one run of bytes, by the number of their store, with the store; put the names of
    the others into ``rest``."""
    found: dict[int, tuple[Store, list[Plain]]] = {}
    place: Callable[[str], tuple[Store, Place] | None] | None = getattr(lazy, "place", None)
    unknown = []
    for name in names:
        if place is not None and (known := place(name)) is not None:
            store, (path, offset, shape, dtype) = known
            _add(found, store, plain(name, path, offset, shape, dtype), rest)
        else:
            unknown.append(name)
    for name in _looked_up(unknown, lazy.__getitem__):
        t = lazy[name]
        extent = t._plain
        if extent is None:
            rest.append(name)
        else:
            _add(found, t.store, plain(name, extent.path, extent.offset, t.spec.shape, t.spec.dtype), rest)
    return found


def _add(found: dict[int, tuple[Store, list[Plain]]], store: Store, one: Plain, rest: list[str]) -> None:
    if one.nbytes:
        found.setdefault(id(store), (store, []))[1].append(one)
    else:
        rest.append(one.name)


def _looked_up(items: Iterable[T], lazy: Callable[[T], LazyArray]) -> Iterator[T]:
    """Yield the items, after locating the archives of several items at once."""
    group: list[T] = []
    found: list[tuple[Store, Packed, str]] = []
    for item in items:
        t = lazy(item)
        group.append(item)
        found += [(t.store, archive, t.name) for archive in t._archives]
        if len(found) >= _LOOKED_UP:
            _look_up(found)
            yield from group
            group, found = [], []
    _look_up(found)
    yield from group


def _look_up(found: list[tuple[Store, Packed, str]]) -> None:
    for store in {id(store): store for store, _, _ in found}.values():
        locate_all(store, [(archive, name) for s, archive, name in found if s is store])


def _target_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype | None:
    return wanted if own.is_floating_point or own.is_complex else None


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = _target_dtype(tensor.dtype, dtype)
    return tensor if wanted is None else tensor.to(wanted)


def fill(pairs: Iterable[tuple[LazyArray, torch.Tensor]], bar: Bar | None = None) -> None:
    """Read each lazy tensor into its target: a tensor of the same shape, on any device, with any dtype and strides."""
    bar = bar or Bar(0, "", False)
    ways: dict[torch.device, Ring] = {}
    group: list[tuple[LazyArray, torch.Tensor]] = []
    size = 0
    with ExitStack() as until:
        for lazy, target in pairs:
            target = target.detach()
            if target.device.type != "cpu":
                if target.device not in ways:
                    ways[target.device] = until.enter_context(ring(target.device))
                lazy._send(ways[target.device], out=target)
                bar.add(lazy.nbytes)
                continue
            group.append((lazy, target))
            size += 0 if _direct(lazy, target) else lazy.nbytes
            if size > _GROUP:
                _fill_together(group, bar)
                group, size = [], 0
        _fill_together(group, bar)


def _direct(lazy: LazyArray, target: torch.Tensor) -> bool:
    """Return whether the bytes can be read directly into the target's memory."""
    same = target.dtype == lazy.dtype and target.is_contiguous()
    return same and not (target.is_conj() or target.is_neg())


def _fill_together(pairs: list[tuple[LazyArray, torch.Tensor]], bar: Bar) -> None:
    ready: list[tuple[Callable[[], torch.Tensor], torch.Tensor | None]] = []

    def tasks() -> Iterator[Task]:
        for lazy, target in _looked_up(pairs, lambda pair: pair[0]):
            direct = _direct(lazy, target)
            more, done = lazy._start(target if direct else None)
            ready.append((done, None if direct else target))
            yield from more
            bar.add(lazy.nbytes)

    run(tasks())
    for done, target in ready:
        read = done()
        if target is not None:
            target.copy_(read)


def load_into(view: Mapping[str, LazyArray], module: torch.nn.Module, strict: bool) -> _IncompatibleKeys:
    """See `CheckpointView.load_into`."""
    _reshard(module)
    slots = _slots(module)
    own_name = own_names(slots)
    wanted = {
        next((n for n in (name, own_name[name]) if named(view, n) is not None), unwrapped(name)): slot
        for name, slot in slots.items()
    }
    there = {name: lazy for name in wanted if (lazy := named(view, name)) is not None}
    missing = [name for name in wanted if name not in there]
    unexpected = [name for name in view if name not in wanted]
    problems = []
    if strict and missing:
        problems.append(f"the checkpoint lacks {some(map(repr, missing), 5)}")
    if strict and unexpected:
        problems.append(f"the module lacks {some(map(repr, unexpected), 5)}")
    found: dict[str, LazyArray] = {}  # this rank's part of each tensor
    for name, lazy in there.items():
        owner, attribute = wanted[name]
        target = getattr(owner, attribute)
        shape = tuple(target.shape)
        if shape != tuple(lazy.shape):
            problems.append(f"{name!r} is {tuple(lazy.shape)} in the checkpoint and {shape} in the module")
            continue
        own = _own(lazy, target)
        if own is not None:
            own._check()  # raise for a missing file before anything is written
            found[name] = own
    if problems:
        raise DataError(f"nothing was loaded: {'; '.join(problems)}")

    filled: dict[int, torch.Tensor] = {}  # by id, because tied parameters of the module are one object
    made: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def pairs() -> Iterator[tuple[LazyArray, torch.Tensor]]:
        for name, tensor in found.items():
            owner, attribute = wanted[name]
            target = getattr(owner, attribute)
            known = id(target) in filled
            if not known:
                filled[id(target)] = _materialised(target) if target.is_meta else target
            if target.is_meta:
                made.append((owner, attribute, filled[id(target)]))
            if not known:
                yield tensor, _local(filled[id(target)])

    once = {id(getattr(*wanted[name])): tensor for name, tensor in found.items()}
    with _bar(sum(t.nbytes for t in once.values())) as bar:
        fill(pairs(), bar)
    for owner, attribute, tensor in made:
        _set(owner, attribute, tensor)
    return _IncompatibleKeys(missing, unexpected)


def _slots(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return names of the state dict -> (submodule, attribute), without buffers that are not saved."""
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


def _materialised(target: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory for one on the meta device: on the CPU or, for a DTensor, on its mesh's devices."""
    target_of = _dtensor(target)
    if target_of is None:
        data = empty(target.shape, target.dtype)
    else:
        held = torch.empty_like(_local(target), device=target_of.device_mesh.device_type)
        data = type(target_of).from_local(
            held, target_of.device_mesh, target_of.placements, shape=target_of.shape, stride=target_of.stride()
        )
    return torch.nn.Parameter(data, target.requires_grad) if isinstance(target, torch.nn.Parameter) else data


def _set(owner: torch.nn.Module, attribute: str, value: torch.Tensor) -> None:
    table: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
    table[attribute] = value


# -- DTensors


def _reshard(module: torch.nn.Module) -> None:
    """Replace gathered parameters of FSDP2, which it would discard, by its shards, as its hooks for state dicts do."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules() if fsdp is not None else ():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _dtensor(tensor: torch.Tensor) -> Any:
    """Return the tensor if it is a DTensor, else None. Without an import of their module there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor.detach() if module is not None and isinstance(tensor, module.DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    spread = _dtensor(tensor)
    local: torch.Tensor = tensor.detach() if spread is None else spread.to_local()
    return local


def _own(tensor: LazyArray, target: torch.Tensor) -> LazyArray | None:
    """Return the part of a lazy tensor that this rank has of the target; None if it has nothing. Raises DataError for a
    placement that no tensor can be read into."""
    spread = _dtensor(target)
    if spread is None:
        return tensor
    mesh = spread.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return None
    layout = Layout(tuple(mesh.shape), tuple(map(_placement, spread.placements)))
    if layout.partial:
        raise DataError(
            f"{tensor.name!r} is spread as {tuple(spread.placements)}: no rank has its values before they are "
            f"reduced ({layout.partial}), so nothing can be loaded there"
        )
    held = layout.runs(tuple(tensor.shape), coordinate)
    for dim, runs in enumerate(held):
        if len(runs) == 1:
            key: Any = slice(runs[0][0], sum(runs[0]))
        else:
            key = np.concatenate([np.arange(0), *(np.arange(start, start + n) for start, n in runs)])
        tensor = tensor.lazy[(slice(None),) * dim + (key,)]
    if tensor.shape != spread.to_local().shape:
        raise DataError(
            f"{tensor.name!r}: this rank's part is {tuple(tensor.shape)} by its placements {tuple(spread.placements)}, "
            f"its memory is {tuple(spread.to_local().shape)}: it was not made as DTensors are"
        )
    return tensor


def _placement(placement: Any) -> MeshPlacement:
    if placement.is_partial():
        return Summand(str(getattr(placement, "reduce_op", "")))
    if placement.is_replicate():
        return Same()
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise DataError(f"the placement {placement} is not known: nothing can be loaded there")
    return Cut(dim, getattr(placement, "split_factor", 1))
