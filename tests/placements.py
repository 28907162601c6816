"""Random tensors, cut over files as training systems cut them; with the address of every element, found out by numpy.

The bookkeeping here is one array of addresses, filled index by index: none of the library's arithmetic on boxes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from lazyckpt.core.box import Box
from lazyckpt.core.extents import Extent, Hole
from lazyckpt.core.index import FileInfo
from lazyckpt.core.placement import Part
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.io.storage.base import Entry
from lazyckpt.io.storage.local import LocalStore

from .algebra import Array, shapes

NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint16: np.uint16,
    torch.int8: np.int8,
    torch.bool: np.bool_,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
UNSET = -1  # no file holds the element; -2 - n: only the n-th hole does
Kind = Literal["plain", "exact", "flagged"]


@dataclass
class Placed:
    """A tensor, what its files hold, and the address of every element: file number << 40 | byte in the file."""

    spec: TensorSpec
    truth: Array
    files: dict[str, bytes]
    holes: list[Hole]
    address: Array
    piece: Array = field(default_factory=lambda: np.zeros(0))
    """The number of the part (of any fragment) that the element is read from."""

    def write(self, folder: Path) -> None:
        for path, data in self.files.items():
            (folder / path).write_bytes(data)


@dataclass
class Disk:
    """Files that grow while arrays are stored in them."""

    rng: np.random.Generator
    files: dict[str, bytearray] = field(default_factory=dict)

    def path(self, draw: st.DrawFn) -> str:
        return f"rank_{draw(st.integers(0, 3))}.bin"

    def junk(self, n: int) -> bytes:
        return self.rng.integers(0, 256, n, dtype=np.uint8).tobytes()

    def store(self, draw: st.DrawFn, array: Array, dtype: torch.dtype, kind: Kind, flat: bool) -> tuple[Extent, Array]:
        """Write an array somehow: permuted, with gaps, unaligned, flagged -> (where it is, address of every element).

        ``kind``: "plain" keeps the bits; "exact" may store another dtype; "flagged" may set conj, neg and swapped.
        """
        if kind == "exact" and dtype in FLOATS:
            dtype = draw(st.sampled_from(FLOATS))
        flags = {"conj": False, "neg": False, "swapped": False}
        if kind == "flagged":
            flags["swapped"] = dtype.itemsize > 1 and draw(st.booleans())
            flags["conj"] = dtype.is_complex and draw(st.booleans())
            flags["neg"] = dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans())
        array = array.astype(NUMPY[dtype])
        array = np.asarray(np.conj(array) if flags["conj"] else -array if flags["neg"] else array)
        size = dtype.itemsize
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).reshape(-1, size)
        if flags["swapped"]:
            unit = size // 2 if dtype.is_complex else size
            raw = raw.reshape(-1, unit)[:, ::-1].reshape(-1, size)

        strides = strides_of(draw, array, flat)
        steps = np.zeros((), np.int64)
        for n, stride in zip(array.shape, strides, strict=True):
            steps = steps[..., None] + np.arange(n) * stride
        reach = int(steps.max()) + 1 if array.size else 0
        path = self.path(draw)
        data = self.files.setdefault(path, bytearray())
        data += self.junk(draw(st.integers(0, 9)))
        offset = len(data)
        region = np.frombuffer(self.junk(reach * size), np.uint8).copy().reshape(-1, size)
        region[steps.reshape(-1)] = raw
        data += region.tobytes()
        number = int(path.split("_")[1][0]) << 40
        extent = Extent(path, offset, dtype, array.shape, tuple(strides), **flags)
        return extent, number + offset + steps * size


def strides_of(draw: st.DrawFn, array: Array, flat: bool) -> list[int]:
    """C order, or any order of the dimensions with gaps, and stride 0 along which nothing changes."""
    if flat or draw(st.booleans()):
        unit = draw(st.sampled_from([1, 1, 1, 2])) if flat else 1
        return [s * unit for s in np.empty(array.shape, np.int8).strides] if array.size else [unit] * array.ndim
    strides = [0] * array.ndim
    at = 1
    for d in draw(st.permutations(range(array.ndim))):
        constant = array.size and array.shape[d] > 1 and same_along(array, d)
        if constant and draw(st.booleans()):
            continue
        strides[d] = at * draw(st.sampled_from([1, 1, 2]))
        at = strides[d] * max(1, array.shape[d]) + draw(st.sampled_from([0, 0, 1, 3]))
    return strides


def same_along(array: Array, d: int) -> bool:
    """Whether nothing changes along a dimension, bit for bit."""
    first = array.take([0], axis=d)
    return np.ascontiguousarray(array).tobytes() == np.repeat(first, array.shape[d], axis=d).tobytes()


@dataclass(frozen=True)
class Local:
    """A rank's array: its shape, and which of its blocks stand where in the whole."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...] | None

    def blocks(self) -> Sequence[Part]:
        return (Part(Box.of(self.shape), (0,) * len(self.shape)),) if self.parts is None else self.parts


def cut_points(draw: st.DrawFn, n: int, most: int = 5) -> list[int]:
    """0 and n, and any points between them: pieces may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, n), max_size=most - 1))), n]


def one_block(box: Box) -> Local:
    return Local(box.shape, (Part(Box.of(box.shape), box.start),))


def cut_grid(draw: st.DrawFn, shape: tuple[int, ...], axes: int) -> list[Local]:
    """Blocks of an uneven grid: TP along one axis, DCP chunks along several."""
    chosen = draw(st.permutations(range(len(shape))))[:axes]
    cuts = [cut_points(draw, n) if d in chosen else [0, n] for d, n in enumerate(shape)]
    pieces = product(*(pairwise(c) for c in cuts))
    return [one_block(Box(tuple(a for a, _ in p), tuple(b for _, b in p))) for p in pieces]


def cut_groups(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Local]:
    """Interleaved groups (gate and up, or q, k and v of every head): a rank holds its share of each, back to back."""
    d = draw(st.integers(0, len(shape) - 1))
    groups = cut_points(draw, shape[d])
    ranks = draw(st.integers(1, 4))
    shares = [[a + s for s in _shares(draw, b - a, ranks)] for a, b in pairwise(groups)]
    locals_ = []
    for r in range(ranks):
        parts, at = [], 0
        for share in shares:
            lo, hi = share[r], share[r + 1]
            side = (*shape[:d], hi - lo, *shape[d + 1 :])
            start, stop = [0] * len(shape), list(side)
            start[d], stop[d] = at, at + hi - lo
            parts.append(Part(Box(tuple(start), tuple(stop)), (*[0] * d, lo, *[0] * (len(shape) - d - 1))))
            at += hi - lo
        locals_.append(Local((*shape[:d], at, *shape[d + 1 :]), tuple(parts)))
    return locals_


def _shares(draw: st.DrawFn, n: int, ranks: int) -> list[int]:
    return [0, *sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n]


def cut_padded(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Local]:
    """Equal shards of a vocabulary that was padded: the last ones run past the tensor."""
    d = draw(st.integers(0, len(shape) - 1))
    ranks = draw(st.integers(1, 4))
    width = -(-shape[d] // ranks) + draw(st.integers(0, 2))
    side = (*shape[:d], width, *shape[d + 1 :])
    return [
        Local(side, (Part(Box.of(side), (*[0] * d, r * width, *[0] * (len(shape) - d - 1))),)) for r in range(ranks)
    ]


def cut_anyhow(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Local]:
    """Overlapping blocks, and at the end the whole."""
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    return [*map(one_block, boxes), Local(shape, None)]


def cut(draw: st.DrawFn, shape: tuple[int, ...], overlaps: bool = True) -> list[Local]:
    kinds = ["whole"] + ["anyhow"] * overlaps + (["tp", "grid", "groups", "padded"] if shape else [])
    match draw(st.sampled_from(kinds)):
        case "tp":
            return cut_grid(draw, shape, 1)
        case "grid":
            return cut_grid(draw, shape, len(shape))
        case "groups":
            return cut_groups(draw, shape)
        case "padded":
            return cut_padded(draw, shape)
        case "anyhow":
            return cut_anyhow(draw, shape)
        case _:
            return [Local(shape, None)]


def spans(draw: st.DrawFn, local: Local) -> list[tuple[int, int] | None]:
    """How the rank's array is cut flat over data-parallel ranks: None (not), ZeRO's equal widths, or anywhere."""
    n = prod(local.shape)
    match draw(st.sampled_from(["not", "zero", "anywhere"])):
        case "zero":
            ranks = draw(st.integers(1, 5))
            width = -(-n // ranks) + draw(st.integers(0, 2))
            # the tail of the last shares is padding: their spans are simply shorter
            return [(min(n, r * width), min(n, (r + 1) * width)) for r in range(ranks)]
        case "anywhere":
            return list(pairwise(cut_points(draw, n)))
        case _:
            return [None]


def fill(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, kind: Kind) -> Array:
    """Random bits; for "exact" and "flagged", small numbers that every dtype holds and that negate exactly."""
    real = NUMPY[dtype]
    if dtype == torch.bool:
        return np.asarray(rng.integers(0, 2, shape), bool)
    if kind == "plain":
        return np.frombuffer(rng.bytes(prod(shape) * dtype.itemsize), real).reshape(shape)
    array = np.asarray(rng.integers(0, 100, shape), np.float64)
    return np.asarray(array + 1j * rng.integers(0, 100, shape) if dtype.is_complex else array).astype(real)


@st.composite
def placed(draw: st.DrawFn, holes: bool = False, replicas: bool = True, overlaps: bool = True) -> Placed:
    """A tensor in files. ``holes``: some of them may be missing. ``overlaps``: blocks that hold the same elements."""
    shape = draw(shapes(max_side=7))
    kind: Kind = draw(st.sampled_from(["plain", "plain", "exact", "flagged"]))
    dtype = draw(st.sampled_from(FLOATS if kind == "exact" else list(NUMPY)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    truth = fill(rng, shape, dtype, kind)
    for d in range(len(shape)):  # some dimensions along which nothing changes: they may be stored expanded
        if shape[d] and draw(st.integers(0, 7)) == 0:
            truth = np.repeat(truth.take([0], axis=d), shape[d], axis=d)
    disk = Disk(rng)
    fragments: list[Fragment] = []
    address, piece = np.full(shape, UNSET), np.full(shape, UNSET)
    lost: list[tuple[Hole, Array]] = []
    for _ in range(draw(st.integers(1, 2)) if replicas else 1):
        for local in cut(draw, shape, overlaps):
            array, element, part = lay_out(rng, local, truth, dtype, kind)
            for span in spans(draw, local):
                held = array if span is None else array.reshape(-1)[slice(*span)]
                ids = element if span is None else element.reshape(-1)[slice(*span)]
                if holes and draw(st.integers(0, 2)) == 0:
                    path = f"lost_{len(lost)}.bin"
                    lost.append((Hole(path, f"{path} is not there"), ids))
                    fragments.append(Fragment(lost[-1][0], local.shape, local.parts, span))
                    continue
                extent, where = disk.store(draw, held, dtype, kind, flat=span is not None)
                fragments.append(Fragment(extent, local.shape, local.parts, span))
                fresh = (ids >= 0) & (address.reshape(-1)[np.maximum(ids, 0)] == UNSET) if address.size else ids >= 0
                address.reshape(-1)[ids[fresh]] = where[fresh]
                numbers = part if span is None else part.reshape(-1)[slice(*span)]
                piece.reshape(-1)[ids[fresh]] = len(fragments) << 20 | numbers[fresh]
    for n, (_, ids) in enumerate(lost):
        mine = ids[ids >= 0]
        flat = address.reshape(-1)
        flat[mine[flat[mine] == UNSET]] = -2 - n
    spec = TensorSpec("t", shape, dtype, tuple(fragments))
    return Placed(spec, truth, {p: bytes(b) for p, b in disk.files.items()}, [h for h, _ in lost], address, piece)


def lay_out(
    rng: np.random.Generator, local: Local, truth: Array, dtype: torch.dtype, kind: Kind
) -> tuple[Array, Array, Array]:
    """A rank's array; and for each of its elements the flat index in the whole (-1: padding, or in no part), and the
    number of its part."""
    array = fill(rng, local.shape, dtype, kind).copy()
    element, number = np.full(local.shape, -1), np.full(local.shape, -1)
    ids = np.arange(truth.size).reshape(truth.shape)
    for n, part in enumerate(local.blocks()):
        ends = map(min, map(sum, zip(part.start, part.local.shape, strict=True)), truth.shape)
        inside = tuple(slice(a, b) for a, b in zip(part.start, ends, strict=True))
        block = truth[inside]
        at = tuple(slice(a, a + n) for a, n in zip(part.local.start, block.shape, strict=True))
        array[at], element[at], number[at] = block, ids[inside], n
    return array, element, number


class PlainStore:
    """A store that cannot map, and counts what is read from it; ``gap`` as an object store might have."""

    is_remote = False

    def __init__(self, folder: Path, gap: int = 0) -> None:
        self._local = LocalStore(folder)
        self._lock = threading.Lock()
        self.gap = gap
        self.pins: Mapping[str, FileInfo] = {}
        self.root = str(folder)
        self.bytes = self.reads = 0

    def pinned(self, pins: Mapping[str, FileInfo]) -> PlainStore:
        return self

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return self._local.list(folder)

    def stat(self, path: str) -> FileInfo:
        return self._local.stat(path)

    def read(self, path: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        with self._lock:
            self.bytes += len(target)
            self.reads += 1
        self._local.read_into(path, offset, target)

    def map(self, path: str) -> None:
        return None

    def private(self, path: str) -> None:
        return None
