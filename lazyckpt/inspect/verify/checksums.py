"""The checksums that writers leave: CRC-32 of zip records, SHA-256 of files.

- torch.save, and the archives inside `.distcp` files: CRC-32 of every record, unless
  `torch.serialization.set_crc32_options(False)` was set; torch.load does not check it.
- Megatron-LM's `integrity.json` (pull request 4305): {"algorithm": "sha256", "files": {path: hex}}.
- Files that huggingface_hub downloaded: `.cache/huggingface/download/FILE.metadata`, whose second line is the ETag: for
  large files the SHA-256. In its cache, `snapshots/REVISION/FILE` is a link to `blobs/ETAG`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...core.extents import Archive
from ...core.requests import Ints
from ...errors import CorruptError, DataError, LazyckptError
from ...io.containers.torch_file import ends
from ...io.containers.zip import DEFLATED, STORED, ZIP_MAGIC, last_length
from ...io.containers.zip_columns import read_columns
from ...io.containers.zip_offsets import data_offsets
from ...io.pool import each
from ...io.reading.packed import unpack
from ...io.storage.base import Store
from ...io.storage.streams import StoreFile
from ...io.storage.urls import is_url
from ...jobs.batching import Task
from ...jobs.executor import Run
from ..report import Finding
from .sweep import Record

_PIECE = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DOWNLOADS = ".cache/huggingface/download"
_SMALL = 64 << 20  # bytes of a document that is read
_TOGETHER = 512  # archives of a file whose ends are read together
_BETWEEN = 64 << 10  # bytes before an archive that are read with its ends, where objects may be
_FOLDERS = 16  # in which integrity.json is looked for


class Recorded(NamedTuple):
    """What a file records of itself.

    Attributes
    ----------
    records
        The records with a CRC-32, in the order of their offsets.
    findings
        What is wrong with the directory, or with compressed records; a note if there are no checksums.
    """

    records: tuple[Record, ...] = ()
    findings: tuple[Finding, ...] = ()


def of_files(store: Store, paths: Sequence[str], archives: Mapping[str, Sequence[Archive]]) -> dict[str, Recorded]:
    """Return what each file records; ``archives`` are the archives inside files, which are no zips as a whole."""
    found: dict[str, Recorded] = {}

    def look(path: str) -> None:
        try:
            several = path in archives or path.endswith(".distcp")
            found[path] = _of_archives(store, path, archives.get(path, ())) if several else _of_file(store, path)
        except (LazyckptError, OSError) as e:
            code = "wrong-checksum" if isinstance(e, CorruptError) else "unreadable-file"
            found[path] = Recorded((), (Finding(code, f"{path}: {_line(e)}", path),))

    each(look, paths)
    return {path: one for path, one in sorted(found.items()) if one.records or one.findings}


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _of_file(store: Store, path: str) -> Recorded:
    size = store.stat(path).size
    if size < len(ZIP_MAGIC) or bytes(store.read(path, 0, len(ZIP_MAGIC))) != ZIP_MAGIC:
        return Recorded()
    return _of_zip(StoreFile(store, path), path)


def _of_archives(store: Store, path: str, archives: Sequence[Archive]) -> Recorded:
    """Return the records of archives that follow each other in a file; what lies between them holds objects."""
    records: list[Record] = []
    findings: list[Finding] = []
    places = [*sorted({(one.offset, one.length) for one in archives}), (store.stat(path).size, 0)]
    at = 0
    for first in range(0, len(places), _TOGETHER):
        group = places[first : first + _TOGETHER]
        with store.holding(_looked_at(path, group, at)):
            for offset, length in group:
                windows = list(_objects(store, path, at, offset))
                for start, size in [*windows, (offset, length)]:
                    file = StoreFile(store, path, *ends(size), window=(start, size))
                    if file.size < len(ZIP_MAGIC) or file.at(0, len(ZIP_MAGIC)) != ZIP_MAGIC:
                        continue
                    try:
                        found = _of_zip(file, f"{path} (at byte {start:,})")
                    except CorruptError:
                        if start == offset:
                            raise
                        continue  # an object that is a zip of another kind; if it is damaged, the reader says so
                    records += found.records
                    findings += found.findings if not findings else ()
                at = max(at, offset + length)
    return Recorded(tuple(records), tuple(findings))


def _looked_at(path: str, places: Sequence[tuple[int, int]], at: int) -> dict[str, tuple[Ints, Ints]]:
    """Return the runs of a file that `_of_archives` reads: the ends of archives, of which ``places`` are the offsets
    and lengths, and of what lies between them from ``at`` on."""
    runs = set[tuple[int, int]]()
    for offset, length in places:
        between = min(max(0, offset - at), _BETWEEN)
        tail, head = ends(length)
        runs |= {(offset - between, between), (offset, head), (offset + length - tail, tail)}
        at = max(at, offset + length)
    columns = np.array(sorted(run for run in runs if run[1]), np.int64).reshape(-1, 2).T
    return {path: (columns[0], columns[1])} if columns.size else {}


def _objects(store: Store, path: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets and lengths of the zips that follow each other in a part of a file, the last one first. What
    is in front of something else, such as a plain pickle, is left out."""
    while end - start > len(ZIP_MAGIC):
        try:
            length = last_length(StoreFile(store, path, window=(start, end - start)))
        except CorruptError:
            return
        if not 0 < length <= end - start:
            return
        end -= length
        yield end, length


def _of_zip(file: StoreFile, where: str) -> Recorded:
    columns = read_columns(file)
    records = columns.records
    offsets = data_offsets(file, columns.start, records)
    sizes = records.nbytes.astype(np.int64)
    held = sizes > 0
    if held.any() and not records.crc[held].any():
        text = f"{where}: its {int(held.sum()):,} records have no checksums (torch's set_crc32_options(False))"
        return Recorded((), (Finding("no-checksum", text, file.path),))
    plain = held & (records.method == STORED)
    found = [
        Record(records.names[n], file.start + int(offsets[n]), int(sizes[n]), int(records.crc[n]))
        for n in np.flatnonzero(plain).tolist()
    ]
    findings = []
    for n in np.flatnonzero(held & (records.method == DEFLATED)).tolist():
        packed = file.start + int(offsets[n]), int(records.stored[n])
        if _inflated(file.store, file.path, *packed, int(sizes[n])) != int(records.crc[n]):
            findings.append(wrong(where, Record(records.names[n], *packed, int(records.crc[n]))))
    return Recorded(tuple(found), tuple(findings))


def wrong(path: str, record: Record) -> Finding:
    """Return the finding about a record whose bytes have another checksum."""
    text = f"{path}: the record {record.name} ({record.nbytes:,} bytes at {record.offset:,}) is not what was written"
    details = {"record": record.name, "offset": record.offset, "nbytes": record.nbytes}
    return Finding("wrong-checksum", text, path.split(" (at byte")[0], details=details)


def compare_packed(store: Store, archives: Sequence[Archive], run: Run) -> list[Finding]:
    """Compare the records of compressed archives with their checksums. They are unpacked once more for this."""
    findings: list[Finding] = []

    def done(task: Task, found: Finding | None) -> None:
        if found is not None:
            findings.append(found)

    def tasks() -> Iterator[Task]:
        for archive in archives:
            need = 2 * (archive.length + prod(archive.shape) * archive.dtype.itemsize)
            yield Task(0, need, partial(_packed, store, archive))

    run(tasks(), done)
    return findings


def _packed(store: Store, archive: Archive) -> Finding | None:
    try:
        with zipfile.ZipFile(io.BytesIO(unpack(store, archive))) as file:
            odd = file.testzip() if any(info.CRC for info in file.infolist()) else None
    except (LazyckptError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None  # reading the tensor reports it
    if odd is None:
        return None
    text = f"{archive.path}: the record {odd} of {archive} is not what was written"
    return Finding("wrong-checksum", text, archive.path, details={"record": odd, "offset": archive.offset})


def _inflated(store: Store, path: str, offset: int, length: int, nbytes: int) -> int | None:
    """Return the CRC-32 of a deflated record; None if it cannot be inflated to its size."""
    inflate, crc, total = zlib.decompressobj(-15), 0, 0
    try:
        for at in range(offset, offset + length, _PIECE):
            data = bytes(store.read(path, at, min(_PIECE, offset + length - at)))
            while data:
                part = inflate.decompress(data, _PIECE)
                crc, total, data = zlib.crc32(part, crc), total + len(part), inflate.unconsumed_tail
                if total > nbytes:
                    return None
    except zlib.error:
        return None
    return crc if total == nbytes and inflate.eof else None


# -- SHA-256 of whole files


def integrity(store: Store, paths: Sequence[str]) -> tuple[dict[str, tuple[str, str]], list[Finding]]:
    """Return what `recorded_sha256` returns, of integrity.json alone. It lies in the folder of a checkpoint."""
    found: dict[str, tuple[str, str]] = {}
    findings: list[Finding] = []
    for folder in ["", *sorted({path.split("/")[0] + "/" for path in paths if "/" in path})[:_FOLDERS]]:
        name = f"{folder}integrity.json"
        data = _document(store, name)
        if data is None:
            continue
        try:
            about = json.loads(data)
            listed = about["files"] if about.get("algorithm") == "sha256" else {}
            found |= {folder + path: (hexes.lower(), name) for path, hexes in listed.items() if _is_sha256(hexes)}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
            text = f"{name} cannot be understood ({type(e).__name__}): its checksums are not compared"
            findings.append(Finding("inconsistent-metadata", text, name))
    for path in list(found):
        by = found[path][1]
        try:
            _refuse_outside(path)
            store.stat(path)
        except (LazyckptError, OSError) as e:
            del found[path]
            code = "missing-file" if isinstance(e, FileNotFoundError) else "unreadable-file"
            findings.append(Finding(code, f"{path}, which {by} lists, cannot be read: {_line(e)}", path))
    return found, findings


def _refuse_outside(path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise DataError("it is outside the checkpoint")


def recorded_sha256(store: Store, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return path -> (SHA-256, what recorded it), of the records of downloads. Reads small files only."""
    found: dict[str, tuple[str, str]] = {}
    downloaded, local = bool(store.list(_DOWNLOADS)), not is_url(store.root)
    for path in paths:
        data = _document(store, f"{_DOWNLOADS}/{path}.metadata") if downloaded else None
        lines = data.decode("utf-8", "replace").split("\n") if data is not None else []
        if len(lines) > 1 and _is_sha256(lines[1].strip()):
            found.setdefault(path, (lines[1].strip(), "the record of its download"))
            continue
        full = os.path.join(store.root, path)
        if local and os.path.islink(full):
            target = os.readlink(full).replace("\\", "/").split("/")
            if len(target) > 1 and target[-2] == "blobs" and _is_sha256(target[-1]):
                found.setdefault(path, (target[-1], "its name in the cache of huggingface_hub"))
    return found


def _is_sha256(text: Any) -> bool:
    return isinstance(text, str) and bool(_SHA256.fullmatch(text.lower()))


def _document(store: Store, path: str) -> bytes | None:
    try:
        size = store.stat(path).size
        return bytes(store.read(path, 0, size)) if size <= _SMALL else None
    except (LazyckptError, OSError):
        return None


def compare_sha256(store: Store, recorded: Mapping[str, tuple[str, str]], run: Run) -> list[Finding]:
    """Hash files and compare them with their records."""
    findings: list[Finding] = []

    def done(task: Task, result: tuple[str, str | None, str]) -> None:
        path, digest, why = result
        want, by = recorded[path]
        if digest is None:
            findings.append(Finding("unreadable-file", f"{path}, which {by} lists, cannot be read: {why}", path))
        elif digest != want:
            text = f"{path} is not the file that {by} describes: its SHA-256 begins with {digest[:12]}, not {want[:12]}"
            findings.append(Finding("wrong-checksum", text, path, details={"sha256": digest, "recorded": want}))

    def tasks() -> Iterator[Task]:
        for path in recorded:
            yield Task(0, _PIECE, partial(_sha256, store, path))

    run(tasks(), done)
    return findings


def _sha256(store: Store, path: str) -> tuple[str, str | None, str]:
    found = hashlib.sha256()
    try:
        size = store.stat(path).size
        memory = bytearray(min(_PIECE, size))
        for at in range(0, size, _PIECE):
            part = memoryview(memory)[: min(_PIECE, size - at)]
            store.read_into(path, at, part)
            found.update(part)
    except (LazyckptError, OSError) as e:
        return path, None, _line(e)
    return path, found.hexdigest(), ""
