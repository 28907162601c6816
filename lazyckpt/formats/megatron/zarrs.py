"""The zarr backend of megatron-core's distributed checkpoints: a folder for each tensor, a raw file for each chunk.

Writer: megatron/core/dist_checkpointing/strategies/zarr.py of megatron-core up to 0.15: zarr v2 arrays without
compression; "bfloat16" is not a dtype of zarr v2, but that is what stands in ``.zarray``. Objects are files of
torch.save in folders of their own.
"""

from __future__ import annotations

import itertools
import json
import posixpath
from collections.abc import Mapping
from math import prod
from typing import Any

from ...core.box import Shape, c_strides
from ...core.index import Extent, FileInfo, Hole, TensorSpec
from ...errors import CorruptError, LazyckptError
from ...io.plain import Path
from ...io.store import Entry, Store
from ..dcp.chunks import Piece, in_chunks
from ..members import Member
from ..torchsave import member as torch_member
from ..zarr.grid import Array, Packing
from ..zarr.metadata import NoTensorError, array_v2

_MAX_JSON = 1 << 20  # bytes of an array's description
_MAX_CHUNKS = 1 << 24


def in_folder(store: Store, folder: str = "") -> Member:
    """The arrays of a folder, and its objects but for ``_extra_state``. Those that are damaged are
    told of. Raises the first one's error if all are."""
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    problems: list[str] = []
    files: dict[str, FileInfo] = {}
    meta: dict[str, Any] = {}
    error: LazyckptError | None = None
    for key, entry in sorted(store.list(folder).items()):
        if not entry.is_dir:
            continue
        below = posixpath.join(folder, key)
        listed = store.list(below)
        if ".zarray" in listed:
            try:
                tensors[key] = ((key,), _array(store, below, key, listed, problems))
            except LazyckptError as e:
                error = error or e
                problems.append(f"{key!r} cannot be read: {e}")
                continue
            files |= {f"{below}/{name}": e.info for name, e in listed.items() if not e.is_dir}
        elif not key.endswith("_extra_state"):
            for name in sorted(n for n in listed if n.endswith(".pt")):
                try:
                    one = torch_member(store, f"{below}/{name}", f"{key}/{name.removesuffix('.pt')}.")
                except LazyckptError as e:
                    problems.append(f"an object cannot be read and is not in view.meta: {e}")
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
        problems=problems,
    )


def _array(store: Store, folder: str, key: str, listed: Mapping[str, Entry], problems: list[str]) -> TensorSpec:
    where = f"{store.root}/{folder}/.zarray"
    array = _described(store, folder, where)
    dtype, shape, chunk = array.dtype, array.shape, array.chunk
    grid = [range(-(-n // size)) for n, size in zip(shape, chunk, strict=True)]
    if prod(map(len, grid)) > min(_MAX_CHUNKS, 64 + 64 * len(listed)):
        raise CorruptError(f"{where}: {prod(map(len, grid)):,} chunks, the folder has {len(listed):,} files: damaged")
    nbytes = prod(chunk) * dtype.itemsize
    chunks: list[tuple[Shape, Shape, Piece]] = []
    lost = []
    for place in itertools.product(*grid):
        name = array.key(place)
        path = f"{folder}/{name}"
        entry = listed.get(name)
        piece: Piece = Extent(path, 0, dtype, chunk, c_strides(chunk))
        if entry is None or entry.info.size != nbytes:
            size = "is missing" if entry is None else f"has {entry.info.size:,} bytes in place of {nbytes:,}"
            piece = Hole(path, f"{path} {size}")
            lost.append(name)
        chunks.append((tuple(n * size for n, size in zip(place, chunk, strict=True)), chunk, piece))
    if lost:
        problems.append(f"{key}: {len(lost):,} of {len(chunks):,} chunks cannot be read ({', '.join(lost[:3])})")
    return in_chunks(key, dtype, shape, chunks)


def _described(store: Store, folder: str, where: str) -> Array:
    size = store.stat(f"{folder}/.zarray").size
    try:
        about = json.loads(bytes(store.read(f"{folder}/.zarray", 0, min(size, _MAX_JSON))))
        array = array_v2(about, where)
    except NoTensorError as e:
        raise CorruptError(f"{where}: {e}: none that Megatron writes") from None
    except CorruptError:
        raise
    except (ValueError, AttributeError, RecursionError) as e:
        raise CorruptError(f"{where} describes no array ({e!r:.80}): the file is damaged") from None
    plain = array.packing == Packing(tuple(range(len(array.shape))))
    if not plain or array.separator != "." or about.get("zarr_format") != 2:
        raise CorruptError(f"{where}: Megatron writes zarr v2 arrays in C order without compression, this is another")
    return array
