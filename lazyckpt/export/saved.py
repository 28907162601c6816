"""Files of torch.save of a single tensor, many of which go into larger files: what stands around the tensor's bytes.

torch writes it itself, once for each dtype and shape, to a file that keeps no data. Source: torch/serialization.py
`skip_data` (storages are passed over), csrc/jit/python/init.cpp `PyTorchFileWriter` (passing over is a `seek`).
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.serialization import skip_data

from ..core.box import Shape
from ..errors import DataError
from .held import Held, Writable
from .torch import placeholders

_DESCRIPTOR = b"PK\x07\x08"  # stands behind a record's data, followed by the checksum
_ENTRY = b"PK\x01\x02"  # begins an entry of the zip's directory
_RECORD = b"/data/0"


class Saved(NamedTuple):
    """``head`` + the tensor's bytes + ``tail``. ``checksums``: where in the tail the CRC-32 of these bytes belongs."""

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]


def saved(tensor: Writable) -> Saved:
    """What a file of torch.save of this tensor has around its bytes."""
    return _saved(tensor.dtype, tuple(tensor.shape))


class _Around(io.RawIOBase):
    """What is written before the one gap that is passed over, and behind it."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        more = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.parts[-1] += more
        return len(more)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or len(self.parts) > 1:
            raise DataError(f"this torch ({torch.__version__}) writes its files in another way than is known")
        self.parts.append(bytearray())
        return offset


@lru_cache(maxsize=1 << 12)
def _saved(dtype: torch.dtype, shape: Shape) -> Saved:
    # (a tensor of this shape that takes no memory)
    (shown,) = placeholders([Held(torch.empty((), dtype=dtype).expand(shape))])
    around = _Around()
    with skip_data():
        torch.save(shown, around)  # type: ignore[arg-type]
    head, tail = bytes(around.parts[0]), b"".join(map(bytes, around.parts[1:]))
    if not tail:  # no elements
        return Saved(head, b"", ())
    name = tail.rfind(_RECORD)
    entry = tail.rfind(_ENTRY, 0, name)
    if entry < 0:
        raise DataError(f"this torch ({torch.__version__}) writes its files in another way than is known")
    behind = (4,) if tail.startswith(_DESCRIPTOR) else ()
    return Saved(head, tail, (*behind, entry + 16))
