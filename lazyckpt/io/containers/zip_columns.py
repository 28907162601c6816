"""The directory of a zip as columns, without an object for each record, under the rules of `zip`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...core.extents import ZipEntry
from ..storage.streams import StoreFile
from .zip import ENTRY_SIZE, FOLDER, HEADER_SIZE, MAX32, STORED, directory_place, large_sizes, read_zip

_USUAL_NAME = 512  # bytes; headers of records with longer names are compared one by one
_ENTRY_FIELDS = np.dtype(
    [
        ("magic", "<u4"), ("made", "<u2"), ("version", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"),
        ("date", "<u2"), ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4"), ("n_name", "<u2"), ("n_extra", "<u2"),
        ("n_comment", "<u2"), ("disk", "<u2"), ("internal", "<u2"), ("attributes", "<u4"), ("header", "<u4"),
    ]
)  # fmt: skip
_CROOKED = re.compile(rb"[\0\\]|[\n/]\.{0,2}[\n/]")


class Records(NamedTuple):
    """Entries of a zip in file order, as columns. ``raw`` holds the encoded names, cut to a fixed width and padded with
    zeros; ``lengths`` holds the full lengths of the names in bytes."""

    names: Sequence[str]
    raw: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    header: NDArray[np.int64]
    nbytes: NDArray[np.uint64]
    stored: NDArray[np.int64]
    crc: NDArray[np.uint32]
    method: NDArray[np.uint16]
    flags: NDArray[np.uint16]

    @classmethod
    def of(cls, entries: Sequence[ZipEntry]) -> Records:
        names = [e.name.encode() for e in entries]
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        width = min(int(lengths.max(initial=1)), _USUAL_NAME)
        # numpy cuts and pads strings of a fixed width
        raw = np.array(names, f"S{width}").view(np.uint8).reshape(len(names), width)
        _, header, nbytes, stored, crc, method, flags, *_ = zip(*entries, strict=True) if entries else [()] * 9
        return cls(
            [e.name for e in entries],
            raw,
            lengths,
            np.array(header, np.int64),
            np.array(nbytes, np.uint64),
            np.array(stored, np.int64),
            np.array(crc, np.uint32),
            np.array(method, np.uint16),
            np.array(flags, np.uint16),
        )

    def part(self, n: int, stop: int) -> Records:
        """Return the records from ``n`` up to ``stop``."""
        return Records(
            self.names[n:stop],
            self.raw[n:stop],
            self.lengths[n:stop],
            self.header[n:stop],
            self.nbytes[n:stop],
            self.stored[n:stop],
            self.crc[n:stop],
            self.method[n:stop],
            self.flags[n:stop],
        )

    def entry(self, n: int) -> ZipEntry:
        columns = (self.header, self.nbytes, self.stored, self.crc, self.method, self.flags)
        header, nbytes, stored, crc, method, flags = (int(column[n]) for column in columns)
        return ZipEntry(self.names[n], header, nbytes, stored, crc, method, flags)


class Columns(NamedTuple):
    """A parsed zip as columns: the offset of its directory, its ``records`` in file order, and for each of them the
    number (``order``) and the position (``at``) of its entry in the directory."""

    start: int
    records: Records
    order: NDArray[np.int64]
    at: NDArray[np.int64]


def read_columns(file: StoreFile) -> Columns:
    """Return the same as `read_zip` as columns. Raises the same errors."""
    count, size, start = directory_place(file)
    found = _columns(file, file.at(start, size), count, start)
    if found is None:  # unusual or damaged: look at the entries one by one
        entries = read_zip(file).entries
        order = np.argsort(np.array([e.header for e in entries], np.int64), kind="stable")
        ordered = [entries[n] for n in order.tolist()]
        return Columns(start, Records.of(ordered), order, np.array([e.at for e in ordered], np.int64))
    return found


def _columns(file: StoreFile, data: bytes, count: int, start: int) -> Columns | None:
    """Return the entries of a directory as columns if all of them are of the usual kind, which `read_zip` accepts."""
    raw = np.frombuffer(data, np.uint8)
    magic = (raw[:-3] == 0x50) & (raw[1:-2] == 0x4B) & (raw[2:-1] == 1) & (raw[3:] == 2)
    at = np.flatnonzero(magic).astype(np.int64)
    if not count or len(at) != count or at[0] or at[-1] + ENTRY_SIZE > len(data):
        return None
    fields = np.ascontiguousarray(sliding_window_view(raw, ENTRY_SIZE)[at]).view(_ENTRY_FIELDS)[:, 0]
    lengths = fields["n_name"].astype(np.int64)
    behind = at + ENTRY_SIZE + lengths
    if not np.array_equal(behind + fields["n_extra"] + fields["n_comment"], np.append(at[1:], len(data))):
        return None
    names = [data[a:b] for a, b in zip((at + ENTRY_SIZE).tolist(), behind.tolist(), strict=True)]
    text = _plain_names(names)
    large = [fields[name].astype(np.int64) for name in ("nbytes", "stored", "header")]
    header, stored, nbytes = large[2], large[1], large[0]
    missing = (header == MAX32) | (stored == MAX32) | (nbytes == MAX32)
    if text is None or len(set(text)) < count or (missing & (fields["n_extra"] == 0)).any():
        return None
    try:
        for n in np.flatnonzero(fields["n_extra"]).tolist():
            extra = data[behind[n] : behind[n] + int(fields["n_extra"][n])]
            small = (int(nbytes[n]), int(stored[n]), int(header[n]))
            nbytes[n], stored[n], header[n] = large_sizes(file, text[n], extra, small)
    except OverflowError:
        return None
    order = np.argsort(header, kind="stable")
    ends = (header + HEADER_SIZE + lengths + stored)[order]
    if (
        (nbytes < 0).any()
        or (stored < 0).any()
        or ((fields["method"] == STORED) & (stored != nbytes)).any()
        or fields["disk"].any()
        or (fields["attributes"] & FOLDER).any()
        or header[order[0]]
        or (ends < 0).any()
        or (ends > np.append(header[order][1:], start)).any()
    ):
        return None
    ordered = order.tolist()
    width = min(int(lengths.max()), _USUAL_NAME)
    matrix = np.array([names[n] for n in ordered], f"S{width}").view(np.uint8).reshape(count, width)
    records = Records(
        [text[n] for n in ordered],
        matrix,
        lengths[order],
        header[order],
        nbytes[order].astype(np.uint64),
        stored[order],
        fields["crc"][order],
        fields["method"][order],
        fields["flags"][order],
    )
    return Columns(start, records, order, at[order])


def _plain_names(raw: Sequence[bytes]) -> list[str] | None:
    """Return names of ASCII characters whose parts are neither empty nor "." nor "..", and None if there are others."""
    joined = b"\n".join(raw)
    if not joined.isascii() or _CROOKED.search(b"\n" + joined + b"\n"):
        return None
    names = joined.decode("ascii").split("\n")
    return names if len(names) == len(raw) else None
