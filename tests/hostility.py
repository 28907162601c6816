"""What tests of bad input share: how a file is tried, real files to damage, and zips written byte by byte."""

from __future__ import annotations

import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import LazyckptError

PATIENCE = 120.0  # seconds; what does not end or takes hours fails, what waits for a busy machine does not
LARGE = 16 << 20  # bytes; a damaged size may ask for more than anyone wants to read


@contextmanager
def deadline(seconds: float = PATIENCE) -> Iterator[None]:
    """Raise TimeoutError if it takes longer, also in the middle of a system call that blocks."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(path: Path, named: str | None = None) -> dict[str, torch.Tensor] | None:
    """Open a file and use all that a view has. -> its tensors, or None if it was refused with an error that names it.

    Any other exception is what these tests are there to find.
    """
    name = path.name if named is None else named
    try:
        view = lazyckpt.open(path, cache=False)
    except LazyckptError as e:
        check_message(e, name)
        return None
    repr(view), view.explain(), repr(dict(view.meta)), view.problems, view.numel, view.files
    found = {}
    for key, tensor in view.items():
        try:
            found[key] = tensor[...] if tensor.nbytes < LARGE else tensor[(slice(0, 1),) * tensor.ndim]
            assert found[key].dtype == tensor.dtype
        except LazyckptError as e:
            check_message(e, name)
    return found


def check_message(error: LazyckptError, name: str) -> None:
    text = str(error)
    assert name in text, f"the error does not name the file: {text}"
    assert len(text) < 1500
    assert type(error).__mro__[1] in (LazyckptError, *LazyckptError.__subclasses__())


def tree() -> dict[str, Any]:
    """Something of everything, small."""
    base = torch.arange(24, dtype=torch.float32)
    return {
        "model": {
            "a.weight": base.view(4, 6),
            "a.view": base[3:11],
            "b.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4).T,
            "ids": torch.arange(5),
            "mask": torch.tensor([True, False]),
            "expanded": torch.ones(1, dtype=torch.float16).expand(3),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
            "complex": torch.ones(2, dtype=torch.complex64).conj(),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "epoch": 3,
        "notes": ["text", (1, 2), None, b"bytes"],
    }


def write_real(folder: Path, kind: str) -> Path:
    """A file as its own library writes it: "zip", "zip without checksums", "legacy", "safetensors"."""
    path = folder / ("model.safetensors" if kind == "safetensors" else "model.pt")
    if kind == "safetensors":
        tensors = {k: v.contiguous() for k, v in tree()["model"].items() if k not in ("complex", "a.view")}
        save_file({k: v.clone() for k, v in tensors.items()}, path, {"format": "pt", "step": "3"})
    elif kind == "legacy":
        torch.save(tree(), path, _use_new_zipfile_serialization=False)
    elif kind == "zip without checksums":
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tree(), path)
        finally:
            torch.serialization.set_crc32_options(before)
    else:
        torch.save(tree(), path)
    return path


KINDS = ("zip", "zip without checksums", "legacy", "safetensors")


@dataclass
class Entry:
    """A member of a zip; what is None is told truly."""

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    stored: int | None = None
    offset: int | None = None  # of the local header, as the directory tells
    local: bool = True  # whether it has bytes of its own; if not, `offset` points into another's
    extra: bytes = b""
    descriptor: bytes | None = None
    local_name: bytes | None = None


def raw_zip(entries: Sequence[Entry], start: bytes = b"", comment: bytes = b"") -> bytes:
    """A zip in which everything can be a lie."""
    body, directory = bytearray(start), bytearray()
    for e in entries:
        at = len(body)
        crc = zlib.crc32(e.data) if e.crc is None else e.crc
        size = len(e.data) if e.size is None else e.size
        stored = len(e.data) if e.stored is None else e.stored
        if e.local:
            name = e.name if e.local_name is None else e.local_name
            told = (0, 0, 0) if e.flags & 8 else (crc, stored & 0xFFFFFFFF, size & 0xFFFFFFFF)
            body += struct.pack("<4s5H3I2H", b"PK\3\4", 20, e.flags, e.method, 0, 0, *told, len(name), len(e.extra))
            body += name + e.extra + e.data
            if e.flags & 8:
                made = struct.pack("<4s3I", b"PK\7\x08", crc, stored & 0xFFFFFFFF, size & 0xFFFFFFFF)
                body += made if e.descriptor is None else e.descriptor
        offset = at if e.offset is None else e.offset
        more = b""
        if max(size, stored, offset) >= 0xFFFFFFFF:  # zip64
            more = struct.pack("<2H3Q", 1, 24, size, stored, offset)
            size = stored = offset = 0xFFFFFFFF
        numbers = (20, 20, e.flags, e.method, 0, 0, crc, stored, size, len(e.name), len(more), 0, 0, 0, 0, offset)
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers)
        directory += e.name + more
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries), len(entries), len(directory), len(body), len(comment))
    return bytes(body + directory + end + comment)


def parts(data: bytes, cut: Callable[[bytes], bool] = bool) -> list[int]:
    """Where the records of a zip begin and end, and its directory."""
    marks = (b"PK\3\4", b"PK\7\x08", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7")
    return sorted({at for mark in marks for at in range(len(data)) if data.startswith(mark, at)} | {len(data)})
