"""One table of dtypes: what torch, safetensors, numpy (with ml_dtypes) and old torch storages call the same thing."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from ..errors import DataError


class Row(NamedTuple):
    torch: torch.dtype
    short: str  # as shown to people
    safetensors: str | None
    numpy: Any  # None: numpy has no such dtype
    storage: str | None  # the class in `torch` that old pickles name the dtype by


def _rows() -> list[Row]:
    t, m = torch, ml_dtypes
    rows = [
        Row(t.float32, "f32", "F32", np.float32, "FloatStorage"),
        Row(t.bfloat16, "bf16", "BF16", m.bfloat16, "BFloat16Storage"),
        Row(t.float16, "f16", "F16", np.float16, "HalfStorage"),
        Row(t.float64, "f64", "F64", np.float64, "DoubleStorage"),
        Row(t.int64, "i64", "I64", np.int64, "LongStorage"),
        Row(t.int32, "i32", "I32", np.int32, "IntStorage"),
        Row(t.int16, "i16", "I16", np.int16, "ShortStorage"),
        Row(t.int8, "i8", "I8", np.int8, "CharStorage"),
        Row(t.uint8, "u8", "U8", np.uint8, "ByteStorage"),
        Row(t.uint16, "u16", "U16", np.uint16, None),
        Row(t.uint32, "u32", "U32", np.uint32, None),
        Row(t.uint64, "u64", "U64", np.uint64, None),
        Row(t.bool, "bool", "BOOL", np.bool_, "BoolStorage"),
        Row(t.complex32, "c32", None, None, None),
        Row(t.complex64, "c64", "C64", np.complex64, "ComplexFloatStorage"),
        Row(t.complex128, "c128", None, np.complex128, "ComplexDoubleStorage"),
        Row(t.float8_e4m3fn, "f8_e4m3", "F8_E4M3", m.float8_e4m3fn, None),
        Row(t.float8_e5m2, "f8_e5m2", "F8_E5M2", m.float8_e5m2, None),
        Row(t.float8_e4m3fnuz, "f8_e4m3fnuz", "F8_E4M3FNUZ", m.float8_e4m3fnuz, None),
        Row(t.float8_e5m2fnuz, "f8_e5m2fnuz", "F8_E5M2FNUZ", m.float8_e5m2fnuz, None),
        # Integers of a quantized tensor: read as they are stored, their scale is another matter (see io/rebuild.py).
        Row(t.int8, "i8", None, np.int8, "QInt8Storage"),
        Row(t.uint8, "u8", None, np.uint8, "QUInt8Storage"),
        Row(t.int32, "i32", None, np.int32, "QInt32Storage"),
        Row(t.uint8, "u8", None, np.uint8, "QUInt4x2Storage"),
        Row(t.uint8, "u8", None, np.uint8, "QUInt2x4Storage"),
    ]
    # Later additions to torch; two 4-bit floats share a byte, and a shape counts the bytes, as torch does.
    for name, short, st, np_dtype in (
        ("float8_e8m0fnu", "f8_e8m0", "F8_E8M0", m.float8_e8m0fnu),
        ("float4_e2m1fn_x2", "f4x2", None, None),
        ("bits8", "bits8", None, None),
        ("bits16", "bits16", None, None),
        ("bits1x8", "bits1x8", None, None),
        ("bits2x4", "bits2x4", None, None),
        ("bits4x2", "bits4x2", None, None),
    ):
        if hasattr(t, name):
            rows.append(Row(getattr(t, name), short, st, np_dtype, None))
    return rows


# Equal-sized types that move bits whatever they mean: not every dtype of torch can be copied with strides, or flipped.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_ROWS = _rows()
_BY_TORCH = {row.torch: row for row in reversed(_ROWS)}
FROM_SAFETENSORS = {row.safetensors: row.torch for row in _ROWS if row.safetensors}
TO_SAFETENSORS = {row.torch: row.safetensors for row in reversed(_ROWS) if row.safetensors}
FROM_STORAGE = {row.storage: row.torch for row in _ROWS if row.storage}
FROM_NAME = {name: d for name, d in vars(torch).items() if isinstance(d, torch.dtype)}
_FLOATS = {name: d for name, d in FROM_NAME.items() if name.startswith("float") and name != "float"}
_WRITTEN = (  # lower case: torch's names, those shown to people, and float written as f or fp
    {start + name.removeprefix("float"): d for name, d in _FLOATS.items() for start in ("f", "fp")}
    | {start + row.short[1:]: row.torch for row in _ROWS if row.short[0] == "f" for start in ("f", "fp", "float")}
    | {row.short: row.torch for row in _ROWS}
    | FROM_NAME
)


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a person means. Raises DataError.

    >>> dtype_named("bf16"), dtype_named("FP16"), dtype_named("torch.float32"), dtype_named("fp8_e4m3")
    (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    """
    found = _WRITTEN.get(name.lower().removeprefix("torch."))
    if found is None:
        usual = "fp32, bf16, fp16, fp64, fp8_e4m3, fp8_e5m2"
        raise DataError(f"{name!r} is no dtype: write for instance {usual}, or a name of torch's")
    return found


def check_converts(name: str, source: torch.dtype, to: torch.dtype) -> None:
    """Raise DataError if torch cannot convert elements of the tensor ``name`` from one dtype to the other."""
    if not converts(source, to):
        raise DataError(f"{name!r} is {source}, torch does not convert that to {to}{_instead(source)}")


def _instead(dtype: torch.dtype) -> str:
    """The end of a message about a dtype that cannot be used: what to call on the tensor instead."""
    if dtype.is_complex:
        return ": convert it first, t.to(torch.complex64)"
    if converts(dtype, torch.float32):
        return ": convert it first, t.to(torch.float32)"
    bits = {1: torch.uint8, 2: torch.uint16}.get(dtype.itemsize)
    return f": its elements are packed bits, t[...].view({bits}) gives them as integers" if bits else ""


@cache
def converts(source: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch converts elements of one dtype to the other: of packed bits it does not."""
    try:
        torch.empty(1, dtype=source, device="cpu").to(to)
    except (NotImplementedError, RuntimeError):  # torch's two ways to say that it has no such conversion
        return False
    return True


def short_name(dtype: torch.dtype) -> str:
    """As shown to people: ``bf16``.

    >>> short_name(torch.bfloat16)
    'bf16'
    """
    row = _BY_TORCH.get(dtype)
    return row.short if row else str(dtype).removeprefix("torch.")


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """What numpy (with ml_dtypes) calls it. Raises DataError if it has no such dtype.

    >>> numpy_dtype(torch.bfloat16)
    dtype(bfloat16)
    """
    row = _BY_TORCH.get(dtype)
    if row is None or row.numpy is None:
        raise DataError(f"numpy has no {dtype}{_instead(dtype)}")
    found: np.dtype[Any] = np.dtype(row.numpy)
    return found


@cache
def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype that numpy, Dask and xarray compute with: float32 for floating-point numbers of 8 and 16 bits, whose
    sums numpy would round at every step (or overflow); any other as it is.

    >>> widened(torch.bfloat16), widened(torch.float64), widened(torch.int8)
    (torch.float32, torch.float64, torch.int8)
    """
    narrow = dtype.is_floating_point and dtype.itemsize <= 2 and converts(dtype, torch.float32)
    return torch.float32 if narrow else dtype


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as a numpy array over the same memory; bf16 and fp8 with the dtypes of ml_dtypes.

    Raises DataError if numpy has no such dtype, or no array of that shape.
    """
    dtype = numpy_dtype(tensor.dtype)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        if dtype.isbuiltin == 1:  # numpy's own, not ml_dtypes'
            return tensor.numpy()
        raw: np.ndarray[Any, Any] = tensor.contiguous().view(BITS[tensor.itemsize]).numpy()
        named: np.ndarray[Any, Any] = raw.view(dtype)
        return named.reshape(tuple(tensor.shape))
    except ValueError as e:  # an empty tensor with dimensions that are too long
        raise DataError(f"numpy has no array of shape {tuple(tensor.shape)}: {e}") from None
