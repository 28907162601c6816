"""Writing to places behind a URL: whole objects, and parts of objects that outlive the process that sends them.

An `Uploads` is a prefix of a bucket, or a folder of a server. It is the counterpart of `Requesting`, which reads.

| URL | by | resumed after a kill |
|---|---|---|
| ``s3://`` | boto3 (`s3.S3Uploads`) | parts of an object |
| ``gs://``, ``az://`` | obstore (`ObjectUploads`) | whole objects |
| others, such as ``memory://`` and ``ssh://`` | fsspec (`FsspecUploads`) | whole files |
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple
from uuid import uuid4

from ...core.requests import Policy
from ...errors import DestinationError, FormatError, MissingFileError
from ..system import after_fork
from .connecting import address, asking, connect, is_object_url, with_defaults
from .credentials import Sealed, seal, unseal, without_secrets
from .file_systems import file_system
from .forked import obstore_works

HELD = 64 << 20  # bytes of an object that are collected before they are sent: up to so many take one request
PART = 16 << 20  # bytes of an upload part, unless an object would have more than MOST_PARTS; boto3 takes 2 ms for each
MOST_PARTS = 10_000  # of S3
_LARGEST = 5 << 40  # bytes of an object of S3
_SENT = 8 << 20  # bytes of the parts of an object that is streamed
_STREAMS = 4  # parts of a streamed object in flight
_RETRIES = 8
_READ_ONLY = {
    "hf": "a repository on the Hub is only read here: write to a local folder, and run `hf upload`",
    "http": "a web server is only read: write to a local path or to a bucket",
    "https": "a web server is only read: write to a local path or to a bucket",
}

_UNFINISHED = re.compile(r"((?:.*/)?)\.([^/]+)\.[0-9a-f]{8}\.part", re.DOTALL)

Bytes = bytes | bytearray | memoryview


class Sent(NamedTuple):
    """An upload part that is there: its size in bytes, and its ETag."""

    nbytes: int
    etag: str


class UploadGoneError(OSError):
    """A multipart upload does not exist any more: it was completed or aborted."""


def is_bucket(url: str) -> bool:
    """Return whether a URL is that of a whole bucket, beside which nothing can be."""
    return is_object_url(url) and "/" not in url.partition("://")[2].strip("/")


def part_size(nbytes: int) -> int:
    """Return the size of the parts of an object, a function of its size alone, so that a resumed call finds the same
    parts. Raises DestinationError for an object that no store takes.

    >>> part_size(1 << 30) >> 20, part_size(200 << 30) >> 20
    (16, 32)
    """
    if nbytes > _LARGEST:
        raise DestinationError(f"a file of {nbytes:,} bytes: objects have at most 5 TiB. Write smaller shards")
    size = PART
    while size * MOST_PARTS < nbytes:
        size *= 2
    return size


class Uploads(ABC):
    """A prefix at a URL that objects are written to, safe to use from several threads and picklable.

    Keys are relative to the prefix. All methods raise OSError for a rejected request, without credentials.
    """

    resumes = False
    """Whether `begin`, `send` and the other methods for parts are there."""
    buffers = True
    """Whether `put` holds an object, or HELD bytes of it, in memory."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._passed = dict(options or {})
        self.options = with_defaults(url, self._passed)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), seal(self.url, self._passed, str(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        """Return the URL without credentials."""
        if not is_object_url(self.url):
            return without_secrets(self.url, self.options)
        start, question, rest = self.url.partition("?")  # which belongs to the key in a bucket
        return f"{without_secrets(start, self.options)}{question}{without_secrets(rest, self.options)}"

    @property
    def name(self) -> str:
        """The last name in the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    def at(self, key: str) -> str:
        """Return the URL of an object without credentials."""
        folder = str(self)
        if not key:
            return folder
        return f"{folder}{key}" if folder.endswith("://") else f"{folder}/{key}"

    @property
    def beside(self) -> Uploads:
        """The prefix that this one is in."""
        folder = self.url.rpartition("/")[0]
        return type(self)(f"{folder}/" if folder.endswith(":/") else folder, self._passed)

    @abstractmethod
    def list(self, below: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all objects whose keys begin with ``below``, by key."""

    @abstractmethod
    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read bytes of an object; fewer than ``length`` at its end. Raises FileNotFoundError."""

    @abstractmethod
    def put(self, key: str, content: Iterable[Bytes]) -> int:
        """Write an object in pieces, each valid until the next one, and return its size. The object appears when it is
        complete."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; those that do not exist are ignored."""

    def forget(self, key: str) -> int:
        """Return the size of an object in bytes, from the store and not from a cache. Raises FileNotFoundError."""
        size = self.list(key).get(key)
        if size is None:
            raise FileNotFoundError(2, "no such object", self.at(key))
        return size


def _restored(kind: type[Uploads], sealed: Sealed) -> Uploads:
    return kind(*unseal(sealed))


class PartUploads(Uploads):
    """Uploads whose parts outlive the process that sends them."""

    resumes = True

    @abstractmethod
    def begin(self, key: str, stamp: str) -> str:
        """Begin an upload, and return its id. ``stamp`` is kept with the object, see `stamp`."""

    @abstractmethod
    def send(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Send a part, numbered from 1, and return its ETag. Raises UploadGoneError."""

    @abstractmethod
    def sent(self, key: str, upload: str) -> dict[int, Sent]:
        """Return the parts that are there, by number. Raises UploadGoneError."""

    @abstractmethod
    def complete(self, key: str, upload: str, etags: Mapping[int, str], stamp: str) -> None:
        """Make the object of its parts, unless that has happened already, as ``stamp`` shows: the answer to an earlier
        request may have got lost. Raises UploadGoneError."""

    @abstractmethod
    def abort(self, key: str, upload: str) -> None:
        """Remove the parts of an upload; one that does not exist is ignored."""

    @abstractmethod
    def begun(self, below: str = "") -> Iterator[tuple[str, str]]:
        """Yield the key and the id of all uploads that are neither completed nor aborted."""

    @abstractmethod
    def stamp(self, key: str) -> str | None:
        """Return what `begin` kept with an object; None if there is no object, or another one."""


def uploads_of(url: str, options: Mapping[str, Any] | None = None) -> Uploads:
    """Return the prefix at a URL. Raises DestinationError for a place that is only read, FormatError for an unknown
    protocol or a missing package."""
    scheme = url.partition("://")[0].lower()
    why = _READ_ONLY.get(scheme)
    if why is not None:
        raise DestinationError(f"{without_secrets(url, options or {})}: {why}")
    if not is_object_url(url):
        return FsspecUploads(url, options)
    if address(url).kind == "s3":
        found: Uploads = importlib.import_module(f"{__package__}.s3").S3Uploads(url, options)
        return found
    return ObjectUploads(url, options)


def collected(
    content: Iterable[Bytes],
) -> tuple[bytearray, Iterator[Bytes] | None]:
    """Return the first HELD bytes or more of a content, and an iterator over the rest, None if that is all."""
    first = bytearray()
    pieces = iter(content)
    for piece in pieces:
        first += piece
        if len(first) > HELD:
            return first, pieces
    return first, None


def part_of(key: str) -> str | None:
    """Return the key of the file that a file of `FsspecUploads` becomes; None for other files.

    >>> part_of("weights/.zarr.json.0123abcd.part")
    'weights/zarr.json'
    """
    found = _UNFINISHED.fullmatch(key)
    return None if found is None else f"{found[1]}{found[2]}"


_lock = threading.Lock()
_stores: dict[tuple[int, str], Any] = {}  # process and connection -> obstore's store


def _forget() -> None:
    """Replace the lock after a fork, because a thread of the parent may hold it."""
    global _lock
    _lock = threading.Lock()


after_fork(_forget)


class ObjectUploads(Uploads):
    """A prefix of a bucket that obstore writes to."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(url, options)
        self._address = address(url)

    @property
    def _store(self) -> Any:
        if not obstore_works():
            raise OSError(
                f"{self}: a process that was forked from one that has used a bucket cannot write there: start the "
                "workers with spawn"
            )
        key = os.getpid(), repr((self._address, sorted(self.options.items())))
        with _lock:
            if key not in _stores:
                policy = Policy.of(self.options.get("requests"))
                _stores[key] = connect(self._address, self.options, policy, retries=_RETRIES)
            return _stores[key]

    def _full(self, key: str) -> str:
        return f"{self._address.key}/{key}".strip("/")

    def list(self, below: str = "") -> dict[str, int]:
        import obstore

        base = f"{self._address.key}/" if self._address.key else ""
        folder = below.rpartition("/")[0]
        with asking(self.at(below), self.options):
            return {
                str(entry["path"]).removeprefix(base): int(entry["size"])
                for page in obstore.list(self._store, prefix=self._full(folder) or None)
                for entry in page
                if str(entry["path"]).removeprefix(base).startswith(below)
            }

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        import obstore

        with asking(self.at(key), self.options):
            if length is None:
                return bytes(obstore.get(self._store, self._full(key)).bytes())
            return (
                bytes(obstore.get_range(self._store, self._full(key), start=offset, length=length)) if length else b""
            )

    def put(self, key: str, content: Iterable[Bytes]) -> int:
        import obstore

        first, rest = collected(content)
        size = len(first)
        with asking(self.at(key), self.options):
            if rest is None:
                obstore.put(self._store, self._full(key), bytes(first), use_multipart=False)
                return size

            def pieces() -> Iterator[bytes]:
                nonlocal size
                yield bytes(first)
                first.clear()
                for piece in rest:
                    size += len(piece)
                    yield bytes(piece)

            obstore.put(self._store, self._full(key), pieces(), chunk_size=_SENT, max_concurrency=_STREAMS)
        return size

    def remove(self, keys: Sequence[str]) -> None:
        import obstore

        for key in keys:
            with suppress(FileNotFoundError), asking(self.at(key), self.options):
                obstore.delete(self._store, self._full(key))


def _rename(fs: Any, old: str, new: str) -> None:
    """Rename a file. Where fsspec has only its general way, it would take the names for patterns of names."""
    from fsspec.spec import AbstractFileSystem

    if type(fs).mv is AbstractFileSystem.mv:
        fs.cp_file(old, new)
        fs.rm_file(old)
    else:
        fs.mv(old, new)


class FsspecUploads(Uploads):
    """A folder of a file system of fsspec. A file is written under another name and renamed when it is complete."""

    buffers = False

    def _fs(self) -> tuple[Any, str]:
        try:
            fs, base = file_system(self.url, str(self), self.options)
        except (FormatError, MissingFileError) as e:
            raise DestinationError(str(e)) from None
        return fs, base.rstrip("/")

    def list(self, below: str = "") -> dict[str, int]:
        fs, base = self._fs()
        folder = below.rpartition("/")[0]
        at = f"{base}/{folder}".rstrip("/")
        with asking(self.at(below), self.options):
            fs.invalidate_cache()
            try:
                found = fs.find(at, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        sizes = {str(path).removeprefix(base).lstrip("/"): int(info["size"] or 0) for path, info in found.items()}
        return {key: size for key, size in sizes.items() if key and key.startswith(below)}

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        fs, base = self._fs()
        if length == 0:
            return b""
        with asking(self.at(key), self.options):
            end = None if length is None else offset + length
            data: bytes = fs.cat_file(f"{base}/{key}", start=offset, end=end)
        return data

    def put(self, key: str, content: Iterable[Bytes]) -> int:
        fs, base = self._fs()
        folder, _, name = f"{base}/{key}".rpartition("/")  # `part_of` is the inverse
        part = f"{folder}/.{name}.{uuid4().hex[:8]}.part"
        size = 0
        pieces = iter(content)
        first = next(pieces, b"")  # what reading raises is no error of the place
        with asking(self.at(key), self.options):
            fs.makedirs(folder, exist_ok=True)
            try:
                with fs.open(part, "wb") as file:
                    for piece in chain([first], pieces):
                        file.write(piece)
                        size += len(piece)
                _rename(fs, part, f"{folder}/{name}")
            except BaseException:
                with suppress(Exception):
                    fs.rm_file(part)
                raise
        return size

    def remove(self, keys: Sequence[str]) -> None:
        fs, base = self._fs()
        for key in keys:
            with suppress(FileNotFoundError), asking(self.at(key), self.options):
                fs.rm_file(f"{base}/{key}")
