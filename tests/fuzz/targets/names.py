"""Texts of users: indices, names, patterns, selections."""

from __future__ import annotations

import functools

import torch

import lazyckpt
from lazyckpt import CheckpointView
from lazyckpt.cli.options import find
from lazyckpt.core.names import Names, matcher, natural, shortened
from lazyckpt.core.select import parse_index
from lazyckpt.errors import SelectionError
from lazyckpt.layouts.rename.table import table

from ..contract import DifferenceError, Target
from .sources import write

SHAPE = (3, 4)


def index(data: bytes) -> None:
    """Parse an index; what it selects is what torch selects."""
    key = parse_index(data.decode("utf-8", "replace"))
    view = _view()
    try:
        ours = view["layers.0.w"][key]
    except SelectionError:
        return
    theirs = _tensor().numpy()[key]
    if tuple(ours.shape) != theirs.shape or not (ours.numpy() == theirs).all():
        raise DifferenceError(f"[{key}]: {ours!r:.200} and, by numpy, {theirs!r:.200}")


@functools.cache
def _tensor() -> torch.Tensor:
    return torch.arange(12.0).reshape(SHAPE)


@functools.cache
def _view() -> CheckpointView:
    path = write("names.pt", b"")
    torch.save({"layers.0.w": _tensor(), "layers.1.w": _tensor(), "a[0]": torch.ones(1), "head": torch.ones(2)}, path)
    return lazyckpt.open(path, cache=False)


def look_up(data: bytes) -> None:
    """Look a text up in every way."""
    text, view = data.decode("utf-8", "surrogateescape"), _view()
    if (text in view) != (view.get(text) is not None):
        raise DifferenceError(f"{text!r}: `in` and `get` disagree")
    view.search(text)
    shortened(text), natural(text), Names(view).near(text), matcher(text)("layers.0.w")
    view.select(text)
    find(view, text)


def renames(data: bytes) -> None:
    left, _, right = data.decode("utf-8", "replace").partition("=")
    names = table({left: right})
    _view().rename({left: right})
    repr(names)


TARGETS = (
    Target("names.index", index, lambda: [b"0:2, ::2", b"..., [2, 0], None", b"-1", b"1:, [0, 1]", b"None, 0"], "text"),
    Target("names.look-up", look_up, lambda: [b"layers.0.w", b"layers.*[0]", b"a[0][0:1]", b"head[::2]"], "text"),
    Target("names.rename", renames, lambda: [b"layers.{l}.w=blocks.{l}.weight", b"head=out"], "text"),
)
