"""What has changed between two checkpoints: a fold over tensors of the same name, shape and dtype.

Each pair is read once. The result has the digests of both, the rows that differ, and how well the difference and the
new values pack, from samples. `lazyckpt.delta` decides by it how each tensor is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..core.merkle import RUN, Form, Hasher, Leaves
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, Run
from ..jobs.passing import parts_of
from ..jobs.pieces import contents
from ..jobs.progress import Bar
from ..lazy import LazyArray, shape_of

_TASK = 16 << 20  # bytes of a task, whole runs
_SAMPLE = 256 << 10  # bytes of the sample of a task
RUNS = 4096  # intervals of rows up to which they are listed
CODEC = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 1 << 20}

Intervals = tuple[tuple[int, int], ...]


class Change(NamedTuple):
    """What has changed in a tensor.

    Attributes
    ----------
    digest, base
        The digests of the tensor and of that of the base; "" if the base has none of the same shape and dtype.
    runs
        The intervals of rows (indices of dimension 0) that differ; None if there are more than `RUNS`.
    nbytes, changed
        The size of the tensor, and of its rows that differ.
    xor, whole
        Packed bytes per byte of the rows that differ, of the difference and of the new values, from samples.
    """

    digest: str
    base: str
    runs: Intervals | None
    nbytes: int
    changed: int
    xor: float
    whole: float

    @property
    def same(self) -> bool:
        """Whether nothing has changed."""
        return self.digest == self.base


@dataclass(slots=True)
class _Pair:
    """The tensors that are compared, and what is known so far."""

    new: LazyArray
    base: LazyArray | None
    form: Form
    leaves: dict[int, bytes] = field(default_factory=dict)
    others: dict[int, bytes] = field(default_factory=dict)
    runs: set[tuple[int, int]] | None = field(default_factory=set)
    changed: int = 0
    sampled: list[tuple[int, int, int]] = field(default_factory=list)

    def change(self) -> Change:
        sampled, xor, whole = (sum(one[n] for one in self.sampled) for n in range(3))
        runs = None if self.runs is None else _joined(sorted(self.runs))
        return Change(
            self._digest(self.leaves), self._digest(self.others) if self.base is not None else "",
            None if runs is None or len(runs) > RUNS else runs, self.form.nbytes, self.changed,
            xor / sampled if sampled else 0.0, whole / sampled if sampled else 0.0,
        )  # fmt: skip

    def _digest(self, leaves: Mapping[int, bytes]) -> str:
        return self.form.digest([leaves[n] for n in range(self.form.runs)], hashlib.sha256).hex()


class _Found(NamedTuple):
    """The result of a task. ``sample``: bytes, and packed bytes of the difference and of the values."""

    number: int
    leaves: Leaves
    others: Leaves | None
    runs: Intervals | None
    changed: int
    sample: tuple[int, int, int]


def changes(
    pairs: Sequence[tuple[LazyArray, LazyArray | None]], run: Run, progress: bool | None = None
) -> list[Change]:
    """Compare pairs of tensors.

    Parameters
    ----------
    pairs
        Tensors of the same shape and dtype: the new one, and that of the base; None if there is none.
    run
        The engine.
    progress
        See `WriteOptions`.
    """
    found = [_Pair(new, base, Form(new.spec.dtype.name, shape_of(new), new.nbytes)) for new, base in pairs]
    with Bar(sum(one.form.nbytes for one in found), "compare", progress) as bar:

        def done(task: Task, result: _Found) -> None:
            one = found[result.number]
            one.leaves.update(enumerate(result.leaves.hashes, result.leaves.first))
            if result.others is not None:
                one.others.update(enumerate(result.others.hashes, result.others.first))
            if one.runs is not None:
                one.runs = None if result.runs is None else one.runs | set(result.runs)
                if one.runs is not None and len(one.runs) > 2 * RUNS:
                    one.runs = None
            one.changed += result.changed
            one.sampled.append(result.sample)
            bar.add(task.nbytes)

        tasks = (task for n, one in enumerate(found) for task in _tasks(n, one))
        run(tasks, done, tensors=[t for pair in pairs for t in pair if t is not None])
    return [one.change() for one in found]


def estimate(pairs: Iterable[tuple[LazyArray, LazyArray | None]]) -> int:
    """Return about how many bytes a delta of these tensors takes, from the first bytes of each.

    Parameters
    ----------
    pairs
        As for `changes`.
    """
    total = 0.0
    for new, base in pairs:
        form = Form(new.spec.dtype.name, shape_of(new), new.nbytes)
        hi = min(RUN, new.nbytes)
        if not hi:
            continue
        values = _read(parts_of(new, form.shape, 0, hi), hi)
        others = None if base is None else _read(parts_of(base, form.shape, 0, hi), hi)
        if others is not None and np.array_equal(values, others):
            continue
        taken, xor, whole = _sampled(values, others, form, [(0, hi)])
        total += min(xor, whole) / taken * new.nbytes
    return round(total)


def _tasks(number: int, pair: _Pair) -> Any:
    most = _TASK // RUN * RUN
    for lo in range(0, max(1, pair.form.nbytes), most):
        hi = min(lo + most, pair.form.nbytes)
        news = parts_of(pair.new, pair.form.shape, lo, hi)
        bases = None if pair.base is None else parts_of(pair.base, pair.form.shape, lo, hi)
        work = partial(_compare, number, news, bases, pair.form, lo, hi)
        yield Task(hi - lo, 3 * (hi - lo) + OVERHEAD, work, news[0] if news else pair.new)


def _compare(
    number: int, news: Sequence[LazyArray], bases: Sequence[LazyArray] | None, whole: Form, lo: int, hi: int
) -> _Found:
    """Compare the bytes of the interval, which begins with a run."""
    new = _read(news, hi - lo)
    leaves = _hashed(whole, lo, new)
    if bases is None:
        return _Found(number, leaves, None, (), hi - lo, _sampled(new, None, whole, [(0, hi - lo)]))
    base = _read(bases, hi - lo)
    if np.array_equal(new, base):
        return _Found(number, leaves, leaves, (), 0, (0, 0, 0))
    row = whole.nbytes // whole.shape[0] if whole.shape else whole.nbytes
    runs = _rows(new, base, lo, row)
    spans = [(max(a * row, lo) - lo, min(b * row, hi) - lo) for a, b in runs]
    listed = runs if len(runs) <= RUNS else None
    sample = _sampled(new, base, whole, spans)
    return _Found(number, leaves, _hashed(whole, lo, base), listed, sum(b - a for a, b in spans), sample)


def _read(parts: Sequence[LazyArray], nbytes: int) -> np.ndarray[Any, Any]:
    memory, at = np.empty(nbytes, np.uint8), 0
    for part in parts:
        for offset, piece in contents(part):
            memory[at + offset : at + offset + len(piece)] = piece
        at += part.nbytes
    return memory


def _hashed(whole: Form, lo: int, data: np.ndarray[Any, Any]) -> Leaves:
    hasher = Hasher(whole, lo, hashlib.sha256)
    hasher.update(data.data)
    return hasher.leaves()


def _rows(new: np.ndarray[Any, Any], base: np.ndarray[Any, Any], lo: int, row: int) -> Intervals:
    """Return the intervals of rows of ``row`` bytes that differ; ``lo``: the position of the first byte."""
    first, last = lo // row, -(-(lo + len(new)) // row)
    inner = -(-lo // row) * row - lo, (lo + len(new)) // row * row - lo  # whole rows
    differ = np.zeros(last - first, bool)
    if inner[0] < inner[1]:
        begin = (inner[0] + lo) // row - first
        rows = [part[inner[0] : inner[1]].reshape(-1, row) for part in (new, base)]
        words = [part.view(np.uint64) for part in rows] if row % 8 == 0 else rows
        differ[begin : begin + len(rows[0])] = (words[0] != words[1]).any(axis=1)
        edges = [(0, inner[0]), (inner[1], len(new))]
    else:
        edges = [(0, len(new))] if first + 1 == last else [(0, inner[1]), (inner[1], len(new))]
    for a, b in edges:
        if a < b and not np.array_equal(new[a:b], base[a:b]):
            differ[(lo + a) // row - first] = True
    at = np.flatnonzero(np.diff(np.concatenate([[0], differ.astype(np.int8), [0]])))
    return tuple((int(a) + first, int(b) + first) for a, b in at.reshape(-1, 2))


def _joined(runs: Sequence[tuple[int, int]]) -> Intervals:
    """Return ascending intervals, with those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for a, b in runs:
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return tuple(found)


def _sampled(
    new: np.ndarray[Any, Any], base: np.ndarray[Any, Any] | None, whole: Form, spans: Sequence[tuple[int, int]]
) -> tuple[int, int, int]:
    """Return the bytes of a sample of these spans, and how many they are when the difference and the values are
    packed."""
    import numcodecs

    kept, left = [], _SAMPLE
    for a, b in spans:
        kept.append(slice(a, min(b, a + left)))
        left -= kept[-1].stop - a
        if left <= 0:
            break
    size = max(1, whole.nbytes // max(1, prod(whole.shape)))
    kind = np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
    codec = numcodecs.get_codec(CODEC)
    part = np.concatenate([new[one] for one in kept]) if kept else new[:0]
    if not len(part):
        return 0, 0, 0
    packed = len(codec.encode(part.view(kind)))
    if base is None:
        return len(part), packed, packed
    other = np.concatenate([base[one] for one in kept])
    return len(part), len(codec.encode((part ^ other).view(kind))), packed
