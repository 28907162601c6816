"""The codecs of a zarr array as the packing of its chunks: shards, the order of dimensions, and codecs to unpack.

A transposition is expressed by strides, big-endian bytes by a property of an extent, and a shard by a place in a file;
only the remaining codecs have to be run. Sources: zarr-specs v3 (codecs/transpose, bytes, sharding-indexed),
zarr-python codecs/sharding.py, zarr/codecs/numcodecs (names "numcodecs.*", parameters of numcodecs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.box import Shape, fits
from ...core.chunking import grid_of
from ...core.extents import Codec
from ...errors import CorruptError, FormatError
from ...io.codecs import KNOWN
from .grid import Level, Packing

_DEPTH = 8  # maximum depth of nested shards
_FILTERS = ("delta", "fixedscaleoffset", "astype", "quantize", "bitround")
_MAX_TABLE = 1 << 24  # maximum number of chunks of a shard
MAX_PACKED = 1 << 34  # maximum bytes of an unpacked chunk


class _Named(NamedTuple):
    name: str
    config: Mapping[str, Any]


class NoTensorError(FormatError):
    """A valid array that is not a tensor, or that lazyckpt does not read. ``kind`` says why in a few words."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def packing_v3(codecs: Any, chunk: Shape, itemsize: int, where: str) -> Packing:
    """Return the packing of a v3 array's chunks. Raises CorruptError for invalid codecs, and NoTensorError for valid
    ones that lazyckpt does not read."""
    return _packing(codecs, chunk, tuple(range(len(chunk))), itemsize, where, _DEPTH)


def packing_v2(about: Mapping[str, Any], ndim: int, swapped: bool, where: str) -> Packing:
    """Return the packing of a v2 array's chunks: filters, then a compressor, in C or F order. Raises CorruptError."""
    order, filters, compressor = about.get("order", "C"), about.get("filters") or [], about.get("compressor")
    if order not in ("C", "F"):
        raise CorruptError(f"{where}: the order {order!r:.20} is neither C nor F")
    if not isinstance(filters, list):
        raise CorruptError(f"{where}: filters are {filters!r:.60}")
    codecs = []
    for config in [*([compressor] if compressor is not None else []), *reversed(filters)]:
        if not isinstance(config, dict) or not isinstance(config.get("id"), str):
            raise CorruptError(f"{where}: {config!r:.60} is no codec")
        codecs.append(Codec(config["id"], _text({k: v for k, v in config.items() if k != "id"})))
    axes = range(ndim) if order == "C" else range(ndim - 1, -1, -1)
    return Packing(tuple(axes), codecs=tuple(codecs), swapped=swapped)


def unknown_codecs(packing: Packing) -> list[str]:
    """Return the names of the codecs that lazyckpt cannot unpack."""
    return [codec.name for codec in packing.codecs if codec.name not in KNOWN]


def _packing(codecs: Any, chunk: Shape, order: Shape, itemsize: int, where: str, depth: int) -> Packing:
    steps = _named(codecs, where)
    filters: list[Codec] = []
    while steps and (steps[0].name == "transpose" or steps[0].name.removeprefix("numcodecs.") in _FILTERS):
        step = steps.pop(0)
        if step.name != "transpose":
            filters.append(Codec(step.name.removeprefix("numcodecs."), _text(step.config)))
        elif filters:
            raise NoTensorError(f"a transposition behind {filters[-1].name} is not read")
        else:
            order = _transposed(order, step.config.get("order"), where)
    if not steps:
        raise CorruptError(f"{where}: its codecs make no bytes of an array")
    main = steps.pop(0)
    packed = [Codec(s.name.removeprefix("numcodecs."), _text(s.config)) for s in reversed(steps)]
    if main.name == "sharding_indexed":
        if filters or packed:
            raise NoTensorError("shards that are filtered or compressed as a whole are not read")
        return _sharded(main.config, chunk, order, itemsize, where, depth)
    if main.name not in ("bytes", "endian"):
        packed.append(Codec(main.name, _text(main.config)))
        return Packing(order, codecs=(*packed, *reversed(filters)))
    swapped = _swapped(main.config, itemsize, where)
    if swapped and filters:
        raise NoTensorError(f"big-endian bytes behind {filters[-1].name} are not read")
    return Packing(order, codecs=(*packed, *reversed(filters)), swapped=swapped)


def _sharded(config: Mapping[str, Any], chunk: Shape, order: Shape, itemsize: int, where: str, depth: int) -> Packing:
    if not depth:
        raise CorruptError(f"{where}: shards in shards in shards, more than {_DEPTH} deep")
    stored = config.get("chunk_shape")
    if not _sizes(stored, len(chunk)):
        raise CorruptError(f"{where}: chunks of shape {stored!r:.60} in a shard")
    cell = [0] * len(chunk)
    for axis, size in zip(order, stored or (), strict=True):
        cell[axis] = size
    if any(n % size for n, size in zip(chunk, cell, strict=True)) or not fits(cell, itemsize):
        raise CorruptError(f"{where}: a shard of shape {chunk} in chunks of {tuple(cell)!s:.60}")
    count = 1
    for n in grid_of(chunk, cell):
        count *= n
    if count > _MAX_TABLE:
        raise CorruptError(f"{where}: a shard of {count:,} chunks")
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise CorruptError(f"{where}: the table of a shard at its {location!r:.20}")
    table = _named(config.get("index_codecs"), where)
    names = [step.name for step in table]
    if names not in (["bytes"], ["bytes", "crc32c"], ["endian"], ["endian", "crc32c"]):
        raise NoTensorError(f"the table of a shard is packed with {names!s:.80}, which is not read")
    level = Level(tuple(cell), order, location == "end", len(table) == 2, _swapped(table[0].config, 8, where))
    inner = _packing(config.get("codecs"), tuple(cell), order, itemsize, where, depth - 1)
    return Packing(inner.order, (level, *inner.levels), inner.codecs, inner.swapped)


def _named(codecs: Any, where: str) -> list[_Named]:
    if not isinstance(codecs, list):
        raise CorruptError(f"{where}: its codecs are {codecs!r:.60}")
    found = []
    for codec in codecs:
        about = {"name": codec} if isinstance(codec, str) else codec
        if not isinstance(about, dict) or not isinstance(about.get("name"), str):
            raise CorruptError(f"{where}: {codec!r:.60} is no codec")
        config = about.get("configuration") or {}
        if not isinstance(config, dict):
            raise CorruptError(f"{where}: the codec {about['name']!r:.40} is configured with {config!r:.60}")
        found.append(_Named(about["name"], config))
    return found


def _transposed(order: Shape, wanted: Any, where: str) -> Shape:
    axes = range(len(order))
    wanted = {"C": list(axes), "F": list(reversed(axes))}.get(wanted, wanted) if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list) or any(type(n) is not int for n in wanted) or sorted(wanted) != list(axes):
        raise CorruptError(f"{where}: {wanted!r:.60} is no order of {len(order)} dimensions")
    return tuple(order[axis] for axis in wanted)


def _swapped(config: Mapping[str, Any], itemsize: int, where: str) -> bool:
    endian = config.get("endian", "little")
    if endian not in ("little", "big"):
        raise CorruptError(f"{where}: the byte order {endian!r:.20}")
    return bool(endian == "big" and itemsize > 1)


def _sizes(sizes: Any, ndim: int) -> bool:
    return isinstance(sizes, Sequence) and len(sizes) == ndim and all(type(n) is int and 0 < n < 1 << 62 for n in sizes)


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)
