"""Delta checkpoints, of lazyckpt and as slime and SkyRL publish them: a genuine one with one file changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import lazyckpt

from ...test_published_deltas import history, skyrl, slime
from ..contract import Target
from .sources import in_order, replacing, scratch, settled


@functools.cache
def _made() -> Path:
    """A base, a version over it in each layout, and lazyckpt's own delta of the same models."""
    folder = scratch() / "deltas"
    if (folder / "own").exists():  # made by the parent of this process
        return folder
    folder.mkdir()
    old, new, *_ = history(folder / "base")
    for encoding in ("xor", "overwrite"):
        slime(folder / encoding, 1, new, old, encoding, "adler32", ranks=1)
        for path in (folder / encoding).rglob("*.safetensors"):
            path.write_bytes(in_order(path.read_bytes()))
    skyrl(folder / "skyrl", 1, new, old, "sha256")
    settled(folder)
    view = lazyckpt.open(folder / "xor" / "weight_v000001", base=folder / "base", cache=False)
    lazyckpt.delta(view, lazyckpt.open(folder / "base", cache=False)).write(folder / "own", progress=False)
    return folder


# target -> (folder, pattern of the file in it, grammar)
FILES = {
    "deltas.slime-index": ("xor/weight_v000001", "model.safetensors.index.json", "json"),
    "deltas.slime-xor": ("xor/weight_v000001", "model-*.safetensors", "safetensors"),
    "deltas.slime-overwrite": ("overwrite/weight_v000001", "model-*.safetensors", "safetensors"),
    "deltas.skyrl-manifest": ("skyrl/delta-00000001", "manifest.json", "json"),
    "deltas.skyrl-payload": ("skyrl/delta-00000001", "delta-*.safetensors", "safetensors"),
    "deltas.own": ("own", "zarr.json", "json"),
}


def _target(name: str, below: str, pattern: str, grammar: str) -> Target:
    def folder() -> Path:
        return _made() / below

    def file() -> str:
        return min(path.name for path in folder().glob(pattern))

    @functools.cache
    def target() -> Callable[[bytes], None]:
        return replacing(folder, file(), lambda: _made() / "base")

    return Target(name, lambda data: target()(data), lambda: [(folder() / file()).read_bytes()], grammar)


TARGETS = tuple(_target(name, *about) for name, about in FILES.items())
