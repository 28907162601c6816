"""The closed table of callables that pickles of checkpoints may use.

They rebuild tensors as records of their places, and plain values of the standard library (`values`) and of numpy
(`arrays`). Nothing is imported by a name from a pickle.

Tensors: torch/_utils.py (`_rebuild_*`), torch/_tensor.py (`_rebuild_from_type_v2`), torch/serialization.py (persistent
ids).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....core.box import Shape, c_strides, fits, hull
from ....core.dtypes import BOOL, FROM_NAME, FROM_STORAGE, U8, DType
from ....errors import CorruptError
from .arrays import NUMPY, NumpyArray
from .records import Opaque, short
from .techniques import PERSISTENT
from .values import VALUES, device, size

_MAX_DIMS = 64


class StorageType(NamedTuple):
    """A storage class of torch; ``dtype`` is None for UntypedStorage (its sizes count bytes)."""

    dtype: DType | None


class StoredStorage(NamedTuple):
    """A storage in a file: ``key`` names its record, ``numel`` counts elements of ``dtype`` (bytes if None).

    ``start`` is its first element within the record (None: the storage is the whole record, not a view of another).
    ``data`` holds the bytes if they are in the pickle and not in a record.
    """

    key: str
    dtype: DType | None
    numel: int
    location: str
    start: int | None = None
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * (self.dtype.itemsize if self.dtype else 1)

    @property
    def reach(self) -> int:
        """Number of bytes of the record up to the end of the storage."""
        return ((self.start or 0) + self.numel) * (self.dtype.itemsize if self.dtype else 1)


class StoredTensor:
    """A record of a tensor in a file.

    ``offset`` and ``strides`` are in elements of ``dtype`` within its storage. ``storage`` is None if the tensor has no
    data (a meta tensor). ``note`` says what is lost when the stored elements are read; it is empty for ordinary
    tensors. ``state`` holds attributes from the pickle."""

    __slots__ = ("conj", "dtype", "neg", "note", "offset", "requires_grad", "shape", "state", "storage", "strides")

    def __init__(
        self,
        storage: StoredStorage | None,
        dtype: DType,
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

    @classmethod
    def plain(
        cls, storage: StoredStorage, dtype: DType, offset: int, shape: Shape, strides: Shape, requires_grad: bool
    ) -> StoredTensor:
        """Return a tensor without metadata, from numbers that the caller has checked."""
        tensor: StoredTensor = object.__new__(cls)
        tensor.conj = tensor.neg = False
        tensor.storage, tensor.dtype, tensor.offset = storage, dtype, offset
        tensor.shape, tensor.strides, tensor.requires_grad = shape, strides, requires_grad
        tensor.note, tensor.state = "", None
        return tensor

    def set_state(self, state: Any) -> None:
        """Set the state as torch.Tensor.__setstate__ does. Raises CorruptError for a state that replaces the storage (4
        or 5 elements)."""
        if not isinstance(state, dict | tuple) or len(state) in (4, 5):
            raise CorruptError(f"a tensor whose place is given by a state ({short(state)}), not where it is rebuilt")
        # a tuple of three: requires_grad, None and the hooks
        self.state = _joined(self.state, state[2] if isinstance(state, tuple) and len(state) == 3 else state)

    def having(self, **attributes: Any) -> StoredTensor:
        """Return a copy with these attributes replaced."""
        other: StoredTensor = object.__new__(StoredTensor)
        for slot in self.__slots__:
            setattr(other, slot, attributes[slot] if slot in attributes else getattr(self, slot))
        return other

    def __repr__(self) -> str:
        return f"StoredTensor({'x'.join(map(str, self.shape)) or 'scalar'}, {self.dtype})"


def _bits(metadata: Any, dtype: DType) -> tuple[bool, bool]:
    """Return a tensor's conj and neg bits. The presence of a key sets a bit, whatever its value
    (torch/csrc/jit/serialization/pickler.h `setTensorMetadata`)."""
    if not metadata:
        return False, False
    if not isinstance(metadata, dict) or not all(type(k) is str for k in metadata):
        raise CorruptError(f"a tensor whose metadata are {short(metadata)}")
    if "conj" in metadata and not dtype.is_complex:
        raise CorruptError(f"a tensor of {dtype} that has torch's conj bit, which complex numbers only may have")
    return "conj" in metadata, "neg" in metadata


def _negates(dtype: DType) -> bool:
    """Return whether torch can negate elements of this dtype: not bools, 8-bit floats or packed dtypes."""
    narrow = dtype.is_floating_point and dtype.itemsize == 1
    return dtype.is_number and not narrow and dtype is not BOOL


class TensorSubclass(Opaque):
    """A record of a Tensor subclass that wraps other tensors (DTensor, torchao), with its pickled parts."""

    __slots__ = ()


class Composite(NamedTuple):
    """A tensor that consists of several plain tensors (sparse, nested), which have their own names. ``state`` holds
    attributes from the pickle."""

    kind: str
    parts: dict[str, Any]
    state: Any = None


def _joined(state: Any, more: Any) -> Any:
    """Merge two states of a tensor; attributes of the second one replace those of the same name."""
    if not more or not state:
        return more or state
    if isinstance(state, dict) and isinstance(more, dict):
        return {**state, **more}
    return (state, more)


def persistent_storage(pid: Any) -> Any:
    """Resolve a persistent id of torch.save: ``("storage", class, key, location, numel)``, or a module's class."""
    if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
        kind, key, location, numel = pid[1:5]
        if isinstance(kind, Opaque):  # a storage class of an extension: the dtype is unknown, so count bytes
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
    return Opaque(PERSISTENT, short(pid))


def viewed_storage(pid: Any) -> Any:
    """Resolve a persistent id of a legacy file, where a storage may be a view of another one:
    ``(..., numel, (key, start, numel))`` (torch/serialization.py `_legacy_load`; written by torch before 0.4)."""
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
    return StoredTensor(s, s.dtype or U8, offset, _ints(size), _ints(stride))


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
    return StoredTensor(s, s.dtype or U8, offset, _ints(size), _ints(stride), requires_grad is True, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor:
    if not isinstance(dtype, DType):
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
    """Rebuild a Tensor subclass or a tensor with attributes: as the plain tensor that it holds, or as a record."""
    name = f"{kind.module}.{kind.name}" if isinstance(kind, Opaque) else ""
    if callable(func) and isinstance(args, tuple):
        made = func(*args)
        if isinstance(made, StoredTensor) and (made.storage is not None or name in _PLAIN_TENSORS):
            note = made.note if name in _PLAIN_TENSORS else f"is a {name}: read as the plain tensor it holds"
            return made.having(state=_joined(made.state, state), note=note)
        if isinstance(made, Composite):
            return made._replace(state=_joined(made.state, _given(state, made.parts) if name == _JAGGED else state))
    record = TensorSubclass(*(name.rsplit(".", 1) if "." in name else ("torch", name or "Tensor")))
    record.args = args if isinstance(args, tuple) else (args,)
    record.state = state
    return record


# torch/nested/_internal/nested_tensor.py `NestedTensor.__reduce_ex__`: the attributes are the parts again
_JAGGED = "torch.nested._internal.nested_tensor.NestedTensor"
# what torch.compile notes about sizes on tensors (torch/_dynamo/decorators.py `mark_dynamic`)
_NOTED = re.compile(r"_dynamo_|_specialize_on$|_has_dynamo_dim_marking$")


def _given(state: Any, parts: Mapping[str, Any]) -> Any:
    """Return the attributes of a tensor without those that torch keeps itself: its parts, and notes about sizes."""
    if not isinstance(state, dict):
        return state
    own = {
        key
        for name, value in parts.items()
        for key in (name, f"_{name}")
        if key in state and _place(state[key]) == _place(value)
    }
    return {key: value for key, value in state.items() if key not in own and not _NOTED.match(str(key))} or None


def _place(value: Any) -> Any:
    """Return what two tensors, or two dicts of them, have in common if they are the same elements."""
    if isinstance(value, StoredTensor):
        return value.storage and value.storage.key, value.offset, value.shape, value.strides, value.dtype
    if type(value) is dict:
        return {key: _place(one) for key, one in value.items()}
    return value if value is None or type(value) is int else id(value)


_PLAIN_TENSORS = {"", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}


def _qtensor(storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, *rest: Any) -> StoredTensor:
    s = _stored(storage)
    tensor = StoredTensor(s, s.dtype or U8, offset, _ints(size), _ints(stride))
    scheme = quantizer[0].name if isinstance(quantizer[0], Opaque) else quantizer[0]
    tensor.note = f"is quantized ({short(scheme)}): read as the integers it stores; view.dequantize() has its values"
    tensor.state = {"quantizer": quantizer}
    return tensor


def _sparse(layout: Any, data: Any) -> Composite:
    names = ("indices", "values", "size") if layout == "torch.sparse_coo" else ("compressed", "plain", "values", "size")
    kind = layout if type(layout) is str and len(layout) < 40 else short(layout)
    return Composite(kind, dict(zip((*names, "is_coalesced"), data, strict=False)))


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Composite:
    return Composite("nested", {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets})


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any = False) -> StoredTensor:
    if not isinstance(dtype, DType):
        raise CorruptError(f"a tensor whose dtype is {short(dtype)}")
    return StoredTensor(
        None, dtype, 0, _ints(size), _ints(stride), requires_grad is True, note="is a meta tensor: it has no data"
    )


def _jagged(parts: Any) -> Composite:
    if not isinstance(parts, dict) or not all(type(k) is str for k in parts):
        raise TypeError("not the parts of a nested tensor")
    cache = parts.get("_metadata_cache")
    held = {**parts, **({"_metadata_cache": {k: _unnoted(v) for k, v in cache.items()}} if type(cache) is dict else {})}
    return Composite("nested", {key: _unnoted(value) for key, value in held.items()})


def _unnoted(value: Any) -> Any:
    """Return a tensor without the notes of torch.compile."""
    if isinstance(value, StoredTensor) and isinstance(value.state, dict):
        return value.having(state=_given(value.state, {}))
    return value


def _from_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> StoredTensor:
    """Rebuild a tensor of another device that was pickled as a CPU tensor."""
    if not isinstance(data, StoredTensor) or data.dtype != dtype:
        raise TypeError("not a tensor of this dtype")
    return data.having(requires_grad=requires_grad is True)


def _from_numpy(data: Any, dtype: Any, device: Any, requires_grad: Any) -> StoredTensor:
    """Rebuild a tensor of another device that was pickled as a numpy array (torch_xla, before torch 2.4). Its bytes are
    in the pickle. numpy has no bfloat16, so the array may have another dtype."""
    if not isinstance(data, NumpyArray) or not isinstance(dtype, DType):
        raise TypeError("not an array that is a tensor")
    shape, raw = data.held(dtype)
    storage = StoredStorage(f"array {id(raw)}", dtype, len(raw) // dtype.itemsize, short(device), data=raw)
    return StoredTensor(storage, dtype, 0, shape, c_strides(shape), requires_grad is True)


def _list(values: Any) -> Any:
    """Return the list of one type that TorchScript wrote (torch/jit/_pickle.py)."""
    if not isinstance(values, list):
        raise TypeError("not a list")
    return values


def _tagged(value: Any, kind: Any) -> Any:
    """Return the container that TorchScript wrote with the name of its type (torch/jit/_pickle.py)."""
    if not isinstance(value, list | dict) or type(kind) is not str:
        raise TypeError("not a container")
    return value


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError("not a text")
    return text


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
        ("torch.jit._pickle", "restore_type_tag"): _tagged,
        **{("torch.jit._pickle", f"build_{kind}list"): _list for kind in ("int", "tensor", "double", "bool")},
        ("torch", "Size"): size,
        ("torch", "device"): device,
        **VALUES,
        **NUMPY,
    }
    for name, dtype in FROM_NAME.items():
        table["torch", name] = dtype
    for storage, dtype in FROM_STORAGE.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            table[module, storage] = StorageType(dtype)
    for module in ("torch", "torch.storage"):
        table[module, "UntypedStorage"] = StorageType(None)
    return table


REBUILD = _table()
