"""Whole state dicts into memory: one large, 1,024 middle and 100,000 small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..limits import THREADS, Preadv, places
from ..sample import Cold, Timed, warm

NEAR = 1 / 0.95  # at least 0.95 of the rate
Files = Callable[[Settings, str], Path]


def _reads(settings: Settings, files: Files, cold: bool) -> Contest:
    """Both give a dict of tensors that own their memory. The limit makes no tensors."""
    file = files(settings, "safetensors")
    where, plain, view = places(file), Preadv(file), lazyckpt.open(file, cache=False)
    warm(file)
    assert all(torch.equal(a, b) for a, b in zip(view.to("cpu").values(), plain.each(where).values(), strict=True))
    peer, limit = f"preadv of each, {THREADS} threads", f"preadv into one buffer of huge pages, {THREADS} threads"
    if cold:
        return Contest(
            Cold([file], lambda: lazyckpt.open(file, cache=False), lambda view: view.to("cpu")),
            (peer, Cold([file], lambda: None, lambda _: plain.each(where))),
            (limit, Cold([file], lambda: None, lambda _: plain.whole())),
            calls=1, most=9, done=plain.close,
        )  # fmt: skip
    return Contest(
        Timed(lambda: view.to("cpu")), (peer, Timed(lambda: plain.each(where))), (limit, Timed(plain.whole)),
        calls=1, most=25, done=plain.close,
    )  # fmt: skip


def _safetensors(settings: Settings, files: Files, copy: bool) -> Contest:
    file = files(settings, "safetensors")
    warm(file)
    view = lazyckpt.open(file, cache=False)
    if not copy:
        peer = ("load_file, which maps too", Timed(lambda: load_file(file)))
        return Contest(Timed(lambda: view.to("cpu", copy=False)), peer)
    peer = ("load_file and clone", Timed(lambda: {name: t.clone() for name, t in load_file(file).items()}))
    return Contest(Timed(lambda: view.to("cpu")), peer, calls=1, most=15)


def _torch(settings: Settings, files: Files) -> Contest:
    file = files(settings, "pt")
    warm(file)
    view = lazyckpt.open(file, cache=False)
    return Contest(Timed(lambda: view.to("cpu")), ("torch.load", Timed(lambda: torch.load(file))), calls=1, most=15)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    kinds: dict[str, Files] = {
        f"one tensor of {settings.pick(128, 32)} MiB": data.one,
        f"{size} MiB in 16 tensors": data.large,
        f"{size} MiB in 1,024 tensors": data.middle,
        f"{settings.pick(100_000, 2_000):,} tensors of 1 KiB": data.small,
    }
    for text, files in kinds.items():
        for cold in (False, True):
            # making the tensors is no part of the limit: of small ones, it is most of the time
            near = None if files is data.small else NEAR
            goals = [Goal(NEAR), Goal(near, against="limit", label="beside one buffer")]
            what = f"{text}, {'cold' if cold else 'warm'}"
            yield Case(what, partial(_reads, settings, files, cold), goals)
        yield Case(f"{text}, peer safetensors", partial(_safetensors, settings, files, True))
        yield Case(f"{text}, mapped (copy=False)", partial(_safetensors, settings, files, False))
        if files is not data.small:  # written by torch.save in a minute
            yield Case(f"{text}, peer torch", partial(_torch, settings, files))


AREA = Area(
    "whole",
    "Whole state dicts",
    "`view.to('cpu')` against a loop of `preadv` with as many threads that reads each tensor into its own new memory: "
    "the goal is 0.95 of its rate. The limit reads the bytes into one buffer of huge pages and makes no tensors.",
    _cases,
)
