"""Versions that reinforcement-learning stacks publish as deltas, put together with the version before each.

The layouts are those of formats/slime.py and formats/skyrl.py. A tensor that a version changes is compared with its
checksum at its first read, so a wrong base gives no wrong bytes. A tensor that no version changes is that of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ..core.box import Shape, c_strides
from ..core.dtypes import U8, DType
from ..core.expr import computed, make, operand, relocated_sources
from ..core.extents import Chunk, Codec, Extent
from ..core.index import FileInfo, Index
from ..core.ops.deltas import bits
from ..core.specs import Expr, Fragment, Input, TensorSpec
from ..errors import CorruptError, DataError
from ..formats.shared.versions import VERSION, Published
from ..io.codecs import frame_size
from ..io.storage.base import Store
from ..io.storage.joined import Joined, joined
from ..namespace import Namespace


def published_of(index: Index) -> Published | None:
    """Return what a published version says of itself; None for any other checkpoint."""
    found = index.meta.get(VERSION)
    return found if isinstance(found, Published) else None


def restored(store: Store, index: Index, about: Published, base: Namespace[Any], where: str) -> tuple[Store, Index]:
    """Return the store and the index of a version, from its stored frames and the version before it.

    Parameters
    ----------
    store, index
        Those of the version's folder.
    about
        What it says of itself.
    base
        The version before it.
    where
        Its path, for messages.

    Raises
    ------
    DataError
        The base lacks a tensor that the version changes.
    CorruptError
        A frame does not say how many bytes it holds.
    """
    stores, (first, second) = joined([base._store, store])
    tensors: dict[str, TensorSpec] = {}
    changed = index.states["weights"]
    owned = {base.owner(name): name for name in changed if base._spec(name) is not None}
    lost = [name for name in changed if base._spec(name) is None]
    if lost:
        raise DataError(
            f"{base.root} is not the base of {where}: it lacks {lost[0]!r:.80}. Open the version with base="
        )
    for name in base._owners():
        spec = base.specs[name]
        old = operand(spec)
        if name not in owned:
            tensors[name] = computed(name, relocated_sources(old, first), spec.rule)
            continue
        if isinstance(old, Expr) and old.op == "delta.checked":
            old = old.inputs[0]  # the result is compared, so the versions before need not be
        frame = changed[owned[name]]
        packed = _packed(store, frame, spec.shape, spec.dtype, about, where)
        inputs = relocated_sources(old, first), Input(packed, second)
        if about.encoding == "xor":
            node = make("delta.xor", *inputs, dtype=spec.dtype, whole=True)
        else:
            node = make("delta.scatter", *inputs)
        algorithm, digits = about.checksums[owned[name]]
        node = make("delta.checked", node, algorithm=algorithm, digest=digits, where=f"{where}: {name!r:.80}")
        tensors[name] = computed(name, node, f"version {about.version}, a delta over version {about.base}")
    return stores, replace(
        base._index,
        format=about.format,
        states={"weights": tensors},
        stored=tensors,
        files=_files(base._index.files, first, base._store) | _files(index.files, second),
        watched=_files(base._index.pins, first, base._store) | _files(index.pins, second),
        indexed={},
        guards={},
        layout=None,
        open_problems=None,
        unreadable={},
        problems=(*base.problems, *index.problems),
    )


def _packed(store: Store, frame: TensorSpec, shape: Shape, dtype: DType, about: Published, where: str) -> TensorSpec:
    """Return a frame as the tensor that it unpacks to: the difference, or the list of changes."""
    extent = frame.fragments[0].extent
    assert isinstance(extent, Extent)
    kind, nbytes = bits(dtype), prod(shape) * dtype.itemsize
    if about.encoding == "overwrite":
        head = bytes(store.read(extent.path, extent.offset, min(18, frame.nbytes)))
        size = frame_size(head)
        if size is None or size < 4:
            raise CorruptError(f"{where}: {frame.name!r:.80} is not a zstd frame that declares its size: damaged")
        kind, shape, nbytes = U8, (size,), size
    window = extent.offset, frame.nbytes
    chunk = Chunk(extent.path, kind, shape, c_strides(shape), nbytes, (Codec("zstd"),), window=window)
    return TensorSpec(frame.name, shape, kind, (Fragment(chunk, shape),))


def _files(files: Mapping[str, FileInfo], number: int, store: Store | None = None) -> dict[str, FileInfo]:
    return dict(files) if isinstance(store, Joined) else {f"{number}/{path}": info for path, info in files.items()}
