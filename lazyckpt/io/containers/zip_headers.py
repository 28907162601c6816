"""Headers of large records of torch's zips, compared with the directory when the records are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.index import FileInfo
from ...errors import CorruptError
from ..storage.base import Entry, Fetched, Store, StoreFile
from ..storage.mapping import Mapped
from .pickle.records import short
from .zip import DESCRIBED, HEADER_SIZE, NEAR, Records, data_offset, data_offsets, read_zip, refused

ALIGNMENT = 64  # bytes, of what torch stores unless a record says otherwise
_STORAGE = re.compile(r"[^/]+/data/[^/]+")
_AHEAD = 64  # headers that are checked together where records are read one after the other


class Unchecked(Store):
    """A store's files without what guards check, for a guard."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.pins)
        self.inner = store
        self.closed = store.closed

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
    """Compares the header of each record of torch's storages with the zip's directory before the record's first bytes
    are used.

    Reading all headers when a file is opened takes a read for each large tensor. torch's writer aligns what it stores,
    so the directory alone tells where the data of a record have to begin; here that is checked.
    """

    __slots__ = ("_ahead", "_begins", "_checked", "_records")

    def __init__(
        self, records: Records | None = None, begins: NDArray[np.int64] | None = None, checked: bytes = b""
    ) -> None:
        self._records, self._begins, self._checked = records, begins, bytearray(checked)
        self._ahead = 0  # records before this one are looked at one by one

    def __reduce__(self) -> tuple[Any, ...]:
        return HeaderGuard, ()  # the directory is read again where it is needed

    def check(self, store: Store, path: str, offset: int, length: int) -> None:
        """Raise CorruptError if a header in front of these bytes contradicts the directory."""
        if self._records is None or self._begins is None:
            self._load(_without_guards(store, path))
        records, begins = self._records, self._begins
        assert records is not None and begins is not None
        n = max(0, int(np.searchsorted(begins, offset, "right")) - 1)
        while n < len(begins) and begins[n] < offset + length:
            if not self._checked[n] and records.stored[n] and begins[n] + records.stored[n] > offset:
                file = _without_guards(store, path)
                if n >= self._ahead and n > 0 and self._checked[n - 1] and not store.gap:  # somebody reads on and on
                    self._look_ahead(file, n)
                if not self._checked[n]:
                    entry = records.entry(n)
                    if data_offset(file, entry) != begins[n]:
                        what = f"the header of the record {short(entry.name)} has not the length of torch's"
                        raise refused(file, what)
                    self._checked[n] = 1
            n += 1

    def _load(self, file: StoreFile) -> None:
        """Read the directory again, in another process."""
        start, entries = read_zip(file)
        records = Records.of(sorted(entries, key=lambda e: e.header))
        begins, certain = aligned_offsets(start, records)
        nexts = np.append(records.header[1:], start).tolist()
        for n in np.flatnonzero(~certain).tolist():
            begins[n] = data_offset(file, records.entry(n)._replace(after=nexts[n]))
        self._checked, self._begins, self._records = bytearray(bytes(~certain)), begins, records

    def _look_ahead(self, file: StoreFile, n: int) -> None:
        """Check the headers from this one on together, as far as they are as they should be."""
        records, begins = self._records, self._begins
        assert records is not None and begins is not None
        stop = min(n + _AHEAD, len(begins) - 1)  # behind the last record is the directory
        self._ahead = max(stop, n + 1)  # other threads, and failures, take one by one
        with suppress(CorruptError):  # the one who reads that record gets the error
            if stop > n:
                found = data_offsets(file, int(records.header[stop]), records.part(n, stop))
                right = (found == begins[n:stop]) | (records.stored[n:stop] == 0)
                self._checked[n:stop] = bytes(right | (np.frombuffer(self._checked[n:stop], np.uint8) > 0))


def _without_guards(store: Store, path: str) -> StoreFile:
    pin = store.pins.get(path)
    return StoreFile(Unchecked(store), path, tail=0, window=None if pin is None else (0, pin.size))


def reads_of_headers(file: StoreFile, records: Records) -> int:
    """How many reads it takes to compare all headers."""
    return 1 + int((np.diff(records.header) > max(NEAR, file.store.gap)).sum())


def aligned_offsets(start: int, records: Records) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where the data of these records have to begin if torch wrote them, and of which records that is certain without
    their headers: of storages behind which a descriptor fits up to the next record in one way only.

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
