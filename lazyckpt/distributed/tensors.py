"""Drop and restore the EP dimension of DTensors, lazy tensors, and whole state dicts.

Of a stack of experts [E, ...] each EP rank of the running model has a parameter [E / ep, ...] (plain, or a DTensor over
"ep_fsdp"). torch's checkpoints would treat the parameters of all EP ranks as the same tensor. So the EP dimension is
restored before saving, to a DTensor [E, ...] over ("ep", "ep_fsdp"), and dropped after loading. The semantics are those
of VeOmni (veomni/checkpoint/dcp_checkpointer.py `restore_ep_dim`, `drop_ep_dim`), for any dimension and uneven cuts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.box import Box, Shape, c_strides
from ..core.compose import compose
from ..core.expr import leaves, relocated
from ..core.fragments import fragments_of
from ..core.placement import Placement
from ..core.specs import TensorSpec
from ..errors import MeshError, some
from ..io.storage.access import guarded, narrow
from ..io.storage.base import Store
from ..io.storage.local import LocalStore
from ..tensor import LazyTensor
from .mesh import EPDegrees, EPSpecInfo, checked, degrees_of, same_ranks

# -- Concatenation of lazy tensors.


def joined(pieces: Sequence[LazyTensor], dim: int, count: int) -> LazyTensor:
    """Concatenate ``count`` lazy tensors along a dimension. Reads nothing.

    They have to be in one store, or in folders of this machine. Raises MeshError for another number of tensors, shapes
    or dtypes that do not fit, indexed lists and steps (`lazy[[3, 1]]`), and pieces in several remote stores.
    """
    if len(pieces) != count or not pieces:
        raise MeshError(f"{len(pieces)} tensors are given, one of each of the {count} expert-parallel ranks is needed")
    first = pieces[0]
    for n, piece in enumerate(pieces):
        if piece.dtype != first.dtype or _rest(piece, dim) != _rest(first, dim):
            raise MeshError(
                f"{first.name!r}: EP rank {n} has {tuple(piece.shape)} of {piece.dtype}, rank 0 "
                f"{tuple(first.shape)} of {first.dtype}: they do not make one tensor along dimension {dim}"
            )
    store, prefixes = _common([piece.store for piece in pieces], [_paths(piece) for piece in pieces], first.name)
    placed: list[tuple[TensorSpec, Placement]] = []
    at = 0
    for piece, prefix in zip(pieces, prefixes, strict=True):
        start = [0] * piece.ndim
        start[dim] = at
        spec = relocated(piece.spec, prefix) if prefix else piece.spec
        placed.append((spec, Placement.of(spec.shape, _block(piece), tuple(start))))
        at += piece.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    rule = f"the experts of {count} expert-parallel ranks, along dimension {dim}"
    return LazyTensor(store, compose(first.name, shape, placed, rule))


def _rest(tensor: LazyTensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :])


def _paths(piece: LazyTensor) -> set[str]:
    return {path for one in leaves(piece.spec) for path in fragments_of(one.spec.fragments).file_paths()}


def _block(piece: LazyTensor) -> Box:
    if piece._block is None:
        raise MeshError(f"{piece.name!r} is no block of what is stored: only slices without steps can be put together")
    return piece._block


def _common(stores: Sequence[Store], paths: Sequence[set[str]], name: str) -> tuple[Store, list[str]]:
    """Return a store of all files, with their pins, and the prefix of each given store in it."""
    narrowed = [narrow(store, used) for store, used in zip(stores, paths, strict=True)]
    first = narrowed[0]
    if all(type(store) is type(first) and store.root == first.root for store in narrowed):
        whole = first.pinned({path: info for store in narrowed for path, info in store.pins.items()})
        if isinstance(whole, Store):  # a wrapper of a store has no guards of its own
            whole.guards = {path: guard for store in narrowed for path, guard in store.guards.items()}
        return whole, [""] * len(stores)
    if not all(isinstance(store, LocalStore) for store in narrowed):
        roots = ", ".join(dict.fromkeys(store.root for store in narrowed))
        raise MeshError(f"{name!r}: its pieces lie in {roots}: only folders of this machine can be put together")
    try:
        root = os.path.commonpath([store.root for store in narrowed])
    except ValueError:  # several drives
        raise MeshError(f"{name!r}: its pieces lie on several drives") from None
    prefixes = [os.path.relpath(store.root, root).replace(os.sep, "/").removeprefix(".") for store in narrowed]
    pins = {
        f"{prefix}/{path}".lstrip("/"): info
        for prefix, store in zip(prefixes, narrowed, strict=True)
        for path, info in store.pins.items()
    }
    guards = {
        f"{prefix}/{path}".lstrip("/"): guard
        for prefix, store in zip(prefixes, narrowed, strict=True)
        for path, guard in store.guards.items()
    }
    return guarded(LocalStore(root, pins, _same_io(narrowed)), guards), prefixes


def _same_io(stores: Sequence[Store]) -> str:
    """Return how all stores read their files; "auto" if they differ."""
    modes = {store.asked_io for store in stores if isinstance(store, LocalStore)}
    return modes.pop() if len(modes) == 1 else "auto"


# -- Dropping and restoring the EP dimension.

MeshLike = DeviceMesh | EPDegrees | EPSpecInfo
_STATE = re.compile(r"(?:^|\.)state\.(.+)\.[^.]+$")  # flattened keys
_WEIGHT = re.compile(r"(?:model|module|state_dict)\.(.+)$")


@overload
def drop_ep_dim(tensor: LazyTensor, mesh: MeshLike, ep_rank: int | None = None) -> LazyTensor: ...
@overload
def drop_ep_dim(tensor: torch.Tensor, mesh: MeshLike, ep_rank: int | None = None) -> torch.Tensor: ...
def drop_ep_dim(tensor: Any, mesh: MeshLike, ep_rank: int | None = None) -> Any:
    """Return the experts of one EP rank.

    Parameters
    ----------
    tensor
        A DTensor over ("ep", "ep_fsdp") or over "ep", or a lazy tensor [E, ...].
    mesh
        The ("ep", "ep_fsdp") mesh, its sizes, or the parameter's `EPSpecInfo`.
    ep_rank
        The EP rank, for a lazy tensor. By default this process's place in the mesh.

    Returns
    -------
    torch.Tensor or LazyTensor
        A DTensor over ("ep", "ep_fsdp") becomes one over "ep_fsdp", a DTensor over "ep" a plain tensor: this rank's
        experts, in the same memory. A lazy tensor becomes that of the rank's experts, cut as `torch.chunk` does;
        nothing is read. A parameter that is not distributed over "ep" is returned unchanged.

    Raises
    ------
    MeshError
        The mesh, the placements or the rank do not fit.
    """
    placement, found = _spread(mesh)
    if placement is None:
        return tensor
    if isinstance(tensor, LazyTensor):
        size, dim = degrees_of(found).ep, _dim(placement, tensor.ndim, tensor.name)
        if ep_rank is None:
            ep_rank = _place(found)
        if not 0 <= ep_rank < size:
            raise MeshError(f"there are {size} expert-parallel ranks, none of the number {ep_rank}")
        step = -(-tensor.shape[dim] // size)
        return tensor.lazy[(slice(None),) * dim + (slice(ep_rank * step, (ep_rank + 1) * step),)]
    live = checked(found)
    if not isinstance(tensor, DTensor):
        raise MeshError(f"a {type(tensor).__name__} has no EP dimension to drop: a DTensor over {live} is needed")
    tensor = tensor.detach()
    over = tensor.placements
    if len(over) == 1 and same_ranks(tensor.device_mesh, live["ep"]) and over[0] == placement:
        return tensor.to_local()
    if len(over) != 2 or not same_ranks(tensor.device_mesh, live) or over[0] != placement or not _plain(over[1]):
        raise MeshError(
            f"a tensor with placements {over} on {tensor.device_mesh} cannot drop its EP dimension: they should be "
            f"({placement}, Shard or Replicate) on {live}, or ({placement},) on its 'ep'"
        )
    dim, shape = placement.dim, list(tensor.shape)
    step = -(-shape[dim] // live.shape[0])
    at = min(_place(live) * step, shape[dim])
    shape[dim] = min(step, shape[dim] - at)
    strides = _dense(shape, tensor.stride())
    return DTensor.from_local(tensor.to_local(), live["ep_fsdp"], over[1:], shape=torch.Size(shape), stride=strides)


@overload
def restore_ep_dim(tensor: torch.Tensor, mesh: MeshLike) -> DTensor: ...
@overload
def restore_ep_dim(tensor: Sequence[LazyTensor], mesh: MeshLike) -> LazyTensor: ...
def restore_ep_dim(tensor: Any, mesh: MeshLike) -> Any:
    """Return the experts of all EP ranks as one tensor [E, ...].

    For tensors in memory all EP ranks have to call it: the number of experts of each rank is gathered.

    Parameters
    ----------
    tensor
        A DTensor over "ep_fsdp" (a parameter of FSDP2), a plain tensor, or the lazy tensors of all EP ranks in order,
        from one folder or several folders of this machine.
    mesh
        The ("ep", "ep_fsdp") mesh, its sizes, or the parameter's `EPSpecInfo`.

    Returns
    -------
    DTensor or LazyTensor
        A DTensor becomes one over ("ep", "ep_fsdp"), a plain tensor a DTensor over "ep", in the same memory. Lazy
        tensors become the lazy tensor of all experts; nothing is read.

    Raises
    ------
    MeshError
        The mesh, the placements or the pieces do not fit together.
    """
    placement, found = _spread(mesh)
    if isinstance(tensor, Sequence):
        if placement is None:
            return tensor[0]
        return joined(tensor, _dim(placement, tensor[0].ndim, tensor[0].name), degrees_of(found).ep)
    if placement is None:
        return tensor
    (shape,) = _whole_shapes([("the tensor", tensor, placement)], checked(found))
    return _restored(tensor, placement, checked(found), shape)


def drop_ep_dims(
    state_dict: Mapping[str, Any], fqn2spec: Mapping[str, EPSpecInfo], ep_rank: int | None = None
) -> dict[str, Any]:
    """Apply `drop_ep_dim` to the tensors of a state dict or a view that are distributed over the experts' mesh.

    Parameters
    ----------
    state_dict
        Tensors, also nested. Optimizer states have keys with their parameter's FQN (``["state"][fqn]["exp_avg"]``), or
        flattened keys (``state.FQN.exp_avg``). States without the parameter's dimensions (``step``) are unchanged.
    fqn2spec
        FQN -> `EPSpecInfo`, from `build_ep_fqn2spec_info` or `ep_specs`.
    ep_rank
        The EP rank, for lazy tensors. By default this process's place in the mesh.

    Returns
    -------
    dict
        The same keys, with the experts of one EP rank.

    Raises
    ------
    MeshError
        What `drop_ep_dim` raises.
    """
    done = {id(t): drop_ep_dim(t, spec, ep_rank) for _, t, spec in _experts(state_dict, fqn2spec)}
    return {key: _rebuilt(state_dict[key], done) for key in state_dict}


def restore_ep_dims(
    state_dict: Mapping[str, Any] | Sequence[Mapping[str, LazyTensor]], fqn2spec: Mapping[str, EPSpecInfo]
) -> dict[str, Any]:
    """Apply `restore_ep_dim` to the tensors of a state dict that are distributed over the experts' mesh.

    All EP ranks have to call it with their state dicts; or one process with the views of all ranks.

    Parameters
    ----------
    state_dict
        The state dict of this rank, nested as for `drop_ep_dims`; or the views of all EP ranks, in order.
    fqn2spec
        FQN -> `EPSpecInfo`, from `build_ep_fqn2spec_info` or `ep_specs`.

    Returns
    -------
    dict
        The same keys, with the experts of all ranks. For views, the other tensors are those of the first.

    Raises
    ------
    MeshError
        The views have different names, or what `restore_ep_dim` raises.
    """
    if not isinstance(state_dict, Mapping):
        first, *others = state_dict
        for n, other in enumerate(others, 1):
            if set(other) != set(first):
                odd = sorted(set(other) ^ set(first))
                raise MeshError(f"EP ranks 0 and {n} have different names: {some(odd, 4)}: are they of one model?")
        whole = dict(first)
        for name, spec in fqn2spec.items():
            if name in whole and _known(spec):
                whole[name] = restore_ep_dim([view[name] for view in state_dict], spec)
        return whole
    leaves: dict[int, tuple[str, Any, EPSpecInfo]] = {}
    for path, tensor, spec in _experts(state_dict, fqn2spec):
        leaves.setdefault(id(tensor), (path, tensor, spec))
    if not leaves:
        return dict(state_dict)
    live = checked(next(iter(leaves.values()))[2].mesh)
    wanted = [(path, t, _placement(spec)) for path, t, spec in leaves.values()]
    shapes = _whole_shapes(wanted, live)
    done = {id(t): _restored(t, p, live, shape) for (_, t, p), shape in zip(wanted, shapes, strict=True)}
    return {key: _rebuilt(state_dict[key], done) for key in state_dict}


def _spread(mesh: MeshLike) -> tuple[Shard | None, DeviceMesh | EPDegrees]:
    """Return the placement over "ep" (None if the parameter is not distributed over it) and the mesh."""
    if not isinstance(mesh, EPSpecInfo):
        degrees_of(mesh)
        return Shard(0), mesh
    if mesh.placement is None or mesh.mesh is None:
        raise MeshError(f"{mesh.name!r}: {mesh.note or 'its placement on the mesh is not known'}")
    return (mesh.placement if isinstance(mesh.placement, Shard) else None), mesh.mesh


def _placement(spec: EPSpecInfo) -> Shard:
    placement, _ = _spread(spec)
    assert placement is not None
    return placement


def _plain(placement: Any) -> bool:
    return isinstance(placement, Replicate) or type(placement) is Shard


def _known(spec: EPSpecInfo | None) -> bool:
    return spec is not None and not isinstance(spec.placement, Replicate)


def _dim(placement: Shard, ndim: int, name: str) -> int:
    if placement.dim >= ndim:
        raise MeshError(f"{name!r} has {ndim} dimensions, none of the number {placement.dim}")
    return placement.dim


def _place(mesh: DeviceMesh | EPDegrees) -> int:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError("without processes there is no own rank: say which EP rank's experts (ep_rank=...)")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"this process is not part of the mesh {mesh}")
    return coordinate[0]


def _restored(tensor: Any, placement: Shard, mesh: DeviceMesh, shape: Shape) -> DTensor:
    tensor = tensor.detach()
    strides = _dense(shape, tensor.stride())
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh["ep"], [placement], shape=torch.Size(shape), stride=strides)
    if not same_ranks(tensor.device_mesh, mesh["ep_fsdp"]) or not all(map(_plain, tensor.placements)):
        raise MeshError(
            f"a tensor with placements {tensor.placements} on {tensor.device_mesh} cannot get an EP dimension: FSDP2's "
            f"parameters of experts lie on {mesh['ep_fsdp']}"
        )
    # "ep" cuts first, so two placements over the same dimension are not a strided shard
    over = [placement, *tensor.placements]
    return DTensor.from_local(tensor.to_local(), mesh, over, shape=torch.Size(shape), stride=strides)


def _whole_shapes(tensors: Sequence[tuple[str, Any, Shard]], mesh: DeviceMesh) -> list[Shape]:
    """Return the shapes of the tensors of all experts. The shapes of all EP ranks are gathered at once."""
    own = [(path, tuple(t.shape)) for path, t, _ in tensors]
    size = mesh.shape[0]
    held: list[Any] = [own] * size
    if size > 1:
        dist.all_gather_object(held, own, group=mesh.get_group("ep"))
    whole = []
    for n, (path, tensor, placement) in enumerate(tensors):
        dim = _dim(placement, tensor.ndim, path)
        if any(len(other) != len(own) or other[n][0] != path for other in held):
            raise MeshError(
                f"{path!r} is not what the other EP ranks restore at the same time: do all have the same names?"
            )
        sizes = [other[n][1][dim] for other in held]
        rests = {other[n][1][:dim] + other[n][1][dim + 1 :] for other in held}
        total, step = sum(sizes), -(-sum(sizes) // size)
        if len(rests) > 1 or sizes != [max(0, min(step, total - rank * step)) for rank in range(size)]:
            raise MeshError(
                f"{path!r}: the EP ranks hold {[other[n][1] for other in held]}: torch.chunk does not cut so"
            )
        shape = own[n][1]
        whole.append((*shape[:dim], total, *shape[dim + 1 :]))
    return whole


def _dense(shape: Sequence[int], strides: Sequence[int]) -> Shape:
    """Return strides without gaps that keep the order of dimensions of ``strides``."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    found = [0] * len(shape)
    for d, stride in zip(order, c_strides([shape[d] for d in order]), strict=True):
        found[d] = stride
    return tuple(found)


def _experts(state_dict: Any, fqn2spec: Mapping[str, EPSpecInfo]) -> Iterator[tuple[str, Any, EPSpecInfo]]:
    """Yield the tensors of a state dict that are distributed over the experts' mesh: (path, tensor, spec)."""
    seen: set[int] = set()
    for path, tensor in _leaves(state_dict, ()):
        if id(tensor) in seen or not tensor.ndim:
            continue
        seen.add(id(tensor))
        spec = _spec(path, fqn2spec)
        if spec is not None and _known(spec) and tensor.ndim > _placement(spec).dim:
            yield ".".join(path), tensor, spec


def _spec(path: tuple[str, ...], fqn2spec: Mapping[str, EPSpecInfo]) -> EPSpecInfo | None:
    """Return the spec of the parameter that a path in a state dict belongs to."""
    whole = ".".join(path)
    flat = (_STATE.search(whole), _WEIGHT.match(whole))
    names = [*path[::-1][:2], whole, *(m[1] for m in flat if m)]
    return next((fqn2spec[name] for name in names if name in fqn2spec), None)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, torch.Tensor | LazyTensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], (*path, str(key)))
    elif isinstance(value, list | tuple):
        for n, item in enumerate(value):
            yield from _leaves(item, (*path, str(n)))


def _rebuilt(value: Any, done: Mapping[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Mapping):
        return {key: _rebuilt(value[key], done) for key in value}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, done) for item in value)
    return value
