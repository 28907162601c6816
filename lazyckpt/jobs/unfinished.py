"""Unfinished exports to object stores: the marker object that one leaves, and what is done with it.

The record in the marker has the fingerprint of the job and the ids of its multipart uploads; which parts the store has,
the store says. From these, an export is resumed, measured or removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from ..formats.zarr.documents import JOB
from ..io.storage.uploads import PartUploads, Sent, UploadGoneError, Uploads, is_bucket, uploads_of
from ..io.storage.urls import is_remote
from . import publish
from .publish import Busy, exclusively

_WIDTH = 32  # small requests at a time

T = TypeVar("T")
R = TypeVar("R")


class Record(NamedTuple):
    """The content of a marker object.

    ``uploads`` has the id of the multipart upload of each file, "" for a file that is written as a whole; None if older
    files may still be there. ``owns``: whether everything at the prefix belongs to the export. ``keys``: the files
    whose uploads may have begun while ``uploads`` is None."""

    fingerprint: str
    uploads: dict[str, str] | None
    owns: bool
    keys: tuple[str, ...] = ()

    def text(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def parsed(cls, text: bytes) -> Record:
        """Return the record of a marker. One that cannot be parsed is a job that nobody resumes."""
        try:
            found = json.loads(text)
            uploads, keys = found["uploads"], tuple(map(str, found.get("keys", ())))
            return cls(str(found["fingerprint"]), None if uploads is None else dict(uploads), bool(found["owns"]), keys)
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("", None, False)


def mark_of(one: str | None) -> str:
    """Return the key of the marker: in a folder, or beside a single file."""
    return JOB if one is None else f".{one}{JOB}"


def record_of(place: Uploads, mark: str) -> Record | None:
    """Return the record of an unfinished export; None if there is none."""
    try:
        return Record.parsed(place.get(mark))
    except (FileNotFoundError, NotADirectoryError):
        return None


def concurrently(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call ``do`` for all items, several at a time, for small requests; return the results in order."""
    items = list(items)
    if len(items) < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(_WIDTH, len(items)), thread_name_prefix="lazyckpt-ask") as pool:
        return list(pool.map(do, items))


def prepared(
    place: PartUploads, record: Record, keys: Sequence[str]
) -> tuple[Record, dict[str, dict[int, Sent] | None]]:
    """Begin the uploads that a record lacks. Return the record with all of them, and the parts that each has; None for
    an object that is complete. Raises OSError."""

    def look(key: str) -> tuple[str, dict[int, Sent] | None]:
        upload = (record.uploads or {}).get(key, "")
        if upload:
            try:
                return upload, place.sent(key, upload)
            except UploadGoneError:
                if place.stamp(key) == record.fingerprint:
                    return upload, None
        return place.begin(key, record.fingerprint), {}

    found = dict(zip(keys, concurrently(look, keys), strict=True))
    return record._replace(uploads={key: upload for key, (upload, _) in found.items()}), {
        key: parts for key, (_, parts) in found.items()
    }


def remove_all(place: Uploads, keys: Iterable[str], keep: str = "") -> None:
    """Remove objects, those at the top first, so that no reader opens a half-removed checkpoint, and the parts of
    unfinished uploads below the prefix."""
    keys = [key for key in keys if key != keep]
    for some in ([k for k in keys if "/" not in k], [k for k in keys if "/" in k]):
        if some:
            place.remove(some)
    if isinstance(place, PartUploads):
        concurrently(lambda found: place.abort(*found), place.begun())


def remove_unfinished(place: Uploads, mark: str, record: Record) -> None:
    """Remove what an unfinished export has written, its marker last."""
    uploads = record.uploads or {}
    if isinstance(place, PartUploads):
        begun = [(key, upload) for key, upload in uploads.items() if upload]
        if record.uploads is None and record.keys:
            below = record.keys[0] if len(record.keys) == 1 else ""
            begun = [one for one in place.begun(below) if one[0] in record.keys]
        concurrently(lambda one: place.abort(*one), begun)
    if record.owns:
        remove_all(place, place.list(), keep=mark)
    elif isinstance(place, PartUploads):
        ours = concurrently(lambda key: place.stamp(key) == record.fingerprint, uploads)
        place.remove([key for key, own in zip(uploads, ours, strict=True) if own])
    elif mark == JOB:
        place.remove(list(uploads))
    place.remove([mark])


def finished_bytes(place: Uploads, mark: str, record: Record) -> int:
    """Return the number of bytes that an unfinished export has sent."""
    uploads = record.uploads or {}

    def sent(key: str) -> int:
        assert isinstance(place, PartUploads)
        try:
            return sum(part.nbytes for part in place.sent(key, uploads[key]).values())
        except UploadGoneError:
            return place.list(key).get(key, 0)

    total = sum(concurrently(sent, uploads)) if isinstance(place, PartUploads) else 0
    if record.owns:
        there = place.list()
        return (
            total
            + sum(size for key, size in there.items() if key != mark and key not in uploads)
            + (0 if isinstance(place, PartUploads) else sum(there.get(key, 0) for key in uploads))
        )
    if not isinstance(place, PartUploads) and mark == JOB:
        total += sum(size for key, size in place.list().items() if key in uploads)
    return total


def busy(url: str) -> Busy:
    return Busy(f"{url}: another export has begun to write there, or has finished or discarded this one. Call again")


def unfinished(dest: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Return the number of bytes that an interrupted or running export has finished.

    Repeat the interrupted call with the same arguments to resume it.

    Parameters
    ----------
    dest
        The destination of the export, a path or a URL.
    storage_options
        Options for a URL.

    Returns
    -------
    int or None
        Finished bytes; None if there is no interrupted or running export.
    """
    if not is_remote(os.fspath(dest)):
        return publish.unfinished(dest)
    found = _unfinished_at(os.fspath(dest), storage_options)
    return None if found is None else finished_bytes(*found)


def discard(dest: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove what an interrupted export has written, so that the next export starts anew.

    Does nothing if there is no interrupted export. Published files at ``dest`` are not touched.

    Parameters
    ----------
    dest
        The destination of the export, a path or a URL. At a URL, parts of unfinished uploads are removed, too.
    storage_options
        Options for a URL.

    Raises
    ------
    DestinationError
        An export to ``dest`` is running, or another user may have written the unfinished files.
    """
    if not is_remote(os.fspath(dest)):
        publish.discard(dest)
        return
    found = _unfinished_at(os.fspath(dest), storage_options)
    if found is not None:
        place, mark, record = found
        name = place.at("" if mark == JOB else mark[1 : -len(JOB)])
        with exclusively(name, busy(name)):
            remove_unfinished(place, mark, record)


def _unfinished_at(url: str, options: Mapping[str, Any] | None) -> tuple[Uploads, str, Record] | None:
    """Return the place, the key of the marker and the record of an unfinished export to a URL, a folder or a file."""
    place = uploads_of(url.rstrip("/"), options)
    found = record_of(place, JOB)
    if found is not None:
        return place, JOB, found
    if is_bucket(url):
        return None
    mark = mark_of(url.rstrip("/").rpartition("/")[2])
    found = record_of(place.beside, mark)
    return None if found is None else (place.beside, mark, found)
