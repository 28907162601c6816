"""Two workers against one, beside what the disk gains by two copies at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..limits import copy
from ..sample import Timed, warm

TWICE = 1 / 1.7  # at least 1.7 times as fast


def _import() -> None:
    """What a worker's first task would import."""
    import torch  # noqa: F401

    import lazyckpt.export.registry  # noqa: F401


def _workers(count: int) -> ProcessPoolExecutor:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "lazyckpt"])
    pool = ProcessPoolExecutor(count, context)
    for future in [pool.submit(_import) for _ in range(count)]:
        future.result()
    return pool


def _two(settings: Settings, do: Callable[[Any, Any, Any], object]) -> Contest:
    source, out = data.torch_file(settings), settings.out()
    warm(source)
    view, pools = lazyckpt.open(source, cache=False), [_workers(n) for n in (2, 1)]

    def anew() -> tuple[()]:
        remove(out)
        os.sync()
        return ()

    def done() -> None:
        for pool in pools:
            pool.shutdown()
        remove(out)

    two, one = (Timed(partial(do, view, out, pool), anew) for pool in pools)
    return Contest(two, ("one worker", one), calls=1, most=5, done=done)


def _disk(settings: Settings) -> Contest:
    """`cp` of two files of the same size, at the same time and one after the other."""
    sources = [data.large(settings, form) for form in ("pt", "safetensors")]
    for path in sources:
        warm(path)
    out = settings.out()

    def anew() -> tuple[()]:
        remove(out)
        os.sync()
        return ()

    def in_turn() -> None:
        out.mkdir()
        for path in sources:
            copy([path], out / path.name)

    two, one = Timed(lambda: copy(sources, out), anew), Timed(in_turn, anew)
    return Contest(two, ("one cp after the other", one), calls=1, most=5, done=lambda: remove(out))


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    works: dict[str, Callable[[Any, Any, Any], object]] = {
        "to safetensors": lambda view, out, pool: view.to_safetensors(out, executor=pool, progress=False),
        "to Zarr with zstd": lambda view, out, pool: view.to_zarr(out, codec="zstd", executor=pool, progress=False),
        "statistics": lambda view, out, pool: view.stats(executor=pool, progress=False),
    }
    for text, do in works.items():
        yield Case(f"two processes, {size} MiB: {text}", partial(_two, settings, do), [Goal(TWICE)])
    yield Case("two copies at a time: what the disk gains", partial(_disk, settings), [Goal(None)])


AREA = Area(
    "workers",
    "Two workers",
    "The goal is 1.7 times the speed of one worker, where the processor is what limits. Writes have the disk in "
    "common: the last row is what two copies at a time gain. Workers are processes that have done their imports.",
    _cases,
)
