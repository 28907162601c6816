"""Slices of every shape and size of one tensor, warm and cold, against the mapped tensor of torch and safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import lazyckpt
from lazyckpt.testing import opened

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..sample import Cold, Sampler, Timed, warm

NAME = "layers.1.weight"
ROWS, COLUMNS = 4096, 2048  # bfloat16: a row is 4 KiB
PAGE = 4096


def _rows(count: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(0))


def _mask() -> torch.Tensor:
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) < 0.1


# text -> the key; whether safetensors' get_slice takes it
SHAPES: dict[str, tuple[Any, bool]] = {
    "one row": (1000, True),
    "64 rows": (slice(1000, 1064), True),
    "a block of 300 x 895": ((slice(1000, 1300), slice(501, 1396)), True),
    "16 columns": ((slice(None), slice(100, 116)), True),
    "every 8th row": (slice(None, None, 8), False),
    "every 8th column": ((slice(None), slice(None, None, 8)), False),
    "1,000 random rows": (_rows(1000), False),
    "a mask of 10 % of the rows": (_mask(), False),
    "the whole": (slice(None), True),
}
SIZES: dict[str, tuple[Any, bool]] = {
    "one element": ((1000, 1000), True),
    "4 KiB of a row": (slice(1000, 1001), True),
    "64 KiB of rows": (slice(1000, 1016), True),
    "1 MiB of rows": (slice(1000, 1256), True),
    "4 MiB of rows": (slice(1000, 2024), True),
}


def wanted(key: Any, row: int = COLUMNS * 2) -> int:
    """The bytes of the pages in which the selected elements of a tensor of 4096 x 2048 lie."""
    numbers = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)[key].flatten()
    # the tensor need not begin at a page: a run that is not aligned touches one page more
    pages = torch.unique(numbers.long() * 2 // PAGE)
    runs = 1 + int((pages.diff() > 1).sum()) if len(pages) else 0
    return (len(pages) + runs) * PAGE


def _warm(settings: Settings, key: Any, peer: str) -> Contest:
    file, safe = data.grid(settings, "pt"), data.grid(settings, "safetensors")
    warm(file, anew=True)
    warm(safe, anew=True)
    theirs: Callable[[], object]
    if peer == "torch":
        ours, mapped = lazyckpt.open(file, cache=False), torch.load(file, mmap=True)
        name, theirs = "torch.load(mmap=True)[name][key].clone()", lambda: mapped[NAME][key].clone()
    else:
        ours, opened_ = lazyckpt.open(safe, cache=False), safe_open(safe, "pt")
        # get_slice gives a view of the mapping: it is copied, as ours and torch's are
        name, theirs = "safe_open.get_slice(name)[key].clone()", lambda: opened_.get_slice(NAME)[key].clone()
    assert torch.equal(ours[NAME][key], theirs())  # type: ignore[arg-type]
    return Contest(Timed(lambda: ours[NAME][key]), (name, Timed(theirs)), count=partial(_requests, file, key))


def _requests(file: Path, key: Any) -> dict[str, float]:
    """Through a store that cannot map and reads over gaps of a page, as a bucket does."""
    view, counts = opened(file, gap=PAGE)
    counts.clear()
    view[NAME][key]
    return {"requests": counts.requests, "requested bytes": counts.bytes}


def _cold(settings: Settings, key: Any) -> Contest:
    file = data.grid(settings, "pt")
    ours: Sampler = Cold([file], lambda: lazyckpt.open(file, cache=False), lambda view: view[NAME][key])
    theirs: Sampler = Cold([file], lambda: torch.load(file, mmap=True), lambda state: state[NAME][key].clone())
    return Contest(ours, ("torch.load(mmap=True)[name][key].clone()", theirs), calls=1, most=15)


def _embedding(settings: Settings) -> Contest:
    file = data.embedding(settings)
    warm(file, anew=True)
    ours, mapped = lazyckpt.open(file, cache=False), torch.load(file, mmap=True)
    name = "layers.0.weight"
    rows = torch.randint(0, len(mapped[name]), (10_000,), generator=torch.Generator().manual_seed(0))
    numbers = rows.tolist()

    def loop() -> torch.Tensor:
        tensor = mapped[name]
        return torch.stack([tensor[n] for n in numbers])

    assert torch.equal(ours[name][rows], loop())
    return Contest(Timed(lambda: ours[name][rows]), ("torch.stack of tensor[n] of the mapped tensor", Timed(loop)))


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    for text, (key, takes) in (SHAPES | SIZES).items():
        yield Case(f"{text}, warm, peer torch", partial(_warm, settings, key, "torch"))
        if takes:
            yield Case(f"{text}, warm, peer safetensors", partial(_warm, settings, key, "safetensors"))
    for text, (key, _) in (SHAPES | SIZES).items():
        pages = Goal(1.05, "resident", float(wanted(key)), "bytes brought into the cache", "the pages wanted")
        yield Case(f"{text}, cold", partial(_cold, settings, key), [Goal(1.0), pages])
    yield Case("10,000 random rows of an embedding in one call", partial(_embedding, settings), [Goal(0.2)])


AREA = Area(
    "slices",
    "Slices of every shape",
    "A bfloat16 tensor of 4096 x 2048 (16 MiB) in a file of four. *Warm*: the file is in the system's cache, and the "
    "peer copies out of its mapping. *Cold*: the file's pages are dropped before each call, and the pages that come "
    "into the cache are counted.",
    _cases,
)
