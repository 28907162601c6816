"""bfloat16 and the 8-bit floats as data types of zarr-python, which (3.1.6) has none of them.

    import lazyckpt.interop.zarr_dtypes

registers those whose name is free, and zarr then opens and creates arrays of them, with numpy's dtypes from ml_dtypes.
All that lazyckpt does with zarr imports this first. There is no entry point that would do it for every program: zarr
3.1.6 never loads those of data types, later versions would let them take the place of their own.

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
    """A float of ml_dtypes. In v2 documents it goes by the same name, as with tensorstore."""

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
            raise TypeError(f"{data!r} is no number that {self._zarr_v3_name} could take")
        return data if type(data) is self._scalar else self._scalar(float(cast(SupportsFloat, data)))

    def default_scalar(self) -> Any:
        """Zero; for float8_e8m0fnu, which has none, the smallest number (whose bits are all zero)."""
        return np.zeros((), np.uint8 if self.item_size == 1 else np.uint16).view(self._scalar)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        """A number, the name of one that JSON has not, or all bits as a hexadecimal number: "0x7fc0"."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.frombuffer(int(data, 16).to_bytes(self.item_size, "little"), self._scalar)[0]
        if isinstance(data, str):
            data = _SPECIAL.get(data)
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise TypeError(f"{data!r} is no fill value of {self._zarr_v3_name}")
        if data == 0 and not float(self._scalar(0)) == 0:
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
            return f"0x{bits[::-1].hex()}"  # another one than "NaN" stands for
        return name


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """The upper half of a float32."""

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
    """4 bits of exponent, 3 of mantissa, no infinities: what most call fp8."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _scalar = ml_dtypes.float8_e4m3fn
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    """5 bits of exponent, 2 of mantissa: the upper half of a float16."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _scalar = ml_dtypes.float8_e5m2
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    """As float8_e4m3fn, with another bias and no negative zero."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))
    _scalar = ml_dtypes.float8_e4m3fnuz
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    """As float8_e5m2, with another bias, no infinities and no negative zero."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))
    _scalar = ml_dtypes.float8_e5m2fnuz
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_Float):
    """Powers of two: the scales of the MX formats."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))
    _scalar = ml_dtypes.float8_e8m0fnu
    _zarr_v3_name = "float8_e8m0fnu"


TYPES = (BFloat16, Float8E4M3FN, Float8E5M2, Float8E4M3FNUZ, Float8E5M2FNUZ, Float8E8M0FNU)


def register() -> None:
    """Register the types whose name, and whose numpy dtype, no other data type of zarr has."""
    for kind in TYPES:
        try:
            data_type_registry.match_dtype(np.dtype(kind._scalar))
        except ValueError:
            if kind._zarr_v3_name not in data_type_registry.contents:
                data_type_registry.register(kind._zarr_v3_name, kind)


register()
