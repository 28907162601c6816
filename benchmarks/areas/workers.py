"""Two workers against one, beside what the disk gains by two copies at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..sample import Timed, warm

TWICE = 1 / 1.7  # at least 1.7 times as fast
_PIECE = 1 << 20


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
    return Contest(two, ("one worker", one), calls=1, most=9, done=done)


def _move(source: str, target: str, start: int, stop: int) -> None:
    """Read and write a part of a file."""
    memory = memoryview(bytearray(_PIECE))
    reads, writes = os.open(source, os.O_RDONLY), os.open(target, os.O_WRONLY)
    for at in range(start, stop, _PIECE):
        size = os.preadv(reads, [memory[: stop - at]], at)
        os.pwrite(writes, memory[:size], at)
    os.close(reads)
    os.close(writes)


def _disk(settings: Settings, files: int) -> Contest:
    """Two processes that only read a file and write another one, or one each, against one process."""
    source, out, pools = data.torch_file(settings), settings.out(), [_workers(n) for n in (2, 1)]
    warm(source)
    size = source.stat().st_size
    half = -(-size // 2)

    def anew() -> tuple[()]:
        remove(out)
        out.mkdir()
        for n in range(files):
            with open(out / f"{n}", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        os.sync()
        return ()

    def move(pool: Executor) -> None:
        parts = [(0, 0, half), (files - 1, half, size)]
        futures = [pool.submit(_move, str(source), str(out / f"{n}"), a, b) for n, a, b in parts]
        for future in futures:
            future.result()

    def done() -> None:
        for pool in pools:
            pool.shutdown()
        remove(out)

    two, one = (Timed(partial(move, pool), anew) for pool in pools)
    return Contest(two, ("one process", one), calls=1, most=7, done=done)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    works: dict[str, Callable[[Any, Any, Any], object]] = {
        "to one safetensors file": lambda view, out, pool: view.to_safetensors(
            out, executor=pool, progress=False, max_shard_size=None
        ),
        "to four safetensors files": lambda view, out, pool: view.to_safetensors(
            out, executor=pool, progress=False, max_shard_size=-(-view.nbytes // 4)
        ),
        "to Zarr": lambda view, out, pool: view.to_zarr(out, executor=pool, progress=False),
        "to Zarr with zstd": lambda view, out, pool: view.to_zarr(out, codec="zstd", executor=pool, progress=False),
        "statistics": lambda view, out, pool: view.stats(executor=pool, progress=False),
    }
    for text, do in works.items():
        yield Case(f"two processes, {size} MiB: {text}", partial(_two, settings, do), [Goal(TWICE)])
    for files, where in ((1, "one file"), (2, "a file each")):
        what = f"two processes that only copy bytes to {where}: what the file system allows"
        yield Case(what, partial(_disk, settings, files), [Goal(None)])


AREA = Area(
    "workers",
    "Two workers",
    "The goal is 1.7 times the speed of one worker, where the file system allows it: the last two rows say what two "
    "processes gain that only copy bytes. Workers are processes that have done their imports.",
    _cases,
)
