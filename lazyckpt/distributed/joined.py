"""Lazy tensors one behind the other, as one lazy tensor: what each of them reads, shifted to its place."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..core.box import Box
from ..core.compose import Piece, compose
from ..core.index import relocated
from ..errors import MeshError
from ..io.local import LocalStore
from ..io.store import Store, guarded, narrow
from ..tensor import LazyTensor


def joined(pieces: Sequence[LazyTensor], dim: int, count: int) -> LazyTensor:
    """The tensor that ``count`` lazy tensors make along a dimension. Reads nothing.

    They have to lie in one store, or in folders of this machine. Raises MeshError for another number of them, shapes or
    dtypes that do not fit, indexed lists and steps (`lazy[[3, 1]]`), and pieces in several remote stores.
    """
    if len(pieces) != count or not pieces:
        raise MeshError(f"{len(pieces)} tensors are given, one of each of the {count} expert-parallel ranks is wanted")
    first = pieces[0]
    for n, piece in enumerate(pieces):
        if piece.dtype != first.dtype or _rest(piece, dim) != _rest(first, dim):
            raise MeshError(
                f"{first.name!r}: EP rank {n} has {tuple(piece.shape)} of {piece.dtype}, rank 0 "
                f"{tuple(first.shape)} of {first.dtype}: they do not make one tensor along dimension {dim}"
            )
    store, prefixes = _common([piece.store for piece in pieces], [_paths(piece) for piece in pieces], first.name)
    placed: list[Piece] = []
    at = 0
    for piece, prefix in zip(pieces, prefixes, strict=True):
        start = [0] * piece.ndim
        start[dim] = at
        spec = relocated(piece.spec, prefix) if prefix else piece.spec
        placed.append(Piece(spec, _block(piece), tuple(start)))
        at += piece.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    if any(piece.spec.combine != first.spec.combine for piece in pieces):
        raise MeshError(f"{first.name!r}: some of its pieces are means of replicas, some are not")
    rule = f"the experts of {count} expert-parallel ranks, along dimension {dim}"
    return LazyTensor(store, compose(first.name, shape, placed, rule))


def _rest(tensor: LazyTensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :])


def _paths(piece: LazyTensor) -> set[str]:
    return {fragment.extent.path for fragment in piece.fragments}


def _block(piece: LazyTensor) -> Box:
    if piece.block is None:
        raise MeshError(f"{piece.name!r} is no block of what is stored: only slices without steps can be put together")
    return piece.block


def _common(stores: Sequence[Store], paths: Sequence[set[str]], name: str) -> tuple[Store, list[str]]:
    """A store that all files are in, pinned as they were, and where in it each of the stores begins."""
    narrowed = [narrow(store, used) for store, used in zip(stores, paths, strict=True)]
    first = narrowed[0]
    if all(type(store) is type(first) and store.root == first.root for store in narrowed):
        whole = first.pinned({path: info for store in narrowed for path, info in store.pins.items()})
        if isinstance(whole, Store):  # a store that wraps another one leaves guards to that
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
    return guarded(LocalStore(root, pins), guards), prefixes
