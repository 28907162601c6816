"""Files at URLs of the protocols that no other store reads, through fsspec: memory://, ssh://, ftp:// and others.

A file's state (`FileInfo`) is its size, its modification time, and its version if the file system has versions. Answers
do not carry it: it is queried once after all requests of a read.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ...core.index import FileInfo
from ...core.requests import Policy
from ...errors import LazyckptError, MissingFileError
from .access import guarded
from .base import Buffer, Entry, Guard, Store
from .credentials import Sealed, is_without_secrets, seal, unseal, without_password, without_secrets
from .file_systems import file_system
from .listed import portable
from .repeating import Transient
from .requesting import Requesting
from .traffic import PASSING, Traffic, retry_after

_KEY = os.urandom(32)  # of this process, so that hashes of options reveal nothing about them elsewhere
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created", "Last-Modified")
# The ETag is first because both listings and responses contain it; S3's version id is not in listings.
_VERSIONS = ("ETag", "etag", "generation", "VersionId", "version_id", "blob_id", "xet_hash")


@contextmanager
def asking(url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert a file system's errors other than "not found" (no credentials, no connection, a rejected request; each
    package has its own exceptions) to an OSError that names the URL."""
    try:
        yield
    except (LazyckptError, FileNotFoundError, NotADirectoryError):
        raise
    except Exception as e:
        answer = getattr(e, "response", e)  # of HTTP libraries; those of asynchronous ones have it in themselves
        status = getattr(answer, "status_code", None) or getattr(answer, "status", None)
        passing = isinstance(e, ConnectionError | TimeoutError) or status in PASSING
        told = " ".join(str(e).split())
        text = without_secrets(told, options) or type(e).__name__
        error = (Transient if passing else OSError)(f"{url}: {text}")
        headers = getattr(answer, "headers", None)
        if isinstance(error, Transient) and isinstance(headers, Mapping):
            error.after = retry_after(headers)
        raise error from (e if is_without_secrets(e, options) else None)


def _restored(sealed: Sealed, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    return guarded(FsspecStore(*unseal(sealed), pins=pins), guards)


class FsspecStore(Requesting):
    """A folder at a URL. ``options`` (credentials, endpoints, ...) are passed to fsspec's file system."""

    _reports_state = False

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
        pins: Mapping[str, FileInfo] | None = None,
    ) -> None:
        self._options = {**_password_of(url), **(options or {})}
        super().__init__(Policy.of(self._options.get("requests")), traffic, pins)
        self._url = without_password(url) if "password" in self._options else url
        self._connect()

    def _connect(self) -> None:
        self._process = os.getpid()
        self._files, base = file_system(self._url, self.root, self._options)
        self._base = base.rstrip("/")

    @property
    def fs(self) -> Any:
        """fsspec's file system. A forked child creates a new one, because fsspec's threads were not copied."""
        if self._process != os.getpid():
            self._connect()
        return self._files

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that were passed to fsspec's file system."""
        return self._options

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (seal(self._url, self._options, self.root), portable(self.pins), dict(self.guards))

    def __repr__(self) -> str:
        return f"FsspecStore({self.root!r})"

    @property
    def root(self) -> str:
        return without_password(self._url)

    def address(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def below(self, folder: str) -> FsspecStore:
        return self._like_this(FsspecStore(f"{self._url}/{folder}", self._options, self.io))

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        try:
            with asking(f"{self.root}/{folder}".rstrip("/"), self._options):
                entries = self.fs.ls(self.full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            found[name] = Entry(_info(entry), entry["type"] == "directory")
        return found

    def split(self) -> tuple[FsspecStore, str]:
        """Return the store and the name in it of a file or folder, see `urls.split_url`. Clears fsspec's cache of
        listings."""
        self.fs.invalidate_cache()
        try:
            with asking(self.root, self._options):
                kind = self.fs.info(self.full(""))["type"]
        except (FileNotFoundError, NotADirectoryError, KeyError):
            kind = "directory" if self.list() else "nothing"
        if kind == "directory":
            return self, ""
        if kind == "nothing":
            raise MissingFileError(f"{self.root}: no such file or folder")
        parent, _, name = self._url.rpartition("/")
        return FsspecStore(f"{parent}/" if parent.endswith(":/") else parent, self._options), name

    @property
    def key(self) -> str:
        text = repr((self._url, sorted(self._options.items(), key=lambda item: item[0]))).encode(
            "utf-8", "surrogatepass"
        )
        return f"{self.root} {hashlib.blake2b(text, key=_KEY).hexdigest()}"

    def _with(self, pins: Mapping[str, FileInfo]) -> FsspecStore:
        return FsspecStore(self._url, self._options, self.io, pins)

    def _ask_state(self, path: str) -> FileInfo:
        full = self.full(path)
        try:
            with asking(f"{self.root}/{path}", self._options):
                if self.pins:  # a pinned file needs its current state; while opening, a cached listing is recent enough
                    self.fs.invalidate_cache(full)
                return _info(self.fs.info(full))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._gone(path, e) from None

    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        try:
            with asking(f"{self.root}/{path}", self._options):
                return None, (self.fs.cat_file(self.full(path), start=start, end=stop),)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._gone(path, e) from None

    def _gone(self, path: str, e: OSError) -> MissingFileError:
        error = MissingFileError(f"{self.root}/{path}: {e or 'not found'}. Is the whole checkpoint there?")
        error.errno = errno.ENOENT if isinstance(e, FileNotFoundError) else e.errno
        return error

    def full(self, path: str) -> str:
        """Return the name of a file within `fs`."""
        return f"{self._base}/{path}" if path else self._base


def _info(entry: Mapping[str, Any]) -> FileInfo:
    """Build a file's state from an fsspec entry. The keys differ by protocol."""
    known = {key: entry[key] for key in (*_TIMES, *_VERSIONS) if entry.get(key)}
    changed = next((known[k] for k in _TIMES if k in known), 0)
    version = next((str(known[k]) for k in _VERSIONS if k in known and known[k] != "null"), "")
    return FileInfo(int(entry.get("size") or 0), _nanoseconds(changed), version)


def _nanoseconds(time: Any) -> int:
    if isinstance(time, str):
        try:
            time = parsedate_to_datetime(time)
        except ValueError:
            try:
                time = datetime.fromisoformat(time)
            except ValueError:
                return 0
    if isinstance(time, datetime):
        time = time.timestamp()
    return int(time * 1e9) if isinstance(time, int | float) else 0


def _password_of(url: str) -> dict[str, str]:
    """Return the password in a URL as an option, if its file system has that option."""
    if without_password(url) == url:
        return {}
    import fsspec

    try:
        found = fsspec.get_filesystem_class(url.partition("://")[0])._get_kwargs_from_urls(url)
    except (ImportError, ValueError):  # `FsspecStore` tells it
        return {}
    return {"password": found["password"]} if found.get("password") else {}
