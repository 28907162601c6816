"""bfloat16 and the 8-bit floats as data types of zarr-python, which lacks them (3.1.6).

    import lazyckpt.interop.zarr_dtypes

registers those whose name is free. zarr then opens and creates arrays of them, with numpy's dtypes from ml_dtypes. All
of lazyckpt's zarr support imports this module first. There is no entry point for other programs: zarr 3.1.6 does not
load entry points of data types, and in later versions they would replace zarr's own.

Sources: zarr-python `core/dtype/npy/float.py`; the fill values of floating-point types in the zarr v3 specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self, SupportsFloat, cast

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _Float(ZDType[Any, Any], HasItemSize):
    """A float of ml_dtypes. In v2 documents it has the same name, as in tensorstore."""

    _scalar: ClassVar[Any]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> Any:
        return np.dtype(self._scalar)

    @property
    def item_size(self) -> int:
        return int(np.dtype(self._scalar).itemsize)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if data != {"name": cls._zarr_v3_name, "object_codec_id": None}:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        name = self._zarr_v3_name
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, SupportsFloat)

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number that {self._zarr_v3_name} can hold")
        return data if type(data) is self._scalar else self._scalar(float(cast(SupportsFloat, data)))

    def default_scalar(self) -> Any:
        # zero; for float8_e8m0fnu, which has no zero, the smallest number, whose bits are all zero
        return np.zeros((), np.uint8 if self.item_size == 1 else np.uint16).view(self._scalar)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        # a number, the name of one that JSON lacks, or all bits in hexadecimal: "0x7fc0"
        if isinstance(data, str) and data.startswith("0x"):
            return np.frombuffer(int(data, 16).to_bytes(self.item_size, "little"), self._scalar)[0]
        if isinstance(data, str):
            data = _SPECIAL.get(data)
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise TypeError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
        if data == 0 and float(self._scalar(0)) != 0:
            return self.default_scalar()
        return self._scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:
        value = self.cast_scalar(data)
        number = float(value)
        if math.isfinite(number):
            return number
        name = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        bits = np.asarray(value).tobytes()
        if name == "NaN" and bits != np.asarray(self._scalar(math.nan)).tobytes():
            return f"0x{bits[::-1].hex()}"  # a NaN with other bits than "NaN" means
        return name


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """bfloat16: the upper half of a float32."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _scalar = ml_dtypes.bfloat16
    _zarr_v3_name = "bfloat16"

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        super().from_native_dtype(dtype)
        return cls(endianness="big" if dtype.byteorder == ">" else "little")

    def to_native_dtype(self) -> Any:
        dtype = np.dtype(self._scalar)
        return dtype.newbyteorder(">") if self.endianness == "big" else dtype


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    """The usual fp8: 4 bits of exponent, 3 of mantissa, no infinities."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _scalar = ml_dtypes.float8_e4m3fn
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    """fp8 with 5 bits of exponent and 2 of mantissa: the upper half of a float16."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _scalar = ml_dtypes.float8_e5m2
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    """float8_e4m3fn with another bias and without negative zero."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))
    _scalar = ml_dtypes.float8_e4m3fnuz
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    """float8_e5m2 with another bias, without infinities and negative zero."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))
    _scalar = ml_dtypes.float8_e5m2fnuz
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_Float):
    """Powers of two, as in the scales of the MX formats."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))
    _scalar = ml_dtypes.float8_e8m0fnu
    _zarr_v3_name = "float8_e8m0fnu"


TYPES = (BFloat16, Float8E4M3FN, Float8E5M2, Float8E4M3FNUZ, Float8E5M2FNUZ, Float8E8M0FNU)


def register() -> None:
    """Register the types whose name and numpy dtype zarr has no data type for. Importing this module calls it."""
    for kind in TYPES:
        try:
            data_type_registry.match_dtype(np.dtype(kind._scalar))
        except ValueError:
            if kind._zarr_v3_name not in data_type_registry.contents:
                data_type_registry.register(kind._zarr_v3_name, kind)


register()
