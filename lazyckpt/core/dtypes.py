"""The table of dtypes, with their names in torch, safetensors, numpy (with ml_dtypes) and legacy torch storages.

A checkpoint is described without importing torch, which takes a second: a `DType` imports torch or numpy on demand.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import torch


class DType:
    """The dtype of a tensor's elements. There is one object for each dtype.

    Compare dtypes with ``is``, or with ``==``, which also accepts a `torch.dtype`.

    Attributes
    ----------
    name : str
        The name in torch: ``"bfloat16"``.
    short : str
        The short name, for display: ``"bf16"``.
    itemsize : int
        The size of an element in bytes.
    is_floating_point, is_complex, is_signed : bool
        As in torch.
    is_number : bool
        Whether torch can convert the elements to other dtypes; False for packed bits and quantized integers.
    safetensors : str or None
        The name in safetensors; None if safetensors has no such dtype.
    storage : str or None
        The torch storage class that stands for the dtype in legacy pickles; None if there is none.
    """

    __slots__ = (
        "_numpy", "_torch", "is_complex", "is_floating_point", "is_number", "is_signed", "itemsize", "name",
        "safetensors", "short", "storage",
    )  # fmt: skip

    name: str
    short: str
    itemsize: int
    is_floating_point: bool
    is_complex: bool
    is_signed: bool
    is_number: bool
    safetensors: str | None
    storage: str | None
    _numpy: str
    _torch: torch.dtype | None

    def __init__(
        self, name: str, short: str, itemsize: int, kind: str, safetensors: str | None, numpy: str, storage: str | None
    ) -> None:
        """Create the dtype.

        ``kind`` holds the letters that apply: f(loating point), c(omplex), s(igned), n(umber). ``numpy`` is the name in
        numpy, or "ml_dtypes." and the name there; it is empty if numpy has no such dtype.
        """
        values = {
            "name": name, "short": short, "itemsize": itemsize, "is_floating_point": "f" in kind,
            "is_complex": "c" in kind, "is_signed": "s" in kind, "is_number": "n" in kind, "safetensors": safetensors,
            "storage": storage, "_numpy": numpy, "_torch": None,
        }  # fmt: skip
        for slot, value in values.items():
            object.__setattr__(self, slot, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a DType cannot be changed: {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a DType cannot be changed: {name!r}")

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return other is self or (_is_torch(other) and other is self.torch)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)

    def __copy__(self) -> DType:
        return self

    def __deepcopy__(self, memo: object) -> DType:
        return self

    @property
    def torch(self) -> torch.dtype:
        """The `torch.dtype`. Raises DataError if the installed torch has no dtype of this name."""
        if self._torch is None:
            module = import_module("torch")
            found = getattr(module, self.name, None)
            if found is None:
                raise DataError(f"torch {module.__version__} has no dtype {self.name}: a later version has")
            object.__setattr__(self, "_torch", found)
        assert self._torch is not None
        return self._torch

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype in numpy or ml_dtypes. Raises DataError if neither has such a dtype.

        >>> dtype_named("bf16").numpy
        dtype(bfloat16)
        """
        if not self._numpy:
            raise DataError(f"numpy has no {self}{_instead(self)}")
        import numpy as np

        name = self._numpy
        found: np.dtype[Any] = np.dtype(
            getattr(import_module("ml_dtypes"), name.removeprefix("ml_dtypes.")) if "." in name else name
        )
        return found


F32 = DType("float32", "f32", 4, "fsn", "F32", "float32", "FloatStorage")
F64 = DType("float64", "f64", 8, "fsn", "F64", "float64", "DoubleStorage")
F16 = DType("float16", "f16", 2, "fsn", "F16", "float16", "HalfStorage")
BF16 = DType("bfloat16", "bf16", 2, "fsn", "BF16", "ml_dtypes.bfloat16", "BFloat16Storage")
I64 = DType("int64", "i64", 8, "sn", "I64", "int64", "LongStorage")
I32 = DType("int32", "i32", 4, "sn", "I32", "int32", "IntStorage")
I16 = DType("int16", "i16", 2, "sn", "I16", "int16", "ShortStorage")
I8 = DType("int8", "i8", 1, "sn", "I8", "int8", "CharStorage")
U8 = DType("uint8", "u8", 1, "n", "U8", "uint8", "ByteStorage")
U16 = DType("uint16", "u16", 2, "n", "U16", "uint16", None)
U32 = DType("uint32", "u32", 4, "n", "U32", "uint32", None)
U64 = DType("uint64", "u64", 8, "n", "U64", "uint64", None)
BOOL = DType("bool", "bool", 1, "n", "BOOL", "bool", "BoolStorage")
C32 = DType("complex32", "c32", 4, "csn", None, "", None)
C64 = DType("complex64", "c64", 8, "csn", "C64", "complex64", "ComplexFloatStorage")
C128 = DType("complex128", "c128", 16, "csn", None, "complex128", "ComplexDoubleStorage")
F8_E4M3FN = DType("float8_e4m3fn", "f8_e4m3", 1, "fsn", "F8_E4M3", "ml_dtypes.float8_e4m3fn", None)
F8_E5M2 = DType("float8_e5m2", "f8_e5m2", 1, "fsn", "F8_E5M2", "ml_dtypes.float8_e5m2", None)
F8_E4M3FNUZ = DType("float8_e4m3fnuz", "f8_e4m3fnuz", 1, "fsn", "F8_E4M3FNUZ", "ml_dtypes.float8_e4m3fnuz", None)
F8_E5M2FNUZ = DType("float8_e5m2fnuz", "f8_e5m2fnuz", 1, "fsn", "F8_E5M2FNUZ", "ml_dtypes.float8_e5m2fnuz", None)
F8_E8M0FNU = DType("float8_e8m0fnu", "f8_e8m0", 1, "fn", "F8_E8M0", "ml_dtypes.float8_e8m0fnu", None)
# Two 4-bit floats share a byte. Shapes count bytes, as in torch.
F4_E2M1FN_X2 = DType("float4_e2m1fn_x2", "f4x2", 1, "fs", None, "", None)

_PACKED = tuple(DType(name, name, 1, "", None, "", None) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")) + (
    DType("bits16", "bits16", 2, "", None, "", None),
    *(DType(f"uint{n}", f"uint{n}", 1, "", None, "", None) for n in range(1, 8)),
    *(DType(f"int{n}", f"int{n}", 1, "s", None, "", None) for n in range(1, 8)),
    *(DType(name, name, 1, "s" if name == "qint8" else "", None, "", None)
      for name in ("qint8", "quint8", "quint4x2", "quint2x4")),
    DType("qint32", "qint32", 4, "s", None, "", None),
)  # fmt: skip
DTYPES = (
    F32, BF16, F16, F64, I64, I32, I16, I8, U8, U16, U32, U64, BOOL, C32, C64, C128, F8_E4M3FN, F8_E5M2, F8_E4M3FNUZ,
    F8_E5M2FNUZ, F8_E8M0FNU, F4_E2M1FN_X2, *_PACKED,
)  # fmt: skip

_ALIASES = {
    "float": F32, "double": F64, "half": F16, "long": I64, "int": I32, "short": I16, "cfloat": C64, "cdouble": C128,
    "chalf": C32,
}  # fmt: skip
FROM_NAME: dict[str, DType] = {d.name: d for d in DTYPES} | _ALIASES  # the names in torch
FROM_NAME["bit"] = FROM_NAME["uint1"]
FROM_SAFETENSORS = {d.safetensors: d for d in DTYPES if d.safetensors}
FROM_STORAGE = {d.storage: d for d in DTYPES if d.storage} | {
    # A quantized tensor is read as its stored integers; the scale is stored elsewhere (see pickle/rebuild.py).
    "QInt8Storage": I8, "QUInt8Storage": U8, "QInt32Storage": I32, "QUInt4x2Storage": U8, "QUInt2x4Storage": U8,
}  # fmt: skip
_FLOATS = {name: d for name, d in FROM_NAME.items() if name.startswith("float") and name != "float"}
_WRITTEN = (  # accepted spellings, in lower case: torch's names, short names, and "f" or "fp" for "float"
    {start + name.removeprefix("float"): d for name, d in _FLOATS.items() for start in ("f", "fp")}
    | {start + d.short[1:]: d for d in DTYPES if d.short[0] == "f" for start in ("f", "fp", "float")}
    | {d.short: d for d in DTYPES}
    | FROM_NAME
)
_of_torch: dict[Any, DType] = {}  # filled by `dtype_of`


def _named(name: str) -> DType:
    return FROM_NAME[name]


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")  # before the import of torch there can be no torch.dtype
    return torch is not None and isinstance(value, torch.dtype)


def dtype_of(value: DType | torch.dtype | np.dtype[Any] | str) -> DType:
    """Return the `DType` of a dtype of torch or numpy, or of its name. Raises DataError for anything else.

    >>> dtype_of("bf16"), dtype_of("torch.float32")
    (torch.bfloat16, torch.float32)
    """
    if type(value) is DType:
        return value
    found = _of_torch.get(value)
    if found is None:
        if isinstance(value, str):
            return dtype_named(value)
        if _is_torch(value):
            found = FROM_NAME.get(str(value).removeprefix("torch."))
        elif hasattr(value, "itemsize") and hasattr(value, "newbyteorder"):  # of numpy, or of ml_dtypes
            found = FROM_NAME.get(str(value.newbyteorder("=")))
        if found is None:
            raise DataError(f"{value!r} is not a dtype that lazyckpt knows: take one of torch's, such as torch.float32")
        _of_torch[value] = found
    return found


def dtype_named(name: str) -> DType:
    """Return the dtype of a name, in any accepted spelling. Raises DataError for an unknown name.

    >>> dtype_named("bf16"), dtype_named("FP16"), dtype_named("torch.float32"), dtype_named("fp8_e4m3")
    (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    """
    found = _WRITTEN.get(name.lower().removeprefix("torch."))
    if found is None:
        usual = "fp32, bf16, fp16, fp64, fp8_e4m3, fp8_e5m2"
        raise DataError(f"{name!r} is no dtype: write for instance {usual}, or a name of torch's")
    return found


def check_converts(name: str, source: DType, to: DType) -> None:
    """Raise DataError if torch cannot convert elements of the tensor ``name`` from one dtype to the other."""
    if not converts(source, to):
        raise DataError(f"{name!r} is {source}, torch does not convert that to {to}{_instead(source)}")


def _instead(dtype: DType) -> str:
    """Return the end of an error message about an unusable dtype: what to call on the tensor instead."""
    if dtype.is_complex:
        return ": convert it first, t.to(torch.complex64)"
    if dtype.is_number:
        return ": convert it first, t.to(torch.float32)"
    bits = {1: U8, 2: U16}.get(dtype.itemsize)
    return f": its elements are packed bits, t[...].view({bits}) gives them as integers" if bits else ""


def converts(source: DType, to: DType) -> bool:
    """Return whether torch converts elements of one dtype to the other; it does not convert packed bits."""
    return source is to or (source.is_number and to.is_number)


def widened(dtype: DType) -> DType:
    """Return the dtype that numpy, Dask and xarray compute with.

    This is float32 for floating-point numbers of 8 and 16 bits, whose sums numpy would round at every step (or
    overflow), and ``dtype`` itself for all others.

    >>> widened(BF16), widened(F64), widened(I8)
    (torch.float32, torch.float64, torch.int8)
    """
    return F32 if dtype.is_floating_point and dtype.is_number and dtype.itemsize <= 2 else dtype


_BITS = {1: U8, 2: I16, 4: I32, 8: I64, 16: C128}


def bits_of(itemsize: int) -> torch.dtype:
    """Return a dtype of this size in bytes for moving bits: torch cannot copy every dtype with strides, or flip it."""
    return _BITS[itemsize].torch


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as a numpy array over the same memory; bf16 and fp8 have the dtypes of ml_dtypes.

    Raises DataError if numpy has no such dtype, or does not support arrays of that shape.
    """
    dtype = dtype_of(tensor.dtype).numpy
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        if dtype.isbuiltin == 1:  # numpy's own, not ml_dtypes'
            return tensor.numpy()
        raw: np.ndarray[Any, Any] = tensor.contiguous().view(bits_of(tensor.itemsize)).numpy()
        named: np.ndarray[Any, Any] = raw.view(dtype)
        return named.reshape(tuple(tensor.shape))
    except ValueError as e:  # an empty tensor whose other dimensions are too long
        raise DataError(f"numpy has no array of shape {tuple(tensor.shape)}: {e}") from None
