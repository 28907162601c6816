"""Verifying a checkpoint, against the tools that only read or hash its files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import LAZYCKPT, Fresh
from ..sample import Timed, warm

MIB = 1 << 20
SLOWEST = 1 / 0.8  # at least 0.8 of the peer's speed


def _verify(settings: Settings, form: str) -> Contest:
    if form == "pages":
        path = data.pages(settings, "safetensors")
    else:
        path = data.torch_file(settings) if form == "torch" else data.dcp(settings)
    files = [path] if path.is_file() else sorted(path.glob("*.distcp"))
    warm(path)
    view = lazyckpt.open(path, cache=False)
    memory = Fresh(LAZYCKPT, f"lazyckpt.verify(lazyckpt.open({str(path)!r}, cache=False), progress=False)")
    peer = ("sha256sum", Timed(lambda: subprocess.run(["sha256sum", *files], check=True, capture_output=True)))
    return Contest(Timed(lambda: lazyckpt.verify(view, progress=False)), peer, calls=1, most=7, once=[memory])


def _quick(settings: Settings) -> Contest:
    """Opening is part of both sides."""
    folder: Path = data.ranks(settings, "zero3", settings.pick(1024, 64), settings.pick(126, 8))

    def ours() -> object:
        return lazyckpt.verify(lazyckpt.open(folder, cache=False), level="quick")

    assert not ours(), "the checkpoint is sound"
    peer = ("lazyckpt.open", Timed(lambda: lazyckpt.open(folder, cache=False)))
    return Contest(Timed(ours), peer, calls=1, most=7)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    goals = [Goal(SLOWEST), Goal(1.0, "peak", 256.0 * MIB, "peak memory", "256 MiB")]
    yield Case(f"verify {size} MiB of a torch file", partial(_verify, settings, "torch"), goals)
    yield Case(f"verify {size} MiB of a DCP checkpoint", partial(_verify, settings, "DCP"), goals)
    count = settings.pick(131_072, 4_096)
    yield Case(f"verify {count:,} tensors of 4 KiB", partial(_verify, settings, "pages"), goals[:1])
    yield Case(f"verify --quick of {settings.pick(1024, 64):,} ranks, ZeRO-3", partial(_quick, settings), [Goal(1.5)])


AREA = Area(
    "trust",
    "Verifying",
    "`lazyckpt.verify` reads each byte once and compares the checksums of the records; it also judges the values. "
    "`sha256sum` only hashes the files, on one core.",
    _cases,
)
