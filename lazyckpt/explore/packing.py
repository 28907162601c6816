"""The bodies of the explorer's answers: JSON, and arrays packed with a JSON header."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""Version of the API. It changes when a path or a field is removed or changes its meaning, not when one is added."""

_ALIGN = 8  # bytes; arrays begin at multiples of it


def to_json(value: Any) -> bytes:
    """Encode plain objects as UTF-8 JSON. NaN and infinities become the strings "NaN", "Infinity" and "-Infinity".

    Text that is not valid Unicode (lone surrogates) is escaped, so that the result is always valid UTF-8.
    """
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Pack arrays with a header into one body.

    The body is the length of the header in bytes (4 bytes, little-endian), the header as JSON, and the arrays in C
    order, little-endian. The header, with the 4 bytes before it, and each array are padded to a multiple of 8 bytes.
    ``header["arrays"]`` lists name, dtype ("float32"), shape, and offset from the end of the padded header, in bytes.
    """
    table: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    at = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        table.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": at})
        padding = -len(data) % _ALIGN
        parts += [data, bytes(padding)]
        at += len(data) + padding
    head = to_json({**header, "arrays": table})
    head += b" " * (-(len(head) + 4) % _ALIGN)
    return b"".join([len(head).to_bytes(4, "little"), head, *parts])
