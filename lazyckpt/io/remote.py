"""Files behind a URL, through fsspec: memory://, http(s)://, and (with their packages) s3://, gs://, hf://, ssh://.

Every read is a request for a byte range. Requests are slow to start, so a little over-reading is cheaper than two of
them: `gap` says how much.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from ..core.index import FileInfo
from ..errors import CorruptError, FormatError, LazyckptError, MissingFileError
from .store import CannotMap, Entry, closed_error

GAP = 256 << 10  # bytes; about what 5 ms of waiting transfer at 50 MB/s


def is_url(path: str) -> bool:
    """Whether a path of the user names a protocol (a Windows drive does not)."""
    return "://" in path


@contextmanager
def asking(url: str) -> Iterator[None]:
    """What a file system raises besides "not found" (no credentials, no connection, a refused request; each package has
    errors of its own) becomes an OSError that names the URL."""
    try:
        yield
    except (LazyckptError, FileNotFoundError, NotADirectoryError):
        raise
    except Exception as e:
        raise OSError(f"{url}: {' '.join(str(e).split()) or type(e).__name__}") from e


class RemoteStore(CannotMap):
    """A folder behind a URL. ``options`` go to fsspec's file system (credentials, endpoints, ...)."""

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, pins: Mapping[str, FileInfo] | None = None
    ) -> None:
        import fsspec

        self._url = _folder(url)
        self._options = dict(options or {})
        self.pins: Mapping[str, FileInfo] = pins or {}
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self._url, **self._options)
        except (ImportError, ValueError) as e:  # the protocol's package is not installed, or there is no such protocol
            raise FormatError(f"{url}: {e}") from None
        self._base = self._base.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self._url, self._options, dict(self.pins))

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    @property
    def root(self) -> str:
        return self._url

    @property
    def gap(self) -> int:
        return GAP

    def pinned(self, pins: Mapping[str, FileInfo]) -> RemoteStore:
        return RemoteStore(self._url, self._options, pins)

    def below(self, folder: str) -> RemoteStore:
        return RemoteStore(f"{self._url}/{folder}", self._options)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        try:
            with asking(f"{self._url}/{folder}".rstrip("/")):
                entries = self._fs.ls(self._full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            found[name] = Entry(_info(entry), entry["type"] == "directory")
        return found

    def stat(self, path: str) -> FileInfo:
        try:
            return _info(self._fs.info(self._full(path)))
        except OSError as e:
            error = MissingFileError(f"{self._url}/{path}: {e or 'not found'}. Is the whole checkpoint there?")
            error.errno = errno.ENOENT if isinstance(e, FileNotFoundError) else e.errno
            raise error from None

    def read(self, path: str, offset: int, length: int) -> bytes:
        if self.closed:
            raise closed_error(self._url)
        if length == 0:
            return b""
        try:
            with asking(f"{self._url}/{path}"):
                data: bytes = self._fs.cat_file(self._full(path), start=offset, end=offset + length)
        except FileNotFoundError:
            raise MissingFileError(f"{self._url}/{path}: not found. Is the whole checkpoint there?") from None
        if len(data) != length:
            raise CorruptError(
                f"{self._url}/{path}: {length:,} bytes from {offset:,} on are wanted, {len(data):,} came: truncated, "
                "or the server does not serve ranges"
            )
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        target[:] = self.read(path, offset, len(target))

    def _full(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base


def _info(entry: Mapping[str, Any]) -> FileInfo:
    changed = next((entry[k] for k in ("mtime", "LastModified", "updated", "created") if k in entry), 0)
    seconds = (
        changed.timestamp() if isinstance(changed, datetime) else changed if isinstance(changed, int | float) else 0
    )
    return FileInfo(int(entry.get("size") or 0), int(seconds * 1e9))


def _folder(url: str) -> str:
    """Without slashes at the end; the root of a protocol keeps its own ("memory://")."""
    url = url.rstrip("/")
    return f"{url}//" if url.endswith(":") else url


def split_url(url: str, options: Mapping[str, Any] | None) -> tuple[RemoteStore, str]:
    """The store and the name inside it: a URL that lists is a folder, any other is a file in its parent."""
    url = _folder(url)
    parent, _, name = url.rpartition("/")
    store = RemoteStore(url, options)
    info: Mapping[str, Any] = {}
    try:
        with asking(url):
            info = store._fs.info(store._base)
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
    """Raise FormatError for what a web server has under the URL of ``store`` but cannot be read in parts. A server that
    ignores ranges would send all of a file each time: it is asked for the last byte, and hung up on if more comes."""
    url, size = store.root, info.get("size")
    if info.get("mimetype") == "text/html":
        raise FormatError(
            f"{url}: the server has a page there (text/html). Over http folders cannot be opened: name a file"
        )
    if size == 0:
        return
    served = False
    if size is not None and info.get("partial") is not False:
        with asking(url), store._fs.open(store._base, "rb", size=size, cache_type="none") as file:
            file.seek(size - 1)
            with suppress(ValueError):  # fsspec's: the answer is not the range
                file.read(1)
                served = True
    if not served:
        raise FormatError(f"{url}: the server does not serve parts of files (ranges): download it, and open that")
