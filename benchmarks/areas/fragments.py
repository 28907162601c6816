"""Tensors in one fragment and in a thousand: the same slices, and the time to plan them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import lazyckpt
from lazyckpt.core.plan import plan

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..sample import Timed, warm
from .slices import SHAPES, SIZES

NAME = "layers.0.weight"
ROW = "model.layers.3.mlp.up_proj.weight"


def _dcp(settings: Settings, chunks: int, key: Any) -> Contest:
    folder, file = data.dcp_cut(settings, chunks), data.grid(settings, "pt")
    warm(folder, anew=True)
    warm(file, anew=True)
    ours, mapped = lazyckpt.open(folder, cache=False), torch.load(file, mmap=True)
    assert torch.equal(ours[NAME][key], mapped[NAME][key])
    peer = ("torch.load(mmap=True) of one file", Timed(lambda: mapped[NAME][key].clone()))
    return Contest(Timed(lambda: ours[NAME][key]), peer, most=51)


def _zero(settings: Settings, key: Any) -> Contest:
    folder = data.zero(settings, 2)
    warm(folder)
    import deepspeed  # noqa: F401 - the pickle imports it

    state = lazyckpt.open(folder, cache=False).states["fp32"]
    tensor = max((t for t in state.values() if len(t.fragments) == 1 and t.ndim == 2), key=lambda t: len(t))
    (fragment,) = tensor.fragments
    first = min(f.extent.offset for t in state.values() for f in t.fragments if f.extent.path == fragment.extent.path)
    loaded = torch.load(folder / fragment.extent.path, mmap=True, weights_only=False)["optimizer_state_dict"]
    groups = loaded["single_partition_of_fp32_groups"]
    at = min(group.data_ptr() for group in groups) + fragment.extent.offset - first  # all are parts of one mapping
    flat = next(group for group in groups if group.data_ptr() <= at < group.data_ptr() + group.nbytes)
    start = (at - flat.data_ptr()) // 4
    mapped = flat[start : start + tensor.numel()].view(tensor.shape)
    assert torch.equal(tensor[key], mapped[key])
    peer = ("torch.load(mmap=True) of the rank's file", Timed(lambda: mapped[key].clone()))
    return Contest(Timed(lambda: tensor[key]), peer, most=51)


def _ranks(settings: Settings, key: Any) -> Contest:
    world, layers = settings.pick(1024, 64), settings.pick(126, 8)
    view = lazyckpt.open(data.ranks(settings, "zero3", world, layers), cache=False)
    tensor = view.states["fp32"][ROW]
    return Contest(Timed(lambda: tensor[key]), most=21)


def _plan(settings: Settings, chunks: int, form: str) -> Contest:
    if form == "DCP":
        view = lazyckpt.open(data.dcp_chunks(settings, 1, chunks, 8), cache=False)
        tensor = next(iter(view.values()))
    else:
        view = lazyckpt.open(data.ranks(settings, "zero3", chunks, 126 if chunks == 1024 else 8), cache=False)
        tensor = view.states["fp32"][ROW]
    spec = tensor.spec
    want = tuple(map(range, tensor.shape))
    assert len(plan(spec, want)) >= chunks
    return Contest(Timed(lambda: plan(spec, want)), most=21)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    keys = {text: key for text, (key, _) in (SHAPES | SIZES).items()}
    for chunks, quick in ((1, {"one row", "16 columns"}), (1024, set(keys))):
        for text, key in keys.items():
            what = f"{text} of a DCP tensor in {chunks:,} chunk{'s' if chunks > 1 else ''}"
            yield Case(what, partial(_dcp, settings, chunks, key), quick=text in quick)
    for text in ("one row", "64 rows", "16 columns", "1,000 random rows", "the whole"):
        key = slice(100, 164) if text == "64 rows" else 100 if text == "one row" else keys[text]
        key = torch.arange(0, 500, 3) if text == "1,000 random rows" else key
        label = "167 rows of a list" if text == "1,000 random rows" else text
        yield Case(f"{label} of a ZeRO-2 tensor in one fragment", partial(_zero, settings, key))
    world = settings.pick(1024, 64)
    for text, key in {"one row": 8000, "8 rows": slice(0, 8)}.items():
        goal = Goal(1.0, against=0.01)
        yield Case(f"{text} of a ZeRO-3 tensor over {world:,} ranks", partial(_ranks, settings, key), [goal])
    for chunks, limit in ((1000, 1e-3), (settings.pick(100_000, 4_000), settings.pick(50, 2) * 1e-3)):
        goal = Goal(1.0, against=limit)
        what = f"plan of a whole DCP tensor in {chunks:,} chunks"
        yield Case(what, partial(_plan, settings, chunks, "DCP"), [goal])
    goal = Goal(1.0, against=1e-3)
    yield Case(f"plan of a whole ZeRO-3 tensor over {world:,} ranks", partial(_plan, settings, world, "ZeRO"), [goal])


AREA = Area(
    "fragments",
    "One fragment or a thousand",
    "The same slices of a tensor that a DCP checkpoint or ZeRO ranks hold in parts. Slices are compared with one "
    "mapped file that holds the tensor as a whole. Plans have no peer: the goal is a time.",
    _cases,
)
