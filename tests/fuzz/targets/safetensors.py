"""safetensors: the reference implementation agrees, and so do the fast and the slow way to parse a header."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import lazyckpt
from lazyckpt import LazyckptError
from lazyckpt.io.containers.safetensors import read_safetensors

from ...hostility import write_real
from ..contract import DifferenceError, Target
from .sources import equal, golden, in_order, look, memory, write


def seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        real = in_order(write_real(Path(folder), "safetensors").read_bytes())
    llama = golden("huggingface", "llama_sharded")
    return [real, (llama / "model-00002-of-00006.safetensors").read_bytes(), real[:8] + real[8:]]


def file(data: bytes) -> None:
    """Open a file, and compare it with what safetensors reads."""
    path = write("model.safetensors", data)
    refused = None
    found: dict[str, torch.Tensor] = {}
    try:
        with lazyckpt.open(path, cache=False) as view:
            found = look(view)
            packed = {p.path for p in view.problems if p.code == "unsupported-tensor"}
    except LazyckptError as e:
        refused = e
    try:
        with safe_open(path, "pt") as theirs:
            names = set(theirs.keys())
            for name in names if refused is None else ():
                if name in found and name not in packed and not equal(found[name], theirs.get_tensor(name)):
                    raise DifferenceError(f"{name!r} differs from what safetensors reads")
    except DifferenceError:
        raise
    except Exception:  # whatever safetensors refuses
        return
    if refused is None and names - packed - set(found):
        raise DifferenceError(f"{sorted(names - set(found))[:5]} are read by safetensors only")
    if refused is not None:
        raise refused


def header(data: bytes) -> None:
    """Parse a header, and the same header with a line break in it, which the fast way leaves to the slow one."""
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    if not text.startswith(b"{") or length > len(data) - 8:
        return
    other = (length + 1).to_bytes(8, "little") + b"{\n" + text[1:] + data[8 + length :]
    fast, slow = _outcome(data, 0), _outcome(other, 1)
    if fast != slow:
        raise DifferenceError(f"{fast!r:.500} and {slow!r:.500}")


def _outcome(data: bytes, shift: int) -> Any:
    try:
        found = read_safetensors(memory(data, "m.safetensors"), "m.safetensors")
    except LazyckptError:
        return "refused"
    extents = {name: (e.offset - shift, e.dtype, e.shape) for name, e in found.extents.items()}
    return list(extents.items()), found.metadata, list(map(str, found.notes))


TARGETS = (
    Target("safetensors.file", file, seeds, "safetensors"),
    Target("safetensors.header", header, seeds, "safetensors"),
)
