"""Files at URLs, through fsspec: memory://, http(s)://, and (with their packages) s3://, gs://, hf://, ssh://.

Every read is a request for a byte range. Requests have a high latency, so reading a few unneeded bytes is cheaper than
a second request; `gap` limits how many.

A file's state (`FileInfo`) consists of its size and, over http, the ETag and Last-Modified of the response that carries
the bytes. For object stores it includes the ETag, version or generation, and the modification time; for other file
systems, the modification time. Those are queried once after all requests of a read. If a web server sends neither ETag
nor Last-Modified, only the size is compared.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ...core.index import FileInfo
from ...errors import CorruptError, CredentialsWarning, FormatError, LazyckptError, MissingFileError
from .base import Entry, Fetched, Guard, Store, guarded

_KEY = os.urandom(32)  # of this process, so that hashes of options reveal nothing about them elsewhere
GAP = 256 << 10  # bytes; about as many as 50 MB/s transfer in 5 ms
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created", "Last-Modified")
# The ETag is first because both listings and responses contain it; S3's version id is not in listings.
_VERSIONS = ("ETag", "etag", "generation", "VersionId", "version_id", "blob_id")
_SECRET = re.compile(
    r"(?i)key|secret|token|passw|credential|auth|cookie|header|sas|signature|account|connection_string"
)


def is_url(path: str) -> bool:
    """Return whether a user's path has a protocol; a Windows drive is not one."""
    return "://" in path


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Convert a file system's errors other than "not found" (no credentials, no connection, a rejected request; each
    package has its own exceptions) to an OSError that names the URL."""
    try:
        yield
    except (LazyckptError, FileNotFoundError, NotADirectoryError):
        raise
    except Exception as e:
        raise OSError(f"{url}: {' '.join(str(e).split()) or type(e).__name__}") from e


def _guarded(url: str, options: Mapping[str, Any], pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    return guarded(RemoteStore(url, options, pins), guards)


class RemoteStore(Store):
    """A folder at a URL. ``options`` (credentials, endpoints, ...) are passed to fsspec's file system."""

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, pins: Mapping[str, FileInfo] | None = None
    ) -> None:
        super().__init__(pins)
        self._url = _folder(url)
        self._options = dict(options or {})
        self._connect()
        self._reports_state = self._http

    def _connect(self) -> None:
        import fsspec

        self._process = os.getpid()
        try:
            self._files, base = fsspec.core.url_to_fs(self._url, **self._options)
        except (ImportError, ValueError) as e:  # the protocol's package is not installed, or the protocol is unknown
            raise FormatError(f"{self._url}: {e}") from None
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
        secret = sorted(name for name in self._options if _SECRET.search(name) or _hides(self._options[name]))
        if secret:
            warnings.warn(
                f"a pickle of tensors of {self._url} holds storage options in the open: {', '.join(secret)}. Keep it "
                "secret, or set them in fsspec's configuration or environment instead of passing them to open().",
                CredentialsWarning,
                stacklevel=2,
            )
        if self.guards:
            return _guarded, (self._url, self._options, dict(self.pins), dict(self.guards))
        return RemoteStore, (self._url, self._options, dict(self.pins))

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    @property
    def root(self) -> str:
        return self._url

    @property
    def gap(self) -> int:
        return GAP

    def below(self, folder: str) -> RemoteStore:
        return RemoteStore(f"{self._url}/{folder}", self._options)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        try:
            with asking(f"{self._url}/{folder}".rstrip("/")):
                entries = self.fs.ls(self.full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            found[name] = Entry(_info(entry), entry["type"] == "directory")
        return found

    def forget(self) -> None:
        """Clear fsspec's listing cache, so that another open sees the current files."""
        self.fs.invalidate_cache()

    @property
    def listable(self) -> bool:
        return not self._http

    @property
    def key(self) -> str:
        text = repr(sorted(self._options.items(), key=lambda item: item[0])).encode("utf-8", "surrogatepass")
        return f"{self._url} {hashlib.blake2b(text, key=_KEY).hexdigest()}"

    @property
    def _http(self) -> bool:
        return self._url.startswith(("http://", "https://"))

    def _with(self, pins: Mapping[str, FileInfo]) -> RemoteStore:
        return RemoteStore(self._url, self._options, pins)

    def _stat(self, path: str) -> FileInfo:
        full = self.full(path)
        try:
            with asking(f"{self._url}/{path}"):
                if self.pins:  # a pinned file needs its current state; while opening, a cached listing is recent enough
                    self.fs.invalidate_cache(full)
                return _info(self.fs.info(full))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._gone(path, e) from None

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        full, stop = self.full(path), offset + len(target)
        try:
            with asking(f"{self._url}/{path}"):
                if self._http:
                    data, info = self._get(full, offset, stop)
                else:
                    data, info = self.fs.cat_file(full, start=offset, end=stop), None
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._gone(path, e) from None
        if len(data) > len(target):
            raise CorruptError(
                f"{self._url}/{path}: expected {len(target):,} bytes from {offset:,} on, got {len(data):,}: the "
                "server does not serve ranges"
            )
        target[: len(data)] = data
        return len(data), info

    def _get(self, url: str, start: int, stop: int) -> tuple[bytes, FileInfo | None]:
        """Request a range of a file over http; return its bytes and the file's state from the response headers (fsspec
        returns only the bytes)."""
        from fsspec.asyn import sync

        fs = self.fs

        async def get() -> tuple[bytes, FileInfo | None]:
            session = await fs.set_session()
            options = dict(fs.kwargs)
            headers = {
                **options.pop("headers", {}),
                "Range": f"bytes={start}-{stop - 1}",
                "Accept-Encoding": "identity",
            }
            async with session.get(fs.encode_url(url), headers=headers, **options) as answer:
                total = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", answer.headers.get("Content-Range", ""))
                state = {name: answer.headers.get(name) for name in ("ETag", "Last-Modified")}
                info = _info({**state, "size": int(total[1])}) if total else None
                if answer.status == 416 and info is not None:  # the file is shorter now
                    return b"", info
                if answer.status in (404, 410):
                    raise FileNotFoundError(url)
                answer.raise_for_status()
                if answer.status != 206:
                    whole = answer.headers.get("Content-Length", "")
                    if start or whole != str(stop):
                        raise OSError("the server answers with other bytes than the requested range")
                    info = _info({**state, "size": int(whole)})
                return await answer.read(), info

        got: tuple[bytes, FileInfo | None] = sync(fs.loop, get)
        return got

    def _gone(self, path: str, e: OSError) -> MissingFileError:
        error = MissingFileError(f"{self._url}/{path}: {e or 'not found'}. Is the whole checkpoint there?")
        error.errno = errno.ENOENT if isinstance(e, FileNotFoundError) else e.errno
        return error

    def full(self, path: str) -> str:
        """Return the name of a file within `fs`."""
        return f"{self._base}/{path}" if path else self._base


def _info(entry: Mapping[str, Any]) -> FileInfo:
    """Build a file's state from an fsspec entry or from response headers. The keys differ by protocol."""
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


def _hides(value: Any) -> bool:
    """Return whether a nested option contains a key that looks like the name of a secret."""
    if isinstance(value, Mapping):
        return any(_SECRET.search(str(name)) or _hides(part) for name, part in value.items())
    return False


def _folder(url: str) -> str:
    """Remove trailing slashes, except those of a protocol's root ("memory://")."""
    url = url.rstrip("/")
    return f"{url}//" if url.endswith(":") else url


def split_url(url: str, options: Mapping[str, Any] | None) -> tuple[RemoteStore, str]:
    """Return the store for a user's URL and the name within the store. A folder has the name ""; a file is opened in
    the store of its parent folder."""
    url = _folder(url)
    parent, _, name = url.rpartition("/")
    store = RemoteStore(url, options)
    store.forget()
    info: Mapping[str, Any] = {}
    try:
        with asking(url):
            info = store.fs.info(store.full(""))
        kind = info["type"]
    except (FileNotFoundError, NotADirectoryError, KeyError):
        kind = "directory" if store.list() else "nothing"
    if kind == "directory":
        return store, ""
    if kind == "nothing":
        raise MissingFileError(f"{url}: no such file or folder")
    if url.startswith(("http://", "https://")):
        _check_served(store, info)
    return RemoteStore(parent, options), name


def _check_served(store: RemoteStore, info: Mapping[str, Any]) -> None:
    """Raise FormatError if the URL of ``store`` is an HTML page or its server does not serve ranges. To find out
    without a full download, request the last byte and close the connection if more than that arrives."""
    url, size = store.root, info.get("size")
    if info.get("mimetype") == "text/html":
        raise FormatError(
            f"{url}: the server has a page there (text/html). Over http folders cannot be opened: name a file"
        )
    if size == 0:
        return
    served = False
    if size is not None and info.get("partial") is not False:
        with asking(url), store.fs.open(store.full(""), "rb", size=size, cache_type="none") as file:
            file.seek(size - 1)
            with suppress(ValueError):  # fsspec raises it if the response is not the requested range
                file.read(1)
                served = True
    if not served:
        raise FormatError(f"{url}: the server does not serve parts of files (ranges): download it, and open that")
