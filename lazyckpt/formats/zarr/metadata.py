"""Parsing and validation of the documents of arrays: zarr.json (v3) and .zarray (v2).

Sources: the zarr core specifications, versions 2 and 3; tensorstore driver/zarr/metadata.cc for v2's "bfloat16" and the
8-bit floats. Documents are untrusted, so everything in them is validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ...core.box import Shape, fits
from ...core.chunking import grid_of
from ...core.dtypes import BOOL, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, DType
from ...errors import CorruptError
from .documents import FROM_ZARR
from .grid import Array
from .packing import MAX_PACKED, NoTensorError, packing_v2, packing_v3

# -- Fill values: the elements of absent chunks, as JSON represents them.

_PARTS = {C64: F32, C128: F64}


def fill_bytes(value: Any, dtype: DType, where: str) -> bytes:
    """Return the little-endian bytes of one element with the fill value. Raises CorruptError.

    >>> fill_bytes("0x3f800000", F32, "").hex(), fill_bytes(-1, I16, "").hex()
    ('0000803f', 'ffff')
    """
    part = _PARTS.get(dtype)
    if value is None:
        return bytes(dtype.itemsize)
    if part is not None:
        real, imaginary = value if isinstance(value, list) and len(value) == 2 else (value, 0.0)
        return fill_bytes(real, part, where) + fill_bytes(imaginary, part, where)
    try:
        if isinstance(value, str) and value.startswith("0x"):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(value)
        if not isinstance(value, str | bool | int | float):
            raise TypeError(value)
        if dtype.is_floating_point:
            # round via float32, as torch does; float32 represents every value of a narrower type
            with np.errstate(all="ignore"):
                wide = np.asarray(float(value), (F64 if dtype is F64 else F32).numpy)
                return wide.astype(dtype.numpy.newbyteorder("<")).tobytes()
        if dtype is BOOL:
            return bytes((bool(value),))
        if int(value) != value:
            raise ValueError(value)
        return int(value).to_bytes(dtype.itemsize, "little", signed=dtype.is_signed)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        raise CorruptError(f"{where}: the fill value {value!r:.40} is none of {dtype}") from None


# -- The documents of arrays: zarr.json (v3) and .zarray (v2).

_MAX_CHUNKS = 1 << 24  # maximum number of chunks of an array
_V2 = {
    "f2": F16, "f4": F32, "f8": F64, "c8": C64, "c16": C128,
    "i1": I8, "i2": I16, "i4": I32, "i8": I64, "b1": BOOL,
    "u1": U8, "u2": U16, "u4": U32, "u8": U64,
}  # fmt: skip


def array_v3(about: Mapping[str, Any], where: str) -> Array:
    """Parse a v3 document. Raises CorruptError or NoTensorError."""
    kind = about.get("data_type")
    dtype = FROM_ZARR.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise NoTensorError(f"dtype {kind.get('name') if isinstance(kind, dict) else kind!s:.40}, which torch lacks")
    grid, keys = _named(about.get("chunk_grid"), where), _named(about.get("chunk_key_encoding", "default"), where)
    if grid[0] != "regular":
        raise NoTensorError(f"chunk grid {grid[0]!r:.40}, which is not read")
    if keys[0] not in ("default", "v2"):
        raise NoTensorError(f"chunk key encoding {keys[0]!r:.40}, which is not read")
    if about.get("storage_transformers"):
        raise NoTensorError("storage transformers, which are not read")
    shape, chunk = _shapes(about.get("shape"), grid[1].get("chunk_shape"), dtype, where)
    default = keys[0] == "default"
    separator = _separator(keys[1].get("separator", "/" if default else "."), where)
    packing = packing_v3(about.get("codecs"), chunk, dtype.itemsize, where)
    attributes = about.get("attributes")
    array = Array(
        shape, dtype, chunk, packing, fill_bytes(about.get("fill_value"), dtype, where), "c" if default else "",
        separator, attributes if isinstance(attributes, dict) else None,
    )  # fmt: skip
    return _counted(array, where)


def array_v2(about: Mapping[str, Any], where: str, attributes: Mapping[str, Any] | None = None) -> Array:
    """Parse a v2 document. Raises CorruptError or NoTensorError."""
    kind = about.get("dtype")
    swapped = False
    dtype = FROM_ZARR.get(kind) if isinstance(kind, str) else None  # names that tensorstore and Megatron write
    if dtype is None and isinstance(kind, str) and kind[:1] in ("<", ">", "|"):
        dtype = _V2.get(kind[1:])
        swapped = kind[0] == ">" and dtype is not None and dtype.itemsize > 1
    if dtype is None:
        raise NoTensorError(f"dtype {kind!s:.40}, which torch lacks")
    shape, chunk = _shapes(about.get("shape"), about.get("chunks"), dtype, where)
    packing = packing_v2(about, len(shape), swapped, where)
    fill = fill_bytes(about.get("fill_value"), dtype, where)
    separator = _separator(about.get("dimension_separator", "."), where)
    return _counted(Array(shape, dtype, chunk, packing, fill, "", separator, attributes), where)


def _counted(array: Array, where: str) -> Array:
    cell = array.packing.levels[-1].cell if array.packing.levels else array.chunk
    many = prod(grid_of(array.shape, cell))
    if many > _MAX_CHUNKS:
        raise NoTensorError(f"{many:,} chunks, more than {_MAX_CHUNKS:,}")
    if array.packing.codecs and prod(cell) * array.dtype.itemsize > MAX_PACKED:
        raise NoTensorError(f"packed chunks of shape {cell!s:.60}, more than {MAX_PACKED >> 30} GiB each")
    return array


def _named(about: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the configuration of a v3 extension point."""
    if isinstance(about, str):
        return about, {}
    if isinstance(about, dict) and isinstance(about.get("name"), str):
        config = about.get("configuration", {})
        if isinstance(config, dict):
            return about["name"], config
    raise CorruptError(f"{where} describes no array: {about!r:.60} instead of a name and its configuration")


def _shapes(shape: Any, chunk: Any, dtype: DType, where: str) -> tuple[Shape, Shape]:
    if not isinstance(shape, list) or not isinstance(chunk, list) or len(shape) != len(chunk):
        raise CorruptError(f"{where}: an array of shape {shape!r:.60} in chunks of {chunk!r:.60}")
    sizes = [*shape, *chunk]
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in sizes) or len(shape) > 32:
        raise CorruptError(f"{where}: an array of shape {shape!s:.60} in chunks of {chunk!s:.60}")
    if 0 in shape:  # the array has no chunks; zarr-python writes the array's shape as that of the chunks
        chunk = [max(1, n) for n in chunk]
    if 0 in chunk:
        raise CorruptError(f"{where}: an array of shape {shape!s:.60} in chunks of {chunk!s:.60}")
    if not fits(shape, dtype.itemsize) or not fits(chunk, dtype.itemsize):
        raise CorruptError(f"{where}: an array of shape {shape!s:.60}, which is too large")
    return tuple(shape), tuple(chunk)


def _separator(text: Any, where: str) -> str:
    if text not in (".", "/"):
        raise CorruptError(f"{where}: the separator {text!r:.20} of chunk keys")
    return str(text)
