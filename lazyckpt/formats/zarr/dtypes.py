"""What zarr calls the dtypes of torch.

Sources: the core data types of the zarr v3 specification; zarr-extensions/data-types for bfloat16 and most of the 8-bit
floats; tensorstore's names (driver/zarr3) for float8_e4m3fn, which nobody has registered.
"""

from __future__ import annotations

from typing import Any

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
}
if hasattr(torch, "float8_e8m0fnu"):
    NAMES[torch.float8_e8m0fnu] = "float8_e8m0fnu"
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

# Those that zarr-python (3.1.6) does not know by itself: interop/zarr_dtypes.py teaches it.
FOREIGN = tuple(name for name in NAMES.values() if name == "bfloat16" or name.startswith("float8"))


def fill_value(dtype: torch.dtype) -> Any:
    """Zero, as JSON spells it for the dtype. (Every chunk is written, so nobody reads it.)"""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return [0.0, 0.0]
    return 0.0 if dtype.is_floating_point else 0
