"""What an entry of the index cache consists of: objects as documents and columns."""

from __future__ import annotations

import argparse
import itertools
import math
from collections import deque
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from lazyckpt.core.dtypes import F32
from lazyckpt.core.index import FileInfo
from lazyckpt.core.placement import Rank
from lazyckpt.errors import Problem
from lazyckpt.formats.cache.values import Decoder, Encoder, NotKept
from lazyckpt.io.containers.pickle.plain import TensorRef
from lazyckpt.io.containers.pickle.records import Attributed, Opaque
from lazyckpt.io.containers.pickle.values import Device, Size

from .index_caches import cache, loads, zero
from .same_views import equal

__all__ = ["cache", "loads", "zero"]


# -- values


def _cycle() -> list[Any]:
    inner: list[Any] = [1]
    inner.append({"again": inner})
    return [inner, inner]


def _opaque() -> Opaque:
    record = Opaque("module", "Name", (1, [2]), {"a": 3})
    record.state = {"self": record, "text": "x"}
    record.items = [1]
    record.entries = {"k": (1, "v")}
    return record


def _attributed() -> Attributed:
    found = Attributed({"a": 1})
    found.state = {"b": 2}
    return found


VALUES: list[Any] = [
    PurePosixPath("a/b"),
    PureWindowsPath("c:/d"),
    None,
    True,
    0,
    -1,
    1 << 4000,
    1.5,
    -0.0,
    math.inf,
    math.nan,
    1e-320,
    "",
    "text\n\0",
    "\u2028 \U0001f600",
    b"",
    b"\xff\0",
    bytearray(b"x"),
    1 + 2j,
    (),
    (1, 2),
    (True, 1),
    tuple(range(50)),
    ("a", (1, [2])),
    [],
    [1, [2, [3]]],
    {},
    {1: "a", "b": [1]},
    {(1, "a"): {}},
    {1, 2},
    frozenset((1, "a")),
    range(1, 9, 2),
    deque([1, 2], maxlen=3),
    argparse.Namespace(a=1, b=[2]),
    np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
    np.zeros((0, 3)),
    np.array("text"),
    np.float32(1.5),
    np.int64(-1),
    F32,
    Size((1, 2)),
    Device("cuda", 1),
    TensorRef("name"),
    Problem("missing-file", "a is missing", "a"),
    Rank(1, 2, 3, 4),
    _opaque(),
    Attributed({"a": 1}),
    _attributed(),
    _cycle(),
    FileInfo(1, 2, "v"),
]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_are_kept_exactly(value: Any, lazy: bool) -> None:
    encoder = Encoder()
    encoder.lazy = lazy
    number = encoder.document(value)
    ends = list(itertools.accumulate(map(len, encoder.documents)))
    decoder = Decoder(memoryview(b"".join(encoder.documents)), ends, memoryview(encoder.columns))
    decoder.copies = True
    equal(decoder.document(number), value, "value")


def test_objects_stay_shared() -> None:
    encoder = Encoder()
    shared = [1]
    number = encoder.document({"a": shared, "b": (shared, shared)})
    ends = list(itertools.accumulate(map(len, encoder.documents)))
    found = Decoder(memoryview(b"".join(encoder.documents)), ends, memoryview(encoder.columns)).document(number)
    assert found["a"] is found["b"][0] is found["b"][1]


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(1000):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value",
    [object(), 1 << 9000, "\ud800", _deep(), np.array([object()]), lambda: 0, Fraction(1, 3), Path("a"), torch.ones(1)],
)
def test_what_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(NotKept):
        Encoder().document([value])
