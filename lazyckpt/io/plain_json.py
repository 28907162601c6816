"""Lossless conversion of plain objects, the content of `view.meta`, to JSON and back.

JSON types are written unchanged. Any other object is a dict with a single key that begins with "$" and names the type:
{"$tuple": [...]}, {"$bytes": "base64"}, {"$opaque": {...}}, ...; a dict whose keys are not all strings, or that looks
like such a tagged dict, is written as {"$dict": [[key, value], ...]}.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import decimal
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dtypes import FROM_NAME, DType
from ..errors import CorruptError, DataError
from .containers.pickle.plain import TensorRef
from .containers.pickle.records import Opaque, short
from .containers.pickle.values import Device, Size, device, namespace, size

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_LIMIT = 1 << 23  # objects; 64 characters or bytes of a string count as one more
_EXACT = 1 << 63  # larger integers are written as text: other JSON readers use 64 bits
_FIELDS = {"args": tuple, "kwargs": object, "state": object, "items": list, "entries": dict}


class OnDemand:
    """A part of `view.meta` that is read from the checkpoint when it is asked for. Documents have its text."""


def encode(value: Any, where: str = "meta") -> Any:
    """Convert an object to what `json.dumps` accepts. Raises DataError, naming the place, for an object of another
    type, and for input that is too deep or too large (a pickle may contain one object in a thousand places)."""
    try:
        return _encode(value, where, [_LIMIT])
    except RecursionError:
        raise DataError(f"{where} is nested too deeply to be written as JSON") from None


def _encode(value: Any, where: str, left: list[int]) -> Any:
    kind = type(value)
    left[0] -= 1 + (len(value) >> 6 if kind in (str, bytes, bytearray) else 0)
    if left[0] < 0:
        raise DataError(f"{where}: there is too much in it to be written as JSON")
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_EXACT <= value < _EXACT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        return _text(value)
    if isinstance(value, TensorRef):
        return {"$tensor": _text(value.name)}
    if isinstance(value, Opaque):
        fields = {name: getattr(value, name) for name in _FIELDS if getattr(value, name)}
        known = {name: _encode(v, f"{where}.{name}", left) for name, v in fields.items()}
        if value.args is not None:
            known.setdefault("args", {"$tuple": []})
        return {"$opaque": {"module": _text(value.module), "name": _text(value.name), **known}}
    if isinstance(value, OnDemand):
        return _text(repr(value))
    if isinstance(value, argparse.Namespace):
        return {"$namespace": _pairs(vars(value), where, left)}
    if isinstance(value, Mapping):
        return _dict(value, where, left)
    if isinstance(value, Size) or _is_torch(value, "Size"):
        return {"$size": list(value)}
    if isinstance(value, list):
        return [_encode(v, f"{where}[{n}]", left) for n, v in enumerate(value)]
    for tag, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            items: list[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
            return {tag: [_encode(v, f"{where}[{n}]", left) for n, v in enumerate(items)]}
    simple = _SIMPLE.get(kind)
    if simple is not None:
        tag, write = simple
        return {tag: write(value)}
    if isinstance(value, np.dtype):
        return {"$numpy.dtype": _dtype_text(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _numpy(np.asarray(value), isinstance(value, np.generic), where, left)
    if _is_torch(value, "dtype") or _is_torch(value, "device"):
        return {f"$torch.{kind.__name__}": str(value)}
    if _is_torch(value, "Tensor"):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        about = {"dtype": str(value.dtype), "shape": list(value.shape), "data": _base64(flat.numpy().tobytes())}
        return {"$torch.tensor": about}
    raise DataError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be written as JSON")


def decode(value: Any) -> Any:
    """Invert `encode`. Raises CorruptError for JSON that `encode` never writes."""
    try:
        return _decode(value)
    except RecursionError:
        raise CorruptError("the attributes are nested too deeply to be read") from None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {k: _decode(v) for k, v in value.items()}
    ((tag, inner),) = value.items()
    read = _READ.get(tag)
    if read is None:
        raise CorruptError(
            f"{tag!r:.60} in the attributes is not a tag that lazyckpt writes: written by a later version?"
        )
    try:
        return read(inner)
    except (CorruptError, RecursionError):
        raise
    except (
        TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError, MemoryError,
        SyntaxError,  # numpy, for the text of a dtype
    ) as e:  # fmt: skip
        raise CorruptError(f"{tag!r} in the attributes: {inner!r:.80} cannot be read ({e!r:.80})") from None


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot represent
        return {"$surrogates": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _dict(value: Mapping[Any, Any], where: str, left: list[int]) -> Any:
    if all(type(k) is str and k.isprintable() for k in value) and not (
        len(value) == 1 and next(iter(value)).startswith("$")
    ):
        return {k: _encode(v, f"{where}.{k}", left) for k, v in value.items()}
    return {"$dict": _pairs(value, where, left)}


def _pairs(value: Mapping[Any, Any], where: str, left: list[int]) -> list[Any]:
    return [[_encode(k, where, left), _encode(v, f"{where}.{short(k)}", left)] for k, v in value.items()]


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype_text(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise DataError(f"a numpy array of {dtype} cannot be written as JSON")
    if dtype.kind == "V" and dtype.name in _ML:
        return dtype.name
    return [list(field) for field in dtype.descr] if dtype.names else dtype.str


def _numpy(array: np.ndarray[Any, Any], scalar: bool, where: str, left: list[int]) -> Any:
    if array.dtype.hasobject:
        return {"$numpy.objects": [list(array.shape), [_encode(v, where, left) for v in array.reshape(-1).tolist()]]}
    about = {"dtype": _dtype_text(array.dtype), "shape": list(array.shape), "data": _base64(array.tobytes())}
    return {"$numpy.scalar" if scalar else "$numpy.array": about}


def _np_dtype(text: Any) -> np.dtype[Any]:
    if isinstance(text, list):
        return np.dtype([tuple(tuple(x) if isinstance(x, list) else x for x in field) for field in text])
    dtype: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), text) if text in _ML else text)
    return dtype


def _np_array(about: Any) -> np.ndarray[Any, Any]:
    dtype = _np_dtype(about["dtype"])
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return np.frombuffer(_bytes(about["data"]), dtype).reshape(about["shape"]).copy()


def _np_objects(about: Any) -> np.ndarray[Any, Any]:
    shape, items = about
    array = np.empty(len(items), object)
    array[:] = [decode(v) for v in items]
    return array.reshape(shape)


def _tensor(about: Any) -> torch.Tensor:
    dtype = _torch_dtype(about["dtype"]).torch
    data = bytearray(_bytes(about["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(about["shape"])


def _string(value: Any) -> str:
    text = decode(value)
    if not isinstance(text, str):
        raise TypeError("a name that is not a string")
    return text


def _torch_dtype(text: str) -> DType:
    return FROM_NAME[text.removeprefix("torch.")]


def _is_torch(value: Any, name: str) -> bool:
    """Return whether ``value`` is an instance of this class of torch, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def _opaque(about: Any) -> Opaque:
    record = Opaque(_string(about["module"]), _string(about["name"]))
    for name, kind in _FIELDS.items():
        if name in about:
            value = decode(about[name])
            if not isinstance(value, kind):
                raise TypeError(f"{name} of a record that are {type(value).__name__}")
            setattr(record, name, value)
    return record


_ML = frozenset(  # names of dtypes of ml_dtypes
    (
        "bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn",
        "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int1", "int2",
        "int4", "uint1", "uint2", "uint4",
    )
)  # fmt: skip
_SEQUENCES: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
_SIMPLE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("$bytes", _base64),
    bytearray: ("$bytearray", _base64),
    complex: ("$complex", lambda v: [repr(v.real), repr(v.imag)]),
    range: ("$range", lambda v: [v.start, v.stop, v.step]),
    slice: ("$slice", lambda v: [encode(v.start), encode(v.stop), encode(v.step)]),
    PurePosixPath: ("$path", str),
    PureWindowsPath: ("$windows_path", str),
    datetime.datetime: ("$datetime", datetime.datetime.isoformat),
    datetime.date: ("$date", datetime.date.isoformat),
    datetime.timedelta: ("$timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    datetime.timezone: ("$timezone", lambda v: v.utcoffset(None) // datetime.timedelta(microseconds=1)),
    decimal.Decimal: ("$decimal", str),
    DType: ("$torch.dtype", str),
    Device: ("$torch.device", str),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "$int": lambda v: int(v, 16),
    "$float": float,
    "$surrogates": lambda v: _bytes(v).decode("utf-8", "surrogatepass"),
    "$dict": lambda v: {decode(k): decode(x) for k, x in v},
    "$namespace": lambda v: namespace({_string(k): decode(x) for k, x in v}),
    "$tensor": lambda v: TensorRef(_string(v)),
    "$opaque": _opaque,
    "$size": size,
    "$tuple": lambda v: tuple(map(decode, v)),
    "$set": lambda v: set(map(decode, v)),
    "$frozenset": lambda v: frozenset(map(decode, v)),
    "$deque": lambda v: deque(map(decode, v)),
    "$bytes": _bytes,
    "$bytearray": lambda v: bytearray(_bytes(v)),
    "$complex": lambda v: complex(float(v[0]), float(v[1])),
    "$range": lambda v: range(*v),
    "$slice": lambda v: slice(*map(decode, v)),
    "$path": PurePosixPath,
    "$windows_path": PureWindowsPath,
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda v: datetime.timedelta(*v),
    "$timezone": lambda v: datetime.timezone(datetime.timedelta(microseconds=v)),
    "$decimal": decimal.Decimal,
    "$torch.dtype": _torch_dtype,
    "$torch.device": device,
    "$numpy.dtype": _np_dtype,
    "$numpy.array": _np_array,
    "$numpy.scalar": lambda v: _np_array(v)[()],
    "$numpy.objects": _np_objects,
    "$torch.tensor": _tensor,
}
