"""Zarr: reading, against zarr-python; and many small tensors in packs, against `cp` of one file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..limits import copy
from ..sample import Cold, Timed, warm


def _reading(settings: Settings, compressed: bool) -> Contest:
    import zarr

    path = data.zarr(settings, compressed)
    warm(path)

    def ours() -> None:
        for tensor in lazyckpt.open(path, cache=False).values():
            tensor[...]

    def theirs() -> None:
        group = zarr.open_group(str(path), mode="r")
        for n in range(16):
            group[f"layers/{n}/weight"][...]

    return Contest(Timed(ours), ("zarr-python", Timed(theirs)), calls=1, most=9)


def _small(settings: Settings, count: int, options: Mapping[str, Any]) -> Contest:
    source, out, copied = data.kibibytes(settings, "safetensors", count), settings.out(), settings.out("copy")
    warm(source)
    view = lazyckpt.open(source, cache=False)

    def anew() -> tuple[()]:
        done()
        os.sync()
        return ()

    def done() -> None:
        remove(out)
        remove(copied)

    ours = Timed(lambda: view.to_zarr(out, progress=False, **options), anew)
    peer = ("cp of the source, one file", Timed(lambda: copy([source], copied), anew))
    return Contest(ours, peer, calls=1, rehearse=False, most=7, least=1, done=done)


def _cold(settings: Settings) -> Contest:
    source, out, copied = data.torch_file(settings), settings.out(), settings.out("copy")

    def fresh() -> None:
        remove(out)
        remove(copied)
        os.sync()

    ours = Cold([source], fresh, lambda _: lazyckpt.open(source, cache=False).to_zarr(out, progress=False))
    peer = Cold([source], fresh, lambda _: copy([source], copied))
    return Contest(ours, ("cp of the source", peer), calls=1, most=7, done=fresh)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    for compressed, text in ((False, "uncompressed"), (True, "blosc with zstd")):
        yield Case(f"read {size} MiB, {text}", partial(_reading, settings, compressed))
    yield Case(f"write {size} MiB of a torch file, cold", partial(_cold, settings), [Goal(0.9)])
    for count, quick in ((100_000, False), (1_000, True)):
        what = f"write {count:,} tensors of 1 KiB, packed"
        yield Case(what, partial(_small, settings, count, {"pack": True}), [Goal(1.5)], quick)
    for options, text in (({"shard": True}, "a shard"), ({}, "a chunk")):
        what = f"write 1,000 tensors of 1 KiB, an array with {text} for each"
        yield Case(what, partial(_small, settings, 1000, options), [Goal(None)])


AREA = Area(
    "zarr",
    "Zarr",
    "Reading is against zarr-python with its own defaults, one array after another into new memory.",
    _cases,
)
