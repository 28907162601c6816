"""What the pickles of checkpoints may build: tensors as records of where they lie, and plain values of the standard
library and numpy. Nothing here is looked up by what a pickle says; it is a closed table.

Tensors: torch/_utils.py (`_rebuild_*`), torch/_tensor.py (`_rebuild_from_type_v2`), torch/serialization.py (persistent
ids). numpy: numpy/_core/multiarray (`_reconstruct`, `scalar`), ndarray and dtype `__setstate__`.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import pathlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.box import Shape, c_strides, fits, hull
from ..core.dtypes import FROM_NAME, FROM_STORAGE
from ..errors import CorruptError
from .keys import check_keys
from .records import Attributed, Opaque, short

_MAX_DIMS = 64
_MAX_FIELDS = 256  # of a numpy dtype, over all levels
_PATH = 1 << 15  # characters of a path


class StorageType(NamedTuple):
    """A storage class of torch; ``dtype`` is None for UntypedStorage (its sizes count bytes)."""

    dtype: torch.dtype | None


class StoredStorage(NamedTuple):
    """A storage that a file holds: ``key`` names its record, ``numel`` counts elements of ``dtype`` (bytes if None).

    ``start``: the element of the record that it begins at (None: it is all of it, and no view of another).
    ``data``: the bytes themselves, where they are in the pickle and not in a record.
    """

    key: str
    dtype: torch.dtype | None
    numel: int
    location: str
    start: int | None = None
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * (self.dtype.itemsize if self.dtype else 1)

    @property
    def reach(self) -> int:
        """Bytes of the record up to its end."""
        return ((self.start or 0) + self.numel) * (self.dtype.itemsize if self.dtype else 1)


class StoredTensor:
    """A tensor that a file holds. ``offset`` and ``strides`` are in elements of ``dtype``, within its storage; a
    ``storage`` of None means that it has no data (a meta tensor). ``note`` says what reading it as it is stored leaves
    out; empty for ordinary tensors. ``state``: attributes that the pickle gives it."""

    __slots__ = ("conj", "dtype", "neg", "note", "offset", "requires_grad", "shape", "state", "storage", "strides")

    def __init__(
        self,
        storage: StoredStorage | None,
        dtype: torch.dtype,
        offset: int,
        shape: Shape,
        strides: Shape,
        requires_grad: bool = False,
        metadata: Any = None,
        note: str = "",
    ) -> None:
        if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
            raise CorruptError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
        for n in (offset, *shape, *strides):
            if type(n) is not int or not 0 <= n < 1 << 62:
                raise CorruptError(
                    f"a tensor of shape {short(shape)}, strides {short(strides)}, offset {short(offset)}"
                )
        if not fits(shape, dtype.itemsize):
            raise CorruptError(f"a tensor of shape {short(shape)}: more bytes than there can be")
        if storage is not None and storage.start is not None:
            if 0 not in shape and offset + hull(shape, strides) > storage.numel:
                raise CorruptError(f"a tensor of shape {short(shape)} past the end of its view of {storage.numel:,}")
            offset += storage.start
        self.conj, self.neg = _bits(metadata, dtype)
        if self.neg and not _negates(dtype):
            storage, note = None, f"has torch's neg bit, but torch negates no {dtype}: it cannot be read"
        self.storage = storage
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.strides = strides
        self.requires_grad = requires_grad
        self.note = note
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """What torch.Tensor.__setstate__ takes, but nothing that says where the tensor lies (of 4 or 5 elements)."""
        if not isinstance(state, dict | tuple) or len(state) in (4, 5):
            raise CorruptError(f"a tensor whose place is given by a state ({short(state)}), not where it is rebuilt")
        # (three: whether it requires a gradient, nothing, and its hooks)
        self.state = _joined(self.state, state[2] if isinstance(state, tuple) and len(state) == 3 else state)

    def having(self, **attributes: Any) -> StoredTensor:
        """The same tensor with other attributes."""
        other: StoredTensor = object.__new__(StoredTensor)
        for slot in self.__slots__:
            setattr(other, slot, attributes[slot] if slot in attributes else getattr(self, slot))
        return other

    def __repr__(self) -> str:
        return f"StoredTensor({'x'.join(map(str, self.shape)) or 'scalar'}, {self.dtype})"


def _bits(metadata: Any, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a tensor has the bits conj and neg: the keys alone set them, whatever their values
    (torch/csrc/jit/serialization/pickler.h `setTensorMetadata`)."""
    if not metadata:
        return False, False
    if not isinstance(metadata, dict) or not all(type(k) is str for k in metadata):
        raise CorruptError(f"a tensor whose metadata are {short(metadata)}")
    if "conj" in metadata and not dtype.is_complex:
        raise CorruptError(f"a tensor of {dtype} that has torch's conj bit, which complex numbers only may have")
    return "conj" in metadata, "neg" in metadata


@cache
def _negates(dtype: torch.dtype) -> bool:
    try:
        torch._neg_view(torch.zeros(1, dtype=torch.uint8).expand(16).contiguous().view(dtype)).clone()
    except RuntimeError:  # torch's way to say that it does not
        return False
    return True


class TensorSubclass(Opaque):
    """A subclass of Tensor that wraps others (DTensor, torchao): a record of what it was made from."""

    __slots__ = ()


class Composite(NamedTuple):
    """A tensor whose data is several plain tensors (sparse, nested): they are found under their own names. ``state``:
    attributes that the pickle gives it."""

    kind: str
    parts: dict[str, Any]
    state: Any = None


def _joined(state: Any, more: Any) -> Any:
    """The attributes of a tensor that is given attributes twice; the later ones replace those of the same name."""
    if not more or not state:
        return more or state
    if isinstance(state, dict) and isinstance(more, dict):
        return {**state, **more}
    return (state, more)


def persistent_storage(pid: Any) -> Any:
    """A persistent id of torch.save: ``("storage", class, key, location, numel)``, or a module's class."""
    if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
        kind, key, location, numel = pid[1:5]
        if isinstance(kind, Opaque):  # a storage class of an extension: its elements are unknown, its bytes are not
            kind = StorageType(None)
        if not isinstance(kind, StorageType) or not _counts(numel):
            raise CorruptError(f"a storage that is described as {short(pid)}")
        if type(key) not in (str, int) or type(location) is not str:
            raise CorruptError(f"a storage whose key is {short(key)}, on the device {short(location)}")
        if len(pid) > 5 and pid[5] is not None:
            raise CorruptError(f"a storage that views another one ({short(pid[5])}), which legacy files only may have")
        return StoredStorage(str(key), kind.dtype, numel, location)
    if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module" and isinstance(pid[1], Opaque):
        return pid[1]  # legacy files of whole modules: (class, file, source)
    return Opaque("persistent id", short(pid))


def viewed_storage(pid: Any) -> Any:
    """The same of a legacy file, where a storage may be a part of another: ``(..., numel, (key, start, numel))``
    (torch/serialization.py `_legacy_load`; torch before 0.4 wrote them)."""
    if not (isinstance(pid, tuple) and len(pid) == 6 and pid[0] == "storage" and isinstance(pid[5], tuple)):
        return persistent_storage(pid)
    whole, view = persistent_storage(pid[:5]), pid[5]
    if len(view) != 3 or not _counts(view[1]) or not _counts(view[2]) or view[1] + view[2] > whole.numel:
        raise CorruptError(f"a storage that views another one as {short(view)}, of {whole.numel:,} elements")
    return whole._replace(start=view[1], numel=view[2])


def _counts(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 62


def _ints(values: Any) -> Shape:
    if not isinstance(values, tuple | list):
        raise CorruptError(f"sizes that are {type(values).__name__}")
    if len(values) > _MAX_DIMS:
        raise CorruptError(f"a tensor of {len(values):,} dimensions")
    return tuple(values)


def _stored(storage: Any) -> StoredStorage:
    if not isinstance(storage, StoredStorage):
        raise CorruptError(f"a tensor without a storage ({type(storage).__name__})")
    return storage


def _tensor_v1(storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor:
    s = _stored(storage)
    return StoredTensor(s, s.dtype or torch.uint8, offset, _ints(size), _ints(stride))


def _tensor_v2(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor:
    s = _stored(storage)
    return StoredTensor(s, s.dtype or torch.uint8, offset, _ints(size), _ints(stride), requires_grad is True, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"a tensor whose dtype is {short(dtype)}")
    return StoredTensor(_stored(storage), dtype, offset, _ints(size), _ints(stride), grad is True, metadata)


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    if isinstance(data, StoredTensor):
        return data.having(requires_grad=requires_grad is True, state=_joined(data.state, state))
    if state and isinstance(data, Composite):
        return data._replace(state=_joined(data.state, state))
    if state and isinstance(data, TensorSubclass):
        record = TensorSubclass(data.module, data.name, data.args, data.kwargs)
        record.state = _joined(data.state, state)
        return record
    return data


def _from_type_v2(func: Any, kind: Any, args: Any, state: Any) -> Any:
    """A subclass of Tensor, or a tensor with attributes: the tensor that it was made from, if that is one."""
    name = f"{kind.module}.{kind.name}" if isinstance(kind, Opaque) else ""
    if callable(func) and isinstance(args, tuple):
        made = func(*args)
        if isinstance(made, StoredTensor) and (made.storage is not None or name in _PLAIN_TENSORS):
            note = made.note if name in _PLAIN_TENSORS else f"is a {name}: read as the plain tensor it holds"
            return made.having(state=_joined(made.state, state), note=note)
        if isinstance(made, Composite):
            return made._replace(state=_joined(made.state, state))
    record = TensorSubclass(*(name.rsplit(".", 1) if "." in name else ("torch", name or "Tensor")))
    record.args = args if isinstance(args, tuple) else (args,)
    record.state = state
    return record


_PLAIN_TENSORS = {"", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}


def _qtensor(storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, *rest: Any) -> StoredTensor:
    s = _stored(storage)
    tensor = StoredTensor(s, s.dtype or torch.uint8, offset, _ints(size), _ints(stride))
    scheme = quantizer[0].name if isinstance(quantizer[0], Opaque) else quantizer[0]
    tensor.note = f"is quantized ({short(scheme)}): read as the integers it stores, without scale and zero point"
    tensor.state = {"quantizer": quantizer}
    return tensor


def _sparse(layout: Any, data: Any) -> Composite:
    names = ("indices", "values", "size") if layout == "torch.sparse_coo" else ("compressed", "plain", "values", "size")
    return Composite(short(layout), dict(zip((*names, "is_coalesced"), data, strict=False)))


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Composite:
    return Composite("nested", {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets})


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any = False) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"a tensor whose dtype is {short(dtype)}")
    return StoredTensor(
        None, dtype, 0, _ints(size), _ints(stride), requires_grad is True, note="is a meta tensor: it has no data"
    )


def _jagged(parts: Any) -> Composite:
    if not isinstance(parts, dict) or not all(type(k) is str for k in parts):
        raise TypeError("not the parts of a nested tensor")
    return Composite("nested", parts)


def _from_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> StoredTensor:
    """A tensor of another device that was pickled as a CPU tensor."""
    if not isinstance(data, StoredTensor) or data.dtype != dtype:
        raise TypeError("not a tensor of this dtype")
    return data.having(requires_grad=requires_grad is True)


def _from_numpy(data: Any, dtype: Any, device: Any, requires_grad: Any) -> StoredTensor:
    """A tensor of another device that was pickled as a numpy array (torch_xla, before torch 2.4): its bytes are in the
    pickle. numpy has no bfloat16, so the array may be of another dtype."""
    if not isinstance(data, NumpyArray) or not isinstance(dtype, torch.dtype):
        raise TypeError("not an array that is a tensor")
    shape, raw = data.held(dtype)
    storage = StoredStorage(f"array {id(raw)}", dtype, len(raw) // dtype.itemsize, short(device), data=raw)
    return StoredTensor(storage, dtype, 0, shape, c_strides(shape), requires_grad is True)


# -- numpy


class NumpyDtype:
    """A dtype as numpy pickles it: a code, then a state with byte order and fields."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self.code, self.state = code, ()
        self._real: np.dtype[Any] | ValueError | None = None
        self._fields = 0

    def set_state(self, state: Any) -> None:
        self.state, self._real = state, None

    def real(self, budget: list[int] | None = None) -> np.dtype[Any]:
        """The dtype. ``budget``: how many more fields it may have, over all levels. Raises ValueError."""
        budget = [_MAX_FIELDS] if budget is None else budget
        if self._real is None:
            before = budget[0]
            try:
                self._real = self._made(budget)
                self._fields = before - budget[0]
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
                self._real = ValueError(f"a numpy dtype that contradicts itself: {e!s:.100}")
        else:
            budget[0] -= self._fields
            if budget[0] < 0:
                raise ValueError("a numpy dtype of hundreds of fields")
        if isinstance(self._real, ValueError):
            raise self._real
        return self._real

    def _made(self, budget: list[int]) -> np.dtype[Any]:
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError("a numpy dtype of hundreds of fields")
        if (
            not isinstance(self.code, str)
            or len(self.code) > 64
            or self.code.lstrip("<>|=")[:1] not in "?bhilqpBHILQPfdgFDGeSaUVOMmciu"
        ):
            raise ValueError(f"a numpy dtype {short(self.code)}")
        if len(self.state) > 2 and self.state[2]:  # an array in every element: (dtype, shape)
            base, shape = self.state[2]
            return np.dtype((base.real(budget), tuple(int(n) for n in shape)))
        if len(self.state) >= 5 and isinstance(self.state[4], dict) and self.state[3]:
            fields = {name: self.state[4][name] for name in self.state[3]}
            formats = [f[0].real(budget) for f in fields.values()]
            spec = {"names": list(fields), "formats": formats, "offsets": [f[1] for f in fields.values()]}
            return np.dtype({**spec, "itemsize": self.state[5]})
        code = self.code
        if code.lstrip("<>|=")[:1] in "mM" and len(self.state) > 8:  # (metadata, (unit, count, divisor, event))
            unit, count = self.state[8][1][:2]
            code = f"{code}[{int(count)}{unit.decode() if isinstance(unit, bytes) else unit}]"
        dtype = np.dtype(code)
        order = self.state[1] if len(self.state) > 1 else "|"
        if order == ">":
            return dtype.newbyteorder(">")
        return dtype.newbyteorder("<") if order == "<" else dtype


class NumpyArray:
    """An array as numpy pickles it: empty first, then a state with shape, dtype and bytes."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None
        self.axes: Any = None  # of numpy 2: how to turn what is in C order into an array that was in none
        self._real: Any = None
        self._held: dict[torch.dtype, tuple[Shape, bytes]] = {}

    def set_state(self, state: Any) -> None:
        self.state, self._real, self._held = state, None, {}

    def held(self, dtype: torch.dtype) -> tuple[Shape, bytes]:
        """Its shape, and its elements as bytes of a tensor of this dtype, in C order. Raises ValueError, TypeError."""
        if dtype not in self._held:
            array = np.ascontiguousarray(self.real())
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")).reshape(self.real().shape)).to(dtype)
            self._held[dtype] = tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return self._held[dtype]

    def real(self) -> Any:
        """The array, made once; an array of objects keeps what the pickle lists. Raises ValueError if it contradicts
        itself."""
        if self._real is None:
            self._real = self._made()
        return self._real

    def _made(self) -> Any:
        _, shape, dtype, fortran, raw = self.state
        kind = dtype.real()
        if not isinstance(raw, list | tuple if kind.hasobject else str | bytes | bytearray):
            raise ValueError("a numpy array without its data")
        if kind.hasobject:
            array = np.empty(len(raw), dtype=object)
            array[:] = [None] * len(raw)
            for n, value in enumerate(raw):
                array[n] = value
        else:
            data: Any = raw.encode("latin1") if isinstance(raw, str) else raw
            array = np.frombuffer(data, dtype=kind).copy()
        # (the list of an array of objects is in C order even where the array was not)
        array = array.reshape(shape, order="F" if fortran and not kind.hasobject else "C")
        return array if self.axes is None else array.transpose(self.axes)


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> NumpyArray:
    array = NumpyArray()
    if not isinstance(buffer, bytes | bytearray):
        raise TypeError("not the bytes of an array")
    array.state = (1, shape, dtype, order == "F", bytes(buffer))
    array.axes = axes if order == "K" else None
    return array


def _scalar(dtype: Any, raw: Any = None) -> Any:
    kind = dtype.real()
    if kind.hasobject:
        return raw
    return np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype=kind)[0]


def plain_numpy(value: Any) -> Any:
    """The real dtype or array of a numpy record, an Opaque where it contradicts itself; anything else as it is."""
    if not isinstance(value, NumpyArray | NumpyDtype):
        return value
    try:
        return value.real()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RuntimeError):
        record = Opaque("numpy", "ndarray" if isinstance(value, NumpyArray) else "dtype")
        record.state = value.state
        return record


# -- plain values


def _listed(*args: Any) -> Sequence[Any]:
    """The elements that a container is made of; only what the pickle itself lists, so none can be larger than it."""
    if not args:
        return []
    (values,) = args
    if not isinstance(values, list | tuple | set | frozenset | dict):
        raise TypeError("not a listed container")
    return values  # type: ignore[return-value]


def _keys(*args: Any) -> Sequence[Any]:
    """Elements that will be hashed."""
    values = _listed(*args)
    check_keys(values)
    return values


def _attributed(*args: Any) -> Attributed:
    if not args:  # the hooks of every tensor
        return Attributed()
    values = _listed(*args)
    for pair in () if isinstance(values, dict) else values:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError("not pairs")
    check_keys(values if isinstance(values, dict) else (pair[0] for pair in values))
    return Attributed(values)


def _size(*args: Any) -> torch.Size:
    sizes = _listed(*args)
    if not all(type(n) is int and abs(n) < 1 << 63 for n in sizes):
        raise TypeError("not sizes")
    return torch.Size(sizes)


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError("not a text")
    return text


def _decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str or len(text) > 1000:  # a long one takes quadratic time
        raise TypeError("not a short text")
    return decimal.Decimal(text)


def _slice(*args: Any) -> slice:
    if not all(a is None or type(a) is int for a in args):
        raise TypeError("not a slice of numbers")
    return slice(*args)


def _range(*args: Any) -> range:
    if not all(type(a) is int for a in args):
        raise TypeError("not a range of numbers")
    return range(*args)


def _getattr(thing: Any, name: Any, *default: Any) -> Opaque:
    """How protocols 2 and 3 spell a nested class: getattr(Outer, "Inner")."""
    if not isinstance(thing, Opaque) or thing.args is not None or type(name) is not str:
        raise TypeError("not an attribute of a named thing")
    return Opaque(thing.module, f"{thing.name}.{name}")


def _reconstructor(cls: Any, base: Any, state: Any) -> Opaque:
    """How protocols 0 and 1 spell an object of a plain class."""
    if not isinstance(cls, Opaque) or cls.args is not None:
        raise TypeError("not an object of a named class")
    record = Opaque(cls.module, cls.name, ())
    if isinstance(state, dict):
        record.entries = dict(state)
    elif isinstance(state, list):
        record.items = list(state)
    elif state is not None:
        record.args = (state,)
    return record


class Deque(list[Any]):
    """A collections.deque: a list until its depth is known (freeing nested deques recurses in C)."""


def _posix_path(*args: Any) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*_segments(args))


def _windows_path(*args: Any) -> pathlib.PureWindowsPath:
    return pathlib.PureWindowsPath(*_segments(args))


def _segments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if sum(len(a) if isinstance(a, str) else 256 for a in args) > _PATH:
        raise TypeError("not a path")
    return args


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise ValueError(encoding)
    return text.encode(encoding)


def _bytearray(*args: Any) -> bytearray:
    # no size and no iterable: a few bytes of pickle must not become gigabytes
    if args and not (len(args) == 1 and isinstance(args[0], bytes | bytearray)):
        return bytearray(_encode(*args))
    return bytearray(*args)


class Namespace(argparse.Namespace):
    """argparse.Namespace that takes its attributes as data."""

    def set_state(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str) and k != "set_state"})


def _table() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): _tensor_v1,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _from_type_v2,
        ("torch._tensor", "_rebuild_from_type"): _from_type_v2,
        ("torch.tensor", "_rebuild_from_type"): _from_type_v2,
        ("torch._utils", "_rebuild_qtensor"): _qtensor,
        ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
        ("torch._utils", "_rebuild_nested_tensor"): _nested,
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta,
        ("torch._utils", "_rebuild_device_tensor_from_numpy"): _from_numpy,
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _from_cpu,
        ("torch._utils", "_rebuild_xla_tensor"): _from_numpy,
        ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _jagged,
        ("torch.serialization", "_get_layout"): _text,
        ("torch", "Size"): _size,
        ("torch", "device"): torch.device,
        ("numpy", "dtype"): NumpyDtype,
        ("collections", "OrderedDict"): _attributed,
        ("collections", "defaultdict"): lambda factory=None, *args: _attributed(*args),
        ("collections", "Counter"): _attributed,
        ("collections", "deque"): lambda *args: Deque(_listed(*args[:1])),
        ("argparse", "Namespace"): Namespace,
        ("_codecs", "encode"): _encode,
        ("datetime", "datetime"): datetime.datetime,
        ("datetime", "date"): datetime.date,
        ("datetime", "timedelta"): datetime.timedelta,
        ("datetime", "timezone"): datetime.timezone,
        ("copyreg", "_reconstructor"): _reconstructor,
        ("copy_reg", "_reconstructor"): _reconstructor,
        ("decimal", "Decimal"): _decimal,
    }
    for root in ("numpy._core", "numpy.core"):
        table[f"{root}.multiarray", "_reconstruct"] = NumpyArray
        table[f"{root}.multiarray", "scalar"] = _scalar
        table[f"{root}.numeric", "_frombuffer"] = _frombuffer
    for root in ("builtins", "__builtin__"):
        table[root, "set"] = lambda *args: set(_keys(*args))
        table[root, "frozenset"] = lambda *args: frozenset(_keys(*args))
        table[root, "list"] = lambda *args: list(_listed(*args))
        table[root, "tuple"] = lambda *args: tuple(_listed(*args))
        table[root, "dict"] = _attributed
        table[root, "bytearray"] = _bytearray
        table[root, "bytes"] = lambda *args: bytes(_bytearray(*args))
        table[root, "complex"] = complex
        table[root, "slice"] = _slice
        table[root, "range"] = _range
        table[root, "xrange"] = _range
        table[root, "getattr"] = _getattr
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "Path", "PurePath"):
            table[module, name] = _posix_path
        table[module, "WindowsPath"] = table[module, "PureWindowsPath"] = _windows_path
    for name, dtype in FROM_NAME.items():
        table["torch", name] = dtype
    for storage, dtype in FROM_STORAGE.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            table[module, storage] = StorageType(dtype)
    for module in ("torch", "torch.storage"):
        table[module, "UntypedStorage"] = StorageType(None)
    return table


REBUILD = _table()
