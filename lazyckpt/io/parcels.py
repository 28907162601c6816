"""Pickles that travel between processes, compressed: the paths and offsets of a thousand ranks are alike."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

_SMALL = 16 << 10  # bytes of a pickle that is not worth compressing
_LEVEL = 1  # 9 takes thirty times as long and saves 6 %


def compressed(data: bytes) -> bytes:
    """Return a pickle, compressed if it is large."""
    return zlib.compress(data, _LEVEL) if len(data) >= _SMALL else data


def unpacked(data: bytes) -> Any:
    """Return the object of `compressed` or `packed` data. Only for data that this program has made itself."""
    return pickle.loads(data if data.startswith(pickle.PROTO) else zlib.decompress(data))


def packed(value: Any) -> bytes | None:
    """Return the compressed pickle of an object; None if it is small, or has objects of the main program.

    Dask and others find by the name ``__main__`` in a pickle what they have to send by value, and would not find it in
    compressed bytes.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return None if len(data) < _SMALL or b"__main__" in data else compressed(data)
