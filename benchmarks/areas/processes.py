"""Long-running processes: what opening and closing leaves behind, and many threads on one view."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import LAZYCKPT, Fresh
from ..limits import Preadv, places
from ..sample import Cold, Timed, warm

MIB = 1 << 20
THREADS = (1, 4, 16, 64)
_LEAK = """
def cycle(times):
    for _ in range(times):
        with lazyckpt.open(path, cache=False) as view:
            view[name][3:5]

cycle(50)
gc.collect()
before = [len(os.listdir("/proc/self/fd")), sum(1 for _ in open("/proc/self/maps")), memory("VmRSS")]
cycle({times})
gc.collect()
after = [len(os.listdir("/proc/self/fd")), sum(1 for _ in open("/proc/self/maps")), memory("VmRSS")]
counts = dict(zip(["descriptors", "maps", "growth"], [b - a for a, b in zip(before, after)]))
"""


def _leak(settings: Settings, times: int) -> Contest:
    file = data.grid(settings, "pt")
    prepare = f"import gc; from benchmarks.sample import memory; path, name = {str(file)!r}, 'layers.1.weight'"
    return Contest(Fresh(LAZYCKPT, _LEAK.format(times=times), prepare), calls=1, rehearse=False, most=1)


def _threads(settings: Settings, threads: int, cold: bool) -> Contest:
    """Each thread reads parts of 1 MiB, in an order of its own: together all of the file."""
    file = data.large(settings, "safetensors")
    warm(file)
    where, plain = places(file), Preadv(file)
    pool = ThreadPoolExecutor(threads)
    parts = [(name, row) for name, (_, _, shape) in where.items() for row in range(0, shape[0], 256)]
    random.Random(0).shuffle(parts)

    def read(view: lazyckpt.CheckpointView, part: tuple[str, int]) -> None:
        view[part[0]][part[1] : part[1] + 256]

    def pread(part: tuple[str, int]) -> None:
        import torch

        offset, dtype, shape = where[part[0]]
        target = torch.empty((256, shape[1]), dtype=dtype)
        plain._all([(memoryview(target.view(-1).numpy()).cast("B"), offset + part[1] * shape[1] * 4)])

    def ours(view: lazyckpt.CheckpointView) -> None:
        list(pool.map(partial(read, view), parts))

    def theirs(_: object = None) -> None:
        list(pool.map(pread, parts))

    def done() -> None:
        pool.shutdown()
        plain.close()

    name = f"preadv on {_threads_of(threads)}"
    if cold:
        mine = Cold([file], lambda: lazyckpt.open(file, cache=False), ours)
        return Contest(mine, (name, Cold([file], lambda: None, theirs)), calls=1, most=7, done=done)
    view = lazyckpt.open(file, cache=False)
    return Contest(Timed(lambda: ours(view)), (name, Timed(theirs)), calls=1, most=15, done=done)


def _threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    times = settings.pick(10_000, 500)
    goals = [
        Goal(0.0, "descriptors", 1.0, "descriptors left open", "none"),
        Goal(0.0, "maps", 1.0, "maps left", "none"),
        Goal(1.0, "growth", float(MIB), "growth of memory", "1 MiB"),
    ]
    yield Case(f"{times:,} opens and closes with a slice each", partial(_leak, settings, times), goals)
    for cold in (False, True):
        for threads in THREADS:
            size = settings.pick(1024, 64)
            what = f"{_threads_of(threads)} on one view, {size} MiB, {'cold' if cold else 'warm'}"
            yield Case(what, partial(_threads, settings, threads, cold), [Goal(1 / 0.95)])


AREA = Area(
    "processes",
    "Long-running processes",
    "The threads read 1 MiB at a time from one view, against `preadv` of the same parts on as many threads.",
    _cases,
)
