"""Deferred checks of record headers in torch's zips: they are compared with the directory when a record is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.index import FileInfo
from ...core.requests import Ints
from ...errors import CorruptError
from ..storage.base import Entry, Fetched, Pending, Store
from ..storage.mapping import Mapped
from ..storage.streams import StoreFile
from .pickle.records import short
from .zip import DESCRIBED, HEADER_SIZE, Named, read_zip, refused
from .zip_columns import Records
from .zip_offsets import NEAR, check_header, data_offset, data_offsets

ALIGNMENT = 64  # bytes; torch's default alignment of storages (the record .storage_alignment may change it)
_STORAGE = re.compile(r"[^/]+/data/[^/]+")
_LONGER = "the header of the record {} has another length than torch writes"
_AHEAD = 64  # headers that are checked together when records are read sequentially
_EARLY = 64  # records of a file up to which headers are checked while a checkpoint behind a network is opened
_PLACES = 4  # places of unchecked headers in a file up to which one of them is read then


class Unchecked(Store):
    """A wrapper of a store that reads without the guards' checks, for use by a guard."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.pins)
        self.inner = store
        self.closed = store.closed
        self._ahead = store.ahead if isinstance(store, Store) else None

    @property
    def root(self) -> str:
        return self.inner.root

    @property
    def gap(self) -> int:
        return self.inner.gap

    def below(self, folder: str) -> Store:
        return self.inner.below(folder)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return self.inner.list(folder)

    def _with(self, pins: Mapping[str, FileInfo]) -> Store:
        return Unchecked(self.inner.pinned(pins))

    def _stat(self, path: str) -> FileInfo:
        return self.inner.stat(path)

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        return self.inner._fetch(path, offset, target)

    def read_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.inner._fetch_pieces(path, pieces)

    def map(self, path: str) -> Mapped | None:
        return self.inner.map(path)

    def confirm(self, path: str, mapped: Mapped) -> None:
        self.inner.confirm(path, mapped)


class HeaderGuard:
    """A guard that compares the header of a storage's record with the zip's directory before the record is first used.

    Reading all headers when a file is opened would take a read for each large tensor. torch's writer aligns records, so
    the directory alone determines where the data of a record must begin; the guard checks this.
    """

    __slots__ = ("_ahead", "_begins", "_checked", "_records")

    def __init__(
        self, records: Records | None = None, begins: NDArray[np.int64] | None = None, checked: bytes = b""
    ) -> None:
        self._records, self._begins, self._checked = records, begins, bytearray(checked)
        self._ahead = 0  # headers of records before this one are checked one by one

    def __reduce__(self) -> tuple[Any, ...]:
        return HeaderGuard, ()  # the other process reads the directory again if it needs it

    @property
    def is_loaded(self) -> bool:
        """Whether the directory was read."""
        return self._records is not None

    def check(self, store: Store, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if the header of a record that contains these bytes contradicts the directory."""
        if self._records is None or self._begins is None:
            self._load(_without_guards(store, path))
        records, begins = self._records, self._begins
        assert records is not None and begins is not None
        n = max(0, int(np.searchsorted(begins, offset, "right")) - 1)
        while n < len(begins) and begins[n] < offset + length:
            if not self._checked[n] and records.stored[n] and begins[n] + records.stored[n] > offset:
                file = _without_guards(store, path)
                if n >= self._ahead and n > 0 and self._checked[n - 1] and not store.gap:  # a sequential read
                    self._look_ahead(file, n)
                if not self._checked[n]:
                    entry = records.entry(n)
                    if data_offset(file, entry) != begins[n]:
                        raise refused(file, _LONGER.format(short(entry.name)))
                    self._checked[n] = 1
            n += 1

    def pending(self, store: Store, path: str, offsets: Ints, lengths: Ints) -> Pending | None:
        """Return the headers of the records that contain these bytes and are not checked yet; None if there are none.
        `check` tells what is compared."""
        if self._records is None or self._begins is None:
            self._load(_without_guards(store, path))
        records, begins = self._records, self._begins
        assert records is not None and begins is not None
        first = np.maximum(0, np.searchsorted(begins, offsets, "right") - 1)
        first += begins[first] + records.stored[first] <= offsets  # bytes behind the record's data
        stop = np.searchsorted(begins, offsets + lengths, "left")
        changes = np.zeros(len(begins) + 1, np.int64)
        used = first < stop
        np.add.at(changes, first[used], 1)
        np.add.at(changes, stop[used], -1)
        unchecked = np.frombuffer(self._checked, np.uint8) == 0
        numbers = np.flatnonzero((np.cumsum(changes)[:-1] > 0) & unchecked & (records.stored > 0))
        if not len(numbers):
            return None
        sizes = begins[numbers] - records.header[numbers]

        def compare(data: memoryview) -> None:
            at = 0
            for n, size in zip(numbers.tolist(), sizes.tolist(), strict=True):
                entry = records.entry(n)
                file = Named(f"{store.root}/{path}")
                if check_header(file, entry, bytes(data[at : at + size])) != begins[n]:
                    raise refused(file, _LONGER.format(short(entry.name)))
                self._checked[n] = 1
                at += size

        return Pending(records.header[numbers], sizes, compare)

    def settle(self, store: Store, path: str) -> None:
        """Check the headers that the opening under way has read for other reasons, or that `ask` has asked for, so that
        the first reads of their records need no request for them. A faulty header is left to the read of its record."""
        records, begins, ahead = self._records, self._begins, store.ahead
        if records is None or begins is None or ahead is None or len(begins) > _EARLY:
            return
        file = Named(f"{store.root}/{path}")
        for n in self._unchecked():
            start = int(records.header[n])
            data = ahead.held(path, start, int(begins[n]) - start)
            with suppress(CorruptError):
                self._checked[n] = bool(data and check_header(file, records.entry(n), data) == begins[n])

    def ask(self, store: Store, path: str) -> None:
        """While a checkpoint behind a network is opened: make one more request, for neighbouring headers, if there are
        few others elsewhere. `settle` checks them. So the first row of each of a thousand optimizer files takes one
        request a file, not two.

        The directory alone does not prove where a record begins: a header that states another length makes torch read
        other bytes than those that the directory tells."""
        self.settle(store, path)
        records, begins, ahead = self._records, self._begins, store.ahead
        if records is None or begins is None or ahead is None or len(begins) > _EARLY:
            return
        groups: list[list[int]] = []
        for n in self._unchecked():
            if groups and records.header[n] - begins[groups[-1][-1]] <= NEAR:
                groups[-1].append(n)
            else:
                groups.append([n])
        if 0 < len(groups) <= _PLACES:
            most = max(reversed(groups), key=len)  # the last of equals: DeepSpeed's fp32 weights follow the moments
            start = int(records.header[most[0]])
            ahead.want([(path, start, int(begins[most[-1]]) - start)])

    def _unchecked(self) -> list[int]:
        """Return the numbers of the records whose headers are to be checked."""
        assert self._records is not None
        found: list[int] = np.flatnonzero(
            (np.frombuffer(self._checked, np.uint8) == 0) & (self._records.stored > 0)
        ).tolist()
        return found

    def _load(self, file: StoreFile) -> None:
        """Read the directory again, after unpickling in another process."""
        start, entries = read_zip(file)
        records = Records.of(sorted(entries, key=lambda e: e.header))
        begins, certain = aligned_offsets(start, records)
        nexts = np.append(records.header[1:], start).tolist()
        for n in np.flatnonzero(~certain).tolist():
            begins[n] = data_offset(file, records.entry(n)._replace(after=nexts[n]))
        self._checked, self._begins, self._records = bytearray(bytes(~certain)), begins, records

    def _look_ahead(self, file: StoreFile, n: int) -> None:
        """Check the next headers together, and mark those that are correct as checked."""
        records, begins = self._records, self._begins
        assert records is not None and begins is not None
        stop = min(n + _AHEAD, len(begins) - 1)  # without the last record, which the directory follows
        self._ahead = max(stop, n + 1)  # other threads check one by one, and so do reads after a failure
        with suppress(CorruptError):  # the read of the faulty record raises the error
            if stop > n:
                found = data_offsets(file, int(records.header[stop]), records.part(n, stop))
                right = (found == begins[n:stop]) | (records.stored[n:stop] == 0)
                self._checked[n:stop] = bytes(right | (np.frombuffer(self._checked[n:stop], np.uint8) > 0))


def _without_guards(store: Store, path: str) -> StoreFile:
    pin = store.pins.get(path)
    return StoreFile(Unchecked(store), path, tail=0, window=None if pin is None else (0, pin.size))


def reads_of_headers(file: StoreFile, records: Records) -> int:
    """Return the number of reads needed to check all headers."""
    return 1 + int((np.diff(records.header) > max(NEAR, file.store.gap)).sum())


def aligned_offsets(start: int, records: Records) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the offsets at which the data of these records begins if torch wrote them, and a mask of the records for
    which this is certain without their headers: storages whose descriptor can have only one length.

    caffe2/serialize/inline_container.cc `getPadding` aligns the data of every record.
    """
    nexts = np.append(records.header[1:], start)
    least = records.header + HEADER_SIZE + records.lengths
    begins = [nexts - descriptor - records.stored for descriptor in (16, 24)]
    fits = [(b % ALIGNMENT == 0) & (b >= least) & (b <= least + ALIGNMENT + 64) for b in begins]
    certain = (fits[0] ^ fits[1]) & (records.flags & DESCRIBED != 0)
    certain |= records.stored == 0
    certain &= np.array([_STORAGE.fullmatch(name) is not None for name in records.names], bool)
    return np.where(records.stored == 0, least, np.where(fits[0], *begins)), certain
