"""Conversion of parsed metadata to torch's dtypes, sizes and devices.

Parsers work without torch and use `DType` for torch.dtype, `Size` for torch.Size and `Device` for torch.device.
`CheckpointView.meta` returns torch's objects; code that only prints metadata does not need the conversion.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dtypes import DType
from .containers.pickle.records import Opaque
from .containers.pickle.values import Device, Size, namespace

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


def with_torch(value: Any) -> Any:
    """Replace lazyckpt's stand-ins by torch's objects, recursively; return ``value`` itself if it contains none."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is DType:
        return value.torch
    if kind is Size:
        return torch.Size(value)
    if kind is Device:
        return torch.device(str(value))
    convert = _CONTAINERS.get(kind)
    return value if convert is None else convert(value)


def _dict(value: dict[Any, Any]) -> dict[Any, Any]:
    found = {with_torch(k): with_torch(v) for k, v in value.items()}
    same = all(a is b and v is value[b] for (a, v), b in zip(found.items(), value, strict=True))
    return value if same else found


def _items(make: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        found = list(map(with_torch, value))
        return value if all(a is b for a, b in zip(found, value, strict=True)) else make(found)

    return convert


def _namespace(value: argparse.Namespace) -> argparse.Namespace:
    found = _dict(vars(value))
    return value if found is vars(value) else namespace(found)


def _opaque(value: Opaque) -> Opaque:
    parts = {slot: getattr(value, slot) for slot in Opaque.__slots__}
    found = {slot: with_torch(part) for slot, part in parts.items()}
    if all(found[slot] is part for slot, part in parts.items()):
        return value
    record = Opaque(value.module, value.name)
    for slot, part in found.items():
        setattr(record, slot, part)
    return record


def _array(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not value.dtype.hasobject or value.dtype.names:
        return value
    found = list(map(with_torch, value.reshape(-1)))
    if all(a is b for a, b in zip(found, value.reshape(-1), strict=True)):
        return value
    array = np.empty(len(found), object)
    for n, one in enumerate(found):
        array[n] = one
    return array.reshape(value.shape)


_CONTAINERS: dict[type, Callable[[Any], Any]] = {
    dict: _dict,
    list: _items(list),
    tuple: _items(tuple),
    set: _items(set),
    frozenset: _items(frozenset),
    deque: _items(deque),
    argparse.Namespace: _namespace,
    Opaque: _opaque,
    np.ndarray: _array,
}
