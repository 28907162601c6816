"""The block cache: bytes of remote objects in files of the user's cache folder.

What is cached are the ranges that were read, exactly: a read that finds nothing fetches what it would fetch without a
cache, no more. The next read of the same bytes, also by another process, needs no request. An object is identified by
its URL, its version (ETag, version id, commit) and its size. Objects without a version are never cached.

A file is a segment of an object (`segments`): some dozen files for a checkpoint of some GiB, not one for each block.
The least recently used ones are removed when all together are larger than the limit; who has one open reads on.

Measured (2 busy cores, ext4, page cache warm; as a part of the speed of the same file read locally): a tensor of 1 GiB
0.87 to 0.96, by a process that has not compared the checksums yet 0.5 to 0.75. 10,000 random ranges of 4 to 64 KiB by
`fill` 0.65 to 1.0 of `LocalStore.read_into`, and 0.2 to 0.4 if the blocks around them are compared first. Storing
takes 1 s a GiB, and more where other work needs the cores. With blocks of 16 KiB the first comparison of 1 GiB takes
longer, with 64 KiB that of random ranges. One file for each MiB would be 770,000 files for 405B parameters in bf16;
segments of 64 MiB are 12,100.

No failure of the cache is one of a read: without room, or in a folder that cannot be written, reads go on without it,
and a `CacheWarning` says so once.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...core.units import size_in_bytes
from ...errors import CacheWarning, DataError
from .. import user_folder
from ..directories import Directory
from ..system import after_fork
from ..user_folder import Refused
from .segments import ENDING, SEGMENT, Buffers, Found, ObjectKey, Segment, cut, described, drop, remove, write

SIZE = 20 << 30  # bytes; the default limit of all segments together
_OPEN_FILES = 128
_WRITING = 16  # locks of segments
_USED = 600  # seconds after which a further use of a segment is noted; noting changes the file's times
_STEPS = 32  # parts of the limit; after as many bytes written, a process looks how large the cache is
_LONGEST = 3 << 10  # bytes of a URL
_RUN = 4 << 20  # bytes of an answer that are stored at once; a divisor of `SEGMENT` and a multiple of `BLOCK`
# endpoints: of two servers, objects of one name are two objects
_PLACE = re.compile(r"(?i)endpoint|url|host|port|account_name")
_ENDPOINTS = (
    "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST",
    "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "HF_ENDPOINT",
)  # fmt: skip
# parameters of signed URLs of S3, Google, Azure, CloudFront
_SIGNED = re.compile(
    r"(?i)x-(amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|"
    r"sig|s[erptv]|sr[t]?|spr|sks?[a-z]*|sip|sdd|.*(token|secret|passw|credential|auth|api_?key).*"
)


class Kept(NamedTuple):
    """What the cache has of an object. ``used`` is the time of its last use, in seconds."""

    url: str
    version: str
    nbytes: int
    files: int
    used: float


def object_key(url: str, version: str, size: int, place: str = "") -> ObjectKey | None:
    """Return the key of an object; None if the object must not be cached, because nothing identifies its bytes."""
    if not version or size <= 0:
        return None
    base, _, query = url.partition("?")
    base = re.sub(r"(?<=://)[^/@]*@", "", base)
    kept = [part for part in query.split("&") if part and not _SIGNED.fullmatch(part.partition("=")[0])]
    url = "?".join((base, "&".join(kept))) if kept else base
    if len(url.encode("utf-8", "surrogatepass")) + len(version) > _LONGEST:
        return None
    return ObjectKey(url, version, size, place)


class BlockCache:
    """Ranges of remote objects in a folder. Safe for threads, processes and forks.

    Parameters
    ----------
    folder
        The folder of the files, created at the first write; None: `blocks` in the user's cache folder.
    limit
        The most bytes of all files together; None: 20 GiB, but at most half of the disk's free space.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self._chosen = None if folder is None else os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.limit = limit
        self._open: dict[tuple[ObjectKey, int], Segment] = {}
        self._unused = ""  # why the cache is not read, "" if it is
        self._unwritten = ""  # why it is not written
        self._written: int | None = None  # bytes since the last look at the size of all; None: there was none
        self._forget()
        _caches.add(self)

    @property
    def folder(self) -> Path:
        """The folder of the files. Raises Refused if the user has none."""
        return user_folder.location() / "blocks" if self._chosen is None else Path(self._chosen)

    def __reduce__(self) -> tuple[Any, ...]:
        return shared, (self._chosen, self.limit)

    def __repr__(self) -> str:
        return f"BlockCache({self._chosen!r}, {self.limit!r})"

    def fill(self, key: ObjectKey, offset: int, target: memoryview) -> list[tuple[int, int]]:
        """Fill ``target`` with the bytes from ``offset`` on, as far as they are cached.

        Parameters
        ----------
        key
            The object.
        offset
            The object's byte with which ``target`` begins.
        target
            Bytes, inside the object.

        Returns
        -------
        list of (int, int)
            The ranges of the object that are missing, sorted: (first byte, byte after the last). Parts of ``target``
            outside the object are missing, too.
        """
        missing: list[tuple[int, int]] = []
        for number, start, stop in cut(offset, offset + len(target)):
            base = number * SEGMENT
            part = target[base + start - offset : base + stop - offset]
            for lo, hi in self._read(key, number, start, part):
                if missing and missing[-1][1] == base + lo:
                    missing[-1] = (missing[-1][0], base + hi)
                else:
                    missing.append((base + lo, base + hi))
        return missing

    def store(self, key: ObjectKey, offset: int, *data: memoryview | bytes) -> None:
        """Keep bytes of an object that were read from ``offset`` on, in buffers one after the other. They must be
        those of the version of ``key``.

        Never fails: without room, or in a folder that cannot be written, later calls do nothing."""
        buffers = Buffers(memoryview(one).cast("B") for one in data)
        end = min(offset + buffers.nbytes, key.size)
        if self._unwritten or self._unused or offset >= end:
            return
        try:
            with user_folder.opened(self.folder, make=True) as directory:
                self._make_room(directory, end - offset)
                for number, start, stop in cut(offset, end):
                    at = number * SEGMENT + start - offset
                    part = Buffers(buffers.between(at, at + stop - start))
                    with self._writing[hash((key, number)) % _WRITING]:
                        written = write(directory, key, number, start, part)
                        segment = self._opened(directory, key, number)
                        if segment is not None:
                            segment.used = time.monotonic()
                            segment.wrote(written)
        except Refused as e:
            self._give_up("_unused", "used", str(e))
        except OSError as e:
            self._give_up("_unwritten", "written", e.strerror or str(e))

    def kept(self) -> list[Kept]:
        """Return what the cache has of each object, the last used first. Raises Refused; OSError if there is none."""
        found: dict[tuple[str, str], Kept] = {}
        with user_folder.opened(self.folder) as directory:
            for name, nbytes, used in _files(directory):
                about = described(directory, name)
                url, version = about.get("url", ""), about.get("version", "")
                one = found.get((url, version), Kept(url, version, 0, 0, 0.0))
                found[url, version] = Kept(url, version, one.nbytes + nbytes, one.files + 1, max(one.used, used))
        return sorted(found.values(), key=lambda kept: kept.used, reverse=True)

    def clear(self, url: str | None = None) -> int:
        """Remove all files, or those of one object or of the objects below a folder; return how many. Raises Refused;
        OSError if there is no cache."""
        count = 0
        key = None if url is None else object_key(url, "-", 1)
        with user_folder.opened(self.folder) as directory:
            for name, _, _ in _files(directory):
                there = "" if url is None else described(directory, name).get("url", "")
                if key is None or there == key.url or there.startswith(key.url.rstrip("/") + "/"):
                    count += remove(directory, name)
        return count

    def trim(self, limit: int) -> int:
        """Remove the least recently used files until at most ``limit`` bytes remain; return how many were removed.
        Raises Refused; OSError if there is no cache."""
        with user_folder.opened(self.folder) as directory:
            return self._trim(directory, limit)

    def most(self) -> int:
        """Return the most bytes of all files together. Raises Refused; OSError if there is no cache."""
        if self.limit is not None:
            return self.limit
        with user_folder.opened(self.folder) as directory:
            return self._most(directory)

    # -- implementation

    def _read(self, key: ObjectKey, number: int, start: int, target: memoryview) -> list[tuple[int, int]]:
        """Fill ``target`` with the bytes of a segment from ``start`` on; return which of its ranges are missing."""
        everything = [(start, start + len(target))]
        if self._unused:
            return everything
        try:
            segment = self._segment(key, number)
            found = None if segment is None else segment.read(start, target)
            if segment is not None and found is not None and found.missing:
                found = self._once_more(key, number, segment, start, target, found)
        except Refused as e:
            self._give_up("_unused", "used", str(e))
            return everything
        except OSError:  # not there, or the disk fails
            return everything
        if segment is None or found is None:  # removed, and perhaps there again
            with self._lock:
                self._open.pop((key, number), None)
            return everything
        return found.missing

    def _once_more(
        self, key: ObjectKey, number: int, segment: Segment, start: int, target: memoryview, found: Found
    ) -> Found | None:
        """Read again what a thread of this process may have been writing, while none does; remove what is damaged."""
        if not (segment.is_written or found.damaged):
            return found
        with self._writing[hash((key, number)) % _WRITING]:
            again = segment.read(start, target, afresh=True)
            if again is not None and again.damaged:
                with suppress(OSError, Refused), user_folder.opened(self.folder) as directory:
                    drop(directory, segment.name, again.damaged)
        return again

    def _segment(self, key: ObjectKey, number: int) -> Segment | None:
        """Return a segment, open; None if its file must not be used. Raises Refused; OSError if there is none."""
        segment = self._open.get((key, number))
        if segment is None:
            with user_folder.opened(self.folder) as directory:
                segment = self._opened(directory, key, number)
            if segment is None:
                return None
        if segment.used < time.monotonic() - _USED:
            segment.used = time.monotonic()
            with suppress(OSError):  # a folder that cannot be written to can still be read
                os.utime(segment.file.fd if os.utime in os.supports_fd else self.folder / segment.name)
        return segment

    def _opened(self, directory: Directory, key: ObjectKey, number: int) -> Segment | None:
        """Open a segment. Raises OSError if there is none."""
        found = self._open.get((key, number)) or Segment.of(directory, key, number)
        if found is not None:
            with self._lock:
                found = self._open.setdefault((key, number), found)
                while len(self._open) > _OPEN_FILES:
                    self._open.pop(next(iter(self._open)))
        return found

    def _make_room(self, directory: Directory, nbytes: int) -> None:
        """Remove other segments, if the limit is near."""
        with self._lock:
            if self._written is not None:
                self._written += nbytes
                if self._written < (self.limit or SIZE) // _STEPS:
                    return
            self._written = 0
        self._trim(directory, self._most(directory) - nbytes)

    def _most(self, directory: Directory) -> int:
        if self.limit is not None:
            return self.limit
        used = sum(nbytes for _, nbytes, _ in _files(directory))
        return min(SIZE, (used + shutil.disk_usage(directory.path).free) // 2)

    def _trim(self, directory: Directory, limit: int) -> int:
        total = removed = 0
        for name, nbytes, _ in _files(directory):
            total += nbytes
            if total > limit:
                total -= nbytes
                removed += remove(directory, name)
        return removed

    def _give_up(self, name: str, what: str, why: str) -> None:
        """Note in an attribute that the cache is not used or written from now on. The first thread warns of it."""
        with self._lock:
            if getattr(self, name):
                return
            setattr(self, name, why)
        try:
            where = str(self.folder)
        except Refused:
            where = "none"
        warnings.warn(
            f"the block cache in {where} is not {what}: {why}. Remote reads go on without it. Choose another folder or "
            "size with LAZYCKPT_CACHE, or free some space: `lazyckpt cache clear`.",
            CacheWarning,
            stacklevel=3,
        )

    def _forget(self) -> None:
        """Replace the locks after a fork, because threads of the parent may hold them."""
        self._lock = threading.Lock()
        # of segments: threads of a process do not undo each other's entries
        self._writing = [threading.Lock() for _ in range(_WRITING)]


class Keeping:
    """Stores the bytes of one request, which arrive in chunks, in runs of `_RUN` bytes, so it holds at most so many.
    Each call of `BlockCache.store` opens the file and reads its table, and a block that is stored in two parts is
    compared in between."""

    def __init__(self, cache: BlockCache, key: ObjectKey, start: int) -> None:
        self._cache, self._key, self._start = cache, key, start
        self._held: list[memoryview] = []
        self._stop = start  # of what is held

    def add(self, data: memoryview) -> None:
        """Add the bytes that follow those before."""
        while len(data):
            end = (self._start // _RUN + 1) * _RUN
            part = data[: end - self._stop]
            self._held.append(part)
            self._stop += len(part)
            if self._stop == end:
                self.finish()
            data = data[len(part) :]

    def finish(self) -> None:
        """Store what is left."""
        if self._held:
            self._cache.store(self._key, self._start, *self._held)
            self._start, self._held = self._stop, []


def _files(directory: Directory) -> list[tuple[str, int, float]]:
    """Return all segments: name, bytes on the disk, time of the last use; the last used first."""
    found = []
    for name in directory.names():
        if name.endswith(ENDING):
            with suppress(OSError):  # another process has removed it
                s = directory.stat(name)
                found.append((name, getattr(s, "st_blocks", -(-s.st_size // 512)) * 512, s.st_mtime))
    return sorted(found, key=lambda one: one[2], reverse=True)


def place_of(options: Mapping[str, Any]) -> str:
    """Return what decides, besides a URL, which object it is of: the endpoints in the options of a store and in the
    environment. The text can contain secrets: only hashes of it are stored."""
    found = [f"{name}={os.environ[name]}" for name in _ENDPOINTS if name in os.environ]

    def look(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, one in value.items():
                look(str(inner), one)
        elif isinstance(value, str | int) and _PLACE.search(name):
            found.append(f"{name}={value}")

    look("", options)
    return "\n".join(sorted(found))


def configured(chosen: bool | str | os.PathLike[str] = True) -> BlockCache | None:
    """Return the block cache that ``cache`` of `lazyckpt.open` asks for; None for none.

    Parameters
    ----------
    chosen
        False: none. "disk": the folder ``blocks`` in the user's cache folder. A size ("50GiB"): the same with this
        limit. A path: the folder ``blocks`` in it. "disk:SIZE" and "PATH:SIZE": with this limit. True: what the
        environment variable ``LAZYCKPT_CACHE`` asks for in the same way; none if it is not set, or is 0 or 1.

    Raises
    ------
    DataError
        The text is none of these.
    """
    if not isinstance(chosen, str | os.PathLike):
        value = os.environ.get("LAZYCKPT_CACHE", "").strip()
        if not chosen or value.lower() in ("", *user_folder.OFF, *user_folder.ON):
            return None
        return _of_text(value, f"LAZYCKPT_CACHE={value!r}")
    text = os.fsdecode(chosen)
    return _of_text(text, f"cache={text!r}", isinstance(chosen, os.PathLike))


def _of_text(text: str, shown: str, is_path: bool = False) -> BlockCache:
    folder, limit = text, None
    if not is_path:
        folder, _, size = text.rpartition(":")
        try:
            limit = size_in_bytes(size)
        except DataError:
            folder = text
        if folder == "disk" or (not folder and limit):
            return shared(None, limit)
        if not any(mark in folder for mark in ("/", os.sep)) and not folder.startswith(("~", ".")):
            raise DataError(
                f"{shown} is not understood: 'disk', a size ('50GiB'), a path with a slash ('./blocks'), or both "
                "('/scratch/me:50GiB')"
            )
    return shared(os.path.join(os.path.abspath(os.path.expanduser(folder)), "blocks"), limit)


# -- One cache for each folder in a process.

_caches: weakref.WeakSet[BlockCache] = weakref.WeakSet()
_shared: dict[tuple[str | None, int | None], BlockCache] = {}


def shared(folder: str | None, limit: int | None) -> BlockCache:
    """Return the process's cache of a folder with a limit."""
    return _shared.setdefault((folder, limit), BlockCache(folder, limit))


def _after_fork() -> None:
    for cache in list(_caches):
        cache._forget()


after_fork(_after_fork)
