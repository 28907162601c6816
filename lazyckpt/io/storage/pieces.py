"""The pieces of a request: which bytes of the answer go where, and which of them a cache has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.requests import Ints, cut
from ..tasks import Fetch

FEW = 4  # pieces up to which each is looked up in the cache, and filled in its place
_MANY = 16  # pieces from which on numpy copies them faster than a loop
_LARGE = 32 << 10  # bytes from which on a copy takes longer than another thread waits for it
Ranges = list[tuple[int, int]]  # of a file: first byte, byte after the last
Fill = Callable[[int, memoryview], Ranges]


class Pieces:
    """The pieces of one request, sorted by their offsets, and the fetches that they belong to."""

    __slots__ = ("_at", "_fetches", "_lengths", "_offsets", "_owner", "_plain", "_target")

    def __init__(self, fetches: Sequence[Fetch], offsets: Ints, lengths: Ints, at: Ints, owner: Ints) -> None:
        self._fetches = fetches
        self._offsets, self._lengths, self._at, self._owner = offsets, lengths, at, owner
        self._target: tuple[int, memoryview] | None = None  # of an only piece
        # whether the pieces are of one fetch, equally long, and one after the other in memory
        count = len(offsets)
        self._plain = (
            count >= _MANY
            and bool((owner == owner[0]).all())
            and bool((lengths == lengths[0]).all())
            and bool((np.diff(at) == lengths[0]).all())
            and bool((np.diff(offsets) >= lengths[0]).all())
        )

    def owners(self) -> list[Fetch]:
        if len(self._owner) == 1:
            return [self._fetches[int(self._owner[0])]]
        return [self._fetches[n] for n in np.unique(self._owner).tolist()]

    def fill(self, start: int, stop: int, fill: Fill) -> Ranges:
        """Put what is cached where it belongs; return the ranges that are missing, sorted."""
        missing: Ranges = []
        if len(self._offsets) <= FEW:
            columns = (self._offsets, self._lengths, self._at, self._owner)
            for offset, length, at, owner in zip(*(column.tolist() for column in columns), strict=True):
                missing += fill(offset, self._fetches[owner].memory()[at : at + length])
            return sorted(missing)
        data = memoryview(bytearray(stop - start))
        at = start
        for low, high in [*fill(start, data), (stop, stop)]:
            if at < low:
                self.take(at, data[at - start : low - start])
            at = high
            if ((self._offsets < high) & (self._offsets + self._lengths > low)).any():
                missing.append((low, high))
        return missing

    def targets(self) -> list[tuple[int, memoryview]]:
        """Return the offset of each piece, and the memory to fill."""
        columns = (self._offsets, self._lengths, self._at, self._owner)
        memories = {number: self._fetches[number].memory() for number in np.unique(self._owner).tolist()}
        return [
            (offset, memories[owner][at : at + length])
            for offset, length, at, owner in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def take(self, start: int, data: memoryview) -> None:
        """Copy bytes from ``start`` on to where they belong."""
        if len(self._offsets) == 1:  # all bytes of the answer are of this piece
            if self._target is None:
                self._target = self.targets()[0]
            at = start - self._target[0]
            _copy(self._target[1][at : at + len(data)], data)
            return
        stop = start + len(data)
        offsets, lengths = self._offsets, self._lengths
        last = int(np.searchsorted(offsets, stop, side="left"))
        first = 0
        if self._plain:  # those that overlap the bytes are next to each other
            size = int(lengths[0])
            first = int(np.searchsorted(offsets, start - size, side="right"))
            inner = int(np.searchsorted(offsets, start, side="left"))
            end = int(np.searchsorted(offsets, stop - size, side="right"))
            if end - inner >= _MANY:
                target = np.frombuffer(self._fetches[int(self._owner[0])].memory(), np.uint8)
                source = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), size)
                begin = int(self._at[inner])
                rows = target[begin : begin + (end - inner) * size].reshape(end - inner, size)
                rows[:] = source[offsets[inner:end] - start]
                self._loop(first, inner, start, stop, data)
                first = end
        self._loop(first, last, start, stop, data)

    def _loop(self, first: int, last: int, start: int, stop: int, data: memoryview) -> None:
        part = slice(first, last)
        columns = (self._offsets[part], self._lengths[part], self._at[part], self._owner[part])
        for offset, length, at, owner in zip(*(column.tolist() for column in columns), strict=True):
            low, high = max(offset, start), min(offset + length, stop)
            if low < high:
                memory = self._fetches[owner].memory()
                _copy(memory[at + low - offset : at + high - offset], data[low - start : high - start])


def _copy(target: memoryview, data: memoryview) -> None:
    """Copy bytes. numpy lets other threads run meanwhile: pages of new memory are slow to come by."""
    if len(data) < _LARGE:
        target[:] = data
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def in_order(offsets: Ints, lengths: Ints, at: Ints, owner: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the pieces without empty ones, cut into parts of at most ``size`` bytes, in the order of their offsets."""
    full = lengths > 0
    if not full.all():
        offsets, lengths, at, owner = offsets[full], lengths[full], at[full], owner[full]
    offsets, lengths, at, owner = cut(offsets, lengths, at, owner, size)
    order = np.argsort(offsets, kind="stable")
    return offsets[order], lengths[order], at[order], owner[order]
