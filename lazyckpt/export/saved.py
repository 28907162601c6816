"""Files of torch.save of a single tensor, alone or in rows: what stands around the tensor's bytes.

torch writes it itself, once for each dtype and shape, to a file that keeps no data. Source: torch/serialization.py
`skip_data` (storages are passed over), csrc/jit/python/init.cpp `PyTorchFileWriter` (passing over is a `seek`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.serialization import skip_data

from ..core.box import Shape
from ..errors import DataError
from .held import Held, Writable
from .places import Target
from .stream import Layout, Placed, write_at
from .torch import placeholders

_DESCRIPTOR = b"PK\x07\x08"  # stands behind a record's data, followed by the checksum
_ENTRY = b"PK\x01\x02"  # begins an entry of the zip's directory
_RECORD = b"/data/0"


About = tuple[tuple[str, Any], ...]  # what stands beside the tensor in a dict, where it is "param"


class Saved(NamedTuple):
    """``head`` + the tensor's bytes + ``tail``. ``checksums``: where in the tail the CRC-32 of these bytes belongs."""

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]


class Item(NamedTuple):
    """A file of torch.save at an ``offset`` of a larger one: of a tensor, or of a dict with that as "param"."""

    offset: int
    tensor: Writable
    about: About | None = None

    @property
    def around(self) -> Saved:
        """What it has besides the tensor's bytes."""
        return _saved(self.tensor.dtype, tuple(self.tensor.shape), self.about)

    @property
    def length(self) -> int:
        around = self.around
        return len(around.head) + self.tensor.nbytes + len(around.tail)


def row(items: Sequence[Item], target: Target) -> Layout:
    """Make a file of such files, in which everything stands but the tensors' bytes (those that are there stay)."""
    placed: list[Placed] = []
    fd = target.descriptor(os.O_WRONLY | os.O_CREAT)
    try:
        for item in items:
            around = item.around
            at = item.offset + len(around.head)
            write_at(fd, around.head, item.offset)
            write_at(fd, around.tail, at + item.tensor.nbytes)
            placed.append(Placed(at, item.tensor))
    finally:
        os.close(fd)
    return Layout(target, placed, partial(_finish, target, items))


def _finish(target: Target, items: Sequence[Item], checksums: list[int]) -> None:
    fd = target.descriptor(os.O_WRONLY)
    try:
        for item, checksum in zip(items, checksums, strict=True):
            around = item.around
            for place in around.checksums:
                at = item.offset + len(around.head) + item.tensor.nbytes + place
                write_at(fd, checksum.to_bytes(4, "little"), at)
    finally:
        os.close(fd)


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
def _saved(dtype: torch.dtype, shape: Shape, about: About | None) -> Saved:
    # (a tensor of this shape that takes no memory)
    (shown,) = placeholders([Held(torch.empty((), dtype=dtype, device="cpu").expand(shape))])
    around = _Around()
    with skip_data():
        torch.save(shown if about is None else {"param": shown, **dict(about)}, around)  # type: ignore[arg-type]
    head, tail = bytes(around.parts[0]), b"".join(map(bytes, around.parts[1:]))
    if not tail:  # no elements
        return Saved(head, b"", ())
    name = tail.rfind(_RECORD)
    entry = tail.rfind(_ENTRY, 0, name)
    if entry < 0:
        raise DataError(f"this torch ({torch.__version__}) writes its files in another way than is known")
    behind = (4,) if tail.startswith(_DESCRIPTOR) else ()
    return Saved(head, tail, (*behind, entry + 16))
