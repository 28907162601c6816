"""What targets share: bytes as a store, genuine checkpoints in a folder, a look at all of a view."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import lazyckpt
from lazyckpt import CheckpointView, LazyckptError
from lazyckpt.io.storage.in_memory import Memory
from lazyckpt.io.storage.local import LocalStore

from ...recordings import GOLDEN

LARGE = 1 << 20  # bytes of a tensor, above which one element is read
MANY = 200  # tensors that are read of a view


@functools.cache
def scratch() -> Path:
    """A folder of this process, in memory where the system has such a file system."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="lazyckpt-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def settled(path: Path) -> Path:
    """Give a file, or all of a folder, one time of modification, so that what is made of it is the same in each run."""
    for one in (path, *path.rglob("*")):
        os.utime(one, (1e9, 1e9), follow_symlinks=False)
    return path


def zip_of(folder: Path, method: Callable[[Path], int] = lambda _: zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of a folder, which tells neither times nor who made it; ``method``: how a file is compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            info = zipfile.ZipInfo(str(path.relative_to(folder)) + "/" * path.is_dir())
            if path.is_dir():
                archive.writestr(info, b"")
            else:
                archive.writestr(info, path.read_bytes(), method(path))
    return file.getvalue()


def in_order(data: bytes) -> bytes:
    """A file of safetensors with its header in order: its writer gives the metadata in another order each time."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    return data[:8] + header.ljust(end - 8) + data[end:]


def memory(data: bytes, name: str) -> Memory:
    """A store of one file with these bytes."""
    return Memory(LocalStore(str(scratch())), name, data)


@functools.cache
def golden(group: str, case: str, below: str = "ckpt") -> Path:
    """A recorded checkpoint, unpacked."""
    folder = scratch() / "golden" / group
    with tarfile.open(GOLDEN / group / f"{case}.tar.xz") as archive:
        wanted = [m for m in archive.getmembers() if m.name == f"{case}/{below}" or f"{case}/{below}/" in m.name]
        archive.extractall(folder, members=wanted, filter="data")
    return folder / case / below


def look(view: CheckpointView) -> dict[str, torch.Tensor]:
    """Use all that a view has; return its stored tensors, without those that cannot be read."""
    repr(view), view.explain(), repr(dict(view.meta)), list(map(str, view.problems)), view.numel, view.files
    for state in view.states.values():
        list(state)
    found: dict[str, torch.Tensor] = {}
    for mapping in (view, view.stored):
        for n, name in enumerate(mapping):
            if n == MANY:
                break
            try:
                tensor = mapping[name]
                value = tensor[...] if tensor.nbytes <= LARGE else tensor[(slice(0, 1),) * tensor.ndim]
                if mapping is view.stored and tensor.nbytes <= LARGE:
                    found[name] = value
            except LazyckptError as e:
                str(e)
    return found


def opened(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Open a path and use all that it has."""
    with lazyckpt.open(path, cache=False, **options) as view:
        return look(view)


def replacing(folder: Callable[[], Path], name: str, base: Callable[[], Path] | None = None) -> Callable[[bytes], None]:
    """A target that opens a genuine checkpoint with these bytes in the place of one of its files; ``base``: that of a
    delta."""

    @functools.cache
    def copy() -> Path:
        to = Path(tempfile.mkdtemp(dir=scratch())) / "ckpt"
        shutil.copytree(folder(), to)
        return to

    def run(data: bytes) -> None:
        path = copy() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        opened(copy(), **({} if base is None else {"base": base()}))

    return run


def write(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


Named = Mapping[str, Any]
