"""How the time and the memory of opening grow with the ranks, the tensors and the chunks: a fitted exponent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Sweep
from ..host import LAZYCKPT, Fresh

LIMIT = 1.05
Make = Callable[[Settings, int], Path]

_MAKES: dict[str, tuple[str, Make, Sequence[int], Sequence[int]]] = {
    "ranks": (
        "ZeRO-3 checkpoint of 8 layers of 405B",
        lambda settings, n: data.ranks(settings, "zero3", n, 8),
        (64, 256, 1024, 4096),
        (16, 64, 256),
    ),
    "tensors": (
        "safetensors file",
        data.names,
        (3_000, 10_000, 30_000, 100_000),
        (1_000, 4_000, 16_000),
    ),
    "names": (
        "Hugging Face folder of shards of 500 names",
        lambda settings, n: data.hf_names(settings, n // 500, n),
        (5_000, 25_000, 100_000, 500_000),
        (1_000, 4_000, 16_000),
    ),
    "chunks": (
        "DCP checkpoint of tensors of 102 chunks",
        lambda settings, n: data.dcp_chunks(settings, n // 102, 102, 64),
        (10_200, 51_000, 204_000, 1_020_000),
        (1_020, 3_060, 10_200),
    ),
}


def _sweep(settings: Settings, unit: str, make: Make, sizes: Sequence[int]) -> Sweep:
    programs = []
    for size in sizes:
        path = make(settings, size)
        programs.append((size, Fresh(LAZYCKPT, f"view = lazyckpt.open({str(path)!r}, cache=False)")))
    return Sweep(unit, programs)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    for unit, (text, make, full, quick) in _MAKES.items():
        sizes = quick if settings.quick else full
        goals = [Goal(LIMIT, "seconds", label="time"), Goal(LIMIT, "peak", label="peak memory")]
        yield Case(f"open a {text}, growing {unit}", partial(_sweep, settings, unit, make, sizes), goals)


AREA = Area(
    "scaling",
    "Growth",
    "The exponent is the slope of a line through the logarithms of size and figure: 1 is proportional. The points are "
    "the best of several runs, each in a fresh process.",
    _cases,
)
