"""GGUF: headers, of every version and byte order, and a split file. GGUFReader agrees where it reads a file, too."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

import lazyckpt
from lazyckpt.io.containers.gguf import read_gguf

from ..contract import DifferenceError, Target
from .sources import golden, look, memory, replacing, write

FILES = ("every", "version1", "version2", "big_endian", "big_endian_blocks")


def seeds() -> list[bytes]:
    small = [(golden("gguf", case) / "model.gguf").read_bytes() for case in FILES[1:]]
    return [*small, *(data[: 1 << 12] for data in small)]


def file(data: bytes) -> None:
    """Open a file, and compare tensors with those that GGUFReader finds."""
    path = write("model.gguf", data)
    with lazyckpt.open(path, cache=False) as view:
        found = look(view)
        look(view.dequantize())
    try:
        from gguf import GGUFReader

        theirs = GGUFReader(path).tensors
    except Exception:  # whatever GGUFReader refuses
        return
    for tensor in theirs:
        ours = found.get(tensor.name)
        if ours is None or not tensor.n_elements or view.meta.get("big_endian"):
            continue
        if ours.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() != tensor.data.tobytes():
            raise DifferenceError(f"{tensor.name!r} differs from what GGUFReader reads")


def header(data: bytes) -> None:
    """Parse a header."""
    found = read_gguf(memory(data, "m.gguf"), "m.gguf")
    for extent in found.extents.values():
        if extent.offset < 0 or extent.offset + prod(extent.shape) * extent.dtype.itemsize > len(data):
            raise DifferenceError("a tensor is not within its file")


def _split(number: int) -> bytes:
    return (golden("gguf", "split") / f"model-0000{number}-of-00003.gguf").read_bytes()


def split_seeds() -> list[bytes]:
    return [_split(number) for number in (1, 2, 3)]


def _folder() -> Path:
    return golden("gguf", "split")


TARGETS = (
    Target("gguf.file", file, seeds),
    Target("gguf.header", header, seeds),
    Target("gguf.split", replacing(_folder, "model-00002-of-00003.gguf"), split_seeds),
)
