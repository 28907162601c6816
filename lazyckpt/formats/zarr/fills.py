"""Fill values: the elements that absent chunks stand for, as JSON spells them.

Sources: the zarr v3 core specification, "Fill value list" ("NaN", "Infinity", "0x" and the bits, complex numbers as two
of them); the v2 specification, "Fill value encoding" (null: undefined, which zarr-python reads as zero).
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import CorruptError

_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def fill_bytes(value: Any, dtype: torch.dtype, where: str) -> bytes:
    """The bytes of one element, little-endian. Raises CorruptError.

    >>> fill_bytes("0x3f80", torch.bfloat16, "").hex(), fill_bytes(-1, torch.int16, "").hex()
    ('803f', 'ffff')
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
            # torch rounds twice by way of float32; every value of a narrower type is one of float32
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            one = torch.tensor(float(value), dtype=wide, device="cpu").to(dtype)
        elif dtype == torch.bool:
            one = torch.tensor(bool(value), device="cpu")
        else:
            if int(value) != value:
                raise ValueError(value)
            return int(value).to_bytes(dtype.itemsize, "little", signed=dtype.is_signed)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        raise CorruptError(f"{where}: the fill value {value!r:.40} is none of {dtype}") from None
    return one.reshape(1).view(torch.uint8).numpy().tobytes()
