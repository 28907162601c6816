"""The second opening of large checkpoints, by their indexes in the cache folder, against the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import LAZYCKPT, Fresh

_CACHE = """
import os
from lazyckpt.formats.cache import state
from lazyckpt.formats.cache.tables import KeptSpecs
os.environ |= {{"LAZYCKPT_CACHE": "1", "LAZYCKPT_CACHE_DIR": {folder!r}}}
state.MANY = {many}
"""
_FILL = """
import time, lazyckpt
from lazyckpt.formats import opening
kept = lambda: isinstance(next(iter(lazyckpt.open({path!r}).states.values())).specs, KeptSpecs)
for _ in range(3):
    opening._indexes.clear()
    if kept():
        break
    time.sleep(2.5)  # files that were just written are not trusted
else:
    raise RuntimeError("the index is not kept")
"""
_NEW = "import tempfile; os.environ['LAZYCKPT_CACHE_DIR'] = tempfile.mkdtemp(dir={folder!r})"
_USED = "assert isinstance(next(iter(view.states.values())).specs, KeptSpecs)"


def _second(settings: Settings, make: Callable[[], Path], work: str = "") -> Contest:
    """The second opening, in a new process, and the first one."""
    path = str(make())
    cache = _cache(settings)
    data.python(cache + _FILL.format(path=path))
    ours = Fresh(LAZYCKPT, f"view = lazyckpt.open({path!r}); {work or 'count = len(view)'}; {_USED}", cache)
    peer = Fresh(LAZYCKPT, f"view = lazyckpt.open({path!r}, cache=False); {work or 'count = len(view)'}", cache)
    return Contest(ours, ("the first opening", peer), calls=1, most=15)


def _first(settings: Settings, make: Callable[[], Path]) -> Contest:
    """An opening that keeps its index, and one that does not."""
    path = str(make())
    cache = _cache(settings)
    data.python(cache + _FILL.format(path=path))
    new = cache + _NEW.format(folder=str(settings.data / "cache"))
    ours = Fresh(LAZYCKPT, f"view = lazyckpt.open({path!r})", new)
    peer = Fresh(LAZYCKPT, f"view = lazyckpt.open({path!r}, cache=False)", cache)
    return Contest(ours, ("opening with cache=False", peer), calls=1, most=15, done=lambda: _remove(settings))


def _cache(settings: Settings) -> str:
    folder = settings.data / "cache"
    folder.mkdir(exist_ok=True)
    return _CACHE.format(folder=str(folder), many=settings.pick(256, 0))


def _remove(settings: Settings) -> None:
    from ..case import remove

    remove(settings.data / "cache")


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    world, layers = settings.pick(1024, 64), settings.pick(126, 8)
    shards, names = settings.pick(1000, 20), settings.pick(500_000, 10_000)
    tensors, ranks, chunks = settings.pick(10_000, 100), settings.pick(2048, 64), 102
    model = "405B" if layers == 126 else f"{layers} layers of 405B"
    zero = {
        text: partial(data.ranks, settings, layout, world, layers)
        for layout, text in (("zero3", "ZeRO-3"), ("zero3_frozen", "ZeRO-3 whose files differ"), ("zero2", "ZeRO-2"))
    }
    megatron = partial(data.megatron, settings)
    hf = partial(data.hf_names, settings, shards, names)
    dcp = partial(data.dcp_chunks, settings, tensors, chunks, ranks)
    for text, make in zero.items():
        what = f"open {model} on {world:,} ranks again, {text}"
        yield Case(what, partial(_second, settings, make), [Goal(0.1)], quick=text != "ZeRO-2")
    what = "open a legacy Megatron checkpoint on 1,024 ranks again"
    yield Case(what, partial(_second, settings, megatron), [Goal(0.1)], quick=False)
    yield Case(f"open {shards:,} shards of {names:,} names again", partial(_second, settings, hf), [Goal(0.1)])
    look = "found = view['model.layers.1.mlp.experts.0.part_0.weight']"
    what = f"open {shards:,} shards of {names:,} names again, and look up one"
    yield Case(what, partial(_second, settings, hf, look), [Goal(0.2)])
    what = f"open {tensors * chunks:,} chunks of DCP in {ranks:,} files again"
    yield Case(what, partial(_second, settings, dcp), [Goal(0.1)])
    for text, make in {"ZeRO-3": zero["ZeRO-3"], "legacy Megatron": megatron, "DCP": dcp}.items():
        what = f"open and keep the index, {text}"
        yield Case(what, partial(_first, settings, make), [Goal(1.35)], quick=make is not megatron)


AREA = Area(
    "cache",
    "Opening again",
    "The second opening of a large checkpoint reads its index from the user's cache folder, here in a new process. It "
    "is compared with the first one. The last rows are what keeping the index adds to the first one.",
    _cases,
)
