"""Writing from every source to every format, against `cp` of what is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..host import LAZYCKPT, Fresh
from ..limits import copy
from ..sample import Timed, warm

MIB = 1 << 20
MEMORY = 256 * MIB  # what a writer is given; a process may take as much again
# format -> the method's call; the quick run takes these sources
WRITERS = {
    "safetensors": "to_safetensors({out!r}, max_shard_size=None, progress=False, memory='256MiB')",
    "torch": "to_torch({out!r}, max_shard_size=None, progress=False, memory='256MiB')",
    "DCP": "to_dcp({out!r}, progress=False, memory='256MiB')",
    "Zarr": "to_zarr({out!r}, progress=False, memory='256MiB')",
}
_QUICK = {("torch file", "safetensors"), ("ZeRO-2", "safetensors"), ("safetensors", "torch"), ("torch file", "DCP"),
          ("torch file", "Zarr"), ("DCP", "safetensors"), ("Zarr", "safetensors")}  # fmt: skip


def _writing(settings: Settings, make: Callable[[], Path], state: str, call: str) -> Contest:
    source, out, copied = make(), settings.out(), settings.out("copy")
    warm(source)
    view = lazyckpt.open(source, cache=False)
    chosen = view.states[state] if state else view
    code = compile(f"view.{call.format(out=str(out))}", "<write>", "eval")

    def before() -> None:
        remove(copied)
        os.sync()  # what was written before is not what is measured

    def anew() -> tuple[()]:
        remove(out)
        os.sync()
        return ()

    ours = Timed(lambda: eval(code, {"view": chosen}), anew)
    peer = ("cp of the result", Timed(lambda: copy([out], copied)))
    opened = f"view = lazyckpt.open({str(source)!r}, cache=False){f'.states[{state!r}]' if state else ''}"
    clear = f"shutil.rmtree({str(out)!r}, ignore_errors=True)"
    fresh = Fresh(LAZYCKPT, f"{opened}\nview.{call.format(out=str(out))}", clear)

    def done() -> None:
        remove(out)
        remove(copied)

    once = [] if settings.quick else [fresh]
    return Contest(ours, peer, before=before, calls=1, most=11, once=once, done=done)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    for source, make, state in data.sources(settings):
        for form, call in WRITERS.items():
            goals = [Goal(0.9)]
            if not settings.quick:
                goals.append(Goal(1.0, "peak", float(2 * MEMORY), "peak memory", "512 MiB"))
            what = f"{source} to {form}"
            quick = (source, form) in _QUICK
            yield Case(what, partial(_writing, settings, make, state, call), goals, quick)


AREA = Area(
    "writing",
    "Writing",
    "1 GiB of float32 (64 MiB in a quick run), in the system's cache, from every source to every format, into a new "
    "folder on the same disk. The copy is of what was written. Both leave it to the system to write the bytes back.",
    _cases,
)
