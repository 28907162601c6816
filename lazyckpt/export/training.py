"""Conversion of a checkpoint's metadata to objects that torch.save can write without other packages.

Records of classes that are not imported cannot be written: they are left out and reported.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from ..io.containers.pickle.plain import TensorRef
from ..io.containers.pickle.records import Opaque
from ..io.containers.pickle.values import namespace
from ..io.plain_json import OnDemand

Lost = dict[str, str]  # dotted path in the metadata -> reason why it is not written
_GONE = object()
_DEPTH = 100


class NotLoaded(str):
    """A reason in `Lost` for a part that is written but that not every program loads."""

    __slots__ = ()


def restored(value: Any, path: str, tensor: Callable[[str], Any], lost: Lost) -> Any:
    """Copy an object without records, which are removed from dicts and replaced by None in lists; return None if
    nothing is left. Mappings become plain dicts. ``tensor`` returns the replacement for the tensor of a raw name.

    >>> lost = {}
    >>> restored({"a": [1, Opaque("some.module", "Class")], "b": 2}, "top", lambda name: None, lost), lost
    ({'a': [1, None], 'b': 2}, {'top.a.1': 'a some.module.Class, which cannot be written without importing it'})
    """
    made = _made(value, path, tensor, lost, 0)
    return None if made is _GONE else made


def _made(value: Any, path: str, tensor: Callable[[str], Any], lost: Lost, depth: int) -> Any:
    def inner(key: object, part: Any) -> Any:
        return _made(part, f"{path}.{key}" if path else str(key), tensor, lost, depth + 1)

    if depth > _DEPTH:
        lost[path] = "nested too deep"
        return _GONE
    if isinstance(value, TensorRef):
        return tensor(value.name)
    if isinstance(value, Mapping):
        found = {key: inner(key, part) for key, part in value.items()}
        if _all_gone(found.values(), path, lost):
            return _GONE
        return {key: part for key, part in found.items() if part is not _GONE}
    if isinstance(value, argparse.Namespace):
        found = {key: inner(key, part) for key, part in vars(value).items()}
        return namespace({key: part for key, part in found.items() if part is not _GONE})
    if type(value) in (list, tuple, set, frozenset):
        parts = [inner(n, part) for n, part in enumerate(value)]
        if _all_gone(parts, path, lost):
            return _GONE
        return type(value)(None if part is _GONE else part for part in parts)
    if isinstance(value, deque):
        parts = [inner(n, part) for n, part in enumerate(value)]
        return deque((None if part is _GONE else part for part in parts), value.maxlen)
    if isinstance(value, OnDemand):
        lost[path] = f"{value}, which are read when they are asked for"
        return _GONE
    if isinstance(value, Opaque):
        lost[path] = f"a {value.module}.{value.name}, which cannot be written without importing it"
        return _GONE
    if value is None or isinstance(value, _PLAIN):
        return value
    lost[path] = f"a {type(value).__name__}, which is not known to be plain data"
    return _GONE


def _all_gone(parts: Collection[Any], path: str, lost: Lost) -> bool:
    """Return whether nothing is left of a non-empty container; report such a container once, not each of its parts."""
    if not parts or not all(part is _GONE for part in parts):
        return False
    reported = [key for key in lost if key.startswith(f"{path}.")]
    for key in reported:
        lost[path] = lost.pop(key)
    return True


_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, slice, range, date, time, timedelta, Decimal, PurePath,
    torch.Size, torch.dtype, torch.device, torch.layout, np.ndarray, np.generic, np.dtype,
)  # fmt: skip
