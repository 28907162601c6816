"""The tensors that an object holds, taken from memory."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Buffer, Parameter

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)
_DICTS = (dict, OrderedDict, defaultdict)


@dataclass
class Truth:
    """The tensors of an object.

    Attributes
    ----------
    named : tensors below plain dicts, lists and tuples, by their keys joined with dots. The format fixes these names.
    others : tensors inside any other object (modules, sparse tensors, subclasses), whose names lazyckpt may choose.
    undecided : dotted names that several tensors of the object have.
    """

    named: dict[str, Tensor] = field(default_factory=dict)
    others: list[Tensor] = field(default_factory=list)
    undecided: set[str] = field(default_factory=set)


def truth_of(value: Any) -> Truth:
    """List the tensors of an object that is saved with `torch.save`."""
    truth = Truth()
    _walk(value, (), truth, set())
    for name in truth.undecided:
        truth.others.append(truth.named.pop(name))
    return truth


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are what its storage holds: it is neither sparse, quantized nor a subclass."""
    return (
        type(tensor) in (Tensor, Parameter, Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _walk(value: Any, path: tuple[str, ...], truth: Truth, above: set[int]) -> None:
    if isinstance(value, _LEAVES) or id(value) in above:
        return
    if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
        value = _elements(value)
    if isinstance(value, Tensor) and is_plain(value):
        name = ".".join(path)
        if name in truth.named:
            truth.undecided.add(name)
            truth.others.append(value)
        else:
            truth.named[name] = value
    elif type(value) in _DICTS:
        for key, item in value.items():
            _walk(item, (*path, str(key)), truth, above | {id(value)})
        if getattr(value, "__dict__", None):  # a state dict's _metadata
            truth.others += _inner(value.__dict__)
    elif type(value) in (list, tuple):
        for n, item in enumerate(value):
            _walk(item, (*path, str(n)), truth, above | {id(value)})
    else:
        truth.others += _inner(value)


def _elements(storage: torch.UntypedStorage | torch.storage.TypedStorage) -> Tensor:
    """A storage as the vector of all its elements; bytes, if it has no dtype."""
    typed = isinstance(storage, torch.storage.TypedStorage)
    dtype = storage.dtype if typed else torch.uint8
    untyped = storage._untyped_storage if typed else storage
    count = untyped.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, 0, (count,), (1,))


def _inner(value: Any) -> list[Tensor]:
    """The tensors that pickling an object meets. An object that cannot be pickled has none."""
    pickler = _Collector(io.BytesIO())
    pickler.dump(value)
    return pickler.found


class _Collector(pickle.Pickler):
    """Collects plain tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.found: list[Tensor] = []
        self._kept: list[Any] = []  # an id must not be used again while this pickler lives

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
            self._kept.append(value)
            return ("storage", id(value))
        return None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        self._kept.append(value)
        if is_plain(value):
            self.found.append(value)
            return str, ("tensor",)
        if value.is_quantized:
            self.found.append(value.int_repr())
            return str, ("quantized",)
        if value.layout is torch.strided and _is_ordinary_subclass(value):
            self.found.append(value.as_subclass(Tensor))
        return NotImplemented


def _is_ordinary_subclass(value: Tensor) -> bool:
    """Whether a subclass has elements of its own: it neither wraps other tensors nor pickles itself in its own way."""
    kind = type(value)
    return (
        not value.is_nested
        and getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
        and kind.__reduce_ex__ is Tensor.__reduce_ex__
    )
