"""Zarr documents of versions 2 and 3, packs, and zips: zarr-python reads the same values where both read an array."""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import lazyckpt
from lazyckpt import LazyckptError

from ...writers import zarr_files
from ..contract import DifferenceError, Target
from .sources import LARGE, look, opened, replacing, scratch, write, zip_of


@functools.cache
def _store(version: int) -> Path:
    folder = Path(tempfile.mkdtemp(dir=scratch())) / f"v{version}.zarr"
    with mock.patch("time.time", return_value=1e9):  # gzip writes it
        (zarr_files.v2 if version == 2 else zarr_files.v3)(folder)
    return folder


@functools.cache
def _own() -> Path:
    """A store that lazyckpt writes, with its packs of small tensors."""
    source = write("small.pt", b"")
    torch.save({f"layer.{n}.bias": torch.arange(n + 1.0) for n in range(6)} | {"w": torch.eye(4)}, source)
    to = Path(tempfile.mkdtemp(dir=scratch())) / "own.zarr"
    with lazyckpt.open(source, cache=False) as view:
        view.to_zarr(to)
    return to


def _documents(folder: Path, name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob(name))]


def array(version: int) -> Callable[[bytes], None]:
    """A target: an array with this document, over the chunks of a genuine one."""
    name = ".zarray" if version == 2 else "zarr.json"

    @functools.cache
    def folder() -> Path:
        genuine = next(path.parent for path in sorted(_store(version).rglob(name)) if path.parent != _store(version))
        to = Path(tempfile.mkdtemp(dir=scratch())) / "one.zarr"
        shutil.copytree(genuine, to)
        return to

    def run(data: bytes) -> None:
        (folder() / name).write_bytes(data)
        with lazyckpt.open(folder(), cache=False) as view:
            for found in look(view).values():
                _compare(folder(), found)

    return run


def _compare(folder: Path, found: torch.Tensor) -> None:
    import zarr

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = zarr.open_array(folder, mode="r")
            if theirs.nbytes > LARGE:
                return
            values = np.asarray(theirs[...])
    except Exception:  # whatever zarr refuses
        return
    ours = found if found.dtype is not torch.bfloat16 else found.float()
    mine = ours.numpy()
    if values.dtype.kind not in "biufc" or values.dtype.itemsize != mine.dtype.itemsize:
        return
    values = values.astype(values.dtype.newbyteorder("="))
    if mine.shape != values.shape or mine.tobytes() != values.tobytes():
        raise DifferenceError(f"{mine!r:.300} and, by zarr, {values!r:.300}")


@functools.cache
def _zip() -> bytes:
    return zip_of(_store(3))


def zipped(data: bytes) -> None:
    try:
        opened(write("store.zarr.zip", data))
    except LazyckptError as e:
        str(e)


TARGETS = (
    Target("zarr.v2", array(2), lambda: _documents(_store(2), ".zarray"), "json"),
    Target("zarr.v3", array(3), lambda: _documents(_store(3), "zarr.json"), "json"),
    Target("zarr.packs", replacing(_own, "weights/zarr.json"), lambda: _documents(_own(), "zarr.json"), "json"),
    Target("zarr.root", replacing(_own, "zarr.json"), lambda: [(_own() / "zarr.json").read_bytes()], "json"),
    Target("zarr.zip", zipped, lambda: [_zip()], "zip"),
)
