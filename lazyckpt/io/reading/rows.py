"""Rows of a tensor in blocks of local files, copied in a few calls, whatever the number of blocks.

A key takes one to three slices of each strip (strips.py) that holds some of its rows. numpy copies elements at any
address, so nothing depends on how a writer aligns them, and on one thread. A large slice of one strip is copied by
torch on all cores; its kernels may rely on alignment, so elements that are not aligned are copied as bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape
from ..pool import run
from ..storage.mapping import Mapped
from .strips import Array, Strip, Strips
from .window import FAR, LARGE, ONE_CALL, SMALL, copied, indices_of, is_far

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_THREADS = 8 << 20  # bytes of a selection of several parts from which several threads copy them
_JOINED = 512 << 10  # bytes of rows that are joined as memory, block by block, which holds Python's lock
_PIECE = 4 << 10  # bytes; smaller blocks are not listed for that
_APART = 4  # copying elements that are not contiguous takes so many times as long
_SHORT = 256  # bytes; a shorter run of elements is copied as one element of this size
_MANY = 96  # most strips of a selection: a store keeps the mappings of some more files
_ALL = slice(None)
_NONE: tuple[Any, ...] = ()
_SIMPLE = {int, slice}

Part = tuple[str, Mapped, Strip, int, int]  # rows of a strip: the file, its mapping, the strip, the first, the end


class Rows(Strips):
    """A tensor in blocks, of which whole strips are read at once."""

    __slots__ = ()

    def rows(self, key: Any) -> torch.Tensor | None:
        """Read a key of ints and slices, the first of which may be a list or a mask; None if its rows are not all in
        strips, or if a planned read is better or has to raise an error."""
        begun = monotonic()
        single, step, inner = False, 1, _NONE
        first = key
        if type(key) is tuple:
            if not 0 < len(key) <= self._rank or not _SIMPLE.issuperset(map(type, key[1:])):
                return None
            first, inner = key[0], key[1:]
            if any(map(is_far, inner)):
                return None
        kind = type(first)
        try:
            if kind is int:
                low = first if first >= 0 else first + self._length
                high, single = low + 1, True
            elif kind is slice:
                low, high, step = first.indices(self._length)
                if step != 1:
                    if not 0 < step < FAR:
                        return None
                    high = low + (high - low - 1) // step * step + 1
            else:
                return self._listed(first, inner, begun)
            if not 0 <= low < high <= self._length:
                return None
            n = bisect_right(self._strip_lows, low) - 1
            if high > self._strip_highs[n]:
                parts = self._parts(n, low, high, step)
                return None if parts is None else self._copied(parts, step, single, inner, begun)
            start = low - self._strip_lows[n]
            known = self._strip(n, start, start + high - low)
            if known is None:
                return None
            path, mapped, strip = known
            block, at = divmod(start, strip.height)
            nbytes = (high - low) * self._row
            if inner:
                column = inner[0]
                if not (single and self._rank == 2 and type(column) is int and 0 <= column < self._rest[0]):
                    return self._copied([(*known, start, start + high - low)], step, single, inner, begun)
                nbytes = self._bits.itemsize
                begin = strip.offset + block * strip.distance + at * self._row + column * nbytes
            elif step != 1 or nbytes > ONE_CALL or (at + high - low > strip.height and self._small(strip)):
                return self._copied([(*known, start, start + high - low)], step, single, inner, begun)
            else:
                begin = strip.offset + block * strip.distance + at * self._row
                if nbytes > SMALL and not self._resident(mapped, strip, start, start + high - low):
                    return None
            if single:
                found = torch.frombuffer(bytearray(mapped.buffer[begin : begin + nbytes]), dtype=self._dtype)
                if inner:
                    found = found.squeeze(0)
                elif self._rank != 2:
                    found = found.view(self._rest)
            else:
                if at + high - low <= strip.height:
                    array = strip.array[block, at : at + high - low].copy()
                elif at or (high - low) % strip.height:
                    pieces = self._pieces(mapped, strip, start, start + high - low)
                    array = np.frombuffer(bytearray().join(pieces), self._bits).reshape(-1, *self._rest)
                else:
                    blocks = strip.array[block : block + (high - low) // strip.height]
                    array = blocks.copy().reshape(-1, *self._rest)
                found = torch.from_numpy(array)
                if found.dtype is not self._dtype:
                    found = found.view(self._dtype)
        except (IndexError, ValueError, TypeError):  # a planned read supports the key, or raises a better error
            return None
        if not mapped.in_burst(begun):
            self._store.confirm(path, mapped)
        return found

    def _parts(self, n: int, low: int, high: int, step: int) -> list[Part] | None:
        """Return the rows of each strip, from strip ``n`` on; None if a row is in none."""
        parts: list[Part] = []
        while low < high:
            if n >= len(self._strip_lows) or len(parts) >= _MANY or low < self._strip_lows[n]:
                return None
            end = min(high, self._strip_highs[n])
            if low < end:
                start, stop = low - self._strip_lows[n], end - self._strip_lows[n]
                known = self._strip(n, start, stop)
                if known is None:
                    return None
                parts.append((*known, start, stop))
                low += -(-(end - low) // step) * step
            n += 1
        return parts

    def _copied(
        self, parts: Sequence[Part], step: int, single: bool, inner: tuple[Any, ...], begun: float
    ) -> torch.Tensor | None:
        """Copy every ``step``-th row of the parts, or the ``single`` one without its dimension."""
        for part in parts:
            if not self._resident(*part[1:]):
                return None
        nbytes = sum(stop - start for *_, start, stop in parts) * self._row
        if step == 1 and not inner and nbytes <= _JOINED and not any(self._small(part[2]) for part in parts):
            pieces = [piece for part in parts for piece in self._pieces(*part[1:])]
            result = torch.frombuffer(bytearray().join(pieces), dtype=self._dtype)
            self._confirm(parts, begun)
            return result.view(self._rest if single else (-1, *self._rest))
        cuts = [(part[2], *cut) for part in parts for cut in _cuts(part[2].height, part[3], part[4], step)]
        strip, index, count = cuts[0]
        if single:
            index = index[0], index[1].start
            cuts = [(strip, index, 1)]
        views = [strip.array[(*index, *inner, ...)] for strip, index, _ in cuts]
        first = views[0]
        shape: Shape = first.shape[(type(index[0]) is slice) + (type(index[1]) is slice) :]
        count = sum(cut[2] for cut in cuts)
        nbytes = count * prod(shape) * self._bits.itemsize
        if nbytes > LARGE:
            return None
        if not single:
            shape = (count, *shape)
        unit = None
        if self._rank > 1 and (len(inner) < self._rank - 1 or type(inner[-1]) is slice):
            unit = _unit(first)
        alone = len(cuts) == 1
        found = self._by_torch(strip, index, inner) if alone and nbytes > ONE_CALL and not unit else None
        if found is None:
            array: Array = np.empty(shape, self._bits)
            out, at = array.view(unit) if unit else array, 0
            places: list[tuple[Array, Array]] = []
            for view, (_, _, count) in zip(views, cuts, strict=True):
                view = view.view(unit) if unit else view
                places.append(((out if alone else out[at : at + count]).reshape(view.shape), view))
                at += count
            work = nbytes if unit or first.strides[-1:] == (self._bits.itemsize,) else _APART * nbytes
            if work < _THREADS:
                for place, view in places:
                    place[...] = view
            else:
                run((work // len(places), partial(np.copyto, *pair)) for pair in places)
            found = torch.from_numpy(array)
            if found.dtype is not self._dtype:
                found = found.view(self._dtype)
        self._confirm(parts, begun)
        return found

    def _small(self, strip: Strip) -> bool:
        """Return whether numpy copies the blocks in less time than it takes to list them."""
        return strip.height * self._row < _PIECE

    def _pieces(self, mapped: Mapped, strip: Strip, start: int, stop: int) -> list[memoryview]:
        """Return the memory of rows, block by block."""
        (block, at), (last, end) = divmod(start, strip.height), divmod(stop, strip.height)
        nbytes, begin = strip.height * self._row, strip.offset + block * strip.distance
        beyond = strip.offset + last * strip.distance + (end > 0)
        pieces = [mapped.buffer[n : n + nbytes] for n in range(begin, beyond, strip.distance)]
        if end:
            pieces[-1] = pieces[-1][: end * self._row]
        if at:
            pieces[0] = pieces[0][at * self._row :]
        return pieces

    def _by_torch(self, strip: Strip, index: tuple[Any, ...], inner: tuple[Any, ...]) -> torch.Tensor | None:
        """Copy on all cores; None if torch cannot copy the key."""
        if strip.torch is None or any(type(item) is slice and (item.step or 1) < 0 for item in inner):
            return None
        if strip.wide > 1 and inner and len(inner) == self._rank - 1:  # the last dimension is indexed, too
            last = inner[-1]
            if type(last) is not slice or last.step not in (None, 1):
                return None
            start, stop, _ = last.indices(self._shape[-1])
            inner = *inner[:-1], slice(start * strip.wide, stop * strip.wide)
        view = strip.torch[(*index, *inner)]
        found = copied(view, view.nbytes)
        if strip.wide > 1:
            found = found.view(self._dtype)
        return found if type(index[0]) is int else found.flatten(0, 1)

    def _listed(self, item: Any, inner: tuple[Any, ...], begun: float) -> torch.Tensor | None:
        """Read the rows of a list, an array or a mask."""
        index = indices_of(item)
        length = self._shape[0]
        if index is None or index.ndim != 1:
            return None
        if index.dtype == np.bool_:
            index = np.flatnonzero(index) if len(index) == length else index[:0]
        if not len(index):
            return None
        low, high = int(index.min()), int(index.max())
        if low < 0:
            if low < -length:
                return None
            index = np.where(index < 0, index + length, index)
            low, high = int(index.min()), int(index.max())
        n = bisect_right(self._strip_lows, low) - 1
        last = bisect_right(self._strip_lows, high) - 1
        if high >= length or last - n >= _MANY or len(index) * self._row > LARGE:
            return None
        order = None
        if n < last and (index[1:] < index[:-1]).any():
            order = np.argsort(index, kind="stable")
            index = index[order]
        bounds = [0, *np.searchsorted(index, self._strip_highs[n:last]).tolist(), len(index)]
        parts: list[Part] = []
        rows: list[tuple[int, int, NDArray[np.int64]]] = []
        for m, (i, j) in enumerate(pairwise(bounds), n):
            if i == j:
                continue
            positions = index[i:j] - self._strip_lows[m]
            if n < last:  # they ascend
                low, high = int(index[i]), int(index[j - 1])
            start, stop = low - self._strip_lows[m], high + 1 - self._strip_lows[m]
            known = self._strip(m, start, stop, j - i) if start >= 0 and high < self._strip_highs[m] else None
            if known is None or not self._resident(*known[1:], start, stop):
                return None
            parts.append((*known, start, stop))
            rows.append((i, j, positions))
        if inner or len(parts) > 1:
            shape = parts[0][2].array[(0, 0, *inner, ...)].shape
            array: Array = np.empty((len(index), *shape), self._bits)
            for (_, _, strip, _, _), (i, j, positions) in zip(parts, rows, strict=True):
                blocks, at = np.divmod(positions, strip.height)
                array[slice(i, j) if order is None else order[i:j]] = strip.array[(_ALL, _ALL, *inner)][blocks, at]
            out = torch.from_numpy(array).view(self._dtype)
        else:
            strip, positions = parts[0][2], rows[0][2]
            blocks, at = np.divmod(positions, strip.height)
            starts = torch.from_numpy((blocks * strip.distance + at * self._row) // strip.unit)
            out = strip.lines.index_select(0, starts).view(self._dtype).view(len(index), *self._rest)
        self._confirm(parts, begun)
        return out

    def _confirm(self, parts: Sequence[Part], begun: float) -> None:
        """Check that the files of the parts are those that were opened."""
        for path, mapped, *_ in parts:
            if not mapped.in_burst(begun):
                self._store.confirm(path, mapped)
        if len(parts) > 1:  # one read, that ends now
            now = monotonic()
            for part in parts:
                part[1].extend_burst(now)


def _cuts(height: int, start: int, stop: int, step: int) -> Iterator[tuple[tuple[Any, slice], int]]:
    """Yield indices of (block, row) that together select every ``step``-th row, and the number of rows of each."""
    stop = start + (stop - start - 1) // step * step + 1
    (first, at), (last, end) = divmod(start, height), divmod(stop - 1, height)
    end += 1
    if first == last:
        yield (first, slice(at, end, step)), -(-(end - at) // step)
    elif step % height == 0:
        count = (last - first) * height // step + 1
        yield (slice(first, last + 1, step // height), slice(at, at + 1)), count
    elif height % step == 0:
        if at >= step:
            yield (first, slice(at, None, step)), -(-(height - at) // step)
            first, at = first + 1, at % step
        rest = end < height - step + 1  # whether the last block is not wanted as far as its end
        blocks = last - first + (not rest)
        if blocks:
            yield (slice(first, first + blocks), slice(at, None, step)), blocks * -(-(height - at) // step)
        if rest:
            yield (last, slice(at, end, step)), -(-(end - at) // step)
    else:
        index = np.arange(start, stop, step)
        for n in range(first, last + 1):
            i, j = np.searchsorted(index, (n * height, n * height + height)).tolist()
            if i < j:
                yield (n, slice(int(index[i]) - n * height, None, step)), j - i


def _unit(view: Array) -> str | None:
    """Return a dtype as large as a short run of elements, the last dimension: numpy copies it as one element."""
    nbytes = view.shape[-1] * view.itemsize if view.ndim > 1 else 0
    if not view.itemsize < nbytes <= _SHORT or view.strides[-1] != view.itemsize or view.strides[-2] == nbytes:
        return None
    return f"V{nbytes}"
